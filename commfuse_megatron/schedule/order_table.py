"""What the order of owners gains under a causal mask, over group sizes and links: the tables of docs/order_by_cost.md.

Times are parts of the whole computation's, so that they hold for any machine: a ratio of 0.5 means that all transfers
of a rank take half as long as all its computations. Nothing here is used by a run.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from commfuse_megatron.schedule.actions import Collective
from commfuse_megatron.schedule.order import OrderChoice, causal_costs_us, choose_order
from commfuse_megatron.schedule.owners import rotation

__all__ = ["RATIOS", "choose_causal_order", "least_free_time", "order_rows", "free_rows"]

RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0)

# Of the search for orders without the rule of permutations: exchanges tried from each start. A judgement, not measured.
_TRIALS = 300

# Parts of the rotation's time that are no difference in three decimals.
_NOTHING = 5e-4


def choose_causal_order(
    collective: Collective, group_size: int, chunks_per_shard: int, ratio: float, at_a_time: int = 1
) -> OrderChoice:
    """The best order found, however little it gains, where all computations take 1 and all transfers `ratio`."""
    return choose_order(
        group_size,
        causal_costs_us(1.0, group_size, chunks_per_shard),
        _transfer(group_size, chunks_per_shard, ratio),
        collective=collective,
        chunks_per_shard=chunks_per_shard,
        at_a_time=at_a_time,
        least_gain=0.0,
    )


def order_rows(
    collective: Collective, group_sizes: Iterable[int], chunks: Iterable[int], at_a_time: int = 1
) -> Iterator[str]:
    """Rows of a Markdown table: the rotation's time and, where another order takes less, its time and gain in %."""
    yield from _head()
    for group_size, m in _pairs(group_sizes, chunks):
        cells = []
        for ratio in RATIOS:
            choice = choose_causal_order(collective, group_size, m, ratio, at_a_time)
            better = f" > {choice.makespan_us:.3f} ({100 * choice.gain:.1f})" if choice.gain > _NOTHING else ""
            cells.append(f"{choice.rotation_us:.3f}{better}")
        yield _row(group_size, m, cells)


def free_rows(group_sizes: Iterable[int], chunks: Iterable[int]) -> Iterator[str]:
    """The same for a reduce-scatter whose ranks need not send and receive in the same positions.

    The best legal time, the best found without the rule, and in brackets the bound that nothing beats; only what
    differs by more than rounding.
    """
    yield from _head()
    for group_size, m in _pairs(group_sizes, chunks):
        cells = []
        for ratio in RATIOS:
            choice = choose_causal_order(Collective.REDUCE_SCATTER, group_size, m, ratio)
            cell, legal = f"{choice.makespan_us:.3f}", choice.makespan_us
            if legal - choice.least_us > _NOTHING:
                found = least_free_time(choice, group_size, m, ratio)
                better = f" > {found:.3f} ({100 * (1 - found / legal):.1f})" if legal - found > _NOTHING else ""
                bound = f" [{choice.least_us:.3f}]" if found - choice.least_us > _NOTHING else ""
                cell = f"{cell}{better}{bound}"
            cells.append(cell)
        yield _row(group_size, m, cells)


def least_free_time(choice: OrderChoice, group_size: int, chunks_per_shard: int, ratio: float) -> float:
    """The shortest time found for a causal reduce-scatter in which every rank may have any order of owners.

    A rank sends one chunk and receives one at a time, whichever of those that are computed. Searched from `choice` and
    from the rotation, by exchanges of owners; an upper bound of what is possible.
    """
    costs = causal_costs_us(1.0, group_size, chunks_per_shard)
    shards = [costs[owner * chunks_per_shard : (owner + 1) * chunks_per_shard] for owner in range(group_size)]
    transfer = _transfer(group_size, chunks_per_shard, ratio)
    rng = random.Random(0)
    rotated = rotation(Collective.REDUCE_SCATTER, group_size)
    best = choice.makespan_us
    for order in (choice.order or rotated, rotated):
        orders = [list(owners) for owners in order]
        time = _free_time(orders, shards, transfer)
        for _ in range(_TRIALS if group_size > 2 else 0):
            changed = [list(owners) for owners in orders]
            for _ in range(rng.choice((1, 1, 2, 3))):
                owners = rng.choice(changed)
                one, other = rng.sample(range(group_size - 1), 2)
                owners[one], owners[other] = owners[other], owners[one]
            changed_time = _free_time(changed, shards, transfer)
            if changed_time <= time:
                orders, time = changed, changed_time
        best = min(best, time)
    return best


def _free_time(orders: Sequence[Sequence[int]], shards: Sequence[Sequence[float]], transfer: float) -> float:
    """Whatever can start first does; of several, what most is left of at its sender and its owner."""
    ready: dict[tuple[int, int], list[float]] = {}  # (sender, owner) -> when its chunks are computed, last one first
    for rank, owners in enumerate(orders):
        computed = 0.0
        for owner in owners:
            times = list(itertools.accumulate(shards[owner], initial=computed))
            computed = times[-1]
            ready[rank, owner] = times[:0:-1]
    group_size, end = len(orders), sum(map(sum, shards))
    sent, received = [0.0] * group_size, [0.0] * group_size
    to_send = [(group_size - 1) * len(shards[0])] * group_size
    to_receive = list(to_send)
    while ready:
        start, _, rank, owner = min(
            (max(sent[rank], received[owner], times[-1]), -to_send[rank] - to_receive[owner], rank, owner)
            for (rank, owner), times in ready.items()
        )
        sent[rank] = received[owner] = start + transfer
        to_send[rank] -= 1
        to_receive[owner] -= 1
        ready[rank, owner].pop()
        if not ready[rank, owner]:
            del ready[rank, owner]
    return max(end, *sent)


def _transfer(group_size: int, chunks_per_shard: int, ratio: float) -> float:
    return ratio / (max(1, group_size - 1) * chunks_per_shard)


def _pairs(group_sizes: Iterable[int], chunks: Iterable[int]) -> list[tuple[int, int]]:
    chunks = list(chunks)
    return [(group_size, m) for group_size in group_sizes for m in chunks]


def _head() -> Iterator[str]:
    yield "| ranks | m | " + " | ".join(f"{ratio:g}" for ratio in RATIOS) + " |"
    yield "|" + "---|" * (2 + len(RATIOS))


def _row(group_size: int, m: int, cells: Iterable[str]) -> str:
    return f"| {group_size} | {m} | {' | '.join(cells)} |"
