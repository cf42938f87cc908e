"""Reduce-scatter under partial GEMMs: every rank computes a partial of every chunk, its own shard last.

Knows who sends which partial when, not how sums are rounded. The partial of step t leaves in the batch of step t + 1,
so the last batch is issued before the first computation of the own shard: no transfer is left at the end.
"""

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Receive, Schedule, Send, Step


def build_reduce_scatter(group_size: int, algorithm: Algorithm, chunks_per_shard: int = 1) -> Schedule:
    """Return the reduce-scatter in which rank r computes its own shard last.

    Ring: shards r-1, r-2, ..., r (mod group_size); a running sum goes to the next rank, which adds its partial and
    passes it on, chunks_per_shard steps later. Direct: shards r+1, r+2, ..., r; every partial goes straight to its
    owner, which sums all that arrived after its last step.

    Raises:
        ScheduleError: a size below 1. ValueError: an unknown algorithm.

    Source: Flash-RS (ring) and the query-split order (direct) of CommFuse (arXiv 2604.24013, 2026).
    """
    algorithm = Algorithm(algorithm)
    is_ring = algorithm is Algorithm.RING
    num_transfers = (group_size - 1) * chunks_per_shard

    def chunk_at(rank: int, step: int) -> Chunk:
        shard, index = divmod(step, chunks_per_shard)
        return Chunk((rank - 1 - shard if is_ring else rank + 1 + shard) % group_size, index)

    def build_step(rank: int, step: int) -> Step:
        send = receive = None
        if 1 <= step <= num_transfers:
            sent = chunk_at(rank, step - 1)
            from_rank = (rank - 1 - (0 if is_ring else (step - 1) // chunks_per_shard)) % group_size
            send = Send(sent, (rank + 1) % group_size if is_ring else sent.owner_rank)
            # The peer's order says what arrives: its partial of the step before.
            receive = Receive(chunk_at(from_rank, step - 1), from_rank)
        is_adding = is_ring and step >= chunks_per_shard
        return Step(step, send, receive, chunk_at(rank, step), step - chunks_per_shard + 1 if is_adding else None)

    steps = tuple(
        tuple(build_step(rank, step) for step in range(group_size * chunks_per_shard)) for rank in range(group_size)
    )
    return Schedule(Collective.REDUCE_SCATTER, algorithm, group_size, chunks_per_shard, steps)
