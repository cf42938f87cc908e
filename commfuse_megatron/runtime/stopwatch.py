"""Times bursts of calls on a device's current stream, host time included where the host is what limits.

Blocks the host, so it is for choosing plans only, never for the calls themselves.
"""

import time
from collections.abc import Callable

import torch


class Stopwatch:
    """Times calls of which each is collective: all ranks time the same ones in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []

    def burst_us(self, call: Callable[[], object], calls: int, lead: Callable[[], object] | None = None) -> float:
        """Microseconds per call, of `calls` in a row after one that is not counted and brings the ranks together.

        lead: work issued before on a GPU, under which the host gets ahead: then host time does not count.
        """
        if not self._events:
            call()
            start_s = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start_s) * 1e6 / calls
        start, end = self._events
        torch.cuda.current_stream(self._device).synchronize()
        if lead is not None:
            lead()
        call()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls
