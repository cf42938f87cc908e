"""How variants are timed against each other: warm, interleaved in random order, maximum over ranks.

One sample is a burst of calls between one pair of events (CPU: readings of the clock). Every round takes one sample of
every variant, in an order that all ranks shuffle alike; the sample of a group is its slowest rank's. A burst begins on
all ranks at a time, when the host is a call ahead. Clocks drift: only compare within one `measure`.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import distributed as dist

from commfuse_megatron.runtime.head_start import start_together
from commfuse_megatron.tools.common.turns import largest_of_ranks, take_turns

Call = Callable[[], object]

# One burst is about this long, so that launch gaps at its ends do not count.
_BURST_MS = 8.0
_MOST_CALLS = 50
_WARM_UP_CALLS = 2
_FEWEST_ROUNDS = 5
_HOST_CALLS, _HOST_RUN = 90, 10
# The host is ahead when the clock starts, as it is in a training loop: by one call, and by half of it for good measure.
# By no more: calls whose host is slower than their GPU are to show it.
_HEAD_START_CALLS = 1.5
_LEAST_HEAD_START_US, _MOST_HEAD_START_US = 200.0, 5000.0


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
    for each in timed.values():
        _burst(each, group, device, _WARM_UP_CALLS)
    first = [_burst(each, group, device, 2) for each in timed.values()]
    first_ms = largest_of_ranks([burst.device_ms for burst in first], device, group)
    most_calls = 1 if device.type == "cpu" else _MOST_CALLS
    calls = [max(1, min(most_calls, round(_BURST_MS / max(ms, 1e-3)))) for ms in first_ms]
    if limit_s is not None:
        round_s = sum(number * ms for number, ms in zip(calls, first_ms, strict=True)) / 1e3
        rounds = max(min(_FEWEST_ROUNDS, rounds), min(rounds, int(limit_s / max(round_s, 1e-6))))
    bursts = {
        name: functools.partial(_burst, each, group, device, number, _head_start_us(burst))
        for (name, each), number, burst in zip(timed.items(), calls, first, strict=True)
    }
    times_ms = [[burst.device_ms for burst in row] for row in take_turns(bursts, rounds).values()]
    slowest = largest_of_ranks(times_ms, device, group)
    return {name: _summary(row) for name, row in zip(timed, slowest, strict=True)}


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
    return largest_of_ranks([statistics.median(times)], device, group)[0]


@dataclass(frozen=True, slots=True)
class _Burst:
    """Milliseconds per call: between the events, and that the host took to submit it."""

    device_ms: float
    host_ms: float


def _head_start_us(burst: _Burst) -> float:
    wanted_us = _HEAD_START_CALLS * burst.host_ms * 1e3
    return min(max(wanted_us, _LEAST_HEAD_START_US), _MOST_HEAD_START_US)


def _burst(
    timed: Timed,
    group: dist.ProcessGroup,
    device: torch.device,
    calls: int,
    head_start_us: float = _LEAST_HEAD_START_US,
) -> _Burst:
    if timed.before_burst is not None:
        timed.before_burst(calls)
    _synchronize(device)
    largest_of_ranks([0.0], device, group)  # a barrier
    if device.type == "cpu":
        start_s = time.perf_counter()
        for _ in range(calls):
            timed.call()
        call_ms = (time.perf_counter() - start_s) / calls * 1e3
        return _Burst(call_ms, call_ms)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_together(group, device, head_start_us)
    start.record()
    start_s = time.perf_counter()
    for _ in range(calls):
        timed.call()
    host_ms = (time.perf_counter() - start_s) / calls * 1e3
    end.record()
    torch.cuda.synchronize()
    return _Burst(start.elapsed_time(end) / calls, host_ms)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _summary(times: list[float]) -> Sample:
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return Sample(statistics.median(ordered), p95, len(ordered))
