"""Both passes of query-split attention, whatever the way: see `query_split_attention`, which plans and calls them.

Knows prepared passes and kernels; must not know autograd.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from commfuse_megatron.kernels.attention import Dropout, join_states
from commfuse_megatron.ops.arguments import remember, with_unit_stride
from commfuse_megatron.ops.attention_recordings import (
    AttentionAtOnce,
    new_joint_states,
    new_states,
    num_lanes_of,
    record_query_split,
    record_query_split_backward,
    split_states,
)
from commfuse_megatron.ops.attention_slabs import GradientSlabs
from commfuse_megatron.ops.linear_reduce_scatter import OPERATION as PROJECTION
from commfuse_megatron.ops.linear_reduce_scatter import ScatterOperands, scatter_backward, scatter_forward
from commfuse_megatron.ops.passes import (
    TapeWeightGrad,
    gather_buffer,
    gather_chunks,
    gather_rows_alone,
    kept_rows,
    scatter_chunks,
    start_gather,
    weight_gradient,
)
from commfuse_megatron.ops.replay import Build, TapeCall, replay
from commfuse_megatron.ops.split_attention import Heads, InputGradients, SplitAttention
from commfuse_megatron.ops.weight_grad import DeferredWeightGrad, WeightGrad
from commfuse_megatron.plan.linear_plan import LinearPlan
from commfuse_megatron.problem import AttentionProblem, RowRange, chunk_ranges
from commfuse_megatron.runtime.executor import AllGatherRun
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.runtime.program import split_rows
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.transport.base import Transfer

__all__ = ["AttentionCall", "Saved", "attention_backward", "attention_forward", "projection_weight_gradient"]


class AttentionCall(NamedTuple):
    """One call: its forward pass, and what differs between calls of one problem."""

    forward: PreparedPass
    weight_grad: WeightGrad
    scale: float
    mask: torch.Tensor | None
    dropout: Dropout | None
    is_rehearsal: bool = False


class Saved(NamedTuple):
    """What a backward pass needs of its forward pass.

    states: by split, as kernels return them; or all in one tensor, as a tape left them: one behind the other, or
    [B, H, S, 1], as one call would have left them.
    """

    heads: Heads
    attended: torch.Tensor  # [S, B, H, D_v]
    states: list[tuple[torch.Tensor, ...]] | torch.Tensor


def attention_forward(
    call: AttentionCall, heads: Heads, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, Saved]:
    """(this rank's rows of the result, what the backward pass needs)."""
    p = call.forward
    problem = _attention_of(p)
    heads = Heads(*map(_for_kernels, heads))
    bias = None if bias is None else bias.contiguous()
    attention = _split(p, call)
    attended = heads.q.new_empty(*heads.q.shape[:3], problem.value_dim)
    if p.plan.is_scheduled:
        return _query_split_forward(p, attention, heads, attended, with_unit_stride(weight), bias)
    states: list[tuple[torch.Tensor, ...]] = [()]
    if attended.numel():
        with _recorded_alone(p, "attend"):
            states = [attention.forward(0, heads, attended)]
    y = scatter_forward(_projection_pass(p, call), attended.flatten(2), weight, bias)
    return y, Saved(heads, attended, states)


def attention_backward(
    p: PreparedPass, call: AttentionCall, saved: Saved, grad_shard: torch.Tensor, weight: torch.Tensor
) -> tuple[Heads, torch.Tensor | None]:
    """Gradients of heads, which are due, and of the weight, if it is. grad_shard: [M_r, N]."""
    attention = _split(p, call)
    if isinstance(saved.states, torch.Tensor):
        if p.can_replay:
            found = _replayed_backward(p, attention, saved, grad_shard, weight, call.weight_grad)
            if found is not None:
                return found
        if saved.states.dim() == 1:
            splits = _split(call.forward, call).splits
            saved = saved._replace(states=split_states(saved.states, _attention_of(p), splits))
    if p.plan.is_scheduled:
        return _query_split_backward(p, attention, saved, grad_shard, weight, call.weight_grad)
    return _backward_at_once(p, call, attention, saved, grad_shard, weight)


def projection_weight_gradient(
    p: PreparedPass, call: AttentionCall, attended: torch.Tensor, grad_shard: torch.Tensor
) -> torch.Tensor | None:
    """The gradient of the weight alone, which is due. attended: [S, B, H, D_v]; grad_shard: [M_r, N]."""
    if not p.plan.is_scheduled:
        operands = ScatterOperands(grad_shard, attended.flatten(2), None, attended.flatten(2).shape)
        return scatter_backward(_projection_pass(p, call), operands, call.weight_grad)[1]
    with p as link:
        is_kept = isinstance(call.weight_grad, DeferredWeightGrad)
        grad = gather_rows_alone(p, link, grad_shard, "all-gather of the output gradient", is_kept=is_kept)
        return weight_gradient(p, grad, attended.view(p.problem.M, p.problem.K), call.weight_grad)


def _backward_at_once(
    p: PreparedPass,
    call: AttentionCall,
    attention: SplitAttention,
    saved: Saved,
    grad_shard: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[Heads, torch.Tensor | None]:
    """The projection's backward pass as a linear of its own, and that of all queries at once."""
    attended, projection = saved.attended.flatten(2), _projection_pass(p, call)
    state: tuple[torch.Tensor, ...] = ()
    if attended.numel():
        state = _state_of_all(p, call, attention, saved)
        if attention.is_plain and projection.can_replay and len(state) == 1:
            operands_at_once = (grad_shard, weight, state[0])
            found = _replayed_at_once(p, projection, attention, saved, operands_at_once, call.weight_grad)
            if found is not None:
                return found
    x = attended if "weight" in p.problem.needs else None
    operands = ScatterOperands(grad_shard, x, weight, attended.shape)
    grad_attended, grad_weight = scatter_backward(projection, operands, call.weight_grad)
    if not attended.numel():
        return Heads(*map(torch.zeros_like, saved.heads)), grad_weight
    assert grad_attended is not None
    with _recorded_alone(p, "attend backward"):
        gradients = attention.gradients(0, saved.heads, saved.attended, state, grad_attended.view(saved.attended.shape))
        return Heads(*(gradient.to(saved.heads.q.dtype) for gradient in gradients)), grad_weight


def _state_of_all(
    p: PreparedPass, call: AttentionCall, attention: SplitAttention, saved: Saved
) -> tuple[torch.Tensor, ...]:
    """What a forward pass of all queries at once would have left."""
    if isinstance(saved.states, torch.Tensor):  # of all splits in one
        return (saved.states,)
    if not call.forward.plan.is_scheduled:
        (state,) = saved.states
        return state
    queries = [split.size for split in _split(call.forward, call).splits]
    joined = join_states(saved.states, queries)
    # A kernel that leaves nothing of some splits: one query that sees one key is cuDNN's formula.
    return attention.forward(0, saved.heads, torch.empty_like(saved.attended)) if joined is None else joined


def _query_split_forward(
    p: PreparedPass,
    attention: SplitAttention,
    heads: Heads,
    attended: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, Saved]:
    problem, context = _attention_of(p), p.context
    y = heads.q.new_empty(p.own_rows, problem.batch, problem.N)
    states: list[tuple[torch.Tensor, ...]] = [()] * len(attention.splits)
    with p as link:
        if attention.is_plain and p.can_replay:
            q, k, v = heads
            for all_states in _memory_for_states(p, attention, q):
                key = (attention.scale, q.stride(), k.stride(), v.stride(), all_states.dim())
                tape_call = TapeCall(q, attended, weight, y, bias, more=(k, v, all_states), key=key)
                if replay(p, link, record_query_split, tape_call):
                    return y, Saved(heads, attended, all_states)
        lanes = context.lanes
        lanes.begin(num_lanes_of(p))
        operands = split_rows(attended.view(problem.M, problem.K), p.scatter.bound.chunk_rows)

        def produce(split: int, target: torch.Tensor, addend: torch.Tensor | None, in_flight: Transfer | None) -> None:
            # What arrived is ordered before this on the current stream only.
            with lanes.turn(waits_for_current=addend is not None and addend.dim() == 3):
                mark = link.mark()  # on the lane, as all of this
                if operands[split].numel():
                    states[split] = attention.forward(split, heads, attended)
                    link.note_compute(f"attend {split}", mark, None)
                    mark = link.mark()
                p.gemm.multiply(operands[split], weight.t(), target, addend, in_flight)
                link.note_compute(f"multiply {split}", mark, None)

        scatter_chunks(p, link, produce, y.flatten(0, -2), bias=bias)
    return y, Saved(heads, attended, states)


def _memory_for_states(p: PreparedPass, attention: SplitAttention, like: torch.Tensor) -> Iterator[torch.Tensor]:
    """Where a tape may leave the states, what suits the backward pass best first."""
    problem = _attention_of(p)
    if p.plan.backward_path is not None and problem.needs:
        joint = new_joint_states(like, problem, attention.splits)
        if joint is not None:
            yield joint
    yield new_states(like, problem, attention.splits)


def _replayed_backward(
    p: PreparedPass,
    attention: SplitAttention,
    saved: Saved,
    grad_shard: torch.Tensor,
    weight: torch.Tensor,
    weight_grad: WeightGrad,
) -> tuple[Heads, torch.Tensor | None] | None:
    """The whole pass with split queries from a tape: see `_from_tape`."""
    assert isinstance(saved.states, torch.Tensor)
    slabs = p.memo.get("slabs")
    if slabs is None:
        slabs = p.memo["slabs"] = GradientSlabs(_attention_of(p), attention.splits)
    operands = (grad_shard, weight, saved.states)
    memory = (slabs.new(saved.heads.k), slabs.new(saved.heads.v))
    return _from_tape(p, p, record_query_split_backward, attention.scale, saved, operands, weight_grad, memory)


def _replayed_at_once(
    p: PreparedPass,
    projection: PreparedPass,
    attention: SplitAttention,
    saved: Saved,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weight_grad: WeightGrad,
) -> tuple[Heads, torch.Tensor | None] | None:
    """The same of a pass whose attention is not split, on a tape of the projection's pass."""
    assert p.attention is not None
    if not p.attention.can_bind or not operands[-1].is_contiguous():
        return None
    recorder = p.memo.get("at once")
    if recorder is None:
        recorder = p.memo["at once"] = AttentionAtOnce(_attention_of(p), p.attention)
    return _from_tape(p, projection, recorder.record, attention.scale, saved, operands, weight_grad)


def _from_tape(
    p: PreparedPass,
    owner: PreparedPass,
    record: Callable[[Build, TapeCall], None],
    scale: float,
    saved: Saved,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weight_grad: WeightGrad,
    slabs: tuple[torch.Tensor, ...] = (),
) -> tuple[Heads, torch.Tensor | None] | None:
    """Gradients of heads and weight, by the tape of `record` that the pass `owner` keeps; None where there is none for
    these layouts. operands: the own rows' gradient, the weight, and what the forward pass left. slabs: more memory for
    the gradients of keys and values.
    """
    (q, k, v), (grad_shard, weight, states) = saved.heads, operands
    gradients = Heads(*map(_empty_contiguous, saved.heads))
    last = TapeWeightGrad(p, grad_shard, weight_grad) if "weight" in p.problem.needs else None
    tape_call = TapeCall(
        grad_shard,
        saved.attended,
        weight,
        torch.empty_like(saved.attended),
        None if last is None else last.memory,
        last is not None and last.accumulates,
        more=(k, v, states, *gradients, *slabs, q),
        key=(scale, q.stride(), k.stride(), v.stride(), torch.are_deterministic_algorithms_enabled()),
        defers=last is not None and last.is_deferred,
    )
    with owner as link:
        if not replay(owner, link, record, tape_call):
            return None
    if last is None:
        return gradients, None
    return gradients, last.finish(last.memory, saved.attended.view(p.problem.M, p.problem.K))


def _empty_contiguous(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _query_split_backward(
    p: PreparedPass,
    attention: SplitAttention,
    saved: Saved,
    grad_shard: torch.Tensor,
    weight: torch.Tensor,
    weight_grad: WeightGrad,
) -> tuple[Heads, torch.Tensor | None]:
    """The pass with split queries, step by step."""
    problem = p.problem
    gradients, grad_weight = InputGradients(saved.heads), None
    with p as link:
        is_kept = "weight" in problem.needs and isinstance(weight_grad, DeferredWeightGrad)
        grad = gather_buffer(p, link, grad_shard, is_kept=is_kept)
        run = start_gather(p, link, grad_shard, grad, "all-gather of the output gradient")
        _gather_under_attention(p, link, run, attention, saved, gradients, weight)
        if "weight" in problem.needs:
            attended = saved.attended.view(problem.M, problem.K)
            grad_weight = weight_gradient(p, kept_rows(link, grad, is_kept=is_kept), attended, weight_grad)
    return gradients.result(), grad_weight


def _gather_under_attention(
    p: PreparedPass,
    link: Link,
    run: AllGatherRun,
    attention: SplitAttention,
    saved: Saved,
    gradients: InputGradients,
    weight: torch.Tensor,
) -> None:
    lanes = p.context.lanes
    grad_attended = torch.empty_like(saved.attended)
    states = saved.states
    assert not isinstance(states, torch.Tensor)
    rows_of = split_rows(grad_attended.view(p.problem.M, p.problem.K), p.gather.bound.chunk_rows)
    lanes.begin(num_lanes_of(p))

    def consume(step: int, split: int, grad_rows: torch.Tensor, in_flight: Transfer | None) -> None:
        mark = link.mark()
        p.gemm.multiply(grad_rows, weight, rows_of[split], None, in_flight)
        p.gemm.join()
        link.note_compute(f"multiply {split}", mark, step)
        if rows_of[split].numel():
            mark = link.mark()
            queries = attention.splits[split]
            rows = grad_attended[queries.start : queries.stop]
            found = attention.gradients(split, saved.heads, saved.attended, states[split], rows)
            lanes.wait_for_previous()  # sums of all splits are touched
            attention.add_gradients(split, found, gradients)
            link.note_compute(f"attend backward {split}", mark, step)

    gather_chunks(p, run, consume, lanes.turn)


@contextmanager
def _recorded_alone(p: PreparedPass, name: str) -> Iterator[None]:
    """Record what is in the with-block, if anything is recorded, as a call of its own: it lies outside any `with p`.

    By the name of the operation only: the block's transfers are the projection's, whose record says what they cost.
    """
    recorder = p.context.link.recorder
    if recorder is None:
        yield
        return
    recorder.begin_call(f"{p.problem.op}.{p.problem.pass_name}")
    mark = recorder.now()
    yield
    recorder.add_compute(name, mark, None)


def _projection_pass(p: PreparedPass, call: AttentionCall) -> PreparedPass:
    """The projection as a linear of its own: planned as any other, or sequential if `p` is."""
    problem, context = _attention_of(p).projection, p.context
    key = (p.plan.path, problem)
    prepared = context.known_calls.get(key)
    if prepared is None and p.plan.path == "sequential":
        plan = LinearPlan("sequential", p.plan.reason, Algorithm.DIRECT, 1, keep_gathered_input=False)
        prepared = context.known_calls[key] = context.make_pass(problem, plan)
    elif prepared is None:
        prepared = remember(context, key, problem, PROJECTION)
    if p.plan.path != "sequential" and not call.is_rehearsal:
        prepared.begin()
    return prepared


def _split(p: PreparedPass, call: AttentionCall) -> SplitAttention:
    """The attention of `call` as `p`, its forward or backward pass, splits it."""
    if call.mask is not None or call.dropout is not None:
        return _make_split(p, call)
    made = p.memo.get("split")
    if made is None or made.scale != call.scale:
        made = p.memo["split"] = _make_split(p, call)
    return made


def _make_split(p: PreparedPass, call: AttentionCall) -> SplitAttention:
    problem, kernel = _attention_of(p), p.attention
    assert kernel is not None
    if p.plan.is_scheduled:
        shards = chunk_ranges(problem.rows, problem.group_size, p.plan.chunks_per_shard)
        splits = [chunk for shard in shards for chunk in shard]
    else:
        splits = [RowRange(0, problem.rows)]
    return SplitAttention(problem, kernel, splits, call.scale, call.mask, call.dropout)


def _attention_of(p: PreparedPass) -> AttentionProblem:
    assert isinstance(p.problem, AttentionProblem)
    return p.problem


def _for_kernels(tensor: torch.Tensor) -> torch.Tensor:
    """An operand as kernels load it, 16 bytes at a time: itself, if it is a view into a fused projection, say."""
    per_load = 16 // tensor.element_size()
    *outer, last = tensor.stride()
    is_aligned = last == 1 and not any(stride <= 0 or stride % per_load for stride in outer)
    if is_aligned and tensor.data_ptr() % 16 == 0:
        return tensor
    # Not `contiguous`, which leaves what begins elsewhere, or has an odd stride in a dimension of size 1, as it is.
    return tensor.clone(memory_format=torch.contiguous_format)
