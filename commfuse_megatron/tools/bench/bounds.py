"""What every timing stands beside: computation alone, communication alone, one after the other.

compute_only                 un-split GEMMs: `torch.mm`
compute_only persistent      the same by our kernel; the row's compute_only_ms is the best of both
comm_only collective         the group's own collectives for what the pass moves
comm_only <transport>        the same bytes as our transports move them, nothing computed
sequential                   plain collective and one GEMM, as `ops.reference` does it
slices_only m=C <gemm>       the GEMMs of a sliced pass one after the other, nothing moved
slicing C=c                  c pieces of M, the collective of one beside the GEMM of another
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, override

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import KernelConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import persistent_matmul, persistent_matmul_unavailable_reason
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.variant import Ready, WithContext, differentiable, in_turn

Gemm = Literal["torch", "persistent"]


def products(work: Work, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The GEMMs of a pass on complete operands as (a, b, where a @ b goes): one forward, else dgrad and wgrad.

    x: [M, K].
    """
    case, pool, grad, weight = work.case, work.pool, work.operands.grad_full, work.operands.weight.detach()
    if work.pass_name == "fprop":
        return [(x, weight.t(), pool.tensor("y", case.M, case.N))]
    grad_x, grad_weight = pool.tensor("grad_x", case.M, case.K), pool.tensor("grad_weight", case.N, case.K)
    return [(grad, weight, grad_x), (grad.t(), x, grad_weight)]


def compute(work: Work, gemm: Gemm = "torch") -> Callable[[], None]:
    """The GEMMs of the pass, un-split."""
    if gemm == "persistent":
        reason = persistent_matmul_unavailable_reason(work.pool.device, work.pool.dtype)
        if reason is not None:
            raise UnsupportedError(reason)
    multiply: Callable[..., object] = persistent_matmul if gemm == "persistent" else torch.mm
    gemms = products(work, work.operands.x_full.detach())
    return in_turn(*(partial(multiply, a, b, out=out) for a, b, out in gemms))


def slices(work: Work, gemm: Gemm, chunks_per_shard: int) -> Callable[[], None]:
    """The GEMMs of a sliced pass, nothing moved: with its compute_only, what splitting costs.

    fprop: a GEMM per chunk. backward: dgrad so, wgrad un-split, as our sliced backward passes do.
    """
    # Without a transport there is no SM budget: what is measured is the split, not the room left to transfers.
    slice_gemm = SliceGemm(KernelConfig(gemm=gemm), "none", 0, work.pool.device, work.pool.dtype)
    (a, b, out), *whole = products(work, work.operands.x_full.detach())
    count = work.case.group_size * chunks_per_shard
    pairs = zip(a.tensor_split(count), out.tensor_split(count), strict=True)
    gemms = [*((rows, b, target) for rows, target in pairs), *whole]
    return in_turn(*(partial(slice_gemm.multiply, *operands) for operands in gemms), slice_gemm.join)


def gathers_of(work: Work) -> list[bool]:
    """What a pass moves, True for a gather: a column's backward gathers x again and scatters dx, a row's gathers dy; an
    all-reduce is both."""
    if work.case.all_reduces:
        return [False, True]
    if work.pass_name == "fprop":
        return [work.case.gathers]
    return [True, False] if work.case.gathers else [True]


def collectives(work: Work) -> Callable[[], None]:
    """The group's own for what the pass moves, one after the other."""
    shard, full, group = work.operands.wire_shard, work.operands.wire_full, work.group
    if work.case.all_reduces:
        return in_turn(partial(dist.all_reduce, full, group=group))
    gather = partial(dist.all_gather_into_tensor, full, shard, group=group)
    scatter = partial(dist.reduce_scatter_tensor, shard, full, group=group)
    return in_turn(*(gather if is_gather else scatter for is_gather in gathers_of(work)))


class CommOnly(WithContext):
    """One transport's transfers of the pass: to every other rank a shard, from every other rank a shard."""

    is_basic = True

    def __init__(self, backend: str) -> None:
        forced = {"path": "sliced", "algorithm": "direct", "chunks_per_shard": 1}
        config = OverlapConfig.from_dict({"linear": {"fprop": forced}, "transport": {"backend": backend}})
        super().__init__(config, backend)
        self.name = f"comm_only {backend}"

    def prepare(self, context: OverlapContext, problem: GemmProblem) -> PreparedPass:
        """The pass whose transfers are run."""
        prepared = context.prepare(problem)
        if prepared.plan.path != "sliced":
            raise UnsupportedError(prepared.plan.reason)
        return prepared

    @override
    def build(self, work: Work) -> Ready:
        case, context = work.case, self.context_for(work)
        # An all-gather that moves what the pass does: only M and the features that travel count.
        sizes = (case.rows, case.batch, 1, case.shard_shape[1], work.dtype_name, case.group_size)
        prepared = self.prepare(context, GemmProblem("all_gather_linear", "fprop", *sizes))

        def once() -> None:
            with prepared:
                prepared.run_transfers(work.operands.wire_shard, "transfers alone")

        call = in_turn(*(once for _ in gathers_of(work)))
        return Ready(call=call, path="transfers", transport=context.transport_name)


