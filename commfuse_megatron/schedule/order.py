"""Chooses in which order the ranks of a direct schedule take each other's shards, where shards differ in cost.

With a causal mask, queries that come later attend to more keys. The own shard stays last (reduce-scatter) or first
(all-gather); which of the others comes when is free as far as `owners` allows. Knows neither tensors nor attention.

The contract that bites: the choice depends on the arguments alone, so ranks that bring equal ones get the same order;
measured times must have been exchanged before.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule.actions import Collective
from commfuse_megatron.schedule.makespan import Clock, Ends, least_makespan_us, makespan_us
from commfuse_megatron.schedule.owners import OwnerOrder, rotation

__all__ = ["OrderChoice", "causal_costs_us", "choose_order"]

# Larger groups keep the rotation: nobody has asked for them, and the search takes time.
_MOST_RANKS = 8

# What differs by less is rounding.
_ROUNDING = 1e-9

# Bounds of the search, in batches of all ranks, so that it ends alike everywhere: some 5 us each on one core.
_MOST_BATCHES_OF_SHIFTS = 24_000
_MOST_BATCHES_OF_CHANGES = 8_000


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """An order and what it gains.

    order: for `build_reduce_scatter`, `build_all_gather` and `bind`; None for the rotation.
    makespan_us: of this order, with one chunk computed at a time as `simulate` has it; rotation_us: of the rotation.
    least_us: no order takes less, not even one for which ranks would send and receive in different positions.
    """

    order: OwnerOrder | None
    makespan_us: float
    rotation_us: float
    least_us: float

    @property
    def gain(self) -> float:
        """Part of the rotation's time that the order saves."""
        return 1 - self.makespan_us / self.rotation_us if self.rotation_us > 0 else 0.0


def causal_costs_us(compute_us: float, group_size: int, chunks_per_shard: int = 1) -> tuple[float, ...]:
    """Return the costs of equal chunks of queries under a causal mask, in sequence order: chunk j has 2j + 1 parts."""
    num_chunks = group_size * chunks_per_shard
    return tuple(compute_us * (2 * chunk + 1) / num_chunks**2 for chunk in range(num_chunks))


def choose_order(
    group_size: int,
    costs_us: Sequence[float],
    transfer_us: float,
    *,
    collective: Collective = Collective.REDUCE_SCATTER,
    chunks_per_shard: int = 1,
    at_a_time: int = 1,
    least_gain: float = 0.01,
) -> OrderChoice:
    """Return the order with the shortest makespan found, or the rotation if that saves no more than `least_gain`.

    All sequences of distances (rank r takes r + d1, r + d2, ...) are tried as far as bounds on their time do not rule
    them out; if the best is not known to be the shortest possible, orders near it are tried, in which ranks differ in
    their distances. Groups of more than 8 ranks keep the rotation.

    Args:
        costs_us: what every chunk takes to compute, on any rank, owner-major (`causal_costs_us` gives them for causal
            attention): group_size * chunks_per_shard numbers.
        transfer_us: what one chunk takes to another rank, latency included.
        collective: an all-gather is taken to issue its batches ahead of the computations, as `simulate` does.
        at_a_time: how many chunks a rank computes at a time, where one leaves part of the device idle: `Clock`.

    Raises:
        ScheduleError: sizes below 1, another number of costs, or a cost that is no time.

    Cost: 0.1 s for 8 ranks at most, then cached.
    """
    costs_us = tuple(costs_us)
    if min(group_size, chunks_per_shard, at_a_time) < 1 or len(costs_us) != group_size * chunks_per_shard:
        raise ScheduleError(
            f"an order was asked for with group_size={group_size}, chunks_per_shard={chunks_per_shard}, at_a_time="
            f"{at_a_time} and {len(costs_us)} costs: sizes must be at least 1, and every chunk needs one cost."
        )
    wrong = next((us for us in (*costs_us, transfer_us) if not (math.isfinite(us) and us >= 0)), None)
    if wrong is not None:
        raise ScheduleError(f"an order was asked for with a cost of {wrong}: it must be a time, finite, not negative.")
    clock_of = (costs_us, float(transfer_us), Collective(collective), chunks_per_shard, at_a_time)
    return _choose(group_size, *clock_of, least_gain)


