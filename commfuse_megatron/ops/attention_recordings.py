"""The passes of query-split attention, put on tapes: which kernels, GEMMs, copies and waits, in which order.

As in `runtime/lanes.py` the pieces, attention and GEMM of one chunk of queries, alternate over two streams:

    lane 0   [attend 1][project 1]          [attend 3][project 3]...
    lane 1             [attend 2  ][project 2]        [attend own][project own]
    copies                        [y 1 ...  ][y 2 ...]

Backward the pieces are the dgrad of one chunk's rows and the attention backward of its queries. Each leaves the
gradients of the keys and values that it saw in a slab of its own; a sum over slabs, in fp32, ends the pass.
"""

import itertools
from collections.abc import Sequence

import torch

from commfuse_megatron.kernels.attention import BoundBackward, SplitMask
from commfuse_megatron.kernels.sum_partials import bind_sum
from commfuse_megatron.ops.recordings import (
    Gather,
    Scatter,
    matrix_of,
    multiply_scattered,
    record_weight_gradient,
    sum_step,
)
from commfuse_megatron.ops.replay import FIRST, LAST, MORE, OUT, SECOND, WEIGHT, Build, TapeCall, Unservable
from commfuse_megatron.problem import AttentionProblem, RowRange, chunk_ranges
from commfuse_megatron.transport.copy_tape import Ref, Step

__all__ = ["new_slabs", "new_states", "record_query_split", "record_query_split_backward", "split_states"]

_FLOATS_PER_LOAD = 4


