"""What a schedule is: build one, prove it, print it, predict its time. Needs no torch, no GPU, no ranks.

    python examples/look_at_a_schedule.py

To go on, read `commfuse_megatron/schedule/actions.py`, then a builder.
"""

from commfuse_megatron.schedule import Algorithm, build_reduce_scatter, render, schedule_bound_us, simulate, validate

# A GEMM of 2.6 ms whose result is reduce-scattered over 4 ranks, on a slow link in 2.8 ms; equal parts per chunk.
COMPUTE_US, TRANSFER_US, RANKS = 2600.0, 2800.0, 4


def main() -> None:
    """Print the grid, then predicted times."""
    print(render(build_reduce_scatter(RANKS, Algorithm.RING)), end="\n\n")
    print(f"sequential: {COMPUTE_US + TRANSFER_US:.0f} us")
    for chunks_per_shard in (1, 2, 4):
        schedule = build_reduce_scatter(RANKS, Algorithm.RING, chunks_per_shard)
        validate(schedule)  # raises ScheduleError with the grid and the failing step marked
        simulation = simulate(
            schedule,
            compute_us_per_chunk=COMPUTE_US / (RANKS * chunks_per_shard),
            transfer_us_per_chunk=TRANSFER_US / ((RANKS - 1) * chunks_per_shard),
        )
        bound_us = schedule_bound_us(COMPUTE_US, TRANSFER_US, RANKS, chunks_per_shard)
        print(
            f"chunks per shard {chunks_per_shard}: {simulation.total_us:.0f} us predicted, closed form {bound_us:.0f}, "
            f"{simulation.exposed_comm_us:.0f} exposed"
        )


if __name__ == "__main__":
    main()
