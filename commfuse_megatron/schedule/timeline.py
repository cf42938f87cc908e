"""What a dry-run found: who did what from when to when, on every rank. Data only, ready to be drawn."""

from dataclasses import dataclass
from enum import StrEnum

from commfuse_megatron.schedule.actions import Chunk, Schedule

__all__ = ["Activity", "Interval", "Simulation", "Timeline"]


class Activity(StrEnum):
    """What fills an interval; each is a lane of its own, except that waits lie between the computations."""

    COMPUTE = "compute"
    WAIT = "wait"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Interval:
    """One activity of one rank from `start_us` to `end_us`.

    step: whose computation or batch it is; for a wait, the step that follows it (or is held up at its end).
    chunk, peer_rank: None where there is none.
    """

    activity: Activity
    step: int
    start_us: float
    end_us: float
    chunk: Chunk | None = None
    peer_rank: int | None = None

    @property
    def name(self) -> str:
        """A label for drawings, such as `send 2.0 to 3` (chunk 0 of shard 2, to rank 3)."""
        chunk = "" if self.chunk is None else f" {self.chunk.owner_rank}.{self.chunk.index}"
        toward = {Activity.SEND: " to", Activity.RECEIVE: " from"}.get(self.activity, "")
        peer = "" if self.peer_rank is None else f"{toward} {self.peer_rank}"
        return f"{self.activity.value}{chunk}{peer}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank's intervals, by start; computations and waits fill the time from 0 to `end_us` without gaps."""

    intervals: tuple[Interval, ...]

    @property
    def end_us(self) -> float:
        """When the rank has computed, sent and received everything."""
        return max((interval.end_us for interval in self.intervals), default=0.0)

    @property
    def compute_us(self) -> float:
        """Sum of its computations."""
        return self._sum(Activity.COMPUTE)

    @property
    def exposed_comm_us(self) -> float:
        """Sum of its waits: time in which it computes nothing."""
        return self._sum(Activity.WAIT)

    @property
    def tail_us(self) -> float:
        """From the end of its last computation to its end."""
        last = max((i.end_us for i in self.intervals if i.activity is Activity.COMPUTE), default=0.0)
        return self.end_us - last

    def _sum(self, activity: Activity) -> float:
        return sum(i.end_us - i.start_us for i in self.intervals if i.activity is activity)


@dataclass(frozen=True, slots=True)
class Simulation:
    """A dry-run of `schedule`: `timelines[group_rank]` and what follows from them."""

    schedule: Schedule
    timelines: tuple[Timeline, ...]

    @property
    def total_us(self) -> float:
        """When the last rank has finished."""
        return max(timeline.end_us for timeline in self.timelines)

    @property
    def compute_us(self) -> float:
        """What the busiest rank would take with free communication."""
        return max(timeline.compute_us for timeline in self.timelines)

    @property
    def exposed_comm_us(self) -> float:
        """What communication, and waiting for slower ranks, adds to `compute_us`."""
        return self.total_us - self.compute_us

    @property
    def tail_us(self) -> float:
        """The longest time for which a rank goes on communicating after its last computation."""
        return max(timeline.tail_us for timeline in self.timelines)