@functools.lru_cache(maxsize=1024)
def _choose(
    group_size: int,
    costs_us: tuple[float, ...],
    transfer_us: float,
    collective: Collective,
    chunks_per_shard: int,
    at_a_time: int,
    least_gain: float,
) -> OrderChoice:
    costs = [list(owner) for owner in itertools.batched(costs_us, chunks_per_shard)]
    clock = Clock(collective, costs, transfer_us, at_a_time=at_a_time)
    rotation_us = makespan_us(clock, rotation(collective, group_size))
    least_us = least_makespan_us(clock)
    rotated = OrderChoice(None, rotation_us, rotation_us, least_us)
    # What must be beaten: the search looks for nothing above it, so it is short where little can be gained.
    target_us = rotation_us * min(1 - least_gain, 1 - _ROUNDING)
    if group_size > _MOST_RANKS or least_us >= target_us:
        return rotated
    search = _Search(clock, rotation(collective, group_size), target_us, least_us)
    search.try_shifts()
    search.try_changes()
    return rotated if search.best_us >= target_us else OrderChoice(search.best, search.best_us, rotation_us, least_us)


class _Search:
    """The best order so far: `best`, with `best_us` below `target_us` once one was found that is."""

    def __init__(self, clock: Clock, first: OwnerOrder, target_us: float, least_us: float) -> None:
        self.clock = clock
        self.best = first
        self.best_us = target_us
        self.enough_us = least_us * (1 + _ROUNDING)
        group = range(clock.group_size)
        self.owners_at = [tuple((rank + distance) % clock.group_size for rank in group) for distance in group]
        self.num_batches = 0

    def try_shifts(self) -> None:
        """All sequences of distances, those that promise most first; what cannot become the best is left out."""
        self._extend(self.clock.start(), ())

    def _extend(self, ends: Ends, distances: tuple[int, ...]) -> None:
        clock, num_left = self.clock, self.clock.group_size - 2 - len(distances)
        longer = []
        for distance in range(1, clock.group_size):
            if distance not in distances and self.num_batches < _MOST_BATCHES_OF_SHIFTS:
                after = clock.advance(ends, self.owners_at[distance])
                self.num_batches += clock.chunks_per_shard
                longer.append((clock.least_us(after, num_left), distance, after))
        for least_us, distance, after in sorted(longer, key=lambda entry: entry[:2]):
            if least_us >= self.best_us * (1 - _ROUNDING) or self.best_us <= self.enough_us:
                return
            if num_left:
                self._extend(after, (*distances, distance))
            else:
                self.best = clock.make_order([self.owners_at[each] for each in (*distances, distance)])
                self.best_us = least_us

    def try_changes(self) -> None:
        """Legal orders next to the best one, again from the first that is better, until none is."""
        self.num_batches = 0
        has_improved = True
        while has_improved and self.best_us > self.enough_us:
            has_improved = False
            for order in _neighbours(self.best):
                self.num_batches += self.clock.chunks_per_shard * (self.clock.group_size - 1)
                if self.num_batches > _MOST_BATCHES_OF_CHANGES:
                    return
                took_us = makespan_us(self.clock, order, give_up_us=self.best_us * (1 - _ROUNDING))
                if took_us < self.best_us * (1 - _ROUNDING):
                    self.best, self.best_us, has_improved = order, took_us, True
                    break


def _neighbours(order: OwnerOrder) -> Iterator[OwnerOrder]:
    """Legal orders that differ from `order` in two positions, for all ranks or for those of a cycle; or in two names.

    If every rank of a cycle (each takes in one position what the next one takes in the other) swaps the two positions,
    the owners in both stay different.
    """
    group = range(len(order))
    for first, second in itertools.combinations(range(len(order) - 1), 2):
        for cycle in _cycles(order, first, second):
            yield tuple(_swap(owners, first, second) if rank in cycle else owners for rank, owners in enumerate(order))
        yield tuple(_swap(owners, first, second) for owners in order)
    for one, other in itertools.combinations(group, 2):
        names = [other if rank == one else one if rank == other else rank for rank in group]
        yield tuple(tuple(names[owner] for owner in order[names[rank]]) for rank in group)


def _cycles(order: OwnerOrder, first: int, second: int) -> Iterator[set[int]]:
    """The cycles of two positions, unless there is only one, of all ranks."""
    takes_first = {owners[first]: rank for rank, owners in enumerate(order)}
    left = set(range(len(order)))
    while left:
        rank = min(left)
        cycle = set()
        while rank not in cycle:
            cycle.add(rank)
            rank = takes_first[order[rank][second]]
        left -= cycle
        if len(cycle) < len(order):
            yield cycle


def _swap(owners: tuple[int, ...], first: int, second: int) -> tuple[int, ...]:
    swapped = list(owners)
    swapped[first], swapped[second] = owners[second], owners[first]
    return tuple(swapped)
