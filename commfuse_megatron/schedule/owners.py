"""In which order every rank takes the others' shards in a direct schedule: what an order is, and which are legal.

Knows no costs. The contract that bites: a batch holds at most one send and one receive, and both ends of a transfer
stand in the same step; so in every position no two ranks may take shards of the same owner.
"""

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule.actions import Algorithm, Collective

__all__ = ["OwnerOrder", "invert_order", "rotation", "settle_order"]

#: order[rank][position]: the owner whose shard that rank computes then. Its own shard, first or last, is not listed.
type OwnerOrder = tuple[tuple[int, ...], ...]


def rotation(collective: Collective, group_size: int) -> OwnerOrder:
    """Return the default: r+1, r+2, ... in a reduce-scatter, r-1, r-2, ... in an all-gather (mod group_size)."""
    sign = -1 if collective is Collective.ALL_GATHER else 1
    return tuple(tuple((rank + sign * d) % group_size for d in range(1, group_size)) for rank in range(group_size))


def invert_order(order: OwnerOrder) -> OwnerOrder:
    """Return whom every rank's own shard goes to (or comes from): inverse[owner][position] takes it then."""
    inverse = [[0] * len(owners) for owners in order]
    for rank, owners in enumerate(order):
        for position, owner in enumerate(owners):
            inverse[owner][position] = rank
    return tuple(map(tuple, inverse))


def settle_order(order: OwnerOrder | None, collective: Collective, algorithm: Algorithm, group_size: int) -> OwnerOrder:
    """Return the order that a schedule follows: `order` if it can, the rotation for None; else raise ScheduleError."""
    if order is None:
        return rotation(collective, group_size)
    if algorithm is not Algorithm.DIRECT:
        raise ScheduleError(
            f"an order of owners was given for a {algorithm.value}, whose order follows from its neighbours: "
            "leave it out, or ask for direct."
        )
    if len(order) != group_size:
        raise ScheduleError(f"an order for {len(order)} ranks was given, the group has {group_size}.")
    for rank, owners in enumerate(order):
        others = [other for other in range(group_size) if other != rank]
        if sorted(owners) != others:
            raise ScheduleError(
                f"order[{rank}] is {tuple(owners)}: it must name every rank but {rank} once, "
                f"{tuple(others)} in any order."
            )
    for position in range(group_size - 1):
        taken_by: dict[int, int] = {}
        for rank, owners in enumerate(order):
            earlier = taken_by.setdefault(owners[position], rank)
            if earlier != rank:
                raise ScheduleError(
                    f"order: ranks {earlier} and {rank} both take shards of rank {owners[position]} in position "
                    f"{position}, but a rank sends to one other rank and receives from one at a time: "
                    "in every position all owners must differ."
                )
    return order
