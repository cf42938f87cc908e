"""What trace and picture make of a recording alike: rows of intervals, and the two ends of every message.

Reads the peers from the names that the runtime gives its transfers ("to rank 1 from rank 3"); kernels seen by a
profiler carry no peers and have no arrivals. A rank's n-th batch of a call and step pairs with its peer's n-th.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from commfuse_megatron.runtime.meter import TRANSFER
from commfuse_megatron.runtime.recorder import Interval

#: Rank -> its intervals.
Recording = Mapping[int, Sequence[Interval]]

_TO = re.compile(r"\bto rank (\d+)")
_FROM = re.compile(r"\bfrom rank (\d+)")


class Arrival(NamedTuple):
    """One message: `sent` is the sender's interval (None if it is not in the recording), `received` the receiver's."""

    from_rank: int
    to_rank: int
    sent: Interval | None
    received: Interval


def sender_of(interval: Interval) -> int | None:
    """The rank that an interval received from; None for computations and for batches that only send."""
    found = _FROM.search(interval.name) if interval.track == TRANSFER else None
    return None if found is None else int(found[1])


def find_arrivals(recording: Recording) -> list[Arrival]:
    """All messages that arrived, by receiver and time of issue."""

    def key(interval: Interval, from_rank: int, to_rank: int) -> tuple[object, ...]:
        return interval.op, interval.call, interval.step, from_rank, to_rank

    sent: dict[tuple[object, ...], deque[Interval]] = defaultdict(deque)
    for rank, intervals in recording.items():
        for interval in intervals:
            found = _TO.search(interval.name) if interval.track == TRANSFER else None
            if found is not None:
                sent[key(interval, rank, int(found[1]))].append(interval)
    arrivals = []
    for rank, intervals in sorted(recording.items()):
        for interval in intervals:
            from_rank = sender_of(interval)
            if from_rank is not None:
                pairs = sent[key(interval, from_rank, rank)]
                arrivals.append(Arrival(from_rank, rank, pairs.popleft() if pairs else None, interval))
    return arrivals


def assign_lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """Intervals dealt to as few rows as possible, so that none overlap within a row; each row in order of time."""
    lanes: list[list[Interval]] = []
    for interval in sorted(intervals, key=lambda i: (i.start_us, i.end_us)):
        for lane in lanes:
            if lane[-1].end_us <= interval.start_us:
                lane.append(interval)
                break
        else:
            lanes.append([interval])
    return lanes


def lanes_by_label(intervals: Iterable[Interval]) -> list[tuple[str, list[list[Interval]]]]:
    """(label, rows) of every lane or stream that the intervals name, each in rows of its own."""
    by_label: dict[str, list[Interval]] = defaultdict(list)
    for interval in intervals:
        by_label[interval.row].append(interval)
    # "stream 7" before "stream 20"
    return [(label, assign_lanes(by_label[label])) for label in sorted(by_label, key=lambda label: (len(label), label))]
