"""How many of what arrives, or leaves, one after the other are taken at a time."""


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