def _state_starts(problem: AttentionProblem, splits: Sequence[RowRange]) -> list[int]:
    """Where the state of each split begins, and where the last ends, in floats: 16 bytes apart, as kernels load."""
    sizes = (problem.batch * problem.heads * queries.size for queries in splits)
    return list(itertools.accumulate((-(-size // _FLOATS_PER_LOAD) * _FLOATS_PER_LOAD for size in sizes), initial=0))


def new_states(like: torch.Tensor, problem: AttentionProblem, splits: Sequence[RowRange]) -> torch.Tensor:
    """Memory for the states of all splits."""
    return like.new_empty(_state_starts(problem, splits)[-1], dtype=torch.float32)


def split_states(
    states: torch.Tensor, problem: AttentionProblem, splits: Sequence[RowRange]
) -> list[tuple[torch.Tensor, ...]]:
    """What each split's forward pass left in `states`, as kernels return it."""
    starts, lead = _state_starts(problem, splits), problem.batch * problem.heads
    return [
        (states[start : start + lead * queries.size].view(problem.batch, problem.heads, queries.size, 1),)
        for start, queries in zip(starts, splits, strict=False)
    ]


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
    starts = _state_starts(problem, splits)
    attend = [
        _attend(build, operands, queries, states.element_size() * start, call.key[0])
        for queries, start in zip(splits, starts, strict=False)
    ]
    tape, lanes = build.tape, build.p.context.lanes.handles()
    turns = itertools.cycle(lanes)

    def prepare(chunk: int) -> None:
        if lanes:
            tape.on(next(turns))
        step = attend[chunk]
        if step is not None:
            tape.compute(step)

    scatter = Scatter(build, problem.N)
    refs = (Ref(SECOND, 0), Ref(WEIGHT, 0), Ref(OUT, 0))
    bias = Ref(LAST, 0)
    folded = bias if call.last is not None and scatter.folds else None
    if lanes:
        tape.fork(lanes)
    multiply_scattered(build, scatter, matrix_of(call.weight, transposed=True), refs, folded, prepare=prepare)
    if lanes:
        tape.join(lanes)
    if not scatter.folds:
        scatter.sum(call.out.view(-1, call.out.size(-1)), refs[2], call.last, bias)
    tape.wait(*scatter.remaining())


def _splits(build: Build) -> list[RowRange]:
    """Queries of every split, flat, owner-major."""
    problem = build.p.problem
    shards = chunk_ranges(problem.rows, problem.group_size, build.p.plan.chunks_per_shard)
    return [chunk for shard in shards for chunk in shard]


def _start_of(tensor: torch.Tensor, row: int) -> int:
    """Bytes from the start of `tensor` to a row."""
    return tensor.stride(0) * tensor.element_size() * row


def _attend(
    build: Build,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    queries: RowRange,
    state_start: int,
    scale: float,
) -> Step | None:
    """The attention of one split; None if it has no queries."""
    problem, kernel = build.p.problem, build.p.attention
    assert isinstance(problem, AttentionProblem)
    assert kernel is not None
    if not queries.size:
        return None
    q, k, v, attended = operands
    band = problem.visible_keys(queries)
    seen = slice(band.keys.start, band.keys.stop)
    rows = slice(queries.start, queries.stop)
    bound = kernel.bind_forward(q[rows], k[seen], v[seen], attended[rows], SplitMask(band), scale)
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


def new_slabs(like: torch.Tensor, num_splits: int) -> torch.Tensor:
    """Memory for every split's gradient of `like` [S, B, H_kv, D]: [splits, S, B * H_kv * D]."""
    return like.new_empty(num_splits, like.size(0), like[0].numel())


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
    tape, lanes = build.tape, build.p.context.lanes.handles()
    turns = itertools.cycle(lanes)
    attend = _attend_backward(build, call, splits)
    tape.order()
    gather = Gather(build, Ref(FIRST, 0), problem.N)
    gather.issue_all()
    if lanes:
        tape.fork(lanes)
    weight, bound = matrix_of(call.weight, transposed=False), gather.bound
    for index, step in enumerate(bound.steps):
        if index == 1 and call.last is not None:
            gather.copy_own()
        if step.compute is None:
            continue
        if lanes:
            tape.on(next(turns))
        gather.wait([] if step.needs_batch is None else [step.needs_batch])
        rows, first = bound.chunk_rows[step.compute], gather.start(step.compute)
        target = Ref(OUT, first * problem.K * build.itemsize)
        shapes = (build.rows(rows, problem.N), weight, build.rows(rows, problem.K))
        build.matmul(shapes, (gather.chunk(step.compute), Ref(WEIGHT, 0), target))
        attention = attend[step.compute]
        if attention is not None:
            tape.compute(attention)
    if lanes:
        tape.join(lanes)
    k, v = call.more[_K - MORE], call.more[_V - MORE]
    for tensor, slabs, gradient in ((k, _SLABS_K, _GRAD_K), (v, _SLABS_V, _GRAD_V)):
        _sum_slabs(build, problem, splits, tensor, Ref(slabs, 0), Ref(gradient, 0))
    if call.last is not None:
        gather.complete()
        record_weight_gradient(build, call, (gather.window, Ref(SECOND, 0)))
    tape.wait(*gather.remaining())


def _attend_backward(build: Build, call: TapeCall, splits: Sequence[RowRange]) -> list[Step | None]:
    """The attention of every split; None for one without queries."""
    problem, kernel = build.p.problem, build.p.attention
    assert isinstance(problem, AttentionProblem)
    assert kernel is not None
    assert call.second is not None
    assert isinstance(call.key, tuple)
    attended, grad_attended = call.second, call.out
    k, v, states, _, _, _, slabs_k, slabs_v, q = call.more
    q_slot = MORE + len(call.more) - 1
    steps: list[Step | None] = []
    numbers = itertools.count()  # of slabs: a split without queries has none
    for queries, state_start in zip(splits, _state_starts(problem, splits), strict=False):
        if not queries.size:
            steps.append(None)
            continue
        number = next(numbers)
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
            Ref(_SLABS_K, _start_of(slabs_k, number) + slabs_k.stride(1) * build.itemsize * seen.start),
            Ref(_SLABS_V, _start_of(slabs_v, number) + slabs_v.stride(1) * build.itemsize * seen.start),
        )
        steps.append(_bound_step(bound, refs))
    return steps


def _bound_step(bound: BoundBackward, refs: Sequence[Ref]) -> Step:
    def step(at: tuple[int, ...], stream: int) -> None:
        bound(stream, *[at[slot] + offset for slot, offset in refs])

    return step


def _sum_slabs(
    build: Build, problem: AttentionProblem, splits: Sequence[RowRange], like: torch.Tensor, slabs: Ref, gradient: Ref
) -> None:
    """gradient [S, ...] = the sum over the splits that see each key of their slabs."""
    cols = like[0].numel()
    row_bytes = cols * build.itemsize
    if row_bytes % 16:  # sums are bound for rows that begin on 16 bytes
        raise Unservable
    seen = [problem.visible_keys(queries).keys for queries in splits if queries.size]
    edges = sorted({edge for keys in seen for edge in (keys.start, keys.stop)} | {0, problem.rows})
    for start, stop in itertools.pairwise(edges):
        by = [number for number, keys in enumerate(seen) if keys.start <= start and stop <= keys.stop]
        if not by or by[-1] - by[0] != len(by) - 1:
            raise Unservable
        shape, stride = (stop - start, cols), problem.rows * cols
        rows = like.new_empty(shape)
        partials = like.new_empty(stride * len(by)).as_strided((len(by) - 1, *shape), (stride, cols, 1))
        add = bind_sum(rows, partials, bias=None, out=rows)
        if add is None:
            raise Unservable
        own = slabs.plus((by[0] * problem.rows + start) * row_bytes)
        refs = (own, own.plus(stride * build.itemsize), gradient.plus(start * row_bytes))
        build.tape.compute(sum_step(add, refs))
