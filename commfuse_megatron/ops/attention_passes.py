"""Both passes of query-split attention, whatever the path: see `query_split_attention`, which plans and calls them.

Knows prepared passes and kernels; must not know autograd.
"""

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
    split_states,
    splits_of,
)
from commfuse_megatron.ops.linear import LinearOperands
from commfuse_megatron.ops.linear_reduce_scatter import OPERATION as PROJECTION
from commfuse_megatron.ops.linear_reduce_scatter import scatter_backward, scatter_forward
from commfuse_megatron.ops.split_attention import Heads, InputGradients, SplitAttention, operands_for_kernels
from commfuse_megatron.ops.weight_grad import DueWeightGrad, WeightGrad, ask_backward
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import AttentionProblem
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.runtime.tape_program import TapeKernel
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.schedule.lower_attention import ADD_GRADIENTS, ATTEND, ATTEND_BACKWARD
from commfuse_megatron.schedule.lower_linear import Asked


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
    heads = operands_for_kernels(heads, is_kept=bool(problem.needs))
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
    backward = _Backward(p, call, _split(p, call), saved, grad_shard, weight)
    if isinstance(saved.states, torch.Tensor):
        if p.can_replay:
            found = backward.split_from_tape()
            if found is not None:
                return found
        if saved.states.dim() == 1:
            splits = _split(call.forward, call).splits
            saved = saved._replace(states=split_states(saved.states, _attention_of(p), splits))
            backward = backward._replace(saved=saved)
    return backward.split_on_tensors() if p.plan.is_scheduled else backward.at_once()


def projection_weight_gradient(
    p: PreparedPass, call: AttentionCall, attended: torch.Tensor, grad_shard: torch.Tensor
) -> torch.Tensor | None:
    """The gradient of the weight alone, which is due. attended: [S, B, H, D_v]; grad_shard: [M_r, N]."""
    if not p.plan.is_scheduled:
        operands = LinearOperands(grad_shard, attended.flatten(2), None, attended.flatten(2).shape)
        return scatter_backward(_projection_pass(p, call), operands, call.weight_grad)[1]
    due = DueWeightGrad(p, grad_shard, call.weight_grad, is_gathered=True)
    x = attended.view(p.problem.M, p.problem.K)
    with p:
        p.run(ask_backward(due, has_product=False), {"shard": grad_shard, "x": x, **due.memory})
    return due.finish(None, x)


