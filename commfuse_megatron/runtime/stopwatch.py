"""Times bursts of calls on a device's current stream, host time included where the host is what limits.

Blocks the host, so it is for choosing plans only, never for the calls themselves.
"""

import time
from collections.abc import Callable
from typing import Protocol, override

import torch

__all__ = ["Stopwatch", "make_stopwatch"]


class Stopwatch(Protocol):
    """Times calls of which each is collective: all ranks time the same ones in the same order."""

    def burst_us(self, call: Callable[[], object], calls: int, lead: Callable[[], object] | None = None) -> float:
        """Microseconds per call, of `calls` in a row after one that is not counted and brings the ranks together.

        lead: work issued before, under which the host gets ahead: then host time does not count.
        """
        ...


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for `device`."""
    return _StreamStopwatch(device) if device.type == "cuda" else _HostStopwatch()


class _StreamStopwatch(Stopwatch):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @override
    def burst_us(self, call: Callable[[], object], calls: int, lead: Callable[[], object] | None = None) -> float:
        torch.cuda.current_stream(self._device).synchronize()
        if lead is not None:
            lead()
        call()
        self._start.record()
        for _ in range(calls):
            call()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / calls


class _HostStopwatch(Stopwatch):
    @override
    def burst_us(self, call: Callable[[], object], calls: int, lead: Callable[[], object] | None = None) -> float:
        call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1e6 / calls
