"""A schedule bound to sizes: which rows of which buffer each action of this rank touches. Built once per shape.

Everything is an index, so that a call only splits its tensors once and replays the steps. Chunks are numbered flat,
owner-major: that is their order along the sequence. Chunks without rows (uneven or tiny sequences) lose their actions
here, at both ends alike.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from commfuse_megatron.problem import chunk_ranges
from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Compute, Receive, Schedule, Send
from commfuse_megatron.schedule.all_gather import build_all_gather
from commfuse_megatron.schedule.reduce_scatter import build_reduce_scatter
from commfuse_megatron.schedule.validate import validate

__all__ = ["BoundSchedule", "BoundStep", "bind"]


@dataclass(frozen=True, slots=True)
class BoundStep:
    """Actions of one step as flat indices; None where there is nothing to do.

    send, receive: (chunk, peer). The receive goes to slot `receive_slot`, the send leaves from the chunk's own place.
    send_row, receive_row: where they arrive, as a row of the receiver's buffer (gathered rows, or receive slots in
    order).
    compute: the chunk to multiply. needs_batch: the step whose batch must have arrived for it (its input, or the
    running sum it adds). is_forward: this step's send passes on what batch `needs_batch` brought, so that must come
    first.
    """

    send: tuple[int, int] | None
    receive: tuple[int, int] | None
    receive_slot: int
    send_row: int
    receive_row: int
    compute: int | None
    is_own: bool
    needs_batch: int | None
    is_forward: bool


@dataclass(frozen=True, slots=True)
class BoundSchedule:
    """One rank's program over [rows, features] buffers.

    chunk_rows: elements-per-feature rows of every chunk, flat. own_chunks: flat indices of this rank's shard.
    slot_rows: rows of every receive slot, in order of arrival. sent_chunks: flat indices of all others' chunks.
    """

    schedule: Schedule
    group_rank: int
    steps: tuple[BoundStep, ...]
    chunk_rows: tuple[int, ...]
    own_chunks: range
    slot_rows: tuple[int, ...]

    @property
    def most_slot_rows(self) -> int:
        """Rows that suffice for the receive slots of any rank of the group."""
        return len(self.slot_rows) * max(self.chunk_rows)

    @property
    def total_rows(self) -> int:
        """Rows of the full buffer."""
        return sum(self.chunk_rows)

    @property
    def own_rows(self) -> int:
        """Rows of this rank's shard."""
        return sum(self.chunk_rows[chunk] for chunk in self.own_chunks)

    @property
    def own_start(self) -> int:
        """First row of this rank's shard in the full buffer."""
        return sum(self.chunk_rows[: self.own_chunks.start])


@functools.lru_cache(maxsize=256)
def _validated(collective: Collective, algorithm: Algorithm, group_size: int, chunks_per_shard: int) -> Schedule:
    build = build_all_gather if collective is Collective.ALL_GATHER else build_reduce_scatter
    schedule = build(group_size, algorithm, chunks_per_shard)
    validate(schedule)
    return schedule


@functools.lru_cache(maxsize=1024)
def bind(
    collective: Collective,
    algorithm: Algorithm,
    group_size: int,
    group_rank: int,
    chunks_per_shard: int,
    rows: int,
    batch: int,
) -> BoundSchedule:
    """Bind the (validated) schedule of `group_rank` to a sequence of `rows` positions of `batch` vectors each."""
    schedule = _validated(collective, algorithm, group_size, chunks_per_shard)
    ranges = chunk_ranges(rows, group_size, chunks_per_shard)
    chunk_rows = tuple(chunk.size * batch for shard in ranges for chunk in shard)

    flat = functools.partial(_flat, schedule)

    program = schedule.programs[group_rank]
    arrival_step: dict[int, int] = {}  # receive slot -> the step whose batch fills it
    arrival_row = _arrival_rows(schedule, chunk_rows)
    slot_rows = _slot_rows(schedule, group_rank, chunk_rows)
    steps: list[BoundStep] = []
    for step in program:
        send: tuple[int, int] | None = None
        receive: tuple[int, int] | None = None
        receive_slot, send_row, receive_row, is_forward = -1, 0, 0, False
        for action in step.transfers:
            if isinstance(action, Receive):
                arrival_step[action.slot] = step.index
            if chunk_rows[flat(action.chunk)] == 0:
                continue
            if isinstance(action, Send):
                send = (flat(action.chunk), action.to_rank)
                send_row = arrival_row(action.to_rank, group_rank, flat(action.chunk))
                is_forward = collective is Collective.ALL_GATHER and action.slot is not None
            else:
                receive, receive_slot = (flat(action.chunk), action.from_rank), action.slot
                receive_row = arrival_row(group_rank, action.from_rank, flat(action.chunk))
        compute = flat(step.compute.chunk) if chunk_rows[flat(step.compute.chunk)] else None
        steps.append(
            BoundStep(
                send=send,
                receive=receive,
                receive_slot=receive_slot,
                send_row=send_row,
                receive_row=receive_row,
                compute=compute,
                is_own=step.compute.chunk.owner_rank == group_rank,
                needs_batch=_needed_batch(step.compute, arrival_step) if compute is not None else None,
                is_forward=is_forward,
            )
        )
    own_chunks = range(group_rank * chunks_per_shard, (group_rank + 1) * chunks_per_shard)
    return BoundSchedule(schedule, group_rank, tuple(steps), chunk_rows, own_chunks, slot_rows)


def _slot_rows(schedule: Schedule, group_rank: int, chunk_rows: tuple[int, ...]) -> tuple[int, ...]:
    rows = [0] * schedule.num_receive_slots
    for action in _receives(schedule, group_rank):
        rows[action.slot] = chunk_rows[_flat(schedule, action.chunk)]
    return tuple(rows)


def _arrival_rows(schedule: Schedule, chunk_rows: tuple[int, ...]) -> Callable[[int, int, int], int]:
    """(receiver, sender, chunk) -> the row of the receiver's buffer where that message begins."""
    if schedule.collective is Collective.ALL_GATHER:
        starts = list(itertools.accumulate(chunk_rows, initial=0))
        return lambda receiver, sender, chunk: starts[chunk]

    @functools.cache
    def rows_of(receiver: int) -> dict[tuple[int, int], int]:
        starts = list(itertools.accumulate(_slot_rows(schedule, receiver, chunk_rows), initial=0))
        return {
            (action.from_rank, _flat(schedule, action.chunk)): starts[action.slot]
            for action in _receives(schedule, receiver)
        }

    return lambda receiver, sender, chunk: rows_of(receiver)[sender, chunk]


def _receives(schedule: Schedule, group_rank: int) -> Iterator[Receive]:
    for step in schedule.programs[group_rank]:
        yield from (action for action in step.transfers if isinstance(action, Receive))


def _flat(schedule: Schedule, chunk: Chunk) -> int:
    return chunk.owner_rank * schedule.chunks_per_shard + chunk.index


def _needed_batch(compute: Compute, arrival_step: dict[int, int]) -> int | None:
    return None if compute.receive_slot is None else arrival_step[compute.receive_slot]
