"""Column-parallel linear: the all-gather of the input hides under the GEMM, forward and backward.

Whoever wants the gathered input, too (adapters beside the layer), gets it without a second all-gather: its gradient is
added to the partials of dx.

Backward:   transfer  [x 1][dx 0][x 2][dx 1]...        x: gathered again, dx: partials on the way to their owners
            compute   [dgrad 0 ][dgrad 1   ]...[dgrad own][wgrad, un-split          ][sum of dx]
"""

import functools
from collections.abc import Callable
from typing import Literal, overload

import torch

from commfuse_megatron.ops.arguments import Operation, with_unit_stride
from commfuse_megatron.ops.collectives import PendingRows, start_gather_rows, start_reduce_scatter_rows
from commfuse_megatron.ops.linear import Linear, LinearOperands, call_linear
from commfuse_megatron.ops.trial import Given, Scratch
from commfuse_megatron.ops.weight_grad import DueWeightGrad, WeightGrad, ask_backward, compute_weight_gradient
from commfuse_megatron.problem import GemmProblem, shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.prepared import PassContext, PreparedPass
from commfuse_megatron.schedule.lower_linear import Asked


@overload
def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    total_rows: int | None = None,
    *,
    context: OverlapContext,
    weight_grad: WeightGrad = None,
    return_gathered: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    total_rows: int | None = None,
    *,
    context: OverlapContext,
    weight_grad: WeightGrad = None,
    return_gathered: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@torch.compiler.disable
def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    total_rows: int | None = None,
    *,
    context: OverlapContext,
    weight_grad: WeightGrad = None,
    return_gathered: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows of all ranks, multiplied by this rank's columns; equals `reference.all_gather_linear` to rounding.

    Shapes:
        x       [S_r, ..., K]   this rank's rows, `torch.tensor_split` of S over the group; may be 0
        weight  [N, K]          this rank's output features
        bias    [N]
        result  [S, ..., N]     fresh and contiguous
        gathered [S, ..., K]    fresh and contiguous, behind the result, if `return_gathered`: x of all ranks
    Middle dimensions (the batch) are equal on all ranks.

    Gradients: x gets its rows of the sum over ranks, weight and bias theirs. The backward pass gathers x again under
    the dgrad slices unless `linear.wgrad.keep_gathered_input` is set or the weight needs no gradient.

    The gradient of `gathered` is this rank's part of a sum over ranks, for all rows, as that of the product is: both
    are added up before the reduce-scatter that makes the gradient of x. Ranks need not all bring one. Where what
    arrives from other ranks is added inside the GEMM (rings with several chunks; own rows over the copy engine), it is
    added after the GEMM, with a rounding of its own. A result that gets no gradient counts as one that gets zeros,
    except that weight and bias get none where the product gets none.

    Args:
        total_rows: S. None means that every rank brings equally many rows; uneven ones must pass it, on all ranks.
        weight_grad: add the weight's gradient into a tensor instead of returning it, or compute it later.
        return_gathered: return (result, gathered). Nothing else is sent for it, forward or backward. With
            `keep_gathered_input` it is what the backward pass reads: not to be changed in place.

    Raises:
        ConfigError: `context` is none.
        ShapeError: an argument is of a wrong kind, the tensors do not fit together, or the ranks bring different
            problems; on all ranks that compare this call. Nothing was sent.
        TransportTimeoutError, TransportError: a peer did not come, here or in an earlier call of a failed context.
        RuntimeError: on the path "sequential" or "async" a peer did not come within the timeout of the group, whose own
            collective raises it. The context has failed by it.

    Under torch.compile the call stays eager, between two graphs.

    Source: CommFuse Alg. 1, arXiv 2604.24013, 2026.
    """
    options = {"total_rows": total_rows, "return_gathered": return_gathered}
    return call_linear(_LINEAR, x, weight, bias, options, context, weight_grad)


def gather_forward(
    p: PreparedPass, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, returns_gathered: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output, and the gathered input [S, ..., K] if it is asked for."""
    problem = p.problem
    x_rows, weight_rows = x.contiguous(), with_unit_stride(weight)
    y = x.new_empty(problem.rows, *x.shape[1:-1], problem.N)
    gathered = None
    with p:
        if p.plan.is_scheduled:
            tensors = {"shard": x_rows, "weight": weight_rows, "out": y}
            if bias is not None:
                tensors["bias"] = bias.contiguous()
            if returns_gathered:
                gathered = x.new_empty(problem.rows, *x.shape[1:])
                tensors |= p.context.memory_for_gathered(gathered)
            p.run(_ask_forward(bias is not None, returns_gathered), tensors)
        else:
            rows = _start_gather(p, x_rows.flatten(0, -2)).wait()
            out = y.flatten(0, -2)
            p.gemm.multiply(rows.view(problem.M, problem.K), weight_rows.t(), out, bias)
            if returns_gathered:  # of one rank, the rows are x itself
                rows = rows.clone() if p.context.group_size == 1 else rows
                gathered = rows.view(problem.rows, *x.shape[1:])
    return y, gathered


