"""How variants are timed against each other: warm, interleaved in random order, maximum over ranks.

One sample is a burst of calls between one pair of events (CPU: readings of the clock). Every round takes one sample of
every variant, in an order that all ranks shuffle alike; the sample of a group is its slowest rank's. Clocks drift: only
compare within one `measure`.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import distributed as dist

__all__ = ["Sample", "Timed", "measure", "measure_host_us"]

Call = Callable[[], object]

# One burst is about this long, so that launch gaps at its ends do not count.
_BURST_MS = 8.0
_MOST_CALLS = 50
_WARM_UP_CALLS = 2
_FEWEST_ROUNDS = 5
_HOST_CALLS, _HOST_RUN = 90, 10
# Cycles, about 0.2 ms: the host is ahead when the clock starts, as it is in a training loop.
_HEAD_START_CYCLES = 400_000


@dataclass(frozen=True, slots=True)
class Timed:
    """A call to time. before_burst: made ready for that many calls outside of the timed part."""

    call: Call
    before_burst: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Milliseconds per call of one variant over the rounds."""

    median_ms: float
    p95_ms: float
    rounds: int = 0


def measure(
    variants: Mapping[str, Timed | Call],
    group: dist.ProcessGroup,
    *,
    rounds: int = 15,
    limit_s: float | None = None,
    device: torch.device | None = None,
) -> dict[str, Sample]:
    """Time all variants; collective over `group`, which must bring the same names in the same order.

    limit_s: about how long that may take; rounds are left out for it, down to five.
    """
    device = torch.device("cuda") if device is None else device
    timed = {name: v if isinstance(v, Timed) else Timed(v) for name, v in variants.items()}
    names = list(timed)
    for name in names:
        _burst(timed[name], group, device, _WARM_UP_CALLS)
    first = [_burst(timed[name], group, device, 2) for name in names]
    first_ms = _max_over_ranks([first], group, device)[0]
    most_calls = 1 if device.type == "cpu" else _MOST_CALLS
    calls = [max(1, min(most_calls, round(_BURST_MS / max(ms, 1e-3)))) for ms in first_ms]
    if limit_s is not None:
        round_s = sum(number * ms for number, ms in zip(calls, first_ms, strict=True)) / 1e3
        rounds = max(min(_FEWEST_ROUNDS, rounds), min(rounds, int(limit_s / max(round_s, 1e-6))))
    shuffle = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    calls_of = dict(zip(names, calls, strict=True))
    for _ in range(rounds):
        for name in shuffle.sample(names, len(names)):
            times[name].append(_burst(timed[name], group, device, calls_of[name]))
    slowest = _max_over_ranks([times[name] for name in names], group, device)
    return {name: _summary(row) for name, row in zip(names, slowest, strict=True)}


def measure_host_us(timed: Timed, group: dist.ProcessGroup, device: torch.device) -> float:
    """Microseconds of host time per call: median over runs of ten that find the device idle, maximum over ranks.

    Ten, since the first call after a wait finds cold caches, which a training loop does not; few enough that no queue
    of the device fills up.
    """
    if timed.before_burst is not None:
        timed.before_burst(_HOST_CALLS)
    times = []
    for _ in range(_HOST_CALLS // _HOST_RUN):
        _synchronize(device)
        start_ns = time.perf_counter_ns()
        for _ in range(_HOST_RUN):
            timed.call()
        times.append((time.perf_counter_ns() - start_ns) / 1e3 / _HOST_RUN)
    _synchronize(device)
    return _max_over_ranks([[statistics.median(times)]], group, device)[0][0]


def _burst(timed: Timed, group: dist.ProcessGroup, device: torch.device, calls: int) -> float:
    """Milliseconds per call."""
    if timed.before_burst is not None:
        timed.before_burst(calls)
    _synchronize(device)
    _max_over_ranks([[0.0]], group, device)  # a barrier
    if device.type == "cpu":
        start_s = time.perf_counter()
        for _ in range(calls):
            timed.call()
        return (time.perf_counter() - start_s) / calls * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    for _ in range(calls):
        timed.call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _max_over_ranks(values: list[list[float]], group: dist.ProcessGroup, device: torch.device) -> list[list[float]]:
    largest = torch.tensor(values, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def _summary(times: list[float]) -> Sample:
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return Sample(statistics.median(ordered), p95, len(ordered))
