"""Both passes of query-split attention, whatever the way: see `query_split_attention`, which plans and calls them.

Knows prepared passes and kernels; must not know autograd.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from commfuse_megatron.kernels.attention import Dropout, join_states
from commfuse_megatron.ops.arguments import remember, with_unit_stride
from commfuse_megatron.ops.attention_slabs import GradientSlabs
from commfuse_megatron.ops.attention_tapes import (
    attend_backward_at_once,
    attend_backward_kernels,
    attend_kernels,
    new_joint_states,
    new_states,
    num_lanes_of,
    split_states,
    splits_of,
)
from commfuse_megatron.ops.linear_reduce_scatter import OPERATION as PROJECTION
from commfuse_megatron.ops.linear_reduce_scatter import (
    ScatterOperands,
    lower_scatter_backward,
    scatter_backward,
    scatter_forward,
)
from commfuse_megatron.ops.split_attention import Heads, InputGradients, SplitAttention
from commfuse_megatron.ops.weight_grad import DueWeightGrad, WeightGrad, ask_backward
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import AttentionProblem
from commfuse_megatron.runtime.prepared import Lower, PreparedPass
from commfuse_megatron.runtime.tape_program import TapeKernel
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.schedule.lower_attention import (
    ADD_GRADIENTS,
    ATTEND,
    ATTEND_BACKWARD,
    lower_at_once_backward,
    lower_query_split,
    lower_query_split_backward,
)
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Program

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
    if problem.needs:
        heads = _filling_their_memory(heads)
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
    due = DueWeightGrad(p, grad_shard, call.weight_grad, is_gathered=True)
    x = attended.view(p.problem.M, p.problem.K)
    asked = ask_backward(due, has_product=False)
    with p:
        p.run(lower_scatter_backward, asked, {"shard": grad_shard, "x": x, **due.memory})
    return _finish(due, x)


def _finish(due: DueWeightGrad | None, attended: torch.Tensor) -> torch.Tensor | None:
    """What autograd is given for the weight. attended: [M, K]."""
    if due is None:
        return None
    if due.when == "now":
        return due.finish()
    due.defer(due.gathered, attended)
    return None


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
            of_all = saved._replace(states=state[0])
            found = _replayed_at_once(p, projection, attention, of_all, grad_shard, weight, call.weight_grad)
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
    problem = _attention_of(p)
    y = heads.q.new_empty(p.own_rows, problem.batch, problem.N)
    tensors = {"a": attended.view(problem.M, problem.K), "weight": weight, "out": y}
    if bias is not None:
        tensors["bias"] = bias
    has_bias = bias is not None
    states: list[tuple[torch.Tensor, ...]] = [()] * len(attention.splits)
    with p:
        if attention.is_plain and p.can_replay:
            for all_states in _memory_for_states(p, attention, heads.q):
                on_tape = tensors | heads._asdict() | {"states": all_states}
                layout = (*_layout(attention, heads), all_states.dim())
                kernels = attend_kernels(p, attention.scale)
                if p.run_from_tape(_lower_forward, has_bias, on_tape, kernels=kernels, layout=layout):
                    return y, Saved(heads, attended, all_states)

        def attend(split: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
            states[split] = attention.forward(split, heads, attended)

        p.run_on_tensors(_lower_forward, has_bias, tensors, kernels={ATTEND: attend})
    return y, Saved(heads, attended, states)


def _lower_forward(p: PreparedPass, policy: Policy, has_bias: bool) -> Program:
    return lower_query_split(p.scatter, _with_lanes(p, policy), has_bias=has_bias)


def _lower_backward(p: PreparedPass, policy: Policy, asked: Asked) -> Program:
    return lower_query_split_backward(p.gather, _with_lanes(p, policy), asked)


def _lower_at_once(p: PreparedPass, policy: Policy, asked: Asked) -> Program:
    return lower_at_once_backward(p.gather, policy, asked)


def _with_lanes(p: PreparedPass, policy: Policy) -> Policy:
    return dataclasses.replace(policy, lanes=num_lanes_of(p))


def _layout(attention: SplitAttention, heads: Heads) -> tuple[Hashable, ...]:
    """What attention's kernels on a tape depend on."""
    return (attention.scale, *(tensor.stride() for tensor in heads))


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
    slabs = p.memo.get("slabs")
    if slabs is None:
        slabs = p.memo["slabs"] = GradientSlabs(_attention_of(p), attention.splits)
    more = {"slabs_k": slabs.new(saved.heads.k), "slabs_v": slabs.new(saved.heads.v)}
    kernels = attend_backward_kernels(p, attention.scale, slabs)
    return _from_tape(p, p, _lower_backward, kernels, attention, saved, grad_shard, weight, weight_grad, more)


