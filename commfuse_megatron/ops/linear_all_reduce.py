"""The two linears of tensor parallelism without sequence parallelism: every rank holds all rows, and the all-reduce of
one product hides under it. Row-parallel the output is summed, column-parallel the gradient of the input:

    forward    linear_all_reduce         partial GEMMs, each chunk summed and sent to all while later ones are computed
               linear_grad_all_reduce    one GEMM, nothing is sent
    backward   linear_all_reduce         two GEMMs, nothing is sent
               linear_grad_all_reduce    as forward above, then [wgrad, un-split] over the last transfers

Either is one program with other operands (`schedule.lower_all_reduce`).
"""

from collections.abc import Callable

import torch

from commfuse_megatron.ops.arguments import Operation, with_unit_stride
from commfuse_megatron.ops.collectives import start_all_reduce
from commfuse_megatron.ops.linear import Linear, LinearOperands, call_linear
from commfuse_megatron.ops.trial import Given, Scratch
from commfuse_megatron.ops.weight_grad import DueWeightGrad, WeightGrad, ask_backward, compute_weight_gradient
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.prepared import PassContext, PreparedPass
from commfuse_megatron.schedule.lower_linear import Asked


@torch.compiler.disable
def linear_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    context: OverlapContext,
    weight_grad: WeightGrad = None,
) -> torch.Tensor:
    """The product summed over ranks, on all of them; equals `reference.linear_all_reduce` to rounding.

    Shapes:
        x       [S, ..., K]     this rank's input features
        weight  [N, K]
        bias    [N]             equal on all ranks; added once, after the sum
        result  [S, ..., N]     fresh and contiguous

    Rounding: each partial is rounded once to the dtype of x, summed by one rank for all in fp32 (fp64 for fp64) with
    the own partial un-rounded where the GEMM can keep it so, and rounded once. The order of the sum is fixed: results
    are bit-identical on all ranks and from run to run.

    Gradients: x, weight and bias get their own, complete; nothing is sent for them, since the gradient of the result
    is taken to be that of the loss, and equal on all ranks.

    Args:
        weight_grad: add the weight's gradient into a tensor instead of returning it, or compute it later.

    Raises: as `linear_reduce_scatter`. The plan is chosen by `linear.fprop`; there are no rings.
    """
    return call_linear(_ROW, x, weight, bias, {}, context, weight_grad)


@torch.compiler.disable
def linear_grad_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    context: OverlapContext,
    weight_grad: WeightGrad = None,
) -> torch.Tensor:
    """This rank's columns of the product; equals `reference.linear_grad_all_reduce` to rounding.

    Shapes:
        x       [S, ..., K]     equal on all ranks
        weight  [N, K]          this rank's output features
        bias    [N]
        result  [S, ..., N]     fresh and contiguous

    Gradients: x gets the sum over ranks, on all of them, rounded and bit-identical as the result of
    `linear_all_reduce`; weight and bias get their own. The weight's gradient hides the end of that all-reduce.

    Args:
        weight_grad: add the weight's gradient into a tensor instead of returning it, or compute it later, which leaves
            the last transfers nothing to hide under.

    Raises: as `linear_reduce_scatter`. The plan of the backward pass is chosen by `linear.dgrad`; there are no rings.
    """
    return call_linear(_COLUMN, x, weight, bias, {}, context, weight_grad)


def _forward(p: PreparedPass, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x_rows, weight_rows = x.contiguous(), with_unit_stride(weight)
    y = x.new_empty(*x.shape[:-1], p.problem.N)
    with p:
        if p.plan.path == "local":
            p.gemm.multiply(x_rows.flatten(0, -2), weight_rows.t(), y.flatten(0, -2), bias)
        elif p.plan.is_scheduled:
            tensors = {"a": x_rows, "weight": weight_rows} | p.context.memory_for_gathered(y)
            if bias is not None:
                tensors["bias"] = bias.contiguous()
            p.run(_WITHOUT_BIAS if bias is None else _WITH_BIAS, tensors)
        else:
            p.gemm.multiply(x_rows.flatten(0, -2), weight_rows.t(), y.flatten(0, -2))
            start_all_reduce(y, p.context.group, is_async=False).wait()
            if bias is not None:
                y.add_(bias)
    return y


_WITHOUT_BIAS, _WITH_BIAS = Asked(), Asked(has_bias=True)


def _backward(
    p: PreparedPass, operands: LinearOperands, weight_grad: WeightGrad
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of input and weight, as far as they are needed; that of the input summed, if the pass sums any."""
    grad, x, weight, x_shape, *_ = operands
    x_rows = None if x is None else x.contiguous().flatten(0, -2)
    grad_x = None if weight is None else grad.new_empty(x_shape)
    if weight is None or grad_x is None or not p.plan.is_scheduled or p.plan.path == "local":
        with p:
            return grad_x, _multiply_whole(p, operands._replace(x=x_rows), grad_x, weight_grad)
    tensors, due = {"a": grad, "weight": weight} | p.context.memory_for_gathered(grad_x), None
    if x_rows is not None:
        due = DueWeightGrad(p, grad, weight_grad, is_gathered=False)
        tensors |= due.memory
        if due.when == "now":
            tensors["x_full"] = x_rows
    with p:
        p.run(ask_backward(due), tensors)
    return grad_x, None if due is None else due.finish(grad, x_rows)


def _multiply_whole(
    p: PreparedPass, operands: LinearOperands, grad_x: torch.Tensor | None, weight_grad: WeightGrad
) -> torch.Tensor | None:
    """Fill the gradient of the input; return the weight's. The group's own all-reduce runs beside that if the path is
    "async", and before it if it is "sequential"."""
    grad, x, weight, *_ = operands
    summing = grad_weight = None
    if grad_x is not None and weight is not None:
        p.gemm.multiply(grad, weight, grad_x.flatten(0, -2))
        if p.plan.path != "local":
            summing = start_all_reduce(grad_x, p.context.group, is_async=p.plan.path == "async")
    if x is not None:
        grad_weight = compute_weight_gradient(p, grad, x, weight_grad)
    if summing is not None:
        summing.wait()
    return grad_weight


def _rehearse(problem: GemmProblem, context: PassContext, given: Given = ()) -> Callable[[PreparedPass], object]:
    """Scratch operands of `problem`, or those given, and what runs a pass of it on them."""
    scratch = Scratch(problem, context.device, given)
    x, weight = scratch.draw(problem.rows, problem.batch, problem.K), scratch.draw(problem.N, problem.K)
    if problem.pass_name == "fprop":
        return lambda p: _forward(p, x, weight, None)
    operands = LinearOperands(
        scratch.draw(problem.M, problem.N),
        x if "weight" in problem.needs else None,
        weight if "input" in problem.needs else None,
        x.shape,
    )
    return lambda p: _backward(p, operands, None)


def _linear(name: str, function: Callable[..., torch.Tensor]) -> Linear:
    return Linear(
        Operation(name, _rehearse, function),
        lambda p, x, weight, bias, _: (_forward(p, x, weight, bias), None),
        _backward,
        gathers=False,
    )


_ROW = _linear("linear_all_reduce", linear_all_reduce)
_COLUMN = _linear("linear_grad_all_reduce", linear_grad_all_reduce)
