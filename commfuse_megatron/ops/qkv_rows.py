"""Projections to and from heads, one group of heads at a time: which rows of a weight, and their products.

A weight of queries, keys and values has rows as Megatron lays them out: of every head of keys, first its heads of
queries, then the key, then the value. A group has some heads of every rank, so blocks of rows at equal distances as a
rule: one batched product. Knows tensors and a problem; must not know autograd, nor that anything travels.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from commfuse_megatron.problem import HeadGroup, RowRange, UlyssesProblem


class QkvRows:
    """The rows of every group of heads of all ranks in the weight of queries, keys and values."""

    def __init__(self, problem: UlyssesProblem, groups: Sequence[HeadGroup]) -> None:
        self.problem, self.groups = problem, groups
        self._shared_by = problem.heads // problem.kv_heads
        both = problem.head_dim + problem.value_dim
        self._per_kv_head = self._shared_by * problem.head_dim + both
        self.num_rows = problem.kv_heads * self._per_kv_head
        #: By group, blocks of rows, in the order in which a product has them as features.
        self.blocks = [joined(self._blocks(group)) for group in groups]

    def split(
        self, projected: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """q, k and v [S_r, B, heads of all ranks, features] of a group's product; None where another group has them."""
        problem, group = self.problem, self.groups[number]
        sizes = [problem.head_dim, problem.value_dim]
        if self._is_whole:
            heads = projected.unflatten(-1, (-1, self._per_kv_head))
            q, k, v = heads.split([self._shared_by * problem.head_dim, *sizes], dim=-1)
            return q.unflatten(-1, (self._shared_by, problem.head_dim)).flatten(2, 3), k, v
        features = problem.group_size * group.q.size * problem.head_dim
        q = projected[..., :features].unflatten(-1, (-1, problem.head_dim))
        if not group.brings_kv:
            return q, None, None
        k, v = projected[..., features:].unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        return q, k, v

    def shapes(self, number: int, rows: int) -> list[tuple[int, int, int, int]]:
        """Those of q, and of k and v if the group has them, of so many rows."""
        problem, group = self.problem, self.groups[number]
        is_part = self._is_whole and len(self.groups) > 1
        kv_heads = problem.group_size * group.kv.size if is_part else problem.kv_heads
        q = (rows, problem.batch, problem.group_size * group.q.size, problem.head_dim)
        kv = [(rows, problem.batch, kv_heads, size) for size in (problem.head_dim, problem.value_dim)]
        return [q, *(kv if group.brings_kv else [])]

    @property
    def _is_whole(self) -> bool:
        """Whether every group has keys and values of its own."""
        return all(group.brings_kv for group in self.groups)

    def _blocks(self, group: HeadGroup) -> list[RowRange]:
        problem, per_kv_head, dim = self.problem, self._per_kv_head, self.problem.head_dim
        if len(self.groups) == 1:
            return [RowRange(0, self.num_rows)]
        ranks = range(problem.group_size)
        if self._is_whole:
            starts = [rank * problem.own_kv_heads for rank in ranks]
            return [RowRange((at + group.kv.start) * per_kv_head, (at + group.kv.stop) * per_kv_head) for at in starts]
        found = []
        for rank in ranks:
            kv_head, place = divmod(rank * problem.own_heads + group.q.start, self._shared_by)
            start = kv_head * per_kv_head + place * dim
            found.append(RowRange(start, start + group.q.size * dim))
        if group.brings_kv:
            before = self._shared_by * dim
            found += [RowRange(at * per_kv_head + before, (at + 1) * per_kv_head) for at in range(problem.kv_heads)]
        return found


def joined(blocks: Sequence[RowRange]) -> tuple[RowRange, ...]:
    """The same rows in as few blocks as neighbours allow."""
    found: list[RowRange] = []
    for block in blocks:
        if found and found[-1].stop == block.start:
            found[-1] = RowRange(found[-1].start, block.stop)
        else:
            found.append(block)
    return tuple(found)


class _Stack(NamedTuple):
    """Blocks of as many rows, at equal distances."""

    start: int
    distance: int
    number: int
    rows: int

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Those rows of a matrix [rows, columns]: [number, rows, columns], a view."""
        by_row, by_column = matrix.stride()
        shape, strides = (self.number, self.rows, matrix.size(1)), (self.distance * by_row, by_row, by_column)
        return matrix.as_strided(shape, strides, matrix.storage_offset() + self.start * by_row)


def _stack_of(blocks: Sequence[RowRange]) -> _Stack | None:
    distances = {b.start - a.start for a, b in itertools.pairwise(blocks)}
    if len({block.size for block in blocks}) > 1 or len(distances) > 1:
        return None
    return _Stack(blocks[0].start, max(distances, default=0), len(blocks), blocks[0].size)


def multiply_blocks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, blocks: Sequence[RowRange]
) -> torch.Tensor:
    """x [M, K] @ (those rows of weight [N, K]) transposed (+ those of bias [N]): [M, rows], block after block."""
    out = x.new_empty(x.size(0), sum(block.size for block in blocks))
    stack = _stack_of(blocks)
    if stack is None:
        parts = out.split([block.size for block in blocks], dim=1)
        for part, block in zip(parts, blocks, strict=True):
            _multiply(x, weight[block.start : block.stop].t(), bias, block, part)
    elif stack.number == 1:
        _multiply(x, weight[blocks[0].start : blocks[0].stop].t(), bias, blocks[0], out)
    else:
        by_block = out.view(x.size(0), stack.number, stack.rows).transpose(0, 1)
        factors = x.expand(stack.number, *x.shape), stack.of(weight).transpose(1, 2)
        if bias is None:
            torch.bmm(*factors, out=by_block)
        else:
            torch.baddbmm(stack.of(bias.unsqueeze(1)).transpose(1, 2), *factors, out=by_block)
    return out


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, block: RowRange, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias[block.start : block.stop], x, weight, out=out)


def multiply_columns(grad: torch.Tensor, weight: torch.Tensor, chosen: RowRange, out: torch.Tensor) -> None:
    """Fill out [R, M, columns] with grad [M, N] @ (of each R-th of the columns of weight [N, K], the chosen ones)."""
    size = out.size(0)
    by_rank = weight.unflatten(1, (size, -1))[:, :, chosen.start : chosen.stop].transpose(0, 1)
    torch.bmm(grad.expand(size, *grad.shape), by_rank, out=out)


def put_blocks(target: torch.Tensor, blocks: Sequence[RowRange], source: torch.Tensor) -> None:
    """Copy source [M, rows], block after block, to those columns of target [M, N]."""
    for block, part in zip(blocks, source.split([block.size for block in blocks], dim=1), strict=True):
        target[:, block.start : block.stop].copy_(part)


def check_heads(heads: Sequence[object], shapes: Sequence[tuple[int, ...]], like: torch.Tensor) -> str | None:
    """What of q, k and v is not as it should be, in one sentence; None if all are."""
    for name, tensor, shape in zip(("q", "k", "v"), heads, [*shapes, None, None][:3], strict=True):
        if shape is None:
            if tensor is not None:
                return f"{name} must be None: another group of heads has brought it"
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            found = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            return f"{name} must be {list(shape)}, got {found}"
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            return f"{name} must be {like.dtype} on {like.device}, got {tensor.dtype} on {tensor.device}"
    return None
