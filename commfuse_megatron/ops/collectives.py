"""The plain collectives that the overlapped operations replace, for any number of rows.

`gather_rows` and `reduce_scatter_rows` block in stream order; the `start_` forms run beside what follows.
`start_all_reduce` sums in place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.problem import shard_range


class PendingRows:
    """The result of a collective that may still run."""

    def __init__(self, work: Any, finish: Callable[[], torch.Tensor], *held: torch.Tensor) -> None:
        self._work = work
        self._finish = finish
        self._held = held  # what the collective reads must live until it is done

    def wait(self) -> torch.Tensor:
        """Order what follows on this stream (CPU: the caller) after the collective; once only."""
        if self._work is not None:
            self._work.wait()
        self._held = ()
        return self._finish()


def gather_rows(x_shard: torch.Tensor, total_rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[S_r, ...] of every rank, in rank order -> [S, ...] on all ranks."""
    return start_gather_rows(x_shard, total_rows, group, is_async=False).wait()


def reduce_scatter_rows(y_partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S, ...] partials -> this rank's rows [S_r, ...] of their sum."""
    return start_reduce_scatter_rows(y_partial, group, is_async=False).wait()


def start_gather_rows(
    x_shard: torch.Tensor, total_rows: int, group: dist.ProcessGroup, *, is_async: bool
) -> PendingRows:
    """`gather_rows`, beside what follows if `is_async`."""
    group_size = group.size()
    if group_size == 1:
        return PendingRows(None, lambda: x_shard)
    tail = x_shard.shape[1:]
    largest = shard_range(total_rows, group_size, 0).size
    if total_rows % group_size == 0:
        source = x_shard.contiguous()
        gathered = x_shard.new_empty(total_rows, *tail)
        work = dist.all_gather_into_tensor(gathered, source, group=group, async_op=is_async)
        return PendingRows(work, lambda: gathered, source)
    # Collectives want equal parts: pad every shard to the largest and drop the padding again.
    padded = x_shard.new_zeros(largest, *tail)
    padded[: x_shard.size(0)] = x_shard
    parts = x_shard.new_empty(group_size, largest, *tail)
    work = dist.all_gather_into_tensor(parts.view(group_size * largest, *tail), padded, group=group, async_op=is_async)

    def join() -> torch.Tensor:
        return torch.cat([parts[rank, : shard_range(total_rows, group_size, rank).size] for rank in range(group_size)])

    return PendingRows(work, join, padded)


def start_reduce_scatter_rows(y_partial: torch.Tensor, group: dist.ProcessGroup, *, is_async: bool) -> PendingRows:
    """`reduce_scatter_rows`, beside what follows if `is_async`."""
    group_size = group.size()
    if group_size == 1:
        return PendingRows(None, lambda: y_partial)
    total_rows, tail = y_partial.size(0), y_partial.shape[1:]
    own = shard_range(total_rows, group_size, group.rank())
    if total_rows % group_size == 0:
        source = y_partial.contiguous()
        summed = y_partial.new_empty(own.size, *tail)
        work = dist.reduce_scatter_tensor(summed, source, group=group, async_op=is_async)
        return PendingRows(work, lambda: summed, source)
    largest = shard_range(total_rows, group_size, 0).size
    padded = y_partial.new_zeros(group_size, largest, *tail)
    for rank in range(group_size):
        rows = shard_range(total_rows, group_size, rank)
        padded[rank, : rows.size] = y_partial[rows.start : rows.stop]
    source = padded.view(group_size * largest, *tail)
    summed = y_partial.new_empty(largest, *tail)
    work = dist.reduce_scatter_tensor(summed, source, group=group, async_op=is_async)
    return PendingRows(work, lambda: summed[: own.size].clone(), source)


def start_all_reduce(partial: torch.Tensor, group: dist.ProcessGroup, *, is_async: bool) -> PendingRows:
    """Sum partials over ranks in place, for all of them."""
    work = None
    if group.size() > 1 and partial.numel():
        work = dist.all_reduce(partial, group=group, async_op=is_async)
    return PendingRows(work, lambda: partial, partial)
