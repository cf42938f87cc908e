"""Passes over the copy engine as bound lists of driver and cuBLASLt calls: the schedules of `passes`, replayed.

A tape is built at the first call of a problem from the same bound schedule that `passes` walks step by step, and holds
numbers only. It serves what cuBLASLt serves, in direct schedules; everything else, and a context that records, takes
the way through `passes`. Both give the same products and sums; only a direct reduce-scatter of two ranks adds what
arrived inside the own GEMM here, where `passes` uses the persistent kernel.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from commfuse_megatron.kernels.blas import BlasMatmul, Matrix, Workspaces, alignment_of
from commfuse_megatron.kernels.sum_partials import bind_sum
from commfuse_megatron.ops.weight_grad import WeightGradTarget
from commfuse_megatron.runtime.binding import BoundSchedule
from commfuse_megatron.runtime.link import Link, Watched
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.transport.copy_engine import CopyEngineTransport, Key
from commfuse_megatron.transport.copy_tape import BoundOperation, CopyTape, Ref, Step

__all__ = ["replay_gather", "replay_gather_backward", "replay_scatter", "replay_scatter_backward"]

# What a call brings, by number; 0 stands for no address.
_ZERO, _FIRST, _SECOND, _WEIGHT, _OUT, _LAST = range(6)
_NOWHERE = Ref(_ZERO, 0)


class _Unservable(Exception):
    """This call's layouts are not for cuBLASLt."""