class _Backward(NamedTuple):
    """A backward pass whose heads get gradients, and what it works on."""

    p: PreparedPass
    call: AttentionCall
    attention: SplitAttention
    saved: Saved
    grad_shard: torch.Tensor
    weight: torch.Tensor

    def split_from_tape(self) -> tuple[Heads, torch.Tensor | None] | None:
        """With split queries: see `_from_tape`."""
        p, attention, heads = self.p, self.attention, self.saved.heads
        slabs = p.remember("slabs", lambda: GradientSlabs(_attention_of(p), attention.splits))
        more = {"slabs_k": slabs.new(heads.k), "slabs_v": slabs.new(heads.v)}
        return self._from_tape(p, attend_backward_kernels(p, attention.scale, slabs), more, attends=False)

    def split_on_tensors(self) -> tuple[Heads, torch.Tensor | None]:
        """With split queries."""
        p, attention, saved, gradients = self.p, self.attention, self.saved, InputGradients(self.saved.heads)
        grad_attended, found = torch.empty_like(saved.attended), dict[int, Heads]()

        def attend(split: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
            queries = attention.splits[split]
            if reads[0].numel():
                rows, state = grad_attended[queries.start : queries.stop], saved.states[split]
                found[split] = attention.gradients(split, saved.heads, saved.attended, state, rows)  # type: ignore[arg-type]

        def add(split: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
            if split in found:
                attention.add_gradients(split, found.pop(split), gradients)

        due, tensors = self._due(), self._tensors(grad_attended)
        tensors |= {} if due is None else due.memory
        with p:
            kernels = {ATTEND_BACKWARD: attend, ADD_GRADIENTS: add}
            p.run_on_tensors(ask_backward(due), tensors, kernels=kernels)
        return gradients.result(), None if due is None else due.finish(None, tensors["x"])

    def at_once(self) -> tuple[Heads, torch.Tensor | None]:
        """The projection's backward pass as a linear of its own, and that of all queries at once."""
        p, attention, saved, projection = self.p, self.attention, self.saved, _projection_pass(self.p, self.call)
        attended = saved.attended.flatten(2)
        state: tuple[torch.Tensor, ...] = ()
        if attended.numel():
            state = self._state_of_all()
            is_one = attention.is_plain and projection.can_replay and len(state) == 1
            if is_one and p.attention is not None and p.attention.can_bind and state[0].is_contiguous():
                of_all = self._replace(saved=saved._replace(states=state[0]))
                kernels = attend_backward_at_once(p, attention.scale)
                found = of_all._from_tape(projection, kernels, {}, attends=True)
                if found is not None:
                    return found
        x = attended if "weight" in p.problem.needs else None
        operands = LinearOperands(self.grad_shard, x, self.weight, attended.shape)
        grad_attended, grad_weight = scatter_backward(projection, operands, self.call.weight_grad)
        if not attended.numel():
            return Heads(*map(torch.zeros_like, saved.heads)), grad_weight
        assert grad_attended is not None
        with _recorded_alone(p, "attend backward"):
            grad = grad_attended.view(saved.attended.shape)
            gradients = attention.gradients(0, saved.heads, saved.attended, state, grad)
            return Heads(*(gradient.to(saved.heads.q.dtype) for gradient in gradients)), grad_weight

    def _from_tape(
        self, owner: PreparedPass, kernels: Mapping[str, TapeKernel], more: dict[str, torch.Tensor], *, attends: bool
    ) -> tuple[Heads, torch.Tensor | None] | None:
        """Gradients of heads and weight, by a tape that the pass `owner` keeps; None where these layouts have none.

        The saved states are one tensor. more: further memory. attends: see `Asked`.
        """
        assert isinstance(self.saved.states, torch.Tensor)
        p, heads, due = self.p, self.saved.heads, self._due()
        gradients = Heads(*(torch.empty_like(each, memory_format=torch.contiguous_format) for each in heads))
        tensors = self._tensors(torch.empty_like(self.saved.attended)) | ({} if due is None else due.memory)
        tensors |= heads._asdict() | {"states": self.saved.states}
        tensors |= {f"grad_{name}": gradient for name, gradient in gradients._asdict().items()} | more
        asked = ask_backward(due, is_bulk=owner.is_bulk, attends=attends)
        layout = (*_layout(self.attention, heads), p.problem, p.attention, torch.are_deterministic_algorithms_enabled())
        with owner:
            if not owner.run_from_tape(asked, tensors, kernels=kernels, layout=layout):
                return None
        return gradients, None if due is None else due.finish(None, tensors["x"])

    def _due(self) -> DueWeightGrad | None:
        if "weight" not in self.p.problem.needs:
            return None
        return DueWeightGrad(self.p, self.grad_shard, self.call.weight_grad, is_gathered=True)

    def _tensors(self, grad_attended: torch.Tensor) -> dict[str, torch.Tensor]:
        shape = (self.p.problem.M, self.p.problem.K)
        attended, out = self.saved.attended.view(shape), grad_attended.view(shape)
        return {"shard": self.grad_shard, "x": attended, "weight": self.weight, "out": out}

    def _state_of_all(self) -> tuple[torch.Tensor, ...]:
        """What a forward pass of all queries at once would have left."""
        call, saved = self.call, self.saved
        if isinstance(saved.states, torch.Tensor):  # of all splits in one
            return (saved.states,)
        if not call.forward.plan.is_scheduled:
            (state,) = saved.states
            return state
        joined = join_states(saved.states, [split.size for split in _split(call.forward, call).splits])
        if joined is None:  # a kernel leaves nothing of some splits: one query that sees one key is cuDNN's formula
            return self.attention.forward(0, saved.heads, torch.empty_like(saved.attended))
        return joined


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
    asked = Asked(has_bias=bias is not None)
    states: list[tuple[torch.Tensor, ...]] = [()] * len(attention.splits)
    with p:
        if attention.is_plain and p.can_replay:
            for all_states in _memory_for_states(p, attention, heads.q):
                on_tape = tensors | heads._asdict() | {"states": all_states}
                layout = (*_layout(attention, heads), all_states.dim())
                kernels = attend_kernels(p, attention.scale)
                if p.run_from_tape(asked, on_tape, kernels=kernels, layout=layout):
                    return y, Saved(heads, attended, all_states)

        def attend(split: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
            states[split] = attention.forward(split, heads, attended)

        p.run_on_tensors(asked, tensors, kernels={ATTEND: attend})
    return y, Saved(heads, attended, states)


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
    return p.remember(("split", call.scale), lambda: _make_split(p, call))


def _make_split(p: PreparedPass, call: AttentionCall) -> SplitAttention:
    problem, kernel = _attention_of(p), p.attention
    assert kernel is not None
    return SplitAttention(problem, kernel, splits_of(p), call.scale, call.mask, call.dropout)


def _attention_of(p: PreparedPass) -> AttentionProblem:
    assert isinstance(p.problem, AttentionProblem)
    return p.problem
