"""The plain collectives that the overlapped operations replace, for any number of rows. Blocking in stream order."""

import torch
from torch import distributed as dist

from commfuse_megatron.problem import shard_range

__all__ = ["gather_rows", "reduce_scatter_rows"]


def gather_rows(x_shard: torch.Tensor, total_rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[S_r, ...] of every rank, in rank order -> [S, ...] on all ranks."""
    group_size = group.size()
    if group_size == 1:
        return x_shard
    tail = x_shard.shape[1:]
    largest = shard_range(total_rows, group_size, 0).size
    if total_rows % group_size == 0:
        gathered = x_shard.new_empty(total_rows, *tail)
        dist.all_gather_into_tensor(gathered, x_shard.contiguous(), group=group)
        return gathered
    # Collectives want equal parts: pad every shard to the largest and drop the padding again.
    padded = x_shard.new_zeros(largest, *tail)
    padded[: x_shard.size(0)] = x_shard
    gathered = x_shard.new_empty(group_size, largest, *tail)
    dist.all_gather_into_tensor(gathered.view(group_size * largest, *tail), padded, group=group)
    return torch.cat([gathered[rank, : shard_range(total_rows, group_size, rank).size] for rank in range(group_size)])


def reduce_scatter_rows(y_partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S, ...] partials -> this rank's rows [S_r, ...] of their sum."""
    group_size = group.size()
    if group_size == 1:
        return y_partial
    total_rows, tail = y_partial.size(0), y_partial.shape[1:]
    own = shard_range(total_rows, group_size, group.rank())
    if total_rows % group_size == 0:
        summed = y_partial.new_empty(own.size, *tail)
        dist.reduce_scatter_tensor(summed, y_partial.contiguous(), group=group)
        return summed
    largest = shard_range(total_rows, group_size, 0).size
    padded = y_partial.new_zeros(group_size, largest, *tail)
    for rank in range(group_size):
        rows = shard_range(total_rows, group_size, rank)
        padded[rank, : rows.size] = y_partial[rows.start : rows.stop]
    summed = y_partial.new_empty(largest, *tail)
    dist.reduce_scatter_tensor(summed, padded.view(group_size * largest, *tail), group=group)
    return summed[: own.size].clone()
