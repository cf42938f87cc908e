"""How long a direct schedule takes in a given order of owners: what `simulate` finds, by a short recurrence.

For searches that try thousands of orders, so position by position: orders that begin alike share their beginning. Every
rank's computation of a chunk costs the same, and so does every transfer. A test holds it against `simulate`, which
computes one chunk at a time.

The contract that bites: as in `simulate`, all slots are there (none is reused), and the batches of an all-gather are
issued ahead of its computations.
"""

from collections.abc import Iterable, Sequence

from commfuse_megatron.schedule.actions import Collective
from commfuse_megatron.schedule.owners import OwnerOrder

__all__ = ["Clock", "Ends", "least_makespan_us", "makespan_us"]

type ChunkCosts = Sequence[Sequence[float]]

#: Per rank: when its latest computations end, of each lane one, those of the lane whose turn it is first; and when its
#: last batch would if it dealt with no slower rank.
type Ends = tuple[list[tuple[float, ...]], list[float]]


class Clock:
    """Steps all ranks through the positions of an order, and says when the last one is done.

    Reduce-scatter: computations wait for nothing. A batch waits for the partial that it sends and for the batch before:

        computed   |- chunk 0 -|- chunk 1 -|- ...      |- own -|
        ended                  |- batch 0 -|- batch 1 -|- ...

    It also waits for both at the two ranks that it deals with. That moves ends from one rank to another but not the
    last of all: transfers cost the same everywhere, so whoever makes a peer late is as late itself. Left out here.

    All-gather: the same backwards, from the last computation to the first batch; no batch waits for a computation:

        ended      |- batch 0 -|- batch 1 -|- ...
        computed   |- own -|   |- chunk 0 -|- chunk 1 -| ...

    Where one chunk leaves part of the device idle, some are computed at a time: they take turns on so many lanes, and
    each takes so much longer than it would if it could be spread over the whole device.

        lane 0     |- - chunk 0 - -|- - chunk 2 ...
        lane 1     |- - - chunk 1 - - -|- chunk 3 ...

    Args:
        costs_us: of every chunk, by owner; together they are what the device computes in that time.
        transfer_us: of every chunk, latency included.
        at_a_time: how many chunks are computed at a time.
    """

    def __init__(self, collective: Collective, costs_us: ChunkCosts, transfer_us: float, *, at_a_time: int = 1) -> None:
        self.is_backwards = collective is Collective.ALL_GATHER
        self.at_a_time = at_a_time
        lasting_us = [[at_a_time * cost for cost in chunks] for chunks in costs_us]
        self.costs_us = [chunks[::-1] for chunks in lasting_us] if self.is_backwards else lasting_us
        self.transfer_us = transfer_us
        self.group_size = len(costs_us)
        self.chunks_per_shard = len(costs_us[0])
        self.total_us = sum(map(sum, costs_us))

    def start(self) -> Ends:
        """Before the first position."""
        return [(0.0,) * self.at_a_time] * self.group_size, [0.0] * self.group_size

    def advance(self, ends: Ends, owners: Sequence[int]) -> Ends:
        """One position further, in which rank r takes the shard of owners[r]."""
        computed, ended = ends
        chunks = [self.costs_us[owner] for owner in owners]
        for index in range(self.chunks_per_shard):
            computed = [(*lanes[1:], lanes[0] + costs[index]) for lanes, costs in zip(computed, chunks, strict=True)]
            ended = [max(lanes[-1], end) + self.transfer_us for lanes, end in zip(computed, ended, strict=True)]
        return computed, ended

    def least_us(self, ends: Ends, num_left: int) -> float:
        """The makespan if nothing waits in the `num_left` positions that are left; exact when none is."""
        computed_us = self.total_us if num_left or self.at_a_time == 1 else self._last_computed_us(ends[0])
        return max(computed_us, max(ends[1]) + num_left * self.chunks_per_shard * self.transfer_us)

    def _last_computed_us(self, computed: Sequence[tuple[float, ...]]) -> float:
        """When the last rank has computed its own chunks, too."""
        last_us = 0.0
        for lanes, own in zip(computed, self.costs_us, strict=True):
            for cost in own:
                lanes = (*lanes[1:], lanes[0] + cost)
            last_us = max(last_us, *lanes)
        return last_us

    def make_order(self, positions: Sequence[tuple[int, ...]]) -> OwnerOrder:
        """The order that has these owners, position by position as the clock goes."""
        return tuple(zip(*(reversed(positions) if self.is_backwards else positions), strict=True))

    def positions(self, order: OwnerOrder) -> list[tuple[int, ...]]:
        """The owners of every position, in the order in which the clock goes."""
        positions = list(zip(*order, strict=True))
        return positions[::-1] if self.is_backwards else positions


def makespan_us(clock: Clock, order: OwnerOrder, *, give_up_us: float = float("inf")) -> float:
    """Return when the last rank is done; or some time from `give_up_us` on, if it is not done before."""
    ends, num_left = clock.start(), clock.group_size - 1
    for owners in clock.positions(order):
        ends = clock.advance(ends, owners)
        num_left -= 1
        if clock.least_us(ends, num_left) >= give_up_us:
            break
    return clock.least_us(ends, num_left)


def least_makespan_us(clock: Clock) -> float:
    """Return a time that no order beats, also if ranks need not send and receive in the same positions.

    Of a reduce-scatter: what rank r sends as its chunk number k leaves no earlier than the k + 1 cheapest chunks take
    (an owner's stay together), and all that follow leave one after the other; what owner j receives, one after the
    other, begins with some rank's first chunk of it. An all-gather is that backwards.
    """
    chunks, m, lanes = clock.costs_us, clock.chunks_per_shard, clock.at_a_time
    num_transfers = (clock.group_size - 1) * m
    shards = [sum(owner) for owner in chunks]
    bounds = [clock.total_us]
    for rank in range(clock.group_size) if num_transfers else ():
        others = [owner for owner in range(clock.group_size) if owner != rank]
        bounds.append(chunks[rank][0] + num_transfers * clock.transfer_us)
        for number in range(num_transfers):
            whole, begun = divmod(number + 1, m)
            computed_us = min(
                sum(chunks[last][:begun]) + _sum_least(whole, (shards[owner] for owner in others if owner != last))
                for last in (others if begun else [rank])
            )
            bounds.append(computed_us / lanes + (num_transfers - number) * clock.transfer_us)
    return max(bounds)


def _sum_least(count: int, values: Iterable[float]) -> float:
    return sum(sorted(values)[:count])
