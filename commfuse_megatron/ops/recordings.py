"""The passes of both linears, put on tapes: which copies, waits and GEMMs, in which order. See `ops.replay`.

GEMMs of forward passes may take turns on two lanes (`ops/piece_lanes.py`): one begins where the SMs of the one before
fall idle.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from commfuse_megatron.kernels.blas import Matrix
from commfuse_megatron.kernels.sum_partials import bind_sum
from commfuse_megatron.ops.piece_lanes import PieceLanes
from commfuse_megatron.ops.replay import (
    FIRST,
    LAST,
    MORE,
    NOWHERE,
    OUT,
    SECOND,
    WEIGHT,
    ZERO,
    Build,
    TapeCall,
    Unservable,
)
from commfuse_megatron.runtime.binding import BoundSchedule
from commfuse_megatron.runtime.link import Watched
from commfuse_megatron.transport.copy_flags import Key
from commfuse_megatron.transport.copy_tape import Ref, Step

__all__ = [
    "Gather",
    "Scatter",
    "matrix_of",
    "multiply_gathered",
    "multiply_scattered",
    "record_gather",
    "record_gather_backward",
    "record_scatter",
    "record_scatter_backward",
    "record_weight_gradient",
    "sum_step",
]


# Lanes for the GEMMs of a forward pass, of up to so many FLOP each. 2 x H200, two lanes against none, M 8192, over the
# larger of GEMM and transfer: 8B qkv 1.051 (1.072), proj 1.260 (1.330), 70B proj 1.063 (1.076), fc1 1.038 (1.016).
# Backward passes gained nothing, and pay for it in host time.
_NUM_LANES = 2
_MOST_FLOP = 4e11


def matrix_of(weight: torch.Tensor, *, transposed: bool) -> Matrix:
    """A weight as operand of a GEMM."""
    seen = weight.t() if transposed else weight
    return Matrix((seen.size(0), seen.size(1)), (seen.stride(0), seen.stride(1)), weight.dtype)


class _Messages:
    """What a collective sends and receives on a tape, until it has been waited for."""

    def __init__(self, build: Build) -> None:
        self._tape = build.tape
        self._sends: list[Key] = []
        self._arrivals: dict[int, Key] = {}

    def remaining(self) -> list[Key]:
        """All that nobody has waited for."""
        keys = [*self._arrivals.values(), *self._sends]
        for key in keys:
            self._tape.note(key)
        return keys


class Gather(_Messages):
    """The messages of a direct all-gather, and where each chunk lies."""

    def __init__(self, build: Build, shard: Ref, features: int) -> None:
        super().__init__(build)
        program = build.p.gather
        self.bound: BoundSchedule = program.bound
        self.window = Ref(ZERO, program.gathered().data_ptr())
        self.row_bytes = features * build.itemsize
        self._places = program.places()
        self._shard = shard
        self._starts = list(itertools.accumulate(self.bound.chunk_rows, initial=0))
        self._own_copy: list[Key] = []
        self._taken: list[Key] = []
        self._issued = -1

    def issue(self, index: int) -> None:
        """Push what leaves in this step, once; what it receives can be waited for."""
        if index <= self._issued:
            return
        self._issued = index
        step = self.bound.steps[index]
        send_place, receive_place = self._places[index]
        batch = []
        if step.receive is not None:
            assert receive_place is not None
            key = self._arrivals[index] = (step.receive[1], receive_place.flag, -1, -1)
            self._tape.notes.append((key, Watched("all-gather", self.bound, index, None, step.receive[1])))
            batch.append(key)
        if step.send is not None:
            assert send_place is not None
            chunk, peer = step.send
            source = self._shard.plus((self._starts[chunk] - self.bound.own_start) * self.row_bytes)
            self._sends.append((-1, -1, peer, send_place.flag))
            batch.append(self._sends[-1])
            self._tape.push(peer, send_place, source, self.bound.chunk_rows[chunk] * self.row_bytes)
        self._tape.issued(batch)

    def issue_all(self) -> None:
        """All messages at once."""
        for index in range(len(self.bound.steps)):
            self.issue(index)

    def copy_own(self) -> None:
        """Put the own rows beside the others', on the side.

        The copy is a kernel, and gets SMs when the GEMM beside it ends, with all that is behind it on the copy stream.
        So it goes beside the last GEMM before the one that needs it, behind transfers that are needed by then: with one
        hardware queue, GEMMs that are submitted behind it wait for those transfers, too.
        """
        if self.bound.own_rows:
            target = self.window.plus(self.bound.own_start * self.row_bytes)
            self._own_copy.append(self._tape.copy(target, self._shard, self.bound.own_rows * self.row_bytes, flag=0))

    def copy_all(self, target: Ref) -> Key:
        """Copy the whole window, whose own rows were copied there, to `target`; returns what to wait for."""
        self.complete()
        self._tape.order()
        return self._tape.copy(target, self.window, self.bound.total_rows * self.row_bytes, flag=1)

    def wait(self, batches: Iterable[int]) -> None:
        """Wait for what these steps receive, each once."""
        keys = [self._arrivals.pop(index) for index in batches if index in self._arrivals]
        self._tape.wait(*keys)
        self._take(keys)

    def complete(self) -> None:
        """Wait for the whole window, the own rows included; also for what another lane has waited for."""
        keys = list(self._arrivals.values())
        self._arrivals.clear()
        self._tape.wait(*self._taken, *keys, *self._own_copy)
        self._take(keys)

    def _take(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._tape.note(key)
            self._taken.append(key)

    def chunk(self, index: int) -> Ref:
        """Where chunk `index` lies once it is here."""
        if index in self.bound.own_chunks:
            return self._shard.plus((self._starts[index] - self.bound.own_start) * self.row_bytes)
        return self.window.plus(self._starts[index] * self.row_bytes)

    def start(self, chunk: int) -> int:
        """First row of a chunk."""
        return self._starts[chunk]


def multiply_gathered(
    build: Build,
    gather: Gather,
    weight: Matrix,
    refs: tuple[Ref, Ref],
    bias: Ref | None,
    *,
    is_bulk: bool = False,
    before_last: Callable[[], None] = lambda: None,
    before_gemm: Callable[[], None] = lambda: None,
) -> None:
    """out [M, n] = gathered [M, k] @ weight [k, n] (+ bias), chunk by chunk, or in at most three GEMMs.

    before_last: called before the last GEMM. before_gemm: chooses the lane of the next GEMM, and of its waiting.
    """
    weight_at, out_at = refs
    k, n = weight.shape
    bound = gather.bound
    out_row_bytes = n * build.itemsize

    def multiply(rows: int, a_at: Ref, first_row: int) -> None:
        shapes = (build.rows(rows, k), weight, build.rows(rows, n))
        build.matmul(shapes, (a_at, weight_at, out_at.plus(first_row * out_row_bytes)), bias=bias)

    if not is_bulk:
        last = _last_that_computes(bound)
        for index, step in enumerate(bound.steps):
            if index == last:
                before_last()
            gather.issue(index)
            if step.compute is not None:
                before_gemm()
                gather.wait([] if step.needs_batch is None else [step.needs_batch])
                multiply(bound.chunk_rows[step.compute], gather.chunk(step.compute), gather.start(step.compute))
        return
    own_stop, me = bound.own_start + bound.own_rows, bound.group_rank
    behind = gather.window.plus(own_stop * gather.row_bytes)
    pieces = (
        (bound.own_rows, gather.chunk(bound.own_chunks.start), bound.own_start, range(0)),
        (bound.own_start, gather.window, 0, range(me)),
        (bound.total_rows - own_stop, behind, own_stop, range(me, bound.schedule.group_size - 1)),
    )
    with_rows = [piece for piece in pieces if piece[0]]
    for piece in with_rows:
        rows, a_at, first_row, batches = piece
        if piece is with_rows[-1]:
            before_last()
        before_gemm()
        gather.wait(batches)
        multiply(rows, a_at, first_row)


def _last_that_computes(bound: BoundSchedule) -> int:
    """The last step with a GEMM."""
    return max(index for index, step in enumerate(bound.steps) if step.compute is not None)


class Scatter(_Messages):
    """The partials and messages of a direct reduce-scatter."""

    def __init__(self, build: Build, features: int) -> None:
        super().__init__(build)
        program = build.p.scatter
        program.refresh()
        self.bound: BoundSchedule = program.bound
        self.features = features
        self.row_bytes = features * build.itemsize
        self.has_transfers = program.has_transfers
        self.folds = program.has_transfers and build.p.has_cover and build.p.context.group_size == 2
        self._program = program
        self._build = build

    def partial(self, chunk: int) -> Ref:
        """Where the partial of another rank's chunk waits to be sent."""
        return Ref(ZERO, self._program.partials[chunk].data_ptr())

    def sent(self, row: int) -> Ref:
        """Row `row` of all partials for others."""
        assert self._program.sent is not None
        return Ref(ZERO, self._program.sent.data_ptr() + row * self.row_bytes)

    def issue(self, index: int) -> None:
        """Push the partial of the step before; what arrives can be waited for."""
        step = self.bound.steps[index]
        send_place, receive_place = self._program.places[index]
        batch = []
        if step.receive is not None:
            assert receive_place is not None
            key = self._arrivals[index] = (step.receive[1], receive_place.flag, -1, -1)
            self._tape.notes.append((key, Watched("reduce-scatter", self.bound, index, None, step.receive[1])))
            batch.append(key)
        if step.send is not None:
            assert send_place is not None
            chunk, peer = step.send
            self._tape.order()
            self._sends.append((-1, -1, peer, send_place.flag))
            batch.append(self._sends[-1])
            self._tape.push(peer, send_place, self.partial(chunk), self.bound.chunk_rows[chunk] * self.row_bytes)
        self._tape.issued(batch)

    def wait_for_own(self, index: int) -> Ref:
        """Wait for all partials of own chunk `index`; where the first one lies."""
        chunks_per_shard = self.bound.schedule.chunks_per_shard
        senders = self.bound.schedule.group_size - 1
        batches = [sender * chunks_per_shard + index + 1 for sender in range(senders)]
        keys = [self._arrivals.pop(batch) for batch in batches if batch in self._arrivals]
        self._tape.wait(*keys)
        for key in keys:
            self._tape.note(key)
        return Ref(ZERO, self._program.arrived_chunks[index].data_ptr())

    def sum_arrived(self, index: int) -> Ref:
        """Add up all partials of own chunk `index`, in place, when they are here; where the sum lies."""
        at, arrived = self.wait_for_own(index), self._program.arrived_chunks[index]
        if arrived.size(0) > 1 and arrived.size(1):
            add = bind_sum(arrived[0], arrived[1:], bias=None, out=arrived[0])
            if add is None:
                raise Unservable
            self._tape.compute(sum_step(add, (at, Ref(ZERO, arrived[1].data_ptr()), at)))
        return at

    def sum(self, out: torch.Tensor, out_ref: Ref, bias: torch.Tensor | None, bias_ref: Ref) -> None:
        """Add what arrived to the own partials in `out`, one pass over it."""
        if not self.has_transfers:
            return
        start = 0
        for index, rows in enumerate(self._program.own_rows):
            if rows:
                self.wait_for_own(index)
                part = out[start : start + rows]
                add = bind_sum(part, self._program.arrived_chunks[index], bias=bias, out=part)
                if add is None:
                    raise Unservable
                own_ref = out_ref.plus(start * self.row_bytes)
                arrived_ref = Ref(ZERO, self._program.arrived_chunks[index].data_ptr())
                self._tape.compute(
                    sum_step(add, (own_ref, arrived_ref, own_ref), bias_ref if bias is not None else None)
                )
            start += rows

    def add_own_rows_of(self, addend: torch.Tensor, addend_ref: Ref, out: torch.Tensor, out_ref: Ref) -> None:
        """Add this rank's rows of `addend` [M, features] to `out` [own rows, features]."""
        if out.size(0):
            start = self.bound.own_start
            add = bind_sum(out, addend[start : start + out.size(0)].unsqueeze(0), bias=None, out=out)
            if add is None:
                raise Unservable
            self._tape.compute(sum_step(add, (out_ref, addend_ref.plus(start * self.row_bytes), out_ref)))


