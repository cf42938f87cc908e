"""A few of many combinations, among which every pair still comes."""

import itertools
from collections.abc import Sequence


def cover_pairs(candidates: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Some of the `candidates` (a word per option) that have every pair of words that any of them has.

    Greedy: always the candidate with most pairs that are missing yet, the first of equals.
    """
    pairs = [set(itertools.combinations(enumerate(words), 2)) for words in candidates]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(candidates)), key=lambda index: len(pairs[index] & missing))
        chosen.append(candidates[best])
        missing -= pairs[best]
    return chosen
