"""Embedding with a vocabulary split over ranks: the reduce-scatter of the output hides under the look-ups.

Forward:    transfer             [rows of owner 1][rows of owner 2]...
            compute   [look up 1][look up 2      ][look up own    ][sum]

The schedule is that of `linear_reduce_scatter`; a look-up takes the place of the GEMM. Backward is the last thing that
a model does: nothing is left to hide its all-gather under, and the gradient is added in one piece, as rounding wants.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from commfuse_megatron.ops.arguments import (
    Operation,
    complain_if_unusable,
    prepare_backward,
    remember,
    require_context,
    require_fitting,
    unusable_reason,
)
from commfuse_megatron.ops.collectives import gather_rows, reduce_scatter_rows
from commfuse_megatron.ops.trial import Scratch
from commfuse_megatron.problem import DTYPE_BYTES, GemmProblem, shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.marks import without_marks
from commfuse_megatron.runtime.prepared import PassContext, PreparedPass
from commfuse_megatron.schedule.lower_linear import LOOK_UP, Asked

_FORWARD, _BACKWARD = Asked(), Asked(is_backward=True, has_product=False, keeps_gathered=True)


@torch.compiler.disable
def embedding_reduce_scatter(
    ids: torch.Tensor,
    weight: torch.Tensor,
    first_id: int,
    *,
    context: OverlapContext,
    is_deterministic: bool = False,
) -> torch.Tensor:
    """This rank's rows of the sequence, looked up in the vocabulary of all ranks; equals
    `reference.embedding_reduce_scatter` exactly: of the summed partials all but one are zero.

    Shapes:
        ids     [B, S]          integers, equal on all ranks
        weight  [V_r, N]        the vectors of the ids from `first_id` on
        result  [S_r, B, N]     `torch.tensor_split` of S over the group; fresh and contiguous; zeros for foreign ids

    Gradients: weight gets its own, complete.

    Args:
        is_deterministic: add gradients of one id in a fixed order; costs a sort on GPUs, as with Megatron.

    Raises: as `linear_reduce_scatter`. The plan is chosen by the configuration of a linear's passes.
    """
    require_context("embedding_reduce_scatter", context)
    with context.guard("embedding_reduce_scatter"):
        forward = _prepare(ids, weight, first_id, is_deterministic, context)
        call = _Call(forward, first_id, is_deterministic)
        if not (torch.is_grad_enabled() and weight.requires_grad):
            forward.begin()
            return _forward(forward, *_localize(ids, weight, first_id), weight)
    return _EmbeddingReduceScatter.apply(ids, weight, call)


_FIRST_IDS = 2**62


class _Call(NamedTuple):
    forward: PreparedPass
    first_id: int
    is_deterministic: bool


class _EmbeddingReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, call: _Call) -> torch.Tensor:
        with call.forward.context.guard(call.forward.problem):
            call.forward.begin()
            rows, is_foreign = _localize(ids, weight, call.first_id)
            y = _forward(call.forward, rows, is_foreign, weight)
        ctx.call = call
        ctx.num_rows = weight.size(0)
        ctx.save_for_backward(rows, is_foreign)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        call: _Call = ctx.call
        context, what = call.forward.context, "the backward pass of embedding_reduce_scatter"
        rows, is_foreign = context.saved_tensors(ctx, what)
        with context.guard(what):
            grad_rows = without_marks(grad_y).contiguous().flatten(0, -2)
            p = prepare_backward(_OPERATION, call.forward, needs_input=False, needs_weight=True)
            p.begin()
            grad = _gather(p, grad_rows).masked_fill(is_foreign, 0)
            return None, _add_up(grad, rows, ctx.num_rows, is_deterministic=call.is_deterministic), None


def _localize(ids: torch.Tensor, weight: torch.Tensor, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the weight [M] in the order of the sequence, 0 where the id is another rank's; and where it is [M, 1]."""
    rows = ids.t().flatten() - first_id
    is_foreign = (rows < 0) | (rows >= weight.size(0))
    return rows.masked_fill(is_foreign, 0), is_foreign.unsqueeze(1)


