"""What a schedule is: build one, prove it, print it, predict its time. Needs no torch, no GPU, no ranks.

    python examples/look_at_a_schedule.py
    python examples/look_at_a_schedule.py all-gather ring --ranks 3 --chunks 2

To go on, read `commfuse_megatron/schedule/actions.py`, then a builder.
"""

import argparse

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule import (
    Algorithm,
    Collective,
    Costs,
    Schedule,
    build_all_gather,
    build_reduce_scatter,
    closed_form_us,
    render,
    simulate,
)
from commfuse_megatron.schedule.binding import bind
from commfuse_megatron.schedule.lower_linear import Asked, lower_gather_pass, lower_scatter_pass
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Gemm
from commfuse_megatron.schedule.program_checks import validate_programs

# A GEMM of 2.6 ms beside a collective that takes 2.8 ms on a slow link; equal parts per chunk.
COMPUTE_US, TRANSFER_US = 2600.0, 2800.0
BUILDERS = {"all-gather": build_all_gather, "reduce-scatter": build_reduce_scatter}


def main() -> None:
    """Print the grid, then predicted times."""
    parser, chosen = parse()
    try:
        schedules = {
            chunks: BUILDERS[chosen.collective](chosen.ranks, Algorithm(chosen.algorithm), chunks)
            for chunks in sorted({1, 2, 4, chosen.chunks})
        }
    except ScheduleError as error:
        parser.error(str(error))
    print(render(schedules[chosen.chunks]), end="\n\n")
    total_us = COMPUTE_US + TRANSFER_US if chosen.ranks > 1 else COMPUTE_US
    print(f"assumed: a GEMM of {COMPUTE_US:.0f} us on each rank, {TRANSFER_US:.0f} us of transfers, no cost per step")
    print(f"sequential: {total_us:.0f} us")
    for schedule in schedules.values():
        predict(schedule)


def predict(schedule: Schedule) -> None:
    """Prove the programs of a schedule, and print what a dry-run of them and the closed form say of its time."""
    num_ranks, chunks = schedule.group_size, schedule.chunks_per_shard
    gemm_us = COMPUTE_US / (num_ranks * chunks)
    costs = Costs(
        work_us=lambda rank, op, beside_us: (gemm_us, gemm_us) if isinstance(op, Gemm) else (0.0, 0.0),
        transfer_us=lambda sender, receiver, channel, rows: TRANSFER_US / (max(1, num_ranks - 1) * chunks),
    )
    sizes = (schedule.collective, schedule.algorithm, num_ranks)
    bound = [bind(*sizes, rank, chunks, rows=num_ranks * chunks, batch=1) for rank in range(num_ranks)]
    policy = Policy(has_windows=True)
    if schedule.collective is Collective.ALL_GATHER:
        programs = [lower_gather_pass(gather, policy, Asked()) for gather in bound]
    else:
        programs = [lower_scatter_pass(scatter, None, policy, Asked()) for scatter in bound]
    validate_programs(programs, policy, Asked())  # raises ScheduleError with the program and the failing op marked
    simulation = simulate(programs, costs)
    bound_us = closed_form_us(COMPUTE_US, TRANSFER_US, num_ranks, chunks)
    print(
        f"chunks per shard {chunks}: {simulation.total_us:.0f} us predicted, closed form {bound_us:.0f}, "
        f"{simulation.exposed_comm_us:.0f} exposed"
    )


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, for its errors, and what the command line chooses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, algorithms = parser.add_argument, [str(name) for name in Algorithm]
    add("collective", nargs="?", choices=list(BUILDERS), default="reduce-scatter", help="default: reduce-scatter")
    add("algorithm", nargs="?", choices=algorithms, default="direct", help="default: direct")
    add("--ranks", type=int, default=4, metavar="N", help="default: 4")
    add("--chunks", type=int, default=1, metavar="M", help="chunks per shard (default: 1)")
    return parser, parser.parse_args()


if __name__ == "__main__":
    main()
