"""Reduce-scatter under partial GEMMs: every rank computes a partial of every chunk, its own shard last.

Knows who sends which partial when, not how sums are rounded. The contract that bites: the partial of step t leaves in
the batch of step t + 1, so the last batch is issued before the first computation of the own shard: no tail.
"""

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Compute, Receive, Schedule, Send, Step
from commfuse_megatron.schedule.sizes import check_sizes, count_slots

__all__ = ["build_reduce_scatter"]


def build_reduce_scatter(
    group_size: int,
    algorithm: Algorithm,
    chunks_per_shard: int = 1,
    num_receive_slots: int | None = None,
    num_send_slots: int | None = None,
) -> Schedule:
    """Return the reduce-scatter in which rank r computes its own shard last.

    Ring: shards r-1, r-2, ..., r (mod group_size); a running sum goes to the next rank, which adds its partial and
    passes it on, chunks_per_shard steps later. Direct: shards r+1, r+2, ..., r; every partial goes straight to its
    owner, which sums all that arrived after its last step.

    Args:
        num_receive_slots: None gives every arrival its own slot. The ring works from chunks_per_shard slots on;
            direct needs one per arrival, since all are summed at the end.
        num_send_slots: None gives every partial its own slot; 2 suffice (one is sent while the other is computed).

    Raises:
        ScheduleError: a size below 1, an unknown algorithm, or too few slots.

    Source: Flash-RS (ring) and the query-split order (direct) of CommFuse (arXiv 2604.24013, 2026).
    """
    algorithm = check_sizes(group_size, algorithm, chunks_per_shard)
    is_ring = algorithm is Algorithm.RING
    num_transfers = (group_size - 1) * chunks_per_shard
    num_receive_slots = count_slots(
        "num_receive_slots",
        num_receive_slots,
        num_transfers,
        least=chunks_per_shard if is_ring else num_transfers,
        reason="a running sum is added chunks_per_shard - 1 steps after its arrival was ordered"
        if is_ring
        else "a direct reduce-scatter sums everything that arrived after its last step",
    )
    num_send_slots = count_slots(
        "num_send_slots",
        num_send_slots,
        num_transfers,
        least=2,
        reason="a partial is sent while the next one is computed",
    )

    def shard_at(rank: int, step: int) -> int:
        distance = 1 + step // chunks_per_shard
        return (rank - distance if is_ring else rank + distance) % group_size

    def build_step(rank: int, step: int) -> Step:
        index = step % chunks_per_shard
        transfers: tuple[Send | Receive, ...] = ()
        if 1 <= step <= num_transfers:
            sent_index = (step - 1) % chunks_per_shard
            sent_shard = shard_at(rank, step - 1)
            to_rank = (rank + 1) % group_size if is_ring else sent_shard
            from_rank = (rank - 1 - (0 if is_ring else (step - 1) // chunks_per_shard)) % group_size
            transfers = (
                Send(Chunk(sent_shard, sent_index), to_rank, (step - 1) % num_send_slots),
                # The peer's program says what arrives: its partial of the step before.
                Receive(Chunk(shard_at(from_rank, step - 1), sent_index), from_rank, (step - 1) % num_receive_slots),
            )
        is_adding = is_ring and step >= chunks_per_shard
        compute = Compute(
            Chunk(shard_at(rank, step), index),
            (step - chunks_per_shard) % num_receive_slots if is_adding else None,
            step % num_send_slots if step < num_transfers else None,
        )
        return Step(step, transfers, compute)

    return Schedule(
        collective=Collective.REDUCE_SCATTER,
        algorithm=algorithm,
        group_size=group_size,
        chunks_per_shard=chunks_per_shard,
        num_receive_slots=num_receive_slots,
        num_send_slots=num_send_slots,
        programs=tuple(
            tuple(build_step(rank, step) for step in range(group_size * chunks_per_shard)) for rank in range(group_size)
        ),
    )