def _forward(p: PreparedPass, rows: torch.Tensor, is_foreign: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    problem = p.problem
    with p:
        if p.plan.is_scheduled:
            y = weight.new_empty(p.own_rows, problem.batch, problem.N)
            look_up = functools.partial(_look_up, p, rows, is_foreign, weight)
            p.run(_FORWARD, {"out": y}, kernels={LOOK_UP: look_up})
            return y
        partial = weight.index_select(0, rows).masked_fill_(is_foreign, 0)
        return reduce_scatter_rows(partial.view(problem.rows, problem.batch, problem.N), p.context.group)


def _look_up(
    p: PreparedPass,
    rows: torch.Tensor,
    is_foreign: torch.Tensor,
    weight: torch.Tensor,
    chunk: int,
    adds: list[torch.Tensor],
    targets: list[torch.Tensor],
) -> None:
    (target,) = targets
    start = sum(p.scatter.chunk_rows[:chunk])
    these = slice(start, start + target.size(0))
    if target.dtype == weight.dtype:
        torch.index_select(weight, 0, rows[these], out=target)
    else:
        target.copy_(weight.index_select(0, rows[these]))
    target.masked_fill_(is_foreign[these], 0)
    for addend in adds:
        target.add_(addend)


def _gather(p: PreparedPass, grad_shard: torch.Tensor) -> torch.Tensor:
    """[M_r, N] of every rank -> [M, N]."""
    problem = p.problem
    with p:
        if not p.plan.is_scheduled:
            rows = grad_shard.view(p.own_rows, problem.batch * problem.N)
            return gather_rows(rows, problem.rows, p.context.group).view(problem.M, problem.N)
        gathered = grad_shard.new_empty(problem.M, problem.N)
        tensors = {"shard": grad_shard, **p.context.memory_for_gathered(gathered)}
        p.run(_BACKWARD, tensors)
        return gathered


def _add_up(grad: torch.Tensor, rows: torch.Tensor, num_rows: int, *, is_deterministic: bool) -> torch.Tensor:
    """[M, N] gradients of the rows looked up -> [num_rows, N], by what autograd uses for the same look-up."""
    if is_deterministic:
        return grad.new_zeros(num_rows, grad.size(1)).index_put_((rows,), grad, accumulate=True)
    return torch.ops.aten.embedding_dense_backward(grad, rows, num_rows, -1, False)


def _prepare(
    ids: torch.Tensor, weight: torch.Tensor, first_id: int, is_deterministic: bool, context: OverlapContext
) -> PreparedPass:
    key = prepared = None
    try:
        tensors = tuple((tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in (ids, weight))
        numbers = (type(first_id), abs(first_id) < _FIRST_IDS, type(is_deterministic))
        key = (_OPERATION.name, *tensors, *numbers, unusable_reason(ids, weight))
        prepared = context.known_calls.get(key)
    except Exception:  # of a wrong kind: the checks say which
        prepared = None
    if prepared is None:
        given = {"ids": ids, "weight": weight, "first_id": first_id, "is_deterministic": is_deterministic}
        require_fitting(_OPERATION, given, functools.partial(_find_complaint, ids, weight, first_id, context), context)
        prepared = remember(context, key, state_look_up(ids, weight, context.group_size), _OPERATION)
    return prepared


def state_look_up(ids: torch.Tensor, weight: torch.Tensor, group_size: int) -> GemmProblem:
    """The forward pass of a call whose arguments fit together."""
    return GemmProblem(
        op=_OPERATION.name,
        pass_name="fprop",
        rows=ids.size(1),
        batch=ids.size(0),
        N=weight.size(1),
        K=1,  # each element of the output is one product with a one-hot vector
        dtype=str(weight.dtype).removeprefix("torch."),
        group_size=group_size,
    )


def _find_complaint(ids: torch.Tensor, weight: torch.Tensor, first_id: int, context: OverlapContext) -> str | None:
    if abs(first_id) >= _FIRST_IDS:
        return f"first_id must fit into 63 bits, got {first_id}"
    if ids.dim() != 2:
        return f"ids must be [B, S], got shape {list(ids.shape)}"
    if ids.dtype not in (torch.int64, torch.int32):
        return f"ids must be int64 or int32, got {ids.dtype}"
    if weight.dim() != 2 or not weight.size(0):
        return f"weight must be [V, N] with at least one row, got shape {list(weight.shape)}"
    if str(weight.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        return f"dtype {weight.dtype} is not supported; supported are {', '.join(DTYPE_BYTES)}"
    for name, tensor in (("ids", ids), ("weight", weight)):
        if tensor.device != context.device:
            served = f"transport {context.transport_name}, which serves {context.device}"
            return f"{name} is on {tensor.device}, but this context uses {served}"
    return complain_if_unusable({"ids": ids, "weight": weight})


def _rehearse(problem: GemmProblem, context: PassContext) -> Callable[[PreparedPass], object]:
    """Scratch operands of `problem`, and what runs a pass of it on them. How many ids there are matters little."""
    scratch = Scratch(problem, context.device)
    if problem.pass_name == "fprop":
        weight = scratch.draw(max(1, problem.M // problem.group_size), problem.N)
        ids = torch.arange(problem.M, device=context.device).view(problem.batch, problem.rows)
        localized = _localize(ids, weight, context.group_rank * weight.size(0))
        return lambda p: _forward(p, *localized, weight)
    own = shard_range(problem.rows, context.group_size, context.group_rank)
    grad = scratch.draw(own.size * problem.batch, problem.N)
    return lambda p: _gather(p, grad)


_OPERATION = Operation("embedding_reduce_scatter", _rehearse, embedding_reduce_scatter)
