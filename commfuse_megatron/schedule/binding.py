"""A schedule bound to sizes: which rows of which buffer each step of this rank touches. Built once per shape.

Everything is an index. Chunks are numbered flat, owner-major: that is their order along the sequence. Chunks without
rows (uneven or tiny sequences) lose their transfers and computations here, at both ends alike.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from commfuse_megatron.problem import chunk_ranges
from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Receive, Schedule, Send
from commfuse_megatron.schedule.all_gather import build_all_gather
from commfuse_megatron.schedule.reduce_scatter import build_reduce_scatter


class Transfer(NamedTuple):
    """One end of a transfer. row: where the chunk arrives in the receiver's buffer of gathered or arrived rows."""

    chunk: int
    peer: int
    row: int


@dataclass(frozen=True, slots=True)
class BoundStep:
    """What one step does; None where there is nothing to do.

    compute: the chunk to multiply. needs: the step that must have arrived for it (its input, or the running sum it
    adds).
    """

    send: Transfer | None
    receive: Transfer | None
    compute: int | None
    needs: int | None


@dataclass(frozen=True, slots=True)
class BoundSchedule:
    """One rank's steps over [rows, features] buffers.

    chunk_rows: rows of every chunk, flat. own_chunks: flat indices of this rank's shard. arrived_rows: rows of all that
    this rank receives.
    """

    schedule: Schedule
    group_rank: int
    steps: tuple[BoundStep, ...]
    chunk_rows: tuple[int, ...]
    own_chunks: range
    arrived_rows: int

    @property
    def most_arrived_rows(self) -> int:
        """Rows that suffice for what any rank of the group receives."""
        return (self.schedule.group_size - 1) * self.schedule.chunks_per_shard * max(self.chunk_rows)

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
def _build(collective: Collective, algorithm: Algorithm, group_size: int, chunks_per_shard: int) -> Schedule:
    build = build_all_gather if collective is Collective.ALL_GATHER else build_reduce_scatter
    return build(group_size, algorithm, chunks_per_shard)


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
    """Bind the schedule of `group_rank` to a sequence of `rows` positions of `batch` vectors each."""
    schedule = _build(collective, algorithm, group_size, chunks_per_shard)
    ranges = chunk_ranges(rows, group_size, chunks_per_shard)
    chunk_rows = tuple(chunk.size * batch for shard in ranges for chunk in shard)
    starts = list(itertools.accumulate(chunk_rows, initial=0))

    def flat(chunk: Chunk) -> int:
        return chunk.owner_rank * chunks_per_shard + chunk.index

    @functools.cache
    def arrivals(receiver: int) -> list[int]:
        """Of a reduce-scatter: where what each step brings begins at its receiver, one behind the other."""
        received = [step.receive for step in schedule.steps[receiver]]
        counts = [0 if receive is None else chunk_rows[flat(receive.chunk)] for receive in received]
        return list(itertools.accumulate(counts, initial=0))

    def transfer(end: Send | Receive | None, index: int) -> Transfer | None:
        if end is None or chunk_rows[flat(end.chunk)] == 0:
            return None
        peer, receiver = (end.to_rank, end.to_rank) if isinstance(end, Send) else (end.from_rank, group_rank)
        number = flat(end.chunk)
        row = starts[number] if collective is Collective.ALL_GATHER else arrivals(receiver)[index]
        return Transfer(number, peer, row)

    steps: list[BoundStep] = []
    for step in schedule.steps[group_rank]:
        compute = flat(step.chunk) if chunk_rows[flat(step.chunk)] else None
        steps.append(
            BoundStep(
                send=transfer(step.send, step.index),
                receive=transfer(step.receive, step.index),
                compute=compute,
                needs=None if compute is None else step.needs,
            )
        )
    own_chunks = range(group_rank * chunks_per_shard, (group_rank + 1) * chunks_per_shard)
    return BoundSchedule(schedule, group_rank, tuple(steps), chunk_rows, own_chunks, arrivals(group_rank)[-1])
