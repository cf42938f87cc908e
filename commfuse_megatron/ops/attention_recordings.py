"""The passes of query-split attention, put on tapes: which kernels, GEMMs, copies and waits, in which order.

As in `runtime/lanes.py` the pieces, attention and GEMM of one chunk of queries, take turns on two streams or more:

    lane 0   [attend 1][project 1]          [attend own][project own + arrived]
    lane 1             [attend 2][project 2]
    current                                        [sum of what arrived]
    copies                       [y 1 ...  ][y 2 ...]

They are submitted in the order attend 1, attend 2, project 1, attend own, project 2, ...: with one hardware queue, as
Megatron has it, a GEMM that waits for its attention holds up everything behind it, so pieces submitted one by one
would hardly run side by side.

The last GEMM adds what arrived, so no pass over the output follows. Of more than two ranks, what arrived is added up
first, beside the attention of the own queries.

Backward the pieces are the dgrad of one chunk's rows and the attention backward of its queries; the weight gradient
runs beside the last of them. Each leaves the gradients of the keys and values that it saw in a slab of its own, or in
the result; sums over slabs, in fp32, end the pass.
"""

import itertools
from collections.abc import Sequence

import torch

from commfuse_megatron.kernels.attention import AttentionKernel, BoundBackward, Operands, SplitMask
from commfuse_megatron.ops.attention_slabs import GradientSlabs
from commfuse_megatron.ops.piece_lanes import PieceLanes
from commfuse_megatron.ops.recordings import (
    Gather,
    Scatter,
    matrix_of,
    multiply_gathered,
    multiply_scattered,
    record_weight_gradient,
)
from commfuse_megatron.ops.replay import FIRST, LAST, MORE, OUT, SECOND, WEIGHT, Build, TapeCall, Unservable
from commfuse_megatron.problem import AttentionProblem, RowRange, chunk_ranges
from commfuse_megatron.runtime.lanes import choose_num_lanes
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.transport.copy_flags import Key
from commfuse_megatron.transport.copy_tape import Ref, Step

__all__ = [
    "AttentionAtOnce",
    "bind_attention",
    "new_joint_states",
    "new_states",
    "num_lanes_of",
    "record_query_split",
    "record_query_split_backward",
    "split_states",
    "state_starts",
]

_FLOATS_PER_LOAD = 4


