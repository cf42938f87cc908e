"""The one way in which a schedule is reported wrong: a sentence, then the grid with the cell in question marked."""

from typing import NoReturn

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule.actions import Schedule
from commfuse_megatron.schedule.render import describe, render

__all__ = ["fail"]

# Enough to see a whole group of four with two chunks per shard, and little enough to read in a log.
_MAX_STEPS = 17


def fail(schedule: Schedule, sentence: str, rank: int | None = None, step: int | None = None) -> NoReturn:
    """Raise ScheduleError for `schedule`; with `rank` and `step`, the sentence is about that cell of the grid."""
    if rank is None:
        raise ScheduleError(f"{describe(schedule)}: {sentence}\n\n{render(schedule, max_steps=_MAX_STEPS)}")
    if step is None:
        grid = render(schedule, show_slots=True, max_steps=_MAX_STEPS)
        raise ScheduleError(f"{describe(schedule)}: rank {rank}: {sentence}\n\n{grid}")
    grid = render(schedule, mark=(rank, step), show_slots=True, max_steps=_MAX_STEPS)
    raise ScheduleError(f"{describe(schedule)}: rank {rank}, step {step}: {sentence}\n\n{grid}")
