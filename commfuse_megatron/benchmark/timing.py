"""How variants are timed against each other on GPUs: warm, interleaved in random order, maximum over ranks.

One sample is a burst of calls between one pair of events. Every round takes one sample of every variant, in an order
that all ranks shuffle alike; the sample of a group is its slowest rank's. Clocks drift: only compare within one
`measure`.
"""

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import distributed as dist

__all__ = ["Sample", "measure"]

Variant = Callable[[], object]

# One burst is about this long, so that launch gaps at its ends do not count.
_BURST_MS = 15.0
_MOST_CALLS = 50
_WARM_UP_CALLS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """Milliseconds per call of one variant over the rounds."""

    median_ms: float
    p95_ms: float


def measure(variants: Mapping[str, Variant], group: dist.ProcessGroup, *, rounds: int = 15) -> dict[str, Sample]:
    """Time all variants; collective over `group`, which must bring the same names in the same order."""
    names = list(variants)
    for name in names:
        for _ in range(_WARM_UP_CALLS):
            variants[name]()
    first = torch.tensor([_burst(variants[name], group, 2) for name in names], device="cuda")
    dist.all_reduce(first, op=dist.ReduceOp.MAX, group=group)
    calls = {
        name: max(1, min(_MOST_CALLS, round(_BURST_MS / ms))) for name, ms in zip(names, first.tolist(), strict=True)
    }
    shuffle = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in shuffle.sample(names, len(names)):
            times[name].append(_burst(variants[name], group, calls[name]))
    slowest = torch.tensor([times[name] for name in names], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return {name: _summary(row) for name, row in zip(names, slowest.tolist(), strict=True)}


def _burst(variant: Variant, group: dist.ProcessGroup, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier(group=group)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        variant()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def _summary(times: list[float]) -> Sample:
    ordered = sorted(times)
    return Sample(statistics.median(ordered), ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))])