def state_starts(problem: AttentionProblem, splits: Sequence[RowRange]) -> list[int]:
    """Where the state of each split begins, and where the last ends, in floats: 16 bytes apart, as kernels load."""
    sizes = (problem.batch * problem.heads * queries.size for queries in splits)
    return list(itertools.accumulate((-(-size // _FLOATS_PER_LOAD) * _FLOATS_PER_LOAD for size in sizes), initial=0))


def new_states(like: torch.Tensor, problem: AttentionProblem, splits: Sequence[RowRange]) -> torch.Tensor:
    """Memory for the states of all splits."""
    return like.new_empty(state_starts(problem, splits)[-1], dtype=torch.float32)


def new_joint_states(like: torch.Tensor, problem: AttentionProblem, splits: Sequence[RowRange]) -> torch.Tensor | None:
    """Memory for the states of all splits as one call for all queries would leave them; None where kernels could not
    load one split's."""
    if any(queries.start % _FLOATS_PER_LOAD for queries in splits):
        return None
    return like.new_empty(problem.batch, problem.heads, problem.rows, 1, dtype=torch.float32)


def split_states(
    states: torch.Tensor, problem: AttentionProblem, splits: Sequence[RowRange]
) -> list[tuple[torch.Tensor, ...]]:
    """What each split's forward pass left in `states`, as kernels return it."""
    starts, lead = state_starts(problem, splits), problem.batch * problem.heads
    return [
        (states[start : start + lead * queries.size].view(problem.batch, problem.heads, queries.size, 1),)
        for start, queries in zip(starts, splits, strict=False)
    ]


def num_lanes_of(p: PreparedPass) -> int:
    """How many splits of this plan are to run at a time."""
    found: int | None = p.memo.get("lanes")
    if found is None:
        problem = p.problem
        assert isinstance(problem, AttentionProblem)
        splits = chunk_ranges(problem.rows, problem.group_size, p.plan.chunks_per_shard)
        largest = max(chunk.size for shard in splits for chunk in shard)
        found = p.memo["lanes"] = choose_num_lanes(largest, problem.batch * problem.heads, p.context.device)
    return found


def record_query_split(build: Build, call: TapeCall) -> None:
    """`query_split_attention` forward: first q, more k, v and the states, last bias or None -> second attended, out y.

    key: the scale of scores comes first in it.
    """
    problem = build.p.problem
    assert isinstance(problem, AttentionProblem)
    assert call.second is not None
    assert isinstance(call.key, tuple)
    k, v, states = call.more
    operands = (call.first, k, v, call.second)
    splits = _splits(build)
    is_joint = states.dim() > 1
    starts = [queries.start for queries in splits] if is_joint else state_starts(problem, splits)
    kernel = build.p.attention
    assert kernel is not None
    attend = [
        bind_attention(
            problem,
            kernel,
            operands,
            queries,
            states.element_size() * start,
            call.key[0],
            state_rows=problem.rows if is_joint else None,
        )
        for queries, start in zip(splits, starts, strict=False)
    ]
    tape, lanes = build.tape, PieceLanes(build, num_lanes_of(build.p))
    scatter = Scatter(build, problem.N)
    order = [step.compute for step in scatter.bound.steps if step.compute is not None]
    begin_piece = lanes.attend_ahead([attend[chunk] for chunk in order])

    def add_up(own_chunk: int) -> Ref:
        if build.p.context.group_size == 2:
            return scatter.wait_for_own(own_chunk)
        with lanes.beside():
            total = scatter.sum_arrived(own_chunk)
            is_here = tape.mark()
        tape.follow(is_here)
        return total

    lanes.begin()
    multiply_scattered(
        build,
        scatter,
        matrix_of(call.weight, transposed=True),
        (Ref(SECOND, 0), Ref(WEIGHT, 0), Ref(OUT, 0)),
        Ref(LAST, 0) if call.last is not None else None,
        before_gemm=begin_piece,
        arrived=add_up if scatter.has_transfers else None,
    )
    lanes.join()
    tape.wait(*scatter.remaining())


def _splits(build: Build) -> list[RowRange]:
    """Queries of every split, flat, owner-major."""
    problem = build.p.problem
    shards = chunk_ranges(problem.rows, problem.group_size, build.p.plan.chunks_per_shard)
    return [chunk for shard in shards for chunk in shard]


def _start_of(tensor: torch.Tensor, row: int) -> int:
    """Bytes from the start of `tensor` to a row."""
    return tensor.stride(0) * tensor.element_size() * row


def bind_attention(
    problem: AttentionProblem,
    kernel: AttentionKernel,
    operands: Operands,
    queries: RowRange,
    state_start: int,
    scale: float,
    state_rows: int | None = None,
) -> Step | None:
    """The attention of one split, of a call that brings q first, more k, v and the states, second attended; None if it
    has no queries. operands: tensors like these: q, k, v, attended. state_rows: see `bind_forward`. Raises Unservable.
    """
    if not queries.size:
        return None
    q, k, v, attended = operands
    band = problem.visible_keys(queries)
    seen = slice(band.keys.start, band.keys.stop)
    rows = slice(queries.start, queries.stop)
    bound = kernel.bind_forward((q[rows], k[seen], v[seen], attended[rows]), SplitMask(band), scale, state_rows)
    if bound is None:
        raise Unservable

    q_start, out_start = _start_of(q, rows.start), _start_of(attended, rows.start)
    k_start, v_start = _start_of(k, seen.start), _start_of(v, seen.start)

    def step(at: tuple[int, ...], stream: int) -> None:
        bound(
            stream,
            at[FIRST] + q_start,
            at[MORE] + k_start,
            at[MORE + 1] + v_start,
            at[SECOND] + out_start,
            at[MORE + 2] + state_start,
        )

    return step


# Of the tensors in `more`, by number.
_K, _V, _STATES, _GRAD_Q, _GRAD_K, _GRAD_V, _SLABS_K, _SLABS_V = range(MORE, MORE + 8)


def record_query_split_backward(build: Build, call: TapeCall) -> None:
    """`query_split_attention` backward: first grad_y [own rows, N], second attended -> out its gradient, last
    grad_weight or None; more k, v, states, the gradients of q, k and v, slabs for those of k and v, and q.

    key: the scale of scores comes first in it.
    """
    problem = build.p.problem
    assert isinstance(problem, AttentionProblem)
    splits = _splits(build)
    tape, lanes = build.tape, PieceLanes(build, num_lanes_of(build.p))
    slabs = GradientSlabs(problem, splits)
    attend = _attend_backward(build, call, splits, slabs)
    tape.order()
    gather = Gather(build, Ref(FIRST, 0), problem.N)
    gather.issue_all()
    lanes.begin()
    weight, bound = matrix_of(call.weight, transposed=False), gather.bound
    pieces = [index for index, step in enumerate(bound.steps) if step.compute is not None]
    copied: tuple[Key, ...] = ()
    for index, step in enumerate(bound.steps):
        if index == pieces[-1] and call.last is not None:
            gather.copy_own()
        if step.compute is None:
            continue
        lanes.next()
        gather.wait([] if step.needs_batch is None else [step.needs_batch])
        rows, first = bound.chunk_rows[step.compute], gather.start(step.compute)
        target = Ref(OUT, first * problem.K * build.itemsize)
        shapes = (build.rows(rows, problem.N), weight, build.rows(rows, problem.K))
        build.matmul(shapes, (gather.chunk(step.compute), Ref(WEIGHT, 0), target))
        attention = attend[step.compute]
        if attention is not None:
            tape.compute(attention)
        if call.last is not None and index == pieces[-1]:
            with lanes.beside():
                copied = record_weight_gradient(build, call, gather, (gather.window, Ref(SECOND, 0)))
    lanes.join()
    k, v = call.more[_K - MORE], call.more[_V - MORE]
    slabs.add_up(build, k, Ref(_SLABS_K, 0), Ref(_GRAD_K, 0))
    slabs.add_up(build, v, Ref(_SLABS_V, 0), Ref(_GRAD_V, 0))
    tape.wait(*gather.remaining(), *copied)


def _attend_backward(
    build: Build, call: TapeCall, splits: Sequence[RowRange], slabs: GradientSlabs
) -> list[Step | None]:
    """The attention of every split; None for one without queries."""
    problem, kernel = build.p.problem, build.p.attention
    assert isinstance(problem, AttentionProblem)
    assert kernel is not None
    assert call.second is not None
    assert isinstance(call.key, tuple)
    attended, grad_attended = call.second, call.out
    k, v, states, _, _, _, _, _, q = call.more
    q_slot = MORE + len(call.more) - 1
    steps: list[Step | None] = []
    for split, (queries, state_start) in enumerate(zip(splits, state_starts(problem, splits), strict=False)):
        if not queries.size:
            steps.append(None)
            continue
        band = problem.visible_keys(queries)
        rows, seen = slice(queries.start, queries.stop), slice(band.keys.start, band.keys.stop)
        operands = (q[rows], k[seen], v[seen], attended[rows])
        bound = kernel.bind_backward(grad_attended[rows], operands, SplitMask(band), call.key[0])
        if bound is None:
            raise Unservable
        refs = (
            Ref(q_slot, _start_of(q, rows.start)),
            Ref(_K, _start_of(k, seen.start)),
            Ref(_V, _start_of(v, seen.start)),
            Ref(SECOND, _start_of(attended, rows.start)),
            Ref(_STATES, states.element_size() * state_start),
            Ref(OUT, _start_of(grad_attended, rows.start)),
            Ref(_GRAD_Q, q[0].numel() * build.itemsize * rows.start),
            slabs.place(split, k, Ref(_SLABS_K, 0), Ref(_GRAD_K, 0)),
            slabs.place(split, v, Ref(_SLABS_V, 0), Ref(_GRAD_V, 0)),
        )
        steps.append(_bound_step(bound, refs))
    return steps


def _bound_step(bound: BoundBackward, refs: Sequence[Ref]) -> Step:
    def step(at: tuple[int, ...], stream: int) -> None:
        bound(stream, *[at[slot] + offset for slot, offset in refs])

    return step


# Of the tensors in `more` of `AttentionAtOnce`, by number.
_AT_ONCE = range(MORE, MORE + 7)


class AttentionAtOnce:
    """The backward pass of the projection as of a linear of its own, and that of attention at once:

        current  [dgrad under the all-gather of dy]
        lane 0                                     [attention backward]
        lane 1                                              [weight gradient]

    One object for each problem and kernel: tapes are found again by its method.
    """

    def __init__(self, problem: AttentionProblem, kernel: AttentionKernel) -> None:
        self._problem = problem
        self._kernel = kernel

    def record(self, build: Build, call: TapeCall) -> None:
        """On the projection's pass: first grad_y [own rows, N], second attended -> out its gradient, last grad_weight
        or None; more k, v, the state, the gradients of q, k and v, and q. key: the scale of scores comes first in it.
        """
        projection, tape = build.p.problem, build.tape
        attention = self._attend(call)
        tape.order()
        gather = Gather(build, Ref(FIRST, 0), projection.N)
        gather.issue_all()
        copy_own = gather.copy_own if call.last is not None else lambda: None
        weight, refs = matrix_of(call.weight, transposed=False), (Ref(WEIGHT, 0), Ref(OUT, 0))
        multiply_gathered(build, gather, weight, refs, None, is_bulk=build.p.is_bulk, before_last=copy_own)
        lanes = PieceLanes(build, 2)
        lanes.begin()
        lanes.next()
        tape.compute(attention)
        copied: tuple[Key, ...] = ()
        if call.last is not None:
            lanes.next()
            copied = record_weight_gradient(build, call, gather, (gather.window, Ref(SECOND, 0)))
        lanes.join()
        tape.wait(*gather.remaining(), *copied)

    def _attend(self, call: TapeCall) -> Step:
        assert call.second is not None
        assert isinstance(call.key, tuple)
        k, v, _, _, _, _, q = call.more
        band = self._problem.visible_keys(RowRange(0, self._problem.rows))
        bound = self._kernel.bind_backward(call.out, (q, k, v, call.second), SplitMask(band), call.key[0])
        if bound is None:
            raise Unservable
        at_k, at_v, at_state, at_grad_q, at_grad_k, at_grad_v, at_q = _AT_ONCE
        slots = (at_q, at_k, at_v, SECOND, at_state, OUT, at_grad_q, at_grad_k, at_grad_v)
        return _bound_step(bound, [Ref(slot, 0) for slot in slots])
