"""All-gather under partial GEMMs: every rank multiplies every chunk, its own shard first.

Knows who sends which chunk when, not what a chunk weighs. The contract that bites: what the batch of step t receives
is multiplied at step t + chunks_per_shard, so the own shard covers the first arrivals and the last steps send nothing.
"""

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Compute, Receive, Schedule, Send, Step
from commfuse_megatron.schedule.sizes import check_sizes, count_slots

__all__ = ["build_all_gather"]


def build_all_gather(
    group_size: int,
    algorithm: Algorithm,
    chunks_per_shard: int = 1,
    num_receive_slots: int | None = None,
) -> Schedule:
    """Return the all-gather in which rank r multiplies shards r, r-1, r-2, ... (mod group_size).

    Ring: a chunk is forwarded from its receive slot to the next rank; only neighbours talk. Direct: every owner sends
    each of its chunks to every other rank. Both receive the same chunks in the same order.

    Args:
        num_receive_slots: None keeps every chunk that arrives (the whole gathered input); with fewer, from
            chunks_per_shard + 1 on, slots are reused round robin.

    Raises:
        ScheduleError: a size below 1, an unknown algorithm, or too few slots.

    Source: Flash-AG of CommFuse (arXiv 2604.24013, 2026); the direct form is ours.
    """
    algorithm = check_sizes(group_size, algorithm, chunks_per_shard)
    num_transfers = (group_size - 1) * chunks_per_shard
    num_receive_slots = count_slots(
        "num_receive_slots",
        num_receive_slots,
        num_transfers,
        least=chunks_per_shard + 1,
        reason="a chunk is multiplied chunks_per_shard steps after its arrival was ordered, while the next one arrives",
    )

    is_ring = algorithm is Algorithm.RING

    def build_step(rank: int, step: int) -> Step:
        shard, index = divmod(step, chunks_per_shard)
        owner = (rank - shard) % group_size
        transfers: tuple[Send | Receive, ...] = ()
        if step < num_transfers:
            # The ring passes on what is being multiplied; with direct, the owner sends to one rank after the other.
            arriving = (owner - 1) % group_size
            is_forwarded = is_ring and shard > 0
            sent_chunk = Chunk(owner if is_forwarded else rank, index)
            sent_slot = (step - chunks_per_shard) % num_receive_slots if is_forwarded else None
            to_rank = (rank + 1) % group_size if is_ring else (rank + 1 + shard) % group_size
            from_rank = (rank - 1) % group_size if is_ring else arriving
            transfers = (
                Send(sent_chunk, to_rank, sent_slot),
                Receive(Chunk(arriving, index), from_rank, step % num_receive_slots),
            )
        receive_slot = (step - chunks_per_shard) % num_receive_slots if shard > 0 else None
        compute = Compute(Chunk(owner, index), receive_slot, None)
        return Step(step, transfers, compute)

    return Schedule(
        collective=Collective.ALL_GATHER,
        algorithm=algorithm,
        group_size=group_size,
        chunks_per_shard=chunks_per_shard,
        num_receive_slots=num_receive_slots,
        num_send_slots=0,
        programs=tuple(
            tuple(build_step(rank, step) for step in range(group_size * chunks_per_shard)) for rank in range(group_size)
        ),
    )