@functools.cache
def _ask_forward(has_bias: bool, keeps_gathered: bool) -> Asked:
    return Asked(has_bias=has_bias, keeps_gathered=keeps_gathered)


def gather_backward(
    p: PreparedPass, operands: LinearOperands, weight_grad: WeightGrad
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of input and weight, as far as they are needed."""
    if not p.plan.is_scheduled:
        with p:
            return _collective_backward(p, operands, weight_grad)
    grad, x, weight, x_shape, kept, addend = operands
    tensors = {"a": grad}
    grad_x = due = None
    if weight is not None:
        grad_x = tensors["out"] = grad.new_empty(x_shape)
        tensors["weight"] = weight
        if addend is not None:
            tensors["addend"] = addend
    if x is not None or kept is not None:
        due = DueWeightGrad(p, grad, weight_grad, is_gathered=kept is None)
        tensors |= due.memory
        if x is not None:
            tensors["shard"] = x.contiguous()
        elif kept is not None:
            tensors["x_full"] = kept
    asked = ask_backward(due, weight is not None, p.is_bulk, kept is not None, "addend" in tensors)
    with p:
        p.run(asked, tensors)
    return grad_x, None if due is None else due.finish(grad, kept)


def _collective_backward(
    p: PreparedPass, operands: LinearOperands, weight_grad: WeightGrad
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """By the group's own collectives, which run beside the GEMMs if the path is "async":

    collective  [x again][dx      ]
    compute     [dgrad  ][wgrad   ]
    """
    grad, x, weight, x_shape, gathered, addend = operands
    problem, group = p.problem, p.context.group
    grad_x = grad_weight = None
    gathering = summing = None
    if x is not None:
        gathering = _start_gather(p, x.contiguous().flatten(0, -2))
    if weight is not None:
        partial = grad.new_empty(problem.rows, problem.batch * problem.K)
        p.gemm.multiply(grad, weight, partial.view(problem.M, problem.K), addend)
        summing = start_reduce_scatter_rows(partial, group, is_async=_is_async(p))
    if gathering is not None:
        gathered = gathering.wait().view(problem.M, problem.K)
    if gathered is not None:
        grad_weight = compute_weight_gradient(p, grad, gathered, weight_grad)
    if summing is not None:
        grad_x = summing.wait().view(x_shape)
    return grad_x, grad_weight


def _is_async(p: PreparedPass) -> bool:
    return p.plan.path == "async"


def _start_gather(p: PreparedPass, shard: torch.Tensor) -> PendingRows:
    """[M_r, K] -> [S, B * K] by the group's own collective."""
    problem, context = p.problem, p.context
    own = shard_range(problem.rows, context.group_size, context.group_rank)
    rows = shard.view(own.size, problem.batch * problem.K)
    return start_gather_rows(rows, problem.rows, context.group, is_async=_is_async(p))


def _rehearse(problem: GemmProblem, context: PassContext, given: Given = ()) -> Callable[[PreparedPass], object]:
    """Scratch operands of `problem`, or those given, and what runs a pass of it on them."""
    scratch = Scratch(problem, context.device, given)
    own = shard_range(problem.rows, context.group_size, context.group_rank)
    x, weight = scratch.draw(own.size, problem.batch, problem.K), scratch.draw(problem.N, problem.K)
    if problem.pass_name == "fprop":
        return lambda p: gather_forward(p, x, weight, None, returns_gathered=p.plan.keep_gathered_input)
    needs_weight, is_kept = "weight" in problem.needs, context.config.linear.wgrad.keep_gathered_input
    operands = LinearOperands(
        scratch.draw(problem.M, problem.N),
        x if needs_weight and not is_kept else None,
        weight if "input" in problem.needs else None,
        x.shape,
        scratch.draw(problem.M, problem.K) if needs_weight and is_kept else None,
    )
    return lambda p: gather_backward(p, operands, None)


_OPERATION = Operation("all_gather_linear", _rehearse, all_gather_linear)
_LINEAR = Linear(
    _OPERATION,
    lambda p, x, weight, bias, keeps: gather_forward(p, x, weight, bias, returns_gathered=keeps),
    gather_backward,
    gathers=True,
)
