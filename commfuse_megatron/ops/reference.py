"""The meaning of every operation: plain collective, then (or after) one GEMM. Sequential and differentiable.

`commfuse_megatron.ops` must give these results and gradients, to rounding. Meant to be read and compared with, not to
be fast.
"""

from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from commfuse_megatron.ops.collectives import gather_rows, reduce_scatter_rows

__all__ = ["all_gather_linear", "embedding_reduce_scatter", "linear_reduce_scatter"]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_shard: torch.Tensor, total_rows: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return gather_rows(x_shard, total_rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter_rows(grad, ctx.group), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.total_rows, ctx.group = y_partial.size(0), group
        return reduce_scatter_rows(y_partial, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_rows(grad, ctx.total_rows, ctx.group), None


def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    total_rows: int | None = None,
    *,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Gather the rows of `x`, multiply by this rank's columns.

    Shapes:
        x       [S_r, ..., K]   this rank's rows of the sequence
        weight  [N, K]          this rank's output features
        bias    [N]
        result  [S, ..., N]
    total_rows is S; None means that every rank brings equally many rows.

    Gradients: x gets the rows S_r of the sum over ranks; weight and bias their own, complete.
    """
    total = x.size(0) * group.size() if total_rows is None else total_rows
    return linear(_GatherRows.apply(x, total, group), weight, bias)


def linear_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """Multiply by this rank's rows of the weight, sum over ranks, keep this rank's rows of the sequence.

    Shapes:
        x       [S, ..., K]     this rank's input features
        weight  [N, K]
        bias    [N]             added once, after the sum
        result  [S_r, ..., N]   rows as `torch.tensor_split` deals them

    Gradients: x and weight get their own, complete; bias the sum over this rank's rows only.
    """
    y = _ReduceScatterRows.apply(linear(x, weight), group)
    if bias is not None and torch.is_autocast_enabled(y.device.type):
        bias = bias.to(y.dtype)  # as autocast does within `linear`
    return y if bias is None else y + bias


def embedding_reduce_scatter(
    ids: torch.Tensor, weight: torch.Tensor, first_id: int, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """Look up ids in this rank's part of the vocabulary, sum over ranks, keep this rank's rows of the sequence.

    Shapes:
        ids     [B, S]
        weight  [V_r, N]        the vectors of the ids from `first_id` on; others give zeros
        result  [S_r, B, N]     rows as `torch.tensor_split` deals them

    Gradients: weight gets its own, complete.
    """
    rows = ids.t() - first_id
    is_foreign = (rows < 0) | (rows >= weight.size(0))
    y = torch.nn.functional.embedding(rows.masked_fill(is_foreign, 0), weight)
    return _ReduceScatterRows.apply(y.masked_fill(is_foreign.unsqueeze(-1), 0), group)
