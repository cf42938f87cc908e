"""Attention kernels on tapes: what `lower_attention` computes by name, over addresses.

Operands by name: q, k, v and what a forward pass leaves of the softmax, "states"; backward also the gradients grad_q,
grad_k and grad_v, and slabs for those of keys and values. "a" or "x" is what attention gave, "out" its gradient.
"""

import itertools
from collections.abc import Sequence

import torch

from commfuse_megatron.kernels.attention import SplitMask
from commfuse_megatron.ops.attention_slabs import GradientSlabs
from commfuse_megatron.problem import AttentionProblem, RowRange, chunk_ranges
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.runtime.tape_program import TapeBinder, TapeKernel, Unservable
from commfuse_megatron.schedule.lower_attention import ATTEND, ATTEND_BACKWARD, SUM_SLABS
from commfuse_megatron.schedule.program import Compute
from commfuse_megatron.transport.copy_steps import Ref

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


def splits_of(p: PreparedPass) -> list[RowRange]:
    """Queries of every split, flat, owner-major; of all at once, where the plan is not a schedule's."""
    problem = p.problem
    if not p.plan.is_scheduled:
        return [RowRange(0, problem.rows)]
    shards = chunk_ranges(problem.rows, problem.group_size, p.plan.chunks_per_shard)
    return [chunk for shard in shards for chunk in shard]


def attend_kernels(p: PreparedPass, scale: float) -> dict[str, TapeKernel]:
    """The kernels of a forward pass: of the states of splits, "states" holds one behind the other; or, in four
    dimensions, those of all queries as one call would leave them."""
    problem, kernel, splits = p.problem, p.attention, splits_of(p)
    assert isinstance(problem, AttentionProblem)
    assert kernel is not None

    def attend(binder: TapeBinder, op: Compute) -> None:
        q, k, v, states = (binder.tensors[name] for name in ("q", "k", "v", "states"))
        queries = splits[op.chunk]
        band = problem.visible_keys(queries)
        rows, seen = slice(queries.start, queries.stop), slice(band.keys.start, band.keys.stop)
        is_joint = states.dim() > 1
        first = queries.start if is_joint else state_starts(problem, splits)[op.chunk]
        attended = _attended(binder, "a", problem)
        operands = (q[rows], k[seen], v[seen], attended[rows])
        bound = kernel.bind_forward(operands, SplitMask(band), scale, problem.rows if is_joint else None)
        if bound is None:
            raise Unservable
        refs = [
            binder.at("q", _start_of(q, rows.start)),
            binder.at("k", _start_of(k, seen.start)),
            binder.at("v", _start_of(v, seen.start)),
            binder.at("a", _start_of(attended, rows.start)),
            binder.at("states", states.element_size() * first),
        ]
        binder.compute(bound, refs)

    return {ATTEND: attend}


def attend_backward_kernels(p: PreparedPass, scale: float, slabs: GradientSlabs) -> dict[str, TapeKernel]:
    """The kernels of a backward pass in splits."""
    problem, splits = p.problem, splits_of(p)
    assert isinstance(problem, AttentionProblem)

    def attend(binder: TapeBinder, op: Compute) -> None:
        queries = splits[op.chunk]
        if queries.size:
            k, v = binder.tensors["k"], binder.tensors["v"]
            targets = (
                slabs.place(op.chunk, k, binder.at("slabs_k"), binder.at("grad_k")),
                slabs.place(op.chunk, v, binder.at("slabs_v"), binder.at("grad_v")),
            )
            _attend_backward(binder, p, queries, state_starts(problem, splits)[op.chunk], scale, targets)

    def add_up(binder: TapeBinder, op: Compute) -> None:
        for name in ("k", "v"):
            slabs.add_up(binder, binder.tensors[name], binder.at(f"slabs_{name}"), binder.at(f"grad_{name}"))

    return {ATTEND_BACKWARD: attend, SUM_SLABS: add_up}


def attend_backward_at_once(p: PreparedPass, scale: float) -> dict[str, TapeKernel]:
    """The kernel of a backward pass for all queries."""

    def attend(binder: TapeBinder, op: Compute) -> None:
        everything = RowRange(0, p.problem.rows)
        _attend_backward(binder, p, everything, 0, scale, (binder.at("grad_k"), binder.at("grad_v")))

    return {ATTEND_BACKWARD: attend}


def _attend_backward(
    binder: TapeBinder, p: PreparedPass, queries: RowRange, state: int, scale: float, targets: tuple[Ref, Ref]
) -> None:
    """targets: where the gradients of the keys and values that `queries` see go. state: in floats."""
    problem, kernel = p.problem, p.attention
    assert isinstance(problem, AttentionProblem)
    assert kernel is not None
    q, k, v, states = (binder.tensors[name] for name in ("q", "k", "v", "states"))
    attended, grad_attended = _attended(binder, "x", problem), _attended(binder, "out", problem)
    band = problem.visible_keys(queries)
    rows, seen = slice(queries.start, queries.stop), slice(band.keys.start, band.keys.stop)
    operands = (q[rows], k[seen], v[seen], attended[rows])
    bound = kernel.bind_backward(grad_attended[rows], operands, SplitMask(band), scale)
    if bound is None:
        raise Unservable
    refs = [
        binder.at("q", _start_of(q, rows.start)),
        binder.at("k", _start_of(k, seen.start)),
        binder.at("v", _start_of(v, seen.start)),
        binder.at("x", _start_of(attended, rows.start)),
        binder.at("states", states.element_size() * state),
        binder.at("out", _start_of(grad_attended, rows.start)),
        binder.at("grad_q", q[0].numel() * binder.itemsize * rows.start),
        *targets,
    ]
    binder.compute(bound, refs)


def _attended(binder: TapeBinder, name: str, problem: AttentionProblem) -> torch.Tensor:
    """An operand [M, K] of the projection as attention sees it: [S, B, H, D_v]."""
    return binder.tensors[name].view(problem.rows, problem.batch, problem.heads, problem.value_dim)


def _start_of(tensor: torch.Tensor, row: int) -> int:
    """Bytes from the start of `tensor` to a row."""
    return tensor.stride(0) * tensor.element_size() * row
