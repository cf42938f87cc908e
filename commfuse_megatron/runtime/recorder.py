"""Keeps what ran when: one interval per slice, sum and transfer of every call, for pictures and for the exposed time.

On the CPU times are read from the host clock around the work, and a transfer lasts from its issue until its arrival was
noticed. On GPUs they come from events: a transfer lasts from the later of its issue and its predecessor's end, since
one communicator runs its batches in order, until its end on the communication stream. Events of the compute stream are
recorded there; the ends of transfers on a probe stream that only waits. The one thing that recording orders: an
operation ends after its probes, since a one-sided transport then clears the flags that they wait for.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_megatron.transport.base import Transfer

__all__ = ["Interval", "Recorder"]


@dataclass(frozen=True, slots=True)
class Interval:
    """One thing that ran: `track` is "compute" or "transfer"; times in microseconds since the recorder began.

    lane: where within the track, e.g. "lane 1" or "stream 7"; empty where there is only one. detail: more than fits
    into a name, e.g. that of a kernel.
    """

    name: str
    track: str
    start_us: float
    end_us: float
    step: int | None
    op: str
    call: int
    lane: str = ""
    detail: str = ""

    @property
    def duration_us(self) -> float:
        """Length in microseconds."""
        return self.end_us - self.start_us


@dataclass(slots=True)
class _Pending:
    name: str
    track: str
    start: Any
    end: Any
    step: int | None
    op: str
    call: int
    lanes: tuple[int, ...] = ()


class Recorder:
    """Collects intervals of one context; `intervals()` resolves them (and waits for the device to do so)."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._pending: list[_Pending] = []
        self._resolved: list[Interval] = []
        self._probe = torch.cuda.Stream(device) if self._is_cuda else None
        self._origin = self.now()
        self._op, self._call = "", 0

    def begin_call(self, op: str, call: int) -> None:
        """Name the call that the following intervals belong to."""
        self._op, self._call = op, call

    def now(self) -> Any:
        """A mark on the current stream (CPU: the clock)."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_compute(self, name: str, start: Any, step: int | None) -> None:
        """Close an interval of the compute track that began at mark `start`."""
        self._pending.append(_Pending(name, "compute", start, self.now(), step, self._op, self._call))

    def add_transfer(self, name: str, start: Any, step: int | None) -> None:
        """Close an interval of the transfer track that began at mark `start`, for what blocks the stream meanwhile."""
        self._pending.append(_Pending(name, "transfer", start, self.now(), step, self._op, self._call))

    def open_transfer(self, name: str, transfer: Transfer, step: int | None) -> int:
        """Open an interval of the transfer track for a batch just issued; returns its handle for `close_transfer`."""
        start, end = self.now(), None
        if self._probe is not None:
            with torch.cuda.stream(self._probe):
                transfer.wait()
                end = torch.cuda.Event(enable_timing=True)
                end.record()
        self._pending.append(_Pending(name, "transfer", start, end, step, self._op, self._call, transfer.lanes))
        return len(self._pending) - 1

    def close_transfer(self, handle: int) -> None:
        """Note on the CPU that the transfer was seen to be complete; on GPUs its end is already an event."""
        if self._pending[handle].end is None:
            self._pending[handle].end = self.now()

    def end_call(self) -> None:
        """Order what follows on the current stream after the probes of this call's transfers."""
        if self._probe is not None:
            torch.cuda.current_stream(self._probe.device).wait_stream(self._probe)

    def intervals(self) -> list[Interval]:
        """All intervals so far, oldest first. Blocks until the recorded work is done; call it outside the hot path."""
        lane_end_us: dict[int, float] = {}
        for item in self._pending:
            start_us, end_us = self._microseconds(item.start), self._microseconds(item.end)
            if item.track == "transfer" and self._is_cuda:
                start_us = max(start_us, *(lane_end_us.get(lane, 0.0) for lane in item.lanes))
                lane_end_us.update(dict.fromkeys(item.lanes, end_us))
            lane = f"lane {'+'.join(map(str, item.lanes))}" if item.lanes else ""
            self._resolved.append(
                Interval(item.name, item.track, start_us, end_us, item.step, item.op, item.call, lane)
            )
        self._pending.clear()
        return list(self._resolved)

    def clear(self) -> None:
        """Forget everything recorded so far; the clock's origin stays."""
        self._pending.clear()
        self._resolved.clear()

    def _microseconds(self, mark: Any) -> float:
        if self._is_cuda:
            mark.synchronize()
            return self._origin.elapsed_time(mark) * 1e3
        return (mark - self._origin) * 1e6
