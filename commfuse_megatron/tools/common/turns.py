"""Measurements on all ranks: where they meet, whose turn it is, and the slowest one's values."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist


def meet(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Wait until all ranks are here and, on a GPU, done with what they had begun."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns[K, T](samples: Mapping[K, Callable[[], T]], rounds: int, seed: int = 0) -> dict[K, list[T]]:
    """The samples of each, one in every round, in an order that all ranks shuffle alike."""
    shuffle = random.Random(seed)
    found: dict[K, list[T]] = {name: [] for name in samples}
    for _ in range(rounds):
        for name in shuffle.sample(list(samples), len(samples)):
            found[name].append(samples[name]())
    return found


def largest_of_ranks(
    values: torch.Tensor | Sequence[Any], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Of each of these numbers the largest of all ranks. Collective."""
    largest = torch.as_tensor(values, dtype=torch.float64).to(device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()
