"""Rows for intervals that overlap, shared by the trace and the picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commfuse_megatron.runtime.recorder import Interval

__all__ = ["assign_lanes", "lanes_by_label"]


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
    by_label: dict[str, list[Interval]] = {}
    for interval in intervals:
        by_label.setdefault(interval.row, []).append(interval)
    # "stream 7" before "stream 20"
    return [(label, assign_lanes(by_label[label])) for label in sorted(by_label, key=lambda label: (len(label), label))]