def replay_gather(
    p: PreparedPass, link: Link, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> bool:
    """`all_gather_linear` forward into y [M, N]; False, and nothing done, where that is not for a tape."""
    addresses = (0, x.data_ptr(), 0, weight.data_ptr(), y.data_ptr(), 0 if bias is None else bias.data_ptr())
    key = ("gather", alignment_of(*addresses), weight.stride(), bias is None)
    return _replay(p, link, key, addresses, lambda build: _record_gather(build, weight, bias is not None))


def replay_scatter(
    p: PreparedPass, link: Link, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> bool:
    """`linear_reduce_scatter` forward into y [own rows, N]; False, and nothing done, where that is not for a tape."""
    addresses = (0, x.data_ptr(), 0, weight.data_ptr(), y.data_ptr(), 0 if bias is None else bias.data_ptr())
    key = ("scatter", alignment_of(*addresses), weight.stride(), bias is None)
    return _replay(p, link, key, addresses, lambda build: _record_scatter(build, weight, bias, y))


def replay_gather_backward(
    p: PreparedPass,
    link: Link,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    target: WeightGradTarget | None,
) -> bool:
    """`all_gather_linear` backward: grad [M, N], x [own rows, K], weight [N, K] -> grad_x, grad_weight."""
    grad, x, weight = operands
    addresses = _backward_addresses(grad, x, weight, grad_x, grad_weight)
    key = ("gather backward", alignment_of(*addresses), weight.stride(), grad_weight.dtype, target is None)
    return _replay(
        p, link, key, addresses, lambda build: _record_gather_backward(build, weight, grad_x, grad_weight, target)
    )


def replay_scatter_backward(
    p: PreparedPass,
    link: Link,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    target: WeightGradTarget | None,
) -> bool:
    """`linear_reduce_scatter` backward: grad [own rows, N], x [M, K], weight [N, K] -> grad_x, grad_weight."""
    grad, x, weight = operands
    addresses = _backward_addresses(grad, x, weight, grad_x, grad_weight)
    key = ("scatter backward", alignment_of(*addresses), weight.stride(), grad_weight.dtype, target is None)
    return _replay(p, link, key, addresses, lambda build: _record_scatter_backward(build, weight, grad_weight, target))


def _backward_addresses(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, grad_x: torch.Tensor, grad_weight: torch.Tensor
) -> tuple[int, ...]:
    return (0, grad.data_ptr(), x.data_ptr(), weight.data_ptr(), grad_x.data_ptr(), grad_weight.data_ptr())


class _Bound(NamedTuple):
    operation: BoundOperation | None  # None: these layouts are for `passes`
    generation: int  # of the buffers whose addresses it holds


_NEVER = -2
_UNKNOWN = _Bound(None, _NEVER)


def _replay(
    p: PreparedPass,
    link: Link,
    key: tuple[str, int, *tuple[object, ...]],
    addresses: tuple[int, ...],
    record: Callable[["_Build"], None],
) -> bool:
    tapes, slots = p.tapes, p.context.slots
    bound = tapes.get(key, _UNKNOWN)
    if bound.generation != slots.generation:
        if bound.operation is None and bound is not _UNKNOWN:
            return False
        operation = None
        try:
            build = _Build(p, link, key[1])
            record(build)
            operation = build.tape.finish()
        except _Unservable:
            pass
        bound = tapes[key] = _Bound(operation, slots.generation if operation is not None else _NEVER)
    if bound.operation is None:
        return False
    link.replay(bound.operation, addresses)
    return True


@functools.cache
def _workspaces(device: torch.device) -> Workspaces:
    return Workspaces(device)


class _Build:
    """One tape in the making."""

    def __init__(self, p: PreparedPass, link: Link, alignment: int) -> None:
        if alignment < 16:
            raise _Unservable
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
            raise _Unservable
        matrices = [
            matrix._replace(alignment=self._alignment_at(ref)) for matrix, ref in zip(shapes, refs, strict=True)
        ]
        if addend is not None:
            least = min(matrices[2].alignment, self._alignment_at(addend))
            matrices[2] = matrices[2]._replace(alignment=least)
        for matrix in matrices:
            leading = matrix.strides[0] if matrix.strides[1] == 1 else matrix.strides[1]
            if 1 not in matrix.strides or leading * matrix.dtype.itemsize % 16:
                raise _Unservable
        multiply = BlasMatmul(*matrices, has_addend=addend is not None, has_bias=bias is not None)
        workspace = self._workspaces.address
        (a, a_at), (b, b_at), (out, out_at) = refs
        extra, extra_at = addend or _NOWHERE
        row, row_at = bias or _NOWHERE

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

        self.tape.steps.append(step)

    def rows(self, count: int, features: int) -> Matrix:
        """[count, features], rows contiguous."""
        return Matrix((count, features), (features, 1), self.dtype)

    def _alignment_at(self, ref: Ref) -> int:
        alignment = min(self._alignment, alignment_of(ref.offset))
        if alignment < 16:
            raise _Unservable
        return alignment


def _of(weight: torch.Tensor, *, transposed: bool) -> Matrix:
    seen = weight.t() if transposed else weight
    return Matrix((seen.size(0), seen.size(1)), (seen.stride(0), seen.stride(1)), weight.dtype)


class _Gather:
    """The messages of a direct all-gather, and where each chunk lies."""

    def __init__(self, build: _Build, shard: Ref, features: int) -> None:
        program = build.p.gather
        self.bound: BoundSchedule = program.bound
        self.window = Ref(_ZERO, program.gathered().data_ptr())
        self.row_bytes = features * build.itemsize
        self._places = program.places()
        self._shard = shard
        self._tape = build.tape
        self._starts = list(itertools.accumulate(self.bound.chunk_rows, initial=0))
        self._sends: list[Key] = []
        self._arrivals: dict[int, Key] = {}
        self._issued = -1

    def issue(self, index: int) -> None:
        """Push what leaves in this step, once; what it receives can be waited for."""
        if index <= self._issued:
            return
        self._issued = index
        step = self.bound.steps[index]
        send_place, receive_place = self._places[index]
        if step.send is not None:
            assert send_place is not None
            chunk, peer = step.send
            source = self._shard.plus((self._starts[chunk] - self.bound.own_start) * self.row_bytes)
            self._tape.push(peer, send_place, source, self.bound.chunk_rows[chunk] * self.row_bytes)
            self._sends.append((-1, -1, peer, send_place.flag))
        if step.receive is not None:
            assert receive_place is not None
            key = self._arrivals[index] = (step.receive[1], receive_place.flag, -1, -1)
            self._tape.notes.append((key, Watched("all-gather", self.bound, index, None, step.receive[1])))

    def issue_all(self) -> None:
        """All messages at once."""
        for index in range(len(self.bound.steps)):
            self.issue(index)

    def copy_own(self) -> Key | None:
        """Put the own rows beside the others', on the side."""
        if self.bound.own_rows == 0:
            return None
        target = self.window.plus(self.bound.own_start * self.row_bytes)
        return self._tape.copy(target, self._shard, self.bound.own_rows * self.row_bytes, flag=0)

    def wait(self, batches: Iterable[int]) -> None:
        """Wait for what these steps receive, each once."""
        keys = [self._arrivals.pop(index) for index in batches if index in self._arrivals]
        self._tape.wait(*keys)
        for key in keys:
            self._tape.note(key)

    def finish(self) -> None:
        """All that is still on its way."""
        self.wait(list(self._arrivals))
        self._tape.wait(*self._sends)
        for key in self._sends:
            self._tape.note(key)

    def chunk(self, index: int) -> Ref:
        """Where chunk `index` lies once it is here."""
        if index in self.bound.own_chunks:
            return self._shard.plus((self._starts[index] - self.bound.own_start) * self.row_bytes)
        return self.window.plus(self._starts[index] * self.row_bytes)

    def start(self, chunk: int) -> int:
        """First row of a chunk."""
        return self._starts[chunk]


def _multiply_gathered(
    build: _Build, gather: _Gather, weight: Matrix, refs: tuple[Ref, Ref], bias: Ref | None, *, is_bulk: bool
) -> None:
    """out [M, n] = gathered [M, k] @ weight [k, n] (+ bias), chunk by chunk, or in at most three GEMMs."""
    weight_at, out_at = refs
    k, n = weight.shape
    bound = gather.bound
    out_row_bytes = n * build.itemsize

    def multiply(rows: int, a_at: Ref, first_row: int) -> None:
        shapes = (build.rows(rows, k), weight, build.rows(rows, n))
        build.matmul(shapes, (a_at, weight_at, out_at.plus(first_row * out_row_bytes)), bias=bias)

    if not is_bulk:
        for index, step in enumerate(bound.steps):
            gather.issue(index)
            if step.compute is not None:
                gather.wait([] if step.needs_batch is None else [step.needs_batch])
                multiply(bound.chunk_rows[step.compute], gather.chunk(step.compute), gather.start(step.compute))
        return
    own_stop = bound.own_start + bound.own_rows
    multiply(bound.own_rows, gather.chunk(bound.own_chunks.start), bound.own_start)
    gather.wait(range(bound.group_rank))
    multiply(bound.own_start, gather.window, 0)
    gather.wait(range(bound.group_rank, bound.schedule.group_size - 1))
    multiply(bound.total_rows - own_stop, gather.window.plus(own_stop * gather.row_bytes), own_stop)


class _Scatter:
    """The partials and messages of a direct reduce-scatter."""

    def __init__(self, build: _Build, features: int) -> None:
        program = build.p.scatter
        program.refresh()
        self.bound: BoundSchedule = program.bound
        self.features = features
        self.row_bytes = features * build.itemsize
        self.folds = program.has_transfers and build.p.has_cover and build.p.context.group_size == 2
        self._program = program
        self._build = build
        self._tape = build.tape
        self._sends: list[Key] = []
        self._arrivals: dict[int, Key] = {}

    def partial(self, chunk: int) -> Ref:
        """Where the partial of another rank's chunk waits to be sent."""
        return Ref(_ZERO, self._program.partials[chunk].data_ptr())

    def sent(self, row: int) -> Ref:
        """Row `row` of all partials for others."""
        assert self._program.sent is not None
        return Ref(_ZERO, self._program.sent.data_ptr() + row * self.row_bytes)

    def issue(self, index: int) -> None:
        """Push the partial of the step before; what arrives can be waited for."""
        step = self.bound.steps[index]
        send_place, receive_place = self._program.places[index]
        if step.send is not None:
            assert send_place is not None
            chunk, peer = step.send
            self._tape.order()
            self._tape.push(peer, send_place, self.partial(chunk), self.bound.chunk_rows[chunk] * self.row_bytes)
            self._sends.append((-1, -1, peer, send_place.flag))
        if step.receive is not None:
            assert receive_place is not None
            key = self._arrivals[index] = (step.receive[1], receive_place.flag, -1, -1)
            self._tape.notes.append((key, Watched("reduce-scatter", self.bound, index, None, step.receive[1])))

    def wait_for_own(self, index: int) -> Ref:
        """Wait for all partials of own chunk `index`; where the first one lies."""
        chunks_per_shard = self.bound.schedule.chunks_per_shard
        senders = self.bound.schedule.group_size - 1
        batches = [sender * chunks_per_shard + index + 1 for sender in range(senders)]
        keys = [self._arrivals.pop(batch) for batch in batches if batch in self._arrivals]
        self._tape.wait(*keys)
        for key in keys:
            self._tape.note(key)
        return Ref(_ZERO, self._program.arrived_chunks[index].data_ptr())

    def sum(self, out: torch.Tensor, out_ref: Ref, bias: torch.Tensor | None, bias_ref: Ref) -> None:
        """Add what arrived to the own partials in `out`, one pass over it."""
        if not self._program.has_transfers:
            return
        start = 0
        for index, rows in enumerate(self._program.own_rows):
            if rows:
                self.wait_for_own(index)
                part = out[start : start + rows]
                add = bind_sum(part, self._program.arrived_chunks[index], bias=bias, out=part)
                if add is None:
                    raise _Unservable
                self._tape.steps.append(
                    _sum_step(add, out_ref.plus(start * self.row_bytes), bias_ref, bias is not None)
                )
            start += rows

    def finish(self) -> None:
        """All that is still on its way."""
        keys = [*self._arrivals.values(), *self._sends]
        self._tape.wait(*keys)
        for key in keys:
            self._tape.note(key)


def _sum_step(add: Callable[[int, int | None, int], None], own: Ref, bias: Ref, has_bias: bool) -> Step:
    slot, offset = own
    bias_slot = bias.slot

    def step(at: tuple[int, ...], stream: int) -> None:
        add(at[slot] + offset, at[bias_slot] if has_bias else None, at[slot] + offset)

    return step


def _multiply_scattered(
    build: _Build,
    scatter: _Scatter,
    weight: Matrix,
    refs: Sequence[Ref],
    bias: Ref | None,
    between: Callable[[], None] | None = None,
) -> None:
    """Partials of a [M, k] @ weight [k, n]: others' to where they are sent from, the own to `out`, own chunks last."""
    a_at, weight_at, out_at = refs
    k, n = weight.shape
    bound = scatter.bound
    a_row_bytes = k * build.itemsize

    def multiply(rows: int, first_row: int, target: Ref, addend: Ref | None = None, row: Ref | None = None) -> None:
        shapes = (build.rows(rows, k), weight, build.rows(rows, n))
        at = (a_at.plus(first_row * a_row_bytes), weight_at, target)
        build.matmul(shapes, at, addend=addend, bias=row)

    starts = list(itertools.accumulate(bound.chunk_rows, initial=0))
    if between is not None:
        own_stop = bound.own_start + bound.own_rows
        later = bound.schedule.group_size - 1 - bound.group_rank
        multiply(bound.total_rows - own_stop, own_stop, scatter.sent(bound.own_start))
        for index in range(1, 1 + later):
            scatter.issue(index)
        multiply(bound.own_start, 0, scatter.sent(0))
        for index in range(1 + later, bound.schedule.group_size):
            scatter.issue(index)
        between()
    for index, step in enumerate(bound.steps):
        if between is None:
            scatter.issue(index)
        if step.compute is None or (between is not None and not step.is_own):
            continue
        rows, start = bound.chunk_rows[step.compute], starts[step.compute]
        if not step.is_own:
            multiply(rows, start, scatter.partial(step.compute))
            continue
        target = out_at.plus((start - bound.own_start) * scatter.row_bytes)
        if scatter.folds:
            arrived = scatter.wait_for_own(step.compute - bound.own_chunks.start)
            multiply(rows, start, target, arrived, bias)
        else:
            multiply(rows, start, target)


def _record_gather(build: _Build, weight: torch.Tensor, has_bias: bool) -> None:
    problem = build.p.problem
    build.tape.order()
    gather = _Gather(build, Ref(_FIRST, 0), problem.K)
    refs = (Ref(_WEIGHT, 0), Ref(_OUT, 0))
    bias = Ref(_LAST, 0) if has_bias else None
    _multiply_gathered(build, gather, _of(weight, transposed=True), refs, bias, is_bulk=False)
    gather.finish()


def _record_scatter(build: _Build, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    scatter = _Scatter(build, build.p.problem.N)
    refs = (Ref(_FIRST, 0), Ref(_WEIGHT, 0), Ref(_OUT, 0))
    bias_ref = Ref(_LAST, 0)
    folded = bias_ref if bias is not None and scatter.folds else None
    _multiply_scattered(build, scatter, _of(weight, transposed=True), refs, folded)
    if not scatter.folds:
        scatter.sum(y.view(-1, y.size(-1)), refs[2], bias, bias_ref)
    scatter.finish()


def _record_gather_backward(
    build: _Build,
    weight: torch.Tensor,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
    target: WeightGradTarget | None,
) -> None:
    problem, is_bulk = build.p.problem, build.p.is_bulk
    build.tape.order()
    gather = _Gather(build, Ref(_SECOND, 0), problem.K)
    gather.issue_all()
    own_copy = gather.copy_own()

    def multiply_weight_gradient() -> None:
        gather.finish()
        if own_copy is not None:
            build.tape.wait(own_copy)
        grads = Matrix((problem.N, problem.M), (1, problem.N), build.dtype)
        _record_weight_gradient(
            build, (grads, build.rows(problem.M, problem.K)), (Ref(_FIRST, 0), gather.window), grad_weight, target
        )

    scatter = _Scatter(build, problem.K)
    refs = (Ref(_FIRST, 0), Ref(_WEIGHT, 0), Ref(_OUT, 0))
    between = multiply_weight_gradient if is_bulk else None
    _multiply_scattered(build, scatter, _of(weight, transposed=False), refs, None, between)
    if not is_bulk:
        multiply_weight_gradient()
    if not scatter.folds:
        scatter.sum(grad_x.view(-1, grad_x.size(-1)), refs[2], None, _NOWHERE)
    scatter.finish()


def _record_scatter_backward(
    build: _Build, weight: torch.Tensor, grad_weight: torch.Tensor, target: WeightGradTarget | None
) -> None:
    problem, is_bulk = build.p.problem, build.p.is_bulk
    build.tape.order()
    gather = _Gather(build, Ref(_FIRST, 0), problem.N)
    gather.issue_all()
    own_copy = gather.copy_own()
    refs = (Ref(_WEIGHT, 0), Ref(_OUT, 0))
    _multiply_gathered(build, gather, _of(weight, transposed=False), refs, None, is_bulk=is_bulk)
    gather.finish()
    if own_copy is not None:
        build.tape.wait(own_copy)
    grads = Matrix((problem.N, problem.M), (1, problem.N), build.dtype)
    _record_weight_gradient(
        build, (grads, build.rows(problem.M, problem.K)), (gather.window, Ref(_SECOND, 0)), grad_weight, target
    )


def _record_weight_gradient(
    build: _Build,
    shapes: tuple[Matrix, Matrix],
    refs: tuple[Ref, Ref],
    grad_weight: torch.Tensor,
    target: WeightGradTarget | None,
) -> None:
    """grad_weight [N, K] = (or += with a target) the product."""
    if not grad_weight.is_contiguous() or grad_weight.dtype not in (build.dtype, torch.float32):
        raise _Unservable
    out = Matrix((grad_weight.size(0), grad_weight.size(1)), (grad_weight.size(1), 1), grad_weight.dtype)
    out_ref = Ref(_LAST, 0)
    build.matmul((*shapes, out), (*refs, out_ref), addend=None if target is None else out_ref)
