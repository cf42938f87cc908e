"""What both linears are to autograd: the checks of a call, what is saved, and which gradients are asked for.

Knows prepared passes; the two operations bring what a forward and a backward pass do.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from commfuse_megatron.ops.arguments import (
    Operation,
    cast_for_autocast,
    needs_autograd,
    prepare,
    prepare_backward,
    require_context,
    with_unit_stride,
)
from commfuse_megatron.ops.asked import gradients_asked_for
from commfuse_megatron.ops.weight_grad import DeferredWeightGrad, WeightGrad
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.marks import without_marks
from commfuse_megatron.runtime.prepared import PreparedPass


class LinearOperands(NamedTuple):
    """What a backward pass works on; what no gradient is due for is None."""

    grad: torch.Tensor  # [M, N]; of a reduce-scatter linear this rank's rows of it
    x: torch.Tensor | None  # the input, for the gradient of the weight
    weight: torch.Tensor | None  # [N, K], for the gradient of the input
    x_shape: torch.Size
    kept: torch.Tensor | None = None  # [M, K], instead of x
    addend: torch.Tensor | None = None  # [M, K], what else the input's partial gradient is the sum of


class Linear(NamedTuple):
    """A linear.

    forward: (pass, x, weight, bias, whether the gathered input is asked for) -> (output, gathered input or None).
    backward: (pass, operands, where the weight's gradient goes) -> (gradients of input and weight, as far as needed).
    """

    operation: Operation
    forward: Callable[
        [PreparedPass, torch.Tensor, torch.Tensor, torch.Tensor | None, bool], tuple[torch.Tensor, torch.Tensor | None]
    ]
    backward: Callable[[PreparedPass, LinearOperands, WeightGrad], tuple[torch.Tensor | None, torch.Tensor | None]]
    gathers: bool


class _Call(NamedTuple):
    linear: Linear
    forward: PreparedPass
    weight_grad: WeightGrad
    returns_gathered: bool


def call_linear(
    linear: Linear,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: Mapping[str, Any],
    context: OverlapContext,
    weight_grad: WeightGrad,
) -> Any:
    """What a call of a linear returns. options: its other arguments, by name."""
    name = linear.operation.name
    require_context(name, context)
    with context.guard(name):
        x, weight, bias = cast_for_autocast(context.device.type, x, weight, bias)
        forward = prepare(linear.operation, x, weight, bias, options, context, weight_grad)
        returns_gathered = options.get("return_gathered", False)
        if not needs_autograd(x, weight, bias):
            forward.begin()
            y, gathered = linear.forward(forward, x, weight, bias, returns_gathered)
            return y if gathered is None else (y, gathered)
    return _Linear.apply(x, weight, bias, _Call(linear, forward, weight_grad, returns_gathered))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        is_kept = call.linear.gathers and needs_weight and call.forward.plan.keep_gathered_input
        # Not around what autograd does afterwards: hooks of what is saved may raise, as checkpoints do on purpose.
        with call.forward.context.guard(call.forward.problem):
            call.forward.begin()
            y, gathered = call.linear.forward(call.forward, x, weight, bias, call.returns_gathered or is_kept)
        ctx.call = call
        ctx.x_shape = x.shape
        ctx.save_for_backward(
            x if needs_weight and not is_kept else None, weight if needs_input else None, gathered if is_kept else None
        )
        if not call.returns_gathered:
            return y
        assert gathered is not None
        ctx.set_materialize_grads(False)
        if not needs_input:
            ctx.mark_non_differentiable(gathered)
        return y, gathered

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_y: torch.Tensor | None, grad_gathered: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        linear, forward = call.linear, call.forward
        grad_x = grad_weight = grad_bias = None
        context, what = forward.context, f"the backward pass of {linear.operation.name}"
        x, weight, kept = context.saved_tensors(ctx, what)
        with context.guard(what):
            needs_input, needs_weight, needs_bias = gradients_asked_for(ctx, 3)
            if grad_y is None:  # only what was gathered has one; the others send what they always send
                assert grad_gathered is not None
                grad = grad_gathered.new_zeros(forward.problem.M, forward.problem.N)
            else:
                grad = without_marks(grad_y).contiguous().flatten(0, -2)
            if needs_input or needs_weight:
                needs = {"needs_input": needs_input, "needs_weight": needs_weight}
                p = prepare_backward(linear.operation, forward, **needs, given=(x, weight, grad, kept))
                p.begin()
                operands = LinearOperands(
                    grad,
                    x if needs_weight else None,
                    with_unit_stride(weight) if needs_input else None,
                    ctx.x_shape,
                    kept.flatten(0, -2) if needs_weight and kept is not None else None,
                    None if grad_gathered is None else without_marks(grad_gathered).contiguous().flatten(0, -2),
                )
                is_due = grad_y is not None or isinstance(call.weight_grad, DeferredWeightGrad)
                grad_x, grad_weight = linear.backward(p, operands, call.weight_grad if is_due else None)
            if grad_y is None:
                grad_weight = None
            elif needs_bias:
                grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None