def sum_step(
    add: Callable[[int, int, int, int | None, int], None], refs: tuple[Ref, Ref, Ref], bias: Ref | None = None
) -> Step:
    """A step that makes a bound sum. refs: own, partials, out."""
    (own, own_at), (partials, partials_at), (out, out_at) = refs
    bias_slot = None if bias is None else bias.slot

    def step(at: tuple[int, ...], stream: int) -> None:
        bias_at = None if bias_slot is None else at[bias_slot]
        add(stream, at[own] + own_at, at[partials] + partials_at, bias_at, at[out] + out_at)

    return step


def multiply_scattered(
    build: Build,
    scatter: Scatter,
    weight: Matrix,
    refs: Sequence[Ref],
    bias: Ref | None,
    *,
    between: Callable[[], None] | None = None,
    before_last: Callable[[], None] = lambda: None,
    before_gemm: Callable[[], None] = lambda: None,
    arrived: Callable[[int], Ref] | None = None,
    addend: Ref | None = None,
) -> None:
    """Partials of a [M, k] @ weight [k, n]: others' to where they are sent from, the own to `out`, own chunks last.

    between: compute this before the own chunks, and each rank's others in at most two GEMMs. before_last: called before
    the last GEMM. before_gemm: chooses the lane of the next GEMM, and computes its rows of a where they are still to be
    computed. arrived: what, once it is here, the GEMM of own chunk number i adds; None: nothing, or where the scatter
    folds, the one partial that there is. addend: [M, n], added to every partial but
    those to which something that arrived is added.
    """
    if arrived is None and scatter.folds:
        arrived = scatter.wait_for_own
    a_at, weight_at, out_at = refs
    k, n = weight.shape
    bound = scatter.bound
    a_row_bytes = k * build.itemsize

    def multiply(rows: int, first_row: int, target: Ref, here: Ref | None = None, row: Ref | None = None) -> None:
        shapes = (build.rows(rows, k), weight, build.rows(rows, n))
        at = (a_at.plus(first_row * a_row_bytes), weight_at, target)
        if here is None and addend is not None:
            here = addend.plus(first_row * scatter.row_bytes)
        build.matmul(shapes, at, addend=here, bias=row)

    starts = list(itertools.accumulate(bound.chunk_rows, initial=0))
    if between is not None:
        own_stop = bound.own_start + bound.own_rows
        later = bound.schedule.group_size - 1 - bound.group_rank
        before_gemm()
        multiply(bound.total_rows - own_stop, own_stop, scatter.sent(bound.own_start))
        for index in range(1, 1 + later):
            scatter.issue(index)
        before_gemm()
        multiply(bound.own_start, 0, scatter.sent(0))
        for index in range(1 + later, bound.schedule.group_size):
            scatter.issue(index)
        before_gemm()
        between()
    last = _last_that_computes(bound)
    for index, step in enumerate(bound.steps):
        if index == last:
            before_last()
        if between is None:
            scatter.issue(index)
        if step.compute is None or (between is not None and not step.is_own):
            continue
        rows, start = bound.chunk_rows[step.compute], starts[step.compute]
        before_gemm()
        if not step.is_own:
            multiply(rows, start, scatter.partial(step.compute))
            continue
        target = out_at.plus((start - bound.own_start) * scatter.row_bytes)
        if arrived is not None:
            multiply(rows, start, target, arrived(step.compute - bound.own_chunks.start), bias)
        else:
            multiply(rows, start, target)


