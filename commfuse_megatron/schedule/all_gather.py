"""All-gather under partial GEMMs: every rank multiplies every chunk, its own shard first.

Knows who sends which chunk when, not what a chunk weighs. What step t receives is multiplied at step
t + chunks_per_shard, so the own shard covers the first arrivals and the last steps send nothing.
"""

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Receive, Schedule, Send, Step


def build_all_gather(group_size: int, algorithm: Algorithm, chunks_per_shard: int = 1) -> Schedule:
    """Return the all-gather in which rank r multiplies shards r, r-1, r-2, ... (mod group_size).

    Ring: a chunk that has arrived is forwarded to the next rank; only neighbours talk. Direct: every owner sends each
    of its chunks to every other rank. Both receive the same chunks in the same order.

    Raises:
        ScheduleError: a size below 1. ValueError: an unknown algorithm.

    Source: Flash-AG of CommFuse (arXiv 2604.24013, 2026); the direct form is ours.
    """
    algorithm = Algorithm(algorithm)
    is_ring = algorithm is Algorithm.RING
    num_transfers = (group_size - 1) * chunks_per_shard

    def build_step(rank: int, step: int) -> Step:
        shard, index = divmod(step, chunks_per_shard)
        owner = (rank - shard) % group_size
        send = receive = None
        if step < num_transfers:
            # The ring passes on what is being multiplied; with direct, the owner sends to one rank after the other.
            arriving = (owner - 1) % group_size
            to_rank = (rank + 1) % group_size if is_ring else (rank + 1 + shard) % group_size
            from_rank = (rank - 1) % group_size if is_ring else arriving
            send = Send(Chunk(owner if is_ring else rank, index), to_rank)
            receive = Receive(Chunk(arriving, index), from_rank)
        return Step(step, send, receive, Chunk(owner, index), step - chunks_per_shard if shard > 0 else None)

    steps = tuple(
        tuple(build_step(rank, step) for step in range(group_size * chunks_per_shard)) for rank in range(group_size)
    )
    return Schedule(Collective.ALL_GATHER, algorithm, group_size, chunks_per_shard, steps)
