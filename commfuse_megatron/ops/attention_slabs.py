"""Where splits put the gradients of the keys and values that they see, and the sums over splits that make one of them.

The split that sees all keys, if the last with queries does, puts its gradient where the result is to be; every other
has a slab of its own. Knows tapes; must not know kernels of attention.
"""

import itertools
from collections.abc import Sequence

import torch

from commfuse_megatron.problem import AttentionProblem, RowRange
from commfuse_megatron.runtime.tape_program import TapeBinder, Unservable
from commfuse_megatron.transport.copy_steps import Ref


class GradientSlabs:
    """The slabs of one problem's splits."""

    def __init__(self, problem: AttentionProblem, splits: Sequence[RowRange]) -> None:
        self._rows = problem.rows
        seen = {split: problem.visible_keys(queries).keys for split, queries in enumerate(splits) if queries.size}
        last = max(seen)
        self._direct = last if seen[last].size == problem.rows else None
        self._seen = [(split, keys) for split, keys in seen.items() if split != self._direct]
        self._number = {split: number for number, (split, _) in enumerate(self._seen)}
        self._starts = {split: keys.start for split, keys in seen.items()}

    def new(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for the slabs of `like` [S, B, H_kv, D]: [slabs, S, B * H_kv * D]."""
        return like.new_empty(max(1, len(self._seen)), self._rows, like[0].numel())

    def place(self, split: int, like: torch.Tensor, slabs: Ref, gradient: Ref) -> Ref:
        """Where `split`, which has queries, puts its gradient of the keys that it sees, [keys, B, H_kv, D]."""
        start = self._starts[split]
        if split == self._direct:
            return gradient.plus(start * _row_bytes(like))
        return slabs.plus((self._number[split] * self._rows + start) * _row_bytes(like))

    def add_up(self, binder: TapeBinder, like: torch.Tensor, slabs: Ref, gradient: Ref) -> None:
        """gradient [S, ...] = the sum over the splits that see each key; all of them were computed."""
        row_bytes, cols = _row_bytes(like), like[0].numel()
        edges = {edge for _, keys in self._seen for edge in (keys.start, keys.stop)}
        for start, stop in itertools.pairwise(sorted(edges | {0, self._rows})):
            at = gradient.plus(start * row_bytes)
            by = [number for number, (_, keys) in enumerate(self._seen) if keys.start <= start and stop <= keys.stop]
            if not by and self._direct is not None:
                continue  # it is there
            if not by or by[-1] - by[0] != len(by) - 1:
                raise Unservable
            first = slabs.plus((by[0] * self._rows + start) * row_bytes)
            if self._direct is not None:
                own, partials, num_partials = at, first, len(by)
            else:
                own, partials, num_partials = first, first.plus(self._rows * row_bytes), len(by) - 1
            binder.sum((stop - start, cols), (own, partials, at), num_partials, self._rows * row_bytes)


def _row_bytes(like: torch.Tensor) -> int:
    return like[0].numel() * like.element_size()