def _begin_lanes(build: Build) -> PieceLanes:
    """Lanes for a forward pass's GEMMs, which go on from where the current stream is; none where they do not pay."""
    p, problem = build.p, build.p.problem
    rows = -(-problem.rows // (problem.group_size * p.plan.chunks_per_shard)) * problem.batch
    lanes = PieceLanes(build, _NUM_LANES if 2.0 * rows * problem.N * problem.K <= _MOST_FLOP else 0)
    lanes.begin()
    return lanes


def record_gather(build: Build, call: TapeCall) -> None:
    """`all_gather_linear` forward: first x [own rows, K], last bias [N] or None -> out [M, N].

    more: [M, K], if given, gets the gathered input.
    """
    problem = build.p.problem
    build.tape.order()
    gather = Gather(build, Ref(FIRST, 0), problem.K)
    refs = (Ref(WEIGHT, 0), Ref(OUT, 0))
    bias = None if call.last is None else Ref(LAST, 0)
    lanes = _begin_lanes(build)
    weight = matrix_of(call.weight, transposed=True)
    if not call.more:
        multiply_gathered(build, gather, weight, refs, bias, before_gemm=lanes.next)
        lanes.join()
        build.tape.wait(*gather.remaining())
        return
    multiply_gathered(build, gather, weight, refs, bias, before_gemm=lanes.next, before_last=gather.copy_own)
    lanes.join()
    copied = gather.copy_all(Ref(MORE, 0))
    build.tape.wait(*gather.remaining(), copied)


def record_scatter(build: Build, call: TapeCall) -> None:
    """`linear_reduce_scatter` forward: first x [M, K], last bias [N] or None -> out [own rows, N]."""
    scatter = Scatter(build, build.p.problem.N)
    refs = (Ref(FIRST, 0), Ref(WEIGHT, 0), Ref(OUT, 0))
    bias = Ref(LAST, 0)
    folded = bias if call.last is not None and scatter.folds else None
    lanes = _begin_lanes(build)
    weight = matrix_of(call.weight, transposed=True)
    multiply_scattered(build, scatter, weight, refs, folded, before_gemm=lanes.next)
    lanes.join()
    if not scatter.folds:
        scatter.sum(call.out.view(-1, call.out.size(-1)), refs[2], call.last, bias)
    build.tape.wait(*scatter.remaining())


def record_gather_backward(build: Build, call: TapeCall) -> None:
    """`all_gather_linear` backward: first grad [M, N], second x [own rows, K] -> out grad_x, last grad_weight.

    more: [M, K], if given, the gradient of the gathered input.
    """
    problem, is_bulk = build.p.problem, build.p.is_bulk
    addend = Ref(MORE, 0) if call.more else None
    build.tape.order()
    gather = Gather(build, Ref(SECOND, 0), problem.K)
    scatter = Scatter(build, problem.K)

    copied: list[Key] = []

    def multiply_weight_gradient() -> None:
        copied.extend(record_weight_gradient(build, call, gather, (Ref(FIRST, 0), gather.window)))

    weight, refs = matrix_of(call.weight, transposed=False), (Ref(FIRST, 0), Ref(WEIGHT, 0), Ref(OUT, 0))
    gather.issue_all()
    if is_bulk:
        gather.copy_own()
        multiply_scattered(build, scatter, weight, refs, None, between=multiply_weight_gradient, addend=addend)
    else:
        multiply_scattered(build, scatter, weight, refs, None, before_last=gather.copy_own, addend=addend)
        multiply_weight_gradient()
    out = call.out.view(-1, call.out.size(-1))
    if not scatter.folds:
        scatter.sum(out, refs[2], None, NOWHERE)
    elif addend is not None:
        scatter.add_own_rows_of(call.more[0].view(-1, problem.K), addend, out, refs[2])
    build.tape.wait(*gather.remaining(), *scatter.remaining(), *copied)


def record_scatter_backward(build: Build, call: TapeCall) -> None:
    """`linear_reduce_scatter` backward: first grad [own rows, N], second x [M, K] -> out grad_x, last grad_weight."""
    problem, is_bulk = build.p.problem, build.p.is_bulk
    build.tape.order()
    gather = Gather(build, Ref(FIRST, 0), problem.N)
    gather.issue_all()
    refs = (Ref(WEIGHT, 0), Ref(OUT, 0))
    weight = matrix_of(call.weight, transposed=False)
    multiply_gathered(build, gather, weight, refs, None, is_bulk=is_bulk, before_last=gather.copy_own)
    copied = record_weight_gradient(build, call, gather, (gather.window, Ref(SECOND, 0)))
    build.tape.wait(*gather.remaining(), *copied)


def record_weight_gradient(build: Build, call: TapeCall, gather: Gather, refs: tuple[Ref, Ref]) -> tuple[Key, ...]:
    """last [N, K] = (or += where the call accumulates) grad.t() [N, M] @ x [M, K], which lie at `refs`, one of them the
    window of `gather`, which is complete then. A call that defers it gets the window's rows in `last` instead.

    Returns what is to be waited for in the end.
    """
    if call.defers:
        return (gather.copy_all(Ref(LAST, 0)),)
    gather.complete()
    problem, grad_weight = build.p.problem, call.last
    shapes = (Matrix((problem.N, problem.M), (1, problem.N), build.dtype), build.rows(problem.M, problem.K))
    assert grad_weight is not None
    if grad_weight.shape != (problem.N, problem.K):
        raise Unservable
    if not grad_weight.is_contiguous() or grad_weight.dtype not in (build.dtype, torch.float32):
        raise Unservable
    out = Matrix((grad_weight.size(0), grad_weight.size(1)), (grad_weight.size(1), 1), grad_weight.dtype)
    out_ref = Ref(LAST, 0)
    build.matmul((*shapes, out), (*refs, out_ref), addend=out_ref if call.accumulates else None)
    return ()
