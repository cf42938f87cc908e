"""Attention with its output projection: the reduce-scatter hides under both, for the queries of one owner at a time.

Forward:    compute   [attend 1][project 1][attend 2][project 2]...[attend own][project own][sum]
            transfer                       [y 1                ][y 2 ...               ]
Backward:   transfer  [dy 1                       ][dy 2 ...
            compute   [dgrad own][attention bwd own][dgrad 1][attention bwd 1]...[wgrad, un-split]

On GPUs the pieces take turns on several streams (`runtime/lanes.py`). The two other paths are made of whole attention
and `linear_reduce_scatter`, the one planned as any linear, the other sequential.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels.attention import AttentionKernel, Dropout
from commfuse_megatron.ops.arguments import (
    Operation,
    cast_for_autocast,
    find_target_complaint,
    is_fitting_target,
    join_needs,
    require_context,
    require_fitting,
    with_unit_stride,
)
from commfuse_megatron.ops.asked import gradients_asked_for
from commfuse_megatron.ops.attention_arguments import (
    AttentionInputs,
    draw_dropout,
    find_attention_complaint,
    prepare_attention,
    state_attention_problem,
)
from commfuse_megatron.ops.attention_passes import (
    AttentionCall,
    Saved,
    attention_backward,
    attention_forward,
    projection_weight_gradient,
)
from commfuse_megatron.ops.split_attention import Heads
from commfuse_megatron.ops.trial import Scratch
from commfuse_megatron.ops.weight_grad import WeightGrad
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import AttentionProblem, shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.marks import without_marks
from commfuse_megatron.runtime.prepared import PassContext, PreparedPass


@torch.compiler.disable
def query_split_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None = None,
    causal: bool = True,
    *,
    window: tuple[int, int] | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    context: OverlapContext,
    weight_grad: WeightGrad = None,
) -> torch.Tensor:
    """This rank's rows of attention times projection, summed over ranks: `reference.query_split_attention` to rounding.

    Shapes:
        q           [S, B, H, D]        this rank's heads
        k           [S, B, H_kv, D]     H is a multiple of H_kv
        v           [S, B, H_kv, D_v]
        out_weight  [N, H * D_v]        this rank's input features
        out_bias    [N]                 added once, after the sum
        mask        [B or 1, H or 1, S, S]
        result      [S_r, B, N]         `torch.tensor_split` of S over the group; fresh and contiguous

    causal: a query sees no later key. window (left, right): nor one farther than that before or after it; -1 is
    unlimited. mask: booleans instead of both; the score of a key that it hides (True) becomes -10000, as in Megatron.

    Which path is taken `context.config.attention` says, by default what a trial found to be the fastest.

    Rounding: that of `linear_reduce_scatter`; attended values are rounded to the dtype of q before the projection.
    Gradients of keys and values are summed over splits in fp32 (fp64 for fp64) and rounded once; "cudnn" and "flash"
    round those of a split, too.

    Gradients: q, k, v and out_weight get their own, complete; out_bias the sum over this rank's rows only.

    Args:
        scale: of scores of this rank's heads, which no other rank attends; None is 1 / sqrt(D).
        dropout: probability of dropping an attention probability of these heads; 0 on all ranks or on none. The mask is
            drawn from a seed that the CPU's default generator and the group rank give: what is computed again from the
            same state drops the same. A CUDA graph would repeat one mask, so none is captured with it.
        weight_grad: add the weight's gradient into a tensor instead of returning it, or compute it later.

    Raises:
        ConfigError: `context` is none.
        ShapeError: an argument is of a wrong kind, the tensors do not fit together, or the ranks bring different
            problems; on all ranks that compare this call. Nothing was sent.
        UnsupportedError: `attention.kernel` asks for a kernel that cannot do this. Nothing was sent.
        TransportTimeoutError, TransportError: a peer did not come, here or in an earlier call of a failed context.
        RuntimeError: on the path "sequential", of attention or of its projection, a peer did not come within the
            timeout of the group, whose own collective raises it. The context has failed by it.

    Under torch.compile the call stays eager, between two graphs.

    Source: CommFuse Alg. 4, arXiv 2604.24013, 2026.
    """
    require_context("query_split_attention", context)
    with context.guard("query_split_attention"):
        q, k, v, out_weight, out_bias = cast_for_autocast(context.device.type, q, k, v, out_weight, out_bias)
    if isinstance(window, list):  # of a file, say: no key
        window = cast(tuple[int, int], tuple(window))
    inputs = AttentionInputs(q, k, v, out_weight, out_bias, causal, window, mask, scale, dropout)
    with context.guard("query_split_attention"), torch.autocast(context.device.type, enabled=False):
        # The plain kernel's products are to be in fp32, whatever autocast makes of products.
        forward = _prepare(inputs, context, weight_grad)
        number = q.size(-1) ** -0.5 if scale is None else float(scale)
        call = AttentionCall(forward, weight_grad, number, mask, draw_dropout(dropout, context))
        if not forward.problem.needs and not (out_bias is not None and out_bias.requires_grad):
            forward.begin()
            return attention_forward(call, Heads(q, k, v), out_weight, out_bias)[0]
    with torch.autocast(context.device.type, enabled=False):
        return _QuerySplitAttention.apply(q, k, v, out_weight, out_bias, call)


def find_attention_kernel(inputs: AttentionInputs, context: OverlapContext) -> AttentionKernel | str:
    """What would compute `inputs`, which fit together, or why nothing that `attention.kernel` allows can."""
    try:
        return _choose_kernel(state_attention_problem(inputs, context.group_size), context)
    except UnsupportedError as error:
        return str(error)


def plan_attention(inputs: AttentionInputs, context: OverlapContext) -> PassPlan:
    """How `query_split_attention` would run `inputs`; all ranks must ask. Nothing is computed but trials of new
    problems. Raises as the operation does."""
    with context.guard("the plan of query_split_attention"):
        return _prepare(inputs, context).plan


class _QuerySplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: AttentionCall,
    ) -> torch.Tensor:
        with call.forward.context.guard(call.forward.problem):
            call.forward.begin()
            y, saved = attention_forward(call, Heads(q, k, v), weight, bias)
        ctx.call = call._replace(mask=None)
        found = saved.states
        ctx.state_sizes = None if isinstance(found, torch.Tensor) else [len(state) for state in found]
        states = [found] if isinstance(found, torch.Tensor) else [tensor for state in found for tensor in state]
        needs_heads, needs_weight = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        for_heads = (*saved.heads, weight, call.mask, *states) if needs_heads else ()
        ctx.save_for_backward(saved.attended if needs_heads or needs_weight else None, *for_heads)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, what = ctx.call.forward.context, "the backward pass of query_split_attention"
        attended, *for_heads = context.saved_tensors(ctx, what)
        with context.guard(what):
            call: AttentionCall = ctx.call
            grad_shard = without_marks(grad_y).contiguous().flatten(0, -2)
            grads: Heads | None = None
            grad_weight = None
            *needs_heads, needs_weight, needs_bias = gradients_asked_for(ctx, 5)
            if any(needs_heads) or needs_weight:
                p = _prepare_backward(call.forward, needs_input=any(needs_heads), needs_weight=needs_weight)
                p.begin()
                with torch.autocast(grad_shard.device.type, enabled=False):  # as in forward
                    if any(needs_heads):
                        q, k, v, weight, mask, *flat = for_heads
                        is_one = ctx.state_sizes is None
                        states = flat[0] if is_one else [tuple(part) for part in _split_list(flat, ctx.state_sizes)]
                        saved = Saved(Heads(q, k, v), attended, states)
                        with_mask = call._replace(mask=mask)
                        grads, grad_weight = attention_backward(
                            p, with_mask, saved, grad_shard, with_unit_stride(weight)
                        )
                    else:
                        grad_weight = projection_weight_gradient(p, call, attended, grad_shard)
            grad_bias = grad_shard.sum(0) if needs_bias else None
        grad_heads = (
            None if grads is None or not is_due else grad
            for grad, is_due in zip(grads or (None,) * 3, needs_heads, strict=True)
        )
        return *grad_heads, grad_weight, grad_bias, None


# -- preparation ------------------------------------------------------------------------------------------------------


def _prepare(inputs: AttentionInputs, context: OverlapContext, weight_grad: WeightGrad = None) -> PreparedPass:
    """The forward pass of a call, checked; not yet agreed on."""
    prepared = None
    try:
        if is_fitting_target(weight_grad, inputs.out_weight):
            prepared = context.known_calls.get(inputs.key)
    except Exception:  # of a wrong kind: the checks say which
        prepared = None
    if prepared is None:
        given = {**inputs._asdict(), "weight_grad": weight_grad}
        require_fitting(_OPERATION, given, functools.partial(_find_complaint, inputs, weight_grad, context), context)
        problem = state_attention_problem(inputs, context.group_size)
        with_all_gradients = dataclasses.replace(problem, needs="input+weight")
        prepared = prepare_attention(_OPERATION, inputs.key, problem, with_all_gradients, context)
    return prepared


def _find_complaint(inputs: AttentionInputs, weight_grad: WeightGrad, context: OverlapContext) -> str | None:
    complaint = find_attention_complaint(inputs, context.device)
    return complaint or find_target_complaint(weight_grad, inputs.out_weight)


def _prepare_backward(forward: PreparedPass, *, needs_input: bool, needs_weight: bool) -> PreparedPass:
    needs = join_needs(needs_input=needs_input, needs_weight=needs_weight)
    problem = dataclasses.replace(forward.problem, pass_name="backward", needs=needs)
    reason = (
        "as the forward pass" if forward.plan.backward_path is None else f"after {forward.plan.name.partition(',')[0]}"
    )
    p = forward.context.prepare_like(problem, forward.plan.for_backward, reason)
    p.attention, p.attention_reason = forward.attention, forward.attention_reason
    return p


def _choose_kernel(problem: AttentionProblem, context: PassContext) -> AttentionKernel:
    return context.attention_kernels.choose(problem, context.config.attention.kernel)


def _split_list(flat: list[torch.Tensor], sizes: list[int]) -> list[list[torch.Tensor]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(flat[start : start + size])
        start += size
    return parts


def _rehearse(problem: AttentionProblem, context: PassContext) -> Callable[[PreparedPass], object]:
    """Scratch operands of `problem`, and what runs a forward pass of it on them, with its backward pass if one is due.

    A mask is drawn as one that hides nothing.
    """
    scratch = Scratch(problem, context.device)
    own = shard_range(problem.rows, context.group_size, context.group_rank)
    rows, batch = problem.rows, problem.batch
    heads = Heads(
        scratch.draw(rows, batch, problem.heads, problem.head_dim),
        scratch.draw(rows, batch, problem.kv_heads, problem.head_dim),
        scratch.draw(rows, batch, problem.kv_heads, problem.value_dim),
    )
    weight, grad = scratch.draw(problem.N, problem.K), scratch.draw(own.size * batch, problem.N)
    mask = torch.zeros(1, 1, rows, rows, dtype=torch.bool, device=context.device) if problem.has_mask else None
    dropout = Dropout(0.1, 0) if problem.has_dropout else None
    kernel = _choose_kernel(problem, context)

    backward_problem = dataclasses.replace(problem, pass_name="backward")
    backward: dict[str, PreparedPass] = {}

    def run(p: PreparedPass) -> None:
        p.attention = kernel
        call = AttentionCall(p, None, problem.head_dim**-0.5, mask, dropout, is_rehearsal=True)
        _, saved = attention_forward(call, heads, weight, None)
        if problem.needs:
            if p.plan.name not in backward:
                backward[p.plan.name] = context.make_pass(backward_problem, p.plan.for_backward)
                backward[p.plan.name].attention = kernel
            if "input" in problem.needs:
                attention_backward(backward[p.plan.name], call, saved, grad, weight)
            else:
                projection_weight_gradient(backward[p.plan.name], call, saved.attended, grad)

    return run


_OPERATION = Operation("query_split_attention", _rehearse, query_split_attention)