def _replayed_at_once(
    p: PreparedPass,
    projection: PreparedPass,
    attention: SplitAttention,
    saved: Saved,
    grad_shard: torch.Tensor,
    weight: torch.Tensor,
    weight_grad: WeightGrad,
) -> tuple[Heads, torch.Tensor | None] | None:
    """The same of a pass whose attention is not split, on a tape of the projection's pass."""
    assert p.attention is not None
    assert isinstance(saved.states, torch.Tensor)
    if not p.attention.can_bind or not saved.states.is_contiguous():
        return None
    kernels = attend_backward_at_once(p, attention.scale)
    return _from_tape(p, projection, _lower_at_once, kernels, attention, saved, grad_shard, weight, weight_grad, {})


def _from_tape(
    p: PreparedPass,
    owner: PreparedPass,
    lower: Lower,
    kernels: Mapping[str, TapeKernel],
    attention: SplitAttention,
    saved: Saved,
    grad_shard: torch.Tensor,
    weight: torch.Tensor,
    weight_grad: WeightGrad,
    more: dict[str, torch.Tensor],
) -> tuple[Heads, torch.Tensor | None] | None:
    """Gradients of heads and weight, by a tape that the pass `owner` keeps; None where there is none for these layouts.

    saved: its states are one tensor. more: further memory.
    """
    assert isinstance(saved.states, torch.Tensor)
    problem = p.problem
    gradients = Heads(*map(_empty_contiguous, saved.heads))
    attended = saved.attended.view(problem.M, problem.K)
    has_weight = "weight" in problem.needs
    due = DueWeightGrad(p, grad_shard, weight_grad, is_gathered=True) if has_weight else None
    tensors = {
        "shard": grad_shard,
        "x": attended,
        "weight": weight,
        "out": torch.empty_like(attended),
        **({} if due is None else due.memory),
        **saved.heads._asdict(),
        "states": saved.states,
        **{f"grad_{name}": gradient for name, gradient in gradients._asdict().items()},
        **more,
    }
    asked = ask_backward(due, is_bulk=owner.is_bulk)
    layout = (*_layout(attention, saved.heads), p.problem, p.attention, torch.are_deterministic_algorithms_enabled())
    with owner:
        if not owner.run_from_tape(lower, asked, tensors, kernels=kernels, layout=layout):
            return None
    return gradients, _finish(due, attended)


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
    """The pass with split queries, on tensors."""
    problem, gradients = p.problem, InputGradients(saved.heads)
    attended, grad_attended = saved.attended.view(problem.M, problem.K), torch.empty_like(saved.attended)
    has_weight = "weight" in problem.needs
    due = DueWeightGrad(p, grad_shard, weight_grad, is_gathered=True) if has_weight else None
    states, found = saved.states, dict[int, Heads]()

    def attend(split: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        queries = attention.splits[split]
        if reads[0].numel():
            rows = grad_attended[queries.start : queries.stop]
            found[split] = attention.gradients(split, saved.heads, saved.attended, states[split], rows)  # type: ignore[arg-type]

    def add(split: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        if split in found:
            attention.add_gradients(split, found.pop(split), gradients)

    tensors = {
        "shard": grad_shard,
        "x": attended,
        "weight": weight,
        "out": grad_attended.view(problem.M, problem.K),
        **({} if due is None else due.memory),
    }
    kernels = {ATTEND_BACKWARD: attend, ADD_GRADIENTS: add}
    with p:
        p.run_on_tensors(_lower_backward, ask_backward(due), tensors, kernels=kernels)
    return gradients.result(), _finish(due, attended)


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
        plan = PassPlan("sequential", p.plan.reason, Algorithm.DIRECT, 1, keep_gathered_input=False)
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
    return SplitAttention(problem, kernel, splits_of(p), call.scale, call.mask, call.dropout)


def _attention_of(p: PreparedPass) -> AttentionProblem:
    assert isinstance(p.problem, AttentionProblem)
    return p.problem


def _filling_their_memory(heads: Heads) -> Heads:
    """Operands to be kept until the backward pass: those that would keep more memory alive than they need are copied.

    As values that are a view into a fused projection, whose queries and keys went through rotary embedding.
    """
    needed: dict[int, int] = {}
    for tensor in heads:
        start = tensor.untyped_storage().data_ptr()
        needed[start] = needed.get(start, 0) + tensor.nbytes
    copies = []
    for tensor in heads:
        storage = tensor.untyped_storage()
        is_filled = needed[storage.data_ptr()] >= storage.nbytes()
        copies.append(tensor if is_filled else tensor.clone(memory_format=torch.contiguous_format))
    return Heads(*copies)


def _for_kernels(tensor: torch.Tensor) -> torch.Tensor:
    """An operand as kernels load it, 16 bytes at a time: itself, if it is a view into a fused projection, say."""
    per_load = 16 // tensor.element_size()
    *outer, last = tensor.stride()
    is_aligned = last == 1 and not any(stride <= 0 or stride % per_load for stride in outer)
    if is_aligned and tensor.data_ptr() % 16 == 0:
        return tensor
    # Not `contiguous`, which leaves what begins elsewhere, or has an odd stride in a dimension of size 1, as it is.
    return tensor.clone(memory_format=torch.contiguous_format)
