"""In which order ranks take each other's shards under a causal mask, and what that gains. No torch, GPU or ranks.

    python examples/order_by_cost.py --ranks 2 3 4
    python examples/order_by_cost.py --ranks 2 3 4 5 6 7 8 --chunks 1 2 4
    python examples/order_by_cost.py --ranks 3 4 5 6 7 8 --chunks 1 2 --at-a-time 2 4

The last two make the tables of `docs/order_by_cost.md`, in about a minute.
Read `commfuse_megatron/schedule/order.py`.
"""

import argparse

from commfuse_megatron.schedule import (
    Algorithm,
    Collective,
    build_reduce_scatter,
    causal_costs_us,
    choose_order,
    render,
    simulate,
)
from commfuse_megatron.schedule.order_table import free_rows, order_rows

# Query-split attention on a link that takes three quarters of its time.
COMPUTE_US, TRANSFER_US = 2000.0, 1500.0


def main() -> None:
    """Print one order as a grid with its time, then the tables."""
    parser = argparse.ArgumentParser(description="What the order of owners gains under a causal mask.")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4], metavar="N", help="default: 2 3 4")
    parser.add_argument("--chunks", nargs="+", type=int, default=[1], metavar="M", help="chunks per shard (default: 1)")
    parser.add_argument(
        "--at-a-time", nargs="+", type=int, default=[], metavar="N", help="instead: with N chunks computed at a time"
    )
    chosen = parser.parse_args()
    if min(chosen.ranks) < 2 or max(chosen.ranks) > 8 or min(*chosen.chunks, *chosen.at_a_time, 1) < 1:
        parser.error("--ranks takes 2 to 8, --chunks and --at-a-time 1 and more")
    for number in chosen.at_a_time:
        print(f"reduce_scatter, {number} chunks at a time: rotation > best order (gain in %)")
        print("\n".join(order_rows(Collective.REDUCE_SCATTER, chosen.ranks, chosen.chunks, number)), end="\n\n")
    if chosen.at_a_time:
        return
    show_one(max(chosen.ranks))
    for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        print(f"{collective}: rotation > best order (gain in %), computing alone = 1, by transfers / computing")
        print("\n".join(order_rows(collective, chosen.ranks, chosen.chunks)), end="\n\n")
    print("reduce_scatter: best order > without the rule of permutations (gain in %) [bound]")
    print("\n".join(free_rows(chosen.ranks, chosen.chunks)))


def show_one(num_ranks: int) -> None:
    """The choice for one problem, as an op makes it: costs in, an order out, a schedule built with it."""
    costs_us = causal_costs_us(COMPUTE_US, num_ranks)
    transfer_us = TRANSFER_US / (num_ranks - 1)
    choice = choose_order(num_ranks, costs_us, transfer_us)
    schedule = build_reduce_scatter(num_ranks, Algorithm.DIRECT, order=choice.order)
    simulation = simulate(
        schedule,
        compute_us_per_chunk=lambda rank, chunk: costs_us[chunk.owner_rank],
        transfer_us_per_chunk=transfer_us,
    )
    print(render(schedule), end="\n\n")
    print(f"rotation {choice.rotation_us:.0f} us, this order {simulation.total_us:.0f} us\n")


if __name__ == "__main__":
    main()