def sequential(work: Work) -> Ready:
    """Plain collective, then GEMM; or GEMM, then plain collective. Its results are what every variant must give."""
    reference, o = getattr(ops.reference, work.case.op), work.operands
    return differentiable(work, lambda: reference(o.x, o.weight, group=work.group))


# --- data slicing, the classic overlap --------------------------------------------------------------------------------


def require_equal_pieces(shard_rows: int, num_pieces: int) -> None:
    """Raise UnsupportedError where the rows of a shard cannot be cut so."""
    if shard_rows % num_pieces:
        raise UnsupportedError(f"{shard_rows} rows of a shard cannot be cut into {num_pieces} equal pieces")


def sliced(work: Work, num_pieces: int) -> Callable[[], object]:
    """Both passes of both linears in pieces of M: the classic overlap.

        AG + GEMM   collective  [piece 0][piece 1][piece 2]...
                    compute              [piece 0][piece 1][piece 2]     the first collective is exposed
        GEMM + RS   compute     [piece 0][piece 1][piece 2]
                    collective           [piece 0][piece 1][piece 2]     the last one is: the tail

    A piece holds the same rows of every rank's shard, so that its collective needs no other order. The GEMM of a piece
    is one batched `torch.bmm` that reads or writes those rows where they lie: no copy on the way.
    """
    require_equal_pieces(work.case.M // work.case.group_size, num_pieces)
    sliced = _Sliced(work, num_pieces)
    if work.pass_name == "fprop":
        return sliced.fprop_gather if work.case.gathers else sliced.fprop_scatter
    return sliced.backward_gather if work.case.gathers else sliced.backward_scatter


class _Sliced:
    def __init__(self, work: Work, num_pieces: int) -> None:
        self.group = work.group
        self.x, self.weight = work.operands.x.detach(), work.operands.weight.detach()
        self.grad_y, self.grad_full = work.operands.grad_y, work.operands.grad_full
        self.size = work.case.group_size
        self.num_pieces = num_pieces
        self.piece_rows = work.case.M // self.size // num_pieces

    def _by_piece(self, full: torch.Tensor) -> torch.Tensor:
        """[M, features] -> [pieces, ranks, rows, features], a view."""
        return full.view(self.size, self.num_pieces, self.piece_rows, -1).transpose(0, 1)

    def _gather_matmul(self, shard: torch.Tensor, b: torch.Tensor, full: torch.Tensor | None = None) -> torch.Tensor:
        """[M, N] = all-gather(shard [M_r, K]) @ b; the gathered rows in their order into `full`, if given."""
        pieces = shard.view(self.num_pieces, self.piece_rows, -1)
        targets = shard.new_empty(self.num_pieces, self.size * self.piece_rows, shard.size(-1))
        works = [
            dist.all_gather_into_tensor(target, source, group=self.group, async_op=True)
            for target, source in zip(targets, pieces, strict=True)
        ]
        arrived = targets.view(self.num_pieces, self.size, self.piece_rows, -1)
        out = shard.new_empty(self.size * shard.size(0), b.size(1))
        batched, outs = b.expand(self.size, *b.shape), self._by_piece(out)
        fulls = None if full is None else self._by_piece(full)
        for piece, work in enumerate(works):
            work.wait()
            torch.bmm(arrived[piece], batched, out=outs[piece])
            if fulls is not None:
                fulls[piece].copy_(arrived[piece])
        return out

    def _matmul_scatter(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """[M_r, N] = reduce-scatter(a @ b), complete once the works are waited for."""
        out = a.new_empty(self.num_pieces, self.piece_rows, b.size(1))
        batched = b.expand(self.size, *b.shape)
        works = []
        for piece, rows in enumerate(self._by_piece(a)):
            partial = torch.bmm(rows, batched).flatten(0, 1)
            works.append(dist.reduce_scatter_tensor(out[piece], partial, group=self.group, async_op=True))
        return out.flatten(0, 1), works

    def fprop_gather(self) -> torch.Tensor:
        return self._gather_matmul(self.x.flatten(0, -2), self.weight.t()).unflatten(0, (-1, self.x.size(1)))

    def fprop_scatter(self) -> torch.Tensor:
        y, works = self._matmul_scatter(self.x.flatten(0, -2), self.weight.t())
        for work in works:
            work.wait()
        return y.unflatten(0, (-1, self.x.size(1)))

    def backward_gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather x again under dgrad, whose partials are scattered piece by piece; then wgrad beside the last one."""
        x = self.x.flatten(0, -2)
        x_full = x.new_empty(self.grad_full.size(0), x.size(1))
        regather = dist.all_gather_into_tensor(x_full, x, group=self.group, async_op=True)
        grad_x, works = self._matmul_scatter(self.grad_full, self.weight)
        regather.wait()
        grad_weight = self.grad_full.t() @ x_full
        for work in works:
            work.wait()
        return grad_x.view(self.x.shape), grad_weight

    def backward_scatter(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather dy piece by piece under dgrad; then wgrad."""
        shard = self.grad_y.flatten(0, -2)
        grad = shard.new_empty(self.size * shard.size(0), shard.size(1))
        grad_x = self._gather_matmul(shard, self.weight, grad)
        return grad_x.view(self.x.shape), grad.t() @ self.x.flatten(0, -2)
