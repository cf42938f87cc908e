"""How many of what arrives, or leaves, one after the other are taken at a time."""

from collections.abc import Callable, Sequence

from commfuse_megatron.errors import ScheduleError


def cut_into_halves(count: int) -> list[range]:
    """The numbers below `count`, at least one, in ranges of half of what is left; the last holds one.

    Whoever adds up what has these numbers, as it arrives, has as long for a range as the next one takes to arrive.
    """
    found, start = list[range](), 0
    while start < count:
        stop = count - (count - start) // 2
        found.append(range(start, stop))
        start = stop
    return found


def doubling(count: int) -> tuple[int, ...]:
    """Sizes of pieces of `count`: one, two, four ...; a small rest goes with the piece before it."""
    sizes, size = list[int](), 1
    while count:
        taken = count if count - size <= size // 2 else size
        sizes.append(taken)
        count, size = count - taken, 2 * size
    return tuple(sizes)


def soonest(count: int, arrival: float, work: Callable[[int], float]) -> tuple[int, ...]:
    """Sizes of pieces of `count`, each worked on when all of it has arrived, so that the last is done soonest.

    arrival: from one to the next, the first so long after the own part is begun. work: how long a piece of a size
    takes, the own part being one of size one. So where arrivals take longer these are pieces of one, where they take
    no time it is one piece, and between, a piece is about what has arrived by then. Three arrivals beside one's work:

    >>> soonest(7, 1.0, lambda size: 0.1 + 3.0 * size)
    (2, 5)
    """
    times = [work(size) for size in range(count + 1)]
    best: list[tuple[float, tuple[int, ...]]] = [(work(1), ())]  # of so many: when they are done, and the sizes
    for done in range(1, count + 1):
        ends = [
            (max(now, done * arrival) + times[done - before], (*sizes, done - before))
            for before, (now, sizes) in enumerate(best)
        ]
        best.append(min(ends, key=lambda end: (end[0], len(end[1]))))
    return best[count][1]


def cut_into_pieces(order: Sequence[int], sizes: Sequence[int]) -> list[range]:
    """Owners, who come in this order, in pieces of these sizes, each one range of owners.

    Where owners are counted from the other end on, a piece ends; a small rest before that goes with the piece before.
    """
    if sum(sizes) != len(order) or min(sizes, default=1) < 1:
        raise ScheduleError(f"pieces of {tuple(sizes)} owners are to hold each of {len(order)} once. Say other sizes.")
    wrap = next((at for at in range(1, len(order)) if abs(order[at] - order[at - 1]) != 1), len(order))
    pieces, start, stop = list[range](), 0, 0
    for size in sizes:
        stop += size
        while start < stop:
            end = min(stop, wrap) if start < wrap else stop
            if start < wrap and wrap - end <= (end - start) // 2:
                end = wrap
            pieces.append(range(min(order[start:end]), max(order[start:end]) + 1))
            start = end
    return pieces
