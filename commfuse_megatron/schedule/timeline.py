"""What a dry-run found: who did what from when to when, on every rank. Data only, ready to be drawn."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Activity(StrEnum):
    """What fills an interval."""

    COMPUTE = "compute"
    WAIT = "wait"
    SEND = "send"
    RECEIVE = "receive"
    COPY = "copy"


class Interval(NamedTuple):
    """One activity of one rank from `start_us` to `end_us`.

    op: its number in the rank's program; of a wait, the op that waits. lane: on which something is computed or waits;
    None: the main one. peer_rank: of a message; else None.
    """

    activity: Activity
    op: int
    start_us: float
    end_us: float
    lane: int | None = None
    peer_rank: int | None = None


class Timeline(NamedTuple):
    """One rank's intervals, by start, and when it has computed, sent and received everything."""

    intervals: tuple[Interval, ...]
    end_us: float

    @property
    def compute_us(self) -> float:
        """For how long it computes, on one lane or several at a time."""
        covered_us = total_us = 0.0
        for activity, _, start_us, end_us, _, _ in self.intervals:
            if activity is Activity.COMPUTE and end_us > covered_us:
                total_us += end_us - max(start_us, covered_us)
                covered_us = end_us
        return total_us


class Simulation(NamedTuple):
    """A dry-run of programs: the timelines of their ranks and what follows from them."""

    timelines: Sequence[Timeline]

    @property
    def total_us(self) -> float:
        """When the last rank has finished."""
        return max(timeline.end_us for timeline in self.timelines)

    @property
    def compute_us(self) -> float:
        """For how long the busiest rank computes."""
        return max(timeline.compute_us for timeline in self.timelines)

    @property
    def exposed_comm_us(self) -> float:
        """What communication, and waiting for slower ranks, adds to `compute_us`."""
        return self.total_us - self.compute_us
