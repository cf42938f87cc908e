"""Row-parallel linear: the reduce-scatter of the output hides under the GEMM; backward, the all-gather of its gradient.

Backward:   transfer             [dy 1     ][dy 2     ]...
            compute   [dgrad own][dgrad 1 ][dgrad 2 ]...[wgrad, un-split]
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from commfuse_megatron.ops.arguments import (
    cast_for_autocast,
    prepare,
    prepare_backward,
    require_context,
    with_unit_stride,
)
from commfuse_megatron.ops.collectives import gather_rows, reduce_scatter_rows
from commfuse_megatron.ops.passes import gather_matmul, matmul_scatter, start_gather, weight_gradient
from commfuse_megatron.ops.weight_grad import WeightGradTarget
from commfuse_megatron.problem import shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.runtime.prepared import PreparedPass

__all__ = ["linear_reduce_scatter"]


@torch.compiler.disable
def linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    context: OverlapContext,
    weight_grad: WeightGradTarget | None = None,
) -> torch.Tensor:
    """This rank's rows of the product summed over ranks; equals `reference.linear_reduce_scatter` to rounding.

    Shapes:
        x       [S, ..., K]     this rank's input features
        weight  [N, K]
        bias    [N]             added once, after the sum
        result  [S_r, ..., N]   `torch.tensor_split` of S over the group; fresh and contiguous

    Rounding: "direct" sends each partial rounded once to the dtype of x, sums in fp32 (fp64 for fp64) with the own
    partial un-rounded where the GEMM can keep it so, and rounds once; "ring" rounds once per hop. The order of the sum
    is fixed: results are bit-identical from run to run.

    Gradients: x and weight get their own, complete; bias the sum over this rank's rows only (the sum over the group is
    the caller's, as with Megatron's `bias.sequence_parallel`).

    Args:
        weight_grad: add the weight's gradient into a tensor instead of returning it.

    Raises:
        ConfigError: `context` is none.
        ShapeError: the tensors do not fit together, or the ranks bring different problems. Nothing was sent.
        TransportTimeoutError, TransportError: a peer did not come, here or in an earlier call of a failed context.

    Under torch.compile the call stays eager, between two graphs.

    Source: CommFuse Alg. 2 and 3, arXiv 2604.24013, 2026.
    """
    require_context("linear_reduce_scatter", context)
    x, weight, bias = cast_for_autocast(x, weight, bias, context.device.type)
    forward = prepare("linear_reduce_scatter", x, weight, bias, None, context)
    return _LinearReduceScatter.apply(x, weight, bias, _Call(forward, weight_grad))


class _Call(NamedTuple):
    forward: PreparedPass
    weight_grad: WeightGradTarget | None


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call
    ) -> torch.Tensor:
        p = call.forward
        problem, context = p.problem, p.context
        own = shard_range(problem.rows, context.group_size, context.group_rank)
        a, b = x.contiguous().flatten(0, -2), with_unit_stride(weight).t()
        bias = None if bias is None else with_unit_stride(bias)
        with p as link:
            if p.plan.is_scheduled:
                y = x.new_empty(own.size, *x.shape[1:-1], problem.N)
                matmul_scatter(p, link, a, b, y.flatten(0, -2), bias=bias)
            else:
                partial = x.new_empty(problem.rows, *x.shape[1:-1], problem.N)
                p.gemm.multiply(a, b, partial.flatten(0, -2))
                y = reduce_scatter_rows(partial, context.group)
                if bias is not None:
                    y = y.add_(bias)
        ctx.call = call
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        call: _Call = ctx.call
        grad_shard = grad_y.contiguous().flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if needs_input or needs_weight:
            p = prepare_backward(call.forward, needs_input=needs_input, needs_weight=needs_weight)
            if needs_input:
                grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            b = with_unit_stride(weight)
            with p as link:
                grad = _gather_under_dgrad(p, link, grad_shard, b, grad_x, needs_weight=needs_weight)
                if needs_weight:
                    a = x.contiguous().flatten(0, -2)
                    grad_weight = weight_gradient(p, grad, a, weight, call.weight_grad)
        if ctx.has_bias and needs_bias:
            grad_bias = grad_shard.sum(0)
        return grad_x, grad_weight, grad_bias, None


def _gather_under_dgrad(
    p: PreparedPass,
    link: Link,
    grad_shard: torch.Tensor,
    weight: torch.Tensor,
    grad_x: torch.Tensor | None,
    *,
    needs_weight: bool,
) -> torch.Tensor:
    """Fill `grad_x` (if given) from the gathered gradient; returns that, complete only if `needs_weight`."""
    problem = p.problem
    if not p.plan.is_scheduled:
        shape = (shard_range(problem.rows, p.context.group_size, p.context.group_rank).size, problem.batch * problem.N)
        grad = gather_rows(grad_shard.view(shape), problem.rows, p.context.group).view(problem.M, problem.N)
        if grad_x is not None:
            p.gemm.multiply(grad, weight, grad_x.flatten(0, -2))
        return grad
    grad = p.gather.gathered()
    if grad_x is not None:
        out = grad_x.flatten(0, -2)
        gather_matmul(p, link, grad_shard, weight, out, gathered=grad if needs_weight else None)
    else:
        run = start_gather(p, link, grad_shard, grad, "all-gather of the output gradient")
        for index in range(run.num_steps):
            run.issue(index)
        run.finish()
    return grad
