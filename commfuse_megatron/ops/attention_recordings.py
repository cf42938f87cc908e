"""The passes of query-split attention, put on tapes: which kernels, GEMMs, copies and waits, in which order.

As in `runtime/lanes.py` the pieces, attention and GEMM of one chunk of queries, alternate over two streams:

    lane 0   [attend 1][project 1]          [attend 3][project 3]...
    lane 1             [attend 2  ][project 2]        [attend own][project own]
    copies                        [y 1 ...  ][y 2 ...]
"""

import itertools
from collections.abc import Sequence

import torch

from commfuse_megatron.kernels.attention import SplitMask
from commfuse_megatron.ops.recordings import Scatter, matrix_of, multiply_scattered
from commfuse_megatron.ops.replay import FIRST, LAST, MORE, OUT, SECOND, WEIGHT, Build, TapeCall, Unservable
from commfuse_megatron.problem import AttentionProblem, RowRange, chunk_ranges
from commfuse_megatron.transport.copy_tape import Ref, Step

__all__ = ["new_states", "record_query_split", "split_states"]

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
    shards = chunk_ranges(problem.rows, problem.group_size, build.p.plan.chunks_per_shard)
    splits = [chunk for shard in shards for chunk in shard]
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

    def start_of(tensor: torch.Tensor, row: int) -> int:
        return tensor.stride(0) * tensor.element_size() * row

    q_start, out_start = start_of(q, rows.start), start_of(attended, rows.start)
    k_start, v_start = start_of(k, seen.start), start_of(v, seen.start)

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
