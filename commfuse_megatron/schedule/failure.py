"""The one way in which a schedule is reported wrong: a sentence, then the grid with the cell in question marked."""

from typing import NoReturn

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule.actions import Chunk, Schedule
from commfuse_megatron.schedule.render import describe, name_chunk, render

__all__ = ["fail", "say_chunk"]

# Enough to see a whole group of four with two chunks per shard, and little enough to read in a log.
_MAX_STEPS = 17
_MAX_WIDTH = 160


def fail(schedule: Schedule, sentence: str, rank: int | None = None, step: int | None = None) -> NoReturn:
    """Raise ScheduleError for `schedule`; with `rank` and `step`, the sentence is about that cell of the grid."""
    mark = None if rank is None or step is None else (rank, step)
    where = "" if rank is None else f"rank {rank}: " if step is None else f"rank {rank}, step {step}: "
    grid = render(schedule, mark=mark, show_slots=True, max_width=_MAX_WIDTH, max_steps=_MAX_STEPS)
    raise ScheduleError(f"{describe(schedule)}: {where}{sentence}\n\n{grid}")


def say_chunk(schedule: Schedule, chunk: Chunk) -> str:
    """Return a chunk's name for a sentence, as the grid has it: `chunk 2`, or `chunk 2.1` of several per shard."""
    return f"chunk {name_chunk(schedule, chunk)}"
