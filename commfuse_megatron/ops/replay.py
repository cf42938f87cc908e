"""Passes over the copy engine as bound lists of driver and cuBLASLt calls: the schedules of `passes`, replayed.

A tape is recorded (`ops.recordings`) at the first call of a problem from the same bound schedule that `passes` walks
step by step, and holds numbers only. It serves what cuBLASLt serves, in direct schedules; everything else, and a
context that records, takes the way through `passes`. Both give the same products and sums; only a direct
reduce-scatter of two ranks adds what arrived inside the own GEMM here, where `passes` uses the persistent kernel.
"""

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from commfuse_megatron.kernels.blas import BlasMatmul, Matrix, Workspaces, alignment_of
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.copy_tape import BoundOperation, CopyTape, Ref

__all__ = [
    "FIRST",
    "LAST",
    "MORE",
    "NOWHERE",
    "OUT",
    "SECOND",
    "WEIGHT",
    "ZERO",
    "Build",
    "TapeCall",
    "Unservable",
    "replay",
]

# What a call brings, by number; 0 stands for no address.
ZERO, FIRST, SECOND, WEIGHT, OUT, LAST, MORE = range(7)
NOWHERE = Ref(ZERO, 0)


class Unservable(Exception):
    """This call's layouts are not for cuBLASLt."""


class TapeCall(NamedTuple):
    """The tensors of one call; what they are, the recorder says.

    accumulates: `last` is added to, not overwritten. defers: `last` gets what was gathered, in place of the weight
    gradient that is made of it. more: numbered from MORE on. key: what else a tape depends on.
    """

    first: torch.Tensor
    second: torch.Tensor | None
    weight: torch.Tensor
    out: torch.Tensor
    last: torch.Tensor | None
    accumulates: bool = False
    more: tuple[torch.Tensor, ...] = ()
    key: Hashable = None
    defers: bool = False


class _Bound(NamedTuple):
    operation: BoundOperation | None  # None: these layouts are for `passes`
    generation: int  # of the buffers whose addresses it holds


# Layouts and scales that vary from call to call must not fill the memory.
_MOST_TAPES = 64

_NEVER = -2
_UNKNOWN = _Bound(None, _NEVER)


def replay(p: PreparedPass, link: Link, record: Callable[["Build", TapeCall], None], call: TapeCall) -> bool:
    """Run the pass that `record` puts on a tape; False, and nothing done, where that is not for a tape."""
    first, second, weight, out, last, accumulates, more, others, defers = call
    addresses: tuple[int, ...] = (
        0,
        first.data_ptr(),
        0 if second is None else second.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        0 if last is None else last.data_ptr(),
    )
    if more:
        addresses += tuple([tensor.data_ptr() for tensor in more])
    alignment = alignment_of(*addresses)
    layout = None if last is None else (last.dtype, last.shape, last.stride())
    key = (record, alignment, weight.stride(), layout, accumulates, defers, others)
    tapes, slots = p.tapes, p.context.slots
    bound = tapes.get(key, _UNKNOWN)
    if bound.generation != slots.generation:
        if bound.operation is None and bound is not _UNKNOWN:
            return False
        operation = None
        try:
            build = Build(p, link, alignment)
            record(build, call)
            operation = build.tape.finish()
        except Unservable:
            pass
        if len(tapes) >= _MOST_TAPES:
            tapes.clear()
        bound = tapes[key] = _Bound(operation, slots.generation if operation is not None else _NEVER)
    if bound.operation is None:
        return False
    link.replay(bound.operation, addresses)
    return True


@functools.cache
def _workspaces(device: torch.device) -> Workspaces:
    return Workspaces(device)


class Build:
    """One tape in the making."""

    def __init__(self, p: PreparedPass, link: Link, alignment: int) -> None:
        if alignment < 16:
            raise Unservable
        assert isinstance(link.transport, CopyEngineTransport)
        self.p = p
        self.tape = CopyTape(link.transport)
        self.dtype: torch.dtype = getattr(torch, p.problem.dtype)
        self.itemsize = self.dtype.itemsize
        self._alignment = alignment
        self._workspaces = _workspaces(p.context.device)

    def matmul(
        self,
        shapes: tuple[Matrix, Matrix, Matrix],
        refs: tuple[Ref, Ref, Ref],
        *,
        addend: Ref | None = None,
        bias: Ref | None = None,
    ) -> None:
        """out = a @ b (+ addend) (+ bias); nothing where it is empty."""
        if 0 in shapes[0].shape or 0 in shapes[1].shape:
            if 0 in shapes[2].shape:
                return
            raise Unservable
        matrices = [
            matrix._replace(alignment=self._alignment_at(ref)) for matrix, ref in zip(shapes, refs, strict=True)
        ]
        if addend is not None:
            least = min(matrices[2].alignment, self._alignment_at(addend))
            matrices[2] = matrices[2]._replace(alignment=least)
        for matrix in matrices:
            leading = matrix.strides[0] if matrix.strides[1] == 1 else matrix.strides[1]
            if 1 not in matrix.strides or leading * matrix.dtype.itemsize % 16:
                raise Unservable
        multiply = BlasMatmul(*matrices, has_addend=addend is not None, has_bias=bias is not None)
        workspace = self._workspaces.address
        (a, a_at), (b, b_at), (out, out_at) = refs
        extra, extra_at = addend or NOWHERE
        row, row_at = bias or NOWHERE

        def step(at: tuple[int, ...], stream: int) -> None:
            multiply(
                stream,
                workspace(stream),
                at[a] + a_at,
                at[b] + b_at,
                at[out] + out_at,
                at[extra] + extra_at,
                at[row] + row_at,
            )

        self.tape.compute(step)

    def rows(self, count: int, features: int) -> Matrix:
        """[count, features], rows contiguous."""
        return Matrix((count, features), (features, 1), self.dtype)

    def _alignment_at(self, ref: Ref) -> int:
        alignment = min(self._alignment, alignment_of(ref.offset))
        if alignment < 16:
            raise Unservable
        return alignment
