"""Keeps what ran when: one interval per slice, sum and transfer of every call, for pictures and for the exposed time.

On the CPU times are read from the host clock around the work, and a transfer lasts from its issue until its arrival was
noticed. On GPUs they come from events: a transfer lasts from the later of its issue and its predecessor's end, since
one communicator runs its batches in order, until its end on the communication stream. Events of the compute stream are
recorded there; the ends of transfers on a probe stream that only waits. The one thing that recording orders: an
operation ends after its probes, since a one-sided transport then clears the flags that they wait for.

Only the latest calls are kept, so that a long run with recording on does not fill the memory.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from commfuse_megatron.problem import Problem
from commfuse_megatron.transport.base import Transfer

# Some 15 steps of 32 layers; a call of 8 ranks with 4 chunks per shard has some 60 intervals. Not measured.
_MOST_CALLS = 4096

# Times between events are single floats, which an hour after the first event are a quarter of a millisecond apart. So
# marks are timed from one that was at most about this long before; after a tenth of a second they are 0.01 us apart.
_NEAR_US = 1e5


@dataclass(frozen=True, slots=True)
class Interval:
    """One thing that ran: `track` is "compute" or "transfer"; times in microseconds since the recorder began.

    row: where within the track, e.g. "communicator 1" or "stream 7"; empty where there is only one. detail: more than
    fits into a name, e.g. that of a kernel.
    """

    name: str
    track: str
    start_us: float
    end_us: float
    step: int | None
    op: str
    call: int
    row: str = ""
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
    communicators: tuple[int, ...] = ()


@dataclass(slots=True)
class _Call:
    """One call of one operation; `pending` is what was not resolved to intervals yet, or has no end: it failed."""

    number: int
    problem: Problem | str
    pending: list[_Pending] = field(default_factory=list)
    resolved: list[Interval] = field(default_factory=list)
    is_done: bool = False  # never of a call that failed

    @property
    def op(self) -> str:
        return self.problem if isinstance(self.problem, str) else f"{self.problem.op}.{self.problem.pass_name}"


class Recorder:
    """Collects intervals of one context's latest calls; `intervals()` resolves them (and waits for the device)."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._calls: deque[_Call] = deque(maxlen=_MOST_CALLS)
        self._num_calls = 0
        self._probe = torch.cuda.Stream(device) if self._is_cuda else None
        self._origin = self.now()
        self._reference: tuple[Any, float] = (self._origin, 0.0)  # a mark and its time

    def begin_call(self, problem: Problem | str) -> None:
        """Say what the following intervals belong to. The oldest call is forgotten where there are too many."""
        self._num_calls += 1
        self._calls.append(_Call(self._num_calls, problem))

    def now(self, stream: int | None = None) -> Any:
        """A mark on the stream with this handle, None being the current one (CPU: the clock)."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(None if stream is None else torch.cuda.ExternalStream(stream))
        return event

    def add_compute(self, name: str, start: Any, step: int | None, stream: int | None = None) -> None:
        """Close an interval of the compute track that began at mark `start` on that stream."""
        self._add(_Pending(name, "compute", start, self.now(stream), step))

    def add_transfer(self, name: str, start: Any, step: int | None) -> None:
        """Close an interval of the transfer track that began at mark `start`, for what blocks the stream meanwhile."""
        self._add(_Pending(name, "transfer", start, self.now(), step))

    def open_transfer(self, name: str, transfer: Transfer, step: int | None, start: Any = None) -> object:
        """Open an interval of the transfer track for a batch just issued; returns its handle for `close_transfer`.

        start: its mark, if not now.
        """
        start, end = self.now() if start is None else start, None
        if self._probe is not None:
            with torch.cuda.stream(self._probe):
                transfer.wait()
                end = torch.cuda.Event(enable_timing=True)
                end.record()
        return self._add(_Pending(name, "transfer", start, end, step, transfer.communicators))

    def close_transfer(self, handle: object) -> None:
        """Note on the CPU that the transfer was seen to be complete; on GPUs its end is already an event."""
        assert isinstance(handle, _Pending)
        if handle.end is None:
            handle.end = self.now()

    def end_call(self) -> None:
        """The call is done; order what follows on the current stream after the probes of its transfers."""
        if self._calls:
            self._calls[-1].is_done = True
        if self._probe is not None:
            torch.cuda.current_stream(self._probe.device).wait_stream(self._probe)

    def intervals(self) -> list[Interval]:
        """All intervals kept, oldest first. Blocks until the recorded work is done; call it outside the hot path."""
        self._resolve()
        return [interval for call in self._calls for interval in call.resolved]

    def calls_by_problem(self) -> dict[Problem, list[list[Interval]]]:
        """The intervals of every call kept that was done and sent or received, oldest first. Blocks like `intervals`.

        Calls of others may state the same problem, but leave the transfers to a collective, which is not recorded.
        """
        self._resolve()
        found: dict[Problem, list[list[Interval]]] = {}
        for call in self._calls:
            is_metered = call.is_done and any(interval.track == "transfer" for interval in call.resolved)
            if is_metered and not isinstance(call.problem, str):
                found.setdefault(call.problem, []).append(list(call.resolved))
        return found

    def clear(self) -> None:
        """Forget everything recorded so far; the clock's origin stays."""
        self._calls.clear()

    def _add(self, item: _Pending) -> _Pending:
        if not self._calls:
            self._calls.append(_Call(self._num_calls, ""))
        self._calls[-1].pending.append(item)
        return item

    def _resolve(self) -> None:
        busy_until_us: dict[int, float] = {}
        for call in self._calls:
            pending, call.pending = call.pending, []
            for item in pending:
                if item.end is None:
                    call.pending.append(item)
                    continue
                start_us, end_us = self._microseconds(item.start), self._microseconds(item.end)
                if item.track == "transfer" and self._is_cuda:
                    start_us = max([start_us, *(busy_until_us.get(number, 0.0) for number in item.communicators)])
                    busy_until_us.update(dict.fromkeys(item.communicators, end_us))
                row = f"communicator {'+'.join(map(str, item.communicators))}" if item.communicators else ""
                call.resolved.append(
                    Interval(item.name, item.track, start_us, end_us, item.step, call.op, call.number, row)
                )

    def _microseconds(self, mark: Any) -> float:
        if self._is_cuda:
            mark.synchronize()
            reference, reference_us = self._reference
            since_us = reference.elapsed_time(mark) * 1e3
            if since_us > _NEAR_US:
                self._reference = mark, reference_us + since_us
            return reference_us + since_us
        return (mark - self._origin) * 1e6
