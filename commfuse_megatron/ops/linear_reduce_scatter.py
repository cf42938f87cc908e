"""Row-parallel linear: the reduce-scatter of the output hides under the GEMM; backward, the all-gather of its gradient.

Backward:   transfer             [dy 1     ][dy 2     ]...
            compute   [dgrad own][dgrad 1 ][dgrad 2 ]...[wgrad, un-split]
"""

from collections.abc import Callable

import torch

from commfuse_megatron.ops.arguments import Operation, with_unit_stride
from commfuse_megatron.ops.collectives import gather_rows, reduce_scatter_rows
from commfuse_megatron.ops.linear import Linear, LinearOperands, call_linear
from commfuse_megatron.ops.trial import Given, Scratch
from commfuse_megatron.ops.weight_grad import DueWeightGrad, WeightGrad, ask_backward, compute_weight_gradient
from commfuse_megatron.problem import GemmProblem, shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.prepared import PassContext, PreparedPass
from commfuse_megatron.schedule.lower_linear import Asked


@torch.compiler.disable
def linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    context: OverlapContext,
    weight_grad: WeightGrad = None,
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
        weight_grad: add the weight's gradient into a tensor instead of returning it, or compute it later.

    Raises:
        ConfigError: `context` is none.
        ShapeError: an argument is of a wrong kind, the tensors do not fit together, or the ranks bring different
            problems; on all ranks that compare this call. Nothing was sent.
        TransportTimeoutError, TransportError: a peer did not come, here or in an earlier call of a failed context.
        RuntimeError: on the path "sequential" a peer did not come within the timeout of the group, whose own
            collective raises it. The context has failed by it.

    Under torch.compile the call stays eager, between two graphs.

    Source: CommFuse Alg. 2 and 3, arXiv 2604.24013, 2026.
    """
    return call_linear(_LINEAR, x, weight, bias, {}, context, weight_grad)


def scatter_forward(p: PreparedPass, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The forward pass of an operation that was prepared."""
    problem = p.problem
    x_rows, weight_rows = x.contiguous(), with_unit_stride(weight)
    with p:
        if p.plan.is_scheduled:
            y = x.new_empty(p.own_rows, *x.shape[1:-1], problem.N)
            tensors = {"a": x_rows, "weight": weight_rows, "out": y}
            if bias is not None:
                tensors["bias"] = bias.contiguous()
            p.run(_WITHOUT_BIAS if bias is None else _WITH_BIAS, tensors)
            return y
        partial = x.new_empty(problem.rows, *x.shape[1:-1], problem.N)
        p.gemm.multiply(x_rows.flatten(0, -2), weight_rows.t(), partial.flatten(0, -2))
        y = reduce_scatter_rows(partial, p.context.group)
        return y if bias is None else y.add_(bias)


_WITHOUT_BIAS, _WITH_BIAS = Asked(), Asked(has_bias=True)


def scatter_backward(
    p: PreparedPass, operands: LinearOperands, weight_grad: WeightGrad
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of input and weight, as far as they are needed."""
    grad_shard, x, weight, x_shape, *_ = operands
    grad_x = None if weight is None else grad_shard.new_empty(x_shape)
    if x is not None:
        x = x.contiguous()
    if not p.plan.is_scheduled:
        with p:
            grad = _gather_by_collective(p, grad_shard)
            if weight is not None and grad_x is not None:
                p.gemm.multiply(grad, weight, grad_x.flatten(0, -2))
            return grad_x, None if x is None else compute_weight_gradient(p, grad, x.flatten(0, -2), weight_grad)
    tensors, due = {"shard": grad_shard}, None
    if weight is not None and grad_x is not None:
        tensors["weight"], tensors["out"] = weight, grad_x
    if x is not None:
        due = DueWeightGrad(p, grad_shard, weight_grad, is_gathered=True)
        tensors["x"] = x
        tensors |= due.memory
    with p:
        p.run(ask_backward(due, weight is not None, p.is_bulk), tensors)
    return grad_x, None if due is None or x is None else due.finish(None, x.flatten(0, -2))


def _gather_by_collective(p: PreparedPass, grad_shard: torch.Tensor) -> torch.Tensor:
    """[M_r, N] of every rank -> [M, N]."""
    problem = p.problem
    rows = grad_shard.view(p.own_rows, problem.batch * problem.N)
    return gather_rows(rows, problem.rows, p.context.group).view(problem.M, problem.N)


def _rehearse(problem: GemmProblem, context: PassContext, given: Given = ()) -> Callable[[PreparedPass], object]:
    """Scratch operands of `problem`, or those given, and what runs a pass of it on them."""
    scratch = Scratch(problem, context.device, given)
    own = shard_range(problem.rows, context.group_size, context.group_rank)
    x, weight = scratch.draw(problem.rows, problem.batch, problem.K), scratch.draw(problem.N, problem.K)
    if problem.pass_name == "fprop":
        return lambda p: scatter_forward(p, x, weight, None)
    grad = scratch.draw(own.size * problem.batch, problem.N)
    operands = LinearOperands(
        grad, x if "weight" in problem.needs else None, weight if "input" in problem.needs else None, x.shape
    )
    return lambda p: scatter_backward(p, operands, None)


OPERATION = Operation("linear_reduce_scatter", _rehearse, linear_reduce_scatter)
_LINEAR = Linear(
    OPERATION,
    lambda p, x, weight, bias, _: (scatter_forward(p, x, weight, bias), None),
    scatter_backward,
    gathers=False,
)
