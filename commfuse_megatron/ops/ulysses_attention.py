"""Attention over sequences that context-parallel ranks share: rows of every head in, the same out.

Stands in for the overlapped operation: keys and values are gathered, and each rank attends with its own queries.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.runtime.context import OverlapContext

__all__ = ["ulysses_attention"]


class _GatherRows(torch.autograd.Function):
    """[S/R, ...] of every rank, in the order of ranks; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    order: str = "contiguous",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    total_rows: int | None = None,
    context: OverlapContext,
) -> torch.Tensor:
    """Attention of all heads over the whole sequence, for this rank's rows.

    Shapes:
        q       [S/R, B, H, D]
        k       [S/R, B, Hk, D]
        v       [S/R, B, Hk, Dv]
        result  [S/R, B, H * Dv]

    order: "contiguous", or "zigzag": of 2R chunks rank r holds chunks r and 2R-1-r.
    """
    if dropout or total_rows is not None:
        raise UnsupportedError("ulysses_attention: dropout and uneven rows are not supported")
    size, rank, rows = context.group_size, context.group_rank, q.size(0)
    if order == "zigzag" and rows % 2:
        raise ShapeError(f"ulysses_attention: zigzag order takes an even number of rows per rank, got {rows}")
    positions = torch.cat([_positions(rows, each, size, order) for each in range(size)]).to(q.device)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    shared_by = q.size(2) // k.size(2)
    keys, values = (_GatherRows.apply(x, context.group).to(wide).repeat_interleave(shared_by, dim=2) for x in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q.to(wide), keys) * (q.size(-1) ** -0.5 if scale is None else scale)
    ahead = positions - positions[rank * rows : (rank + 1) * rows].unsqueeze(1)
    hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
    left, right = (-1, -1) if window is None else window
    hidden = hidden | (ahead < -left) if left >= 0 else hidden
    hidden = hidden | (ahead > right) if right >= 0 else hidden
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    plan = SimpleNamespace(path="overlapped", reason="stands in", overlaps=True)
    context.latest_pass = SimpleNamespace(plan=plan, problem="ulysses_attention")  # type: ignore[assignment]
    return torch.einsum("bhqk,kbhd->qbhd", probabilities, values).to(q.dtype).flatten(2)


def _positions(rows: int, rank: int, size: int, order: str) -> torch.Tensor:
    if order == "contiguous":
        return torch.arange(rank * rows, (rank + 1) * rows)
    first, last, half = rank, 2 * size - 1 - rank, rows // 2
    return torch.cat([torch.arange(chunk * half, (chunk + 1) * half) for chunk in (first, last)])
