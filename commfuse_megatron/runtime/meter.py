"""How much of the communication was hidden: arithmetic on the intervals of one rank.

Knows nothing of how they were recorded. Exposed is the time in which some transfer ran and nothing was computed, of a
call, a training step or a whole recording alike. Beware: only intervals of *one* rank belong together, since every rank
has its own clock and its own compute stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commfuse_megatron.runtime.recorder import Interval

COMPUTE = "compute"
TRANSFER = "transfer"

Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What one rank's recording says about hidden communication, each a length of time without double counting."""

    compute_us: float
    transfer_us: float
    exposed_us: float
    span_us: float  # from the first start to the last end

    @property
    def hidden_fraction(self) -> float:
        """The share of the transfers' time beside which something was computed; 1 when nothing was sent."""
        return 1.0 - self.exposed_us / self.transfer_us if self.transfer_us > 0 else 1.0


def union_spans(intervals: Iterable[Interval], track: str) -> list[Span]:
    """Disjoint spans, in order of time, in which at least one interval of `track` runs."""
    spans = sorted((i.start_us, i.end_us) for i in intervals if i.track == track and i.end_us > i.start_us)
    merged: list[Span] = []
    for start_us, end_us in spans:
        if merged and start_us <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_us))
        else:
            merged.append((start_us, end_us))
    return merged


def exposed_spans(intervals: Iterable[Interval]) -> list[Span]:
    """Disjoint spans in which a transfer runs and no computation does."""
    intervals = list(intervals)
    computing = union_spans(intervals, COMPUTE)
    exposed: list[Span] = []
    first = 0
    for start_us, end_us in union_spans(intervals, TRANSFER):
        while first < len(computing) and computing[first][1] <= start_us:
            first += 1
        cursor_us = start_us
        for busy_start_us, busy_end_us in itertools.islice(computing, first, None):
            if busy_start_us >= end_us:
                break
            if busy_start_us > cursor_us:
                exposed.append((cursor_us, busy_start_us))
            cursor_us = busy_end_us
        if cursor_us < end_us:
            exposed.append((cursor_us, end_us))
    return exposed


def exposed_us(intervals: Iterable[Interval]) -> float:
    """Time in which transfers run and no computation does, of one rank's intervals."""
    return _length(exposed_spans(intervals))


def measure_overlap(intervals: Iterable[Interval]) -> Overlap:
    """Computing, transferring and exposed time of one rank's intervals, taken together."""
    intervals = list(intervals)
    start_us = min((i.start_us for i in intervals), default=0.0)
    return Overlap(
        compute_us=_length(union_spans(intervals, COMPUTE)),
        transfer_us=_length(union_spans(intervals, TRANSFER)),
        exposed_us=exposed_us(intervals),
        span_us=max((i.end_us for i in intervals), default=0.0) - start_us,
    )


def measure_calls(intervals: Iterable[Interval]) -> dict[int, Overlap]:
    """The same for every call by itself (call number -> its overlap): what other calls compute hides nothing."""
    by_call: dict[int, list[Interval]] = {}
    for interval in intervals:
        by_call.setdefault(interval.call, []).append(interval)
    return {call: measure_overlap(members) for call, members in sorted(by_call.items())}


def _length(spans: Iterable[Span]) -> float:
    return sum(end_us - start_us for start_us, end_us in spans)
