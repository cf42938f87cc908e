"""Rows for intervals that overlap, shared by the trace and the picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commfuse_megatron.runtime.recorder import Interval

__all__ = ["assign_lanes"]


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
