"""The meaning of every operation: plain collective, then (or after) whole computations. Sequential, differentiable.

`commfuse_megatron.ops` must give these results and gradients, to rounding. Meant to be read and compared with, not to
be fast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from commfuse_megatron.ops.collectives import gather_rows, reduce_scatter_rows, start_all_reduce
from commfuse_megatron.problem import shard_range


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


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return start_all_reduce(y_partial.clone(), group, is_async=False).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _AllReduceGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return start_all_reduce(
            grad.clone(memory_format=torch.contiguous_format), ctx.group, is_async=False
        ).wait(), None


def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    total_rows: int | None = None,
    *,
    group: dist.ProcessGroup,
    return_gathered: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gather the rows of `x`, multiply by this rank's columns.

    Shapes:
        x       [S_r, ..., K]   this rank's rows of the sequence
        weight  [N, K]          this rank's output features
        bias    [N]
        result  [S, ..., N]     if `return_gathered`, (result, the gathered rows [S, ..., K])
    total_rows is S; None means that every rank brings equally many rows.

    Gradients: x gets the rows S_r of the sum over ranks; weight and bias their own, complete.
    """
    total = x.size(0) * group.size() if total_rows is None else total_rows
    gathered = _GatherRows.apply(x, total, group)
    y = linear(gathered, weight, bias)
    return (y, gathered) if return_gathered else y


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
    return _with_bias(_ReduceScatterRows.apply(linear(x, weight), group), bias)


def linear_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """Multiply by this rank's rows of the weight, sum over ranks, on all of them.

    Shapes:
        x       [S, ..., K]     this rank's input features
        weight  [N, K]
        bias    [N]             equal on all ranks; added once, after the sum
        result  [S, ..., N]

    Gradients: all get their own, complete, since the gradient of the result is taken to be equal on all ranks.
    """
    return _with_bias(_AllReduce.apply(linear(x, weight), group), bias)


def linear_grad_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: dist.ProcessGroup
) -> torch.Tensor:
    """Multiply by this rank's columns; backward, sum the gradient of the input over ranks, on all of them.

    Shapes:
        x       [S, ..., K]     equal on all ranks
        weight  [N, K]          this rank's output features
        bias    [N]
        result  [S, ..., N]

    Gradients: x gets the sum over ranks; weight and bias their own, complete.
    """
    return linear(_AllReduceGrad.apply(x, group), weight, bias)


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
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
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Attention of this rank's heads over the whole sequence, then `linear_reduce_scatter`.

    Shapes:
        q           [S, B, H, D]        this rank's heads
        k           [S, B, H_kv, D]     H is a multiple of H_kv
        v           [S, B, H_kv, D_v]
        out_weight  [N, H * D_v]        this rank's input features
        out_bias    [N]                 added once, after the sum
        mask        [B or 1, H or 1, S, S]
        result      [S_r, B, N]         rows as `torch.tensor_split` deals them

    causal: a query sees no later key. window (left, right): nor one farther than that before or after it, -1 is
    unlimited. mask: booleans instead of both; the score of a key that it hides (True) becomes -10000. scale: of scores,
    default 1 / sqrt(D). Scores and softmax are computed in fp32 (fp64 for fp64).
    """
    attended = attend(q, k, v, causal=causal, window=window, mask=mask, scale=scale)
    return linear_reduce_scatter(attended.flatten(2), out_weight, out_bias, group=group)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    order: str = "contiguous",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    total_rows: int | None = None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Gather the rows of q, k and v, attend with all heads, keep this rank's rows.

    Shapes:
        q       [S_r, B, H, D]        this rank's rows of all heads
        k       [S_r, B, H_kv, D]     H is a multiple of H_kv
        v       [S_r, B, H_kv, D_v]
        result  [S_r, B, H * D_v]
    total_rows is S; None means that every rank brings equally many rows. order: "contiguous", or "zigzag": of 2 R equal
    chunks of the sequence rank r brings numbers r and 2 R - 1 - r. The rest as in `query_split_attention`.

    Gradients: q, k and v get those of this rank's rows, summed over the queries of all ranks.
    """
    total, size = q.size(0) * group.size() if total_rows is None else total_rows, group.size()
    gathered = [_GatherRows.apply(each, total, group) for each in (q, k, v)]
    # Which row of the sequence each gathered row is.
    places = torch.arange(total, device=q.device)
    if order == "zigzag":
        chunks = places.chunk(2 * size) if total else (places,) * (2 * size)
        places = torch.cat([torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) for rank in range(size)])
    in_order = [each[places.argsort()] for each in gathered]
    attended = attend(*in_order, causal=causal, window=window, mask=None, scale=scale).flatten(2)
    own = places.split([shard_range(total, size, rank).size for rank in range(size)])[group.rank()]
    return attended[own]


def ulysses_block(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    out_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    to_heads: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    group: dist.ProcessGroup,
    **attention: Any,
) -> torch.Tensor:
    """Multiply, cut into heads, `ulysses_attention`, multiply.

    Shapes:
        x           [S_r, B, K]
        qkv_weight  [H_kv * (H / H_kv * D + D + D_v), K]    of every head of keys its queries, its key, its value
        out_weight  [N, H * D_v]
        result      [S_r, B, N]

    to_heads: (q, k, v) [S_r, B, heads, features] -> the same after norms and rotary positions.
    """
    by_kv_head = linear(x, qkv_weight, qkv_bias).unflatten(-1, (kv_heads, -1))
    of_queries = heads // kv_heads * head_dim
    q, k, v = by_kv_head.split([of_queries, head_dim, by_kv_head.size(-1) - of_queries - head_dim], dim=-1)
    parts: tuple[torch.Tensor, ...] = (q.reshape(*x.shape[:2], heads, head_dim), k, v)
    attended = ulysses_attention(*(parts if to_heads is None else to_heads(*parts)), group=group, **attention)
    return linear(attended, out_weight)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """[S, B, H, D_v]: the attention of `query_split_attention`. With fewer queries than keys, of the last queries."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    shared_by = q.size(2) // k.size(2)
    keys, values = (tensor.to(wide).repeat_interleave(shared_by, dim=2) for tensor in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q.to(wide), keys) * (q.size(-1) ** -0.5 if scale is None else scale)
    position = torch.arange(k.size(0), device=q.device)
    ahead = position - position[k.size(0) - q.size(0) :].unsqueeze(1)  # of a key [column] before its query [row]
    left, right = (-1, -1) if window is None else window
    if mask is not None:
        scores = scores.masked_fill(mask, -10000.0)
    else:
        hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
        if left >= 0:
            hidden = hidden | (ahead < -left)
        if right >= 0:
            hidden = hidden | (ahead > right)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), values).to(q.dtype)
