"""Which heads of which rows go where between ranks' tensors [S_r, B, H, features] and what is exchanged: as copies.

Knows views; must not know who copies. What travels of a group of heads is, for each token, its heads of queries, then
of keys, then of values: kernels take them as views, so nothing is taken apart where it arrives.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from commfuse_megatron.ops.split_attention import Heads
from commfuse_megatron.problem import HeadGroup, RowRange, UlyssesProblem

__all__ = ["CopyPair", "HeadPieces", "Piece", "pack_copies", "sum_pieces", "unpack_copies"]


class CopyPair(NamedTuple):
    """target = source. names: of the operands that these are views into."""

    target: torch.Tensor
    source: torch.Tensor
    names: tuple[str, str]


class Piece(NamedTuple):
    """What some ranks computed of this rank's rows: tokens [ranks, rows, B, ...], in the order of ranks.

    name: of the operand that it is a view into.
    """

    ranks: slice
    rows: slice
    tokens: torch.Tensor
    name: str

    def of(self, part: torch.Tensor) -> "Piece":
        """The same of some features."""
        return self._replace(tokens=part)


class HeadPieces:
    """The heads of one rank's groups in what is exchanged. Groups are numbered as in the forward pass."""

    def __init__(self, problem: UlyssesProblem, number: int, group_rank: int) -> None:
        self.problem, self.group_rank = problem, group_rank
        self.groups = problem.head_groups(number)
        self.own_rows = sum(run.size for run in problem.kept_rows(group_rank))

    def in_tokens(self, group: HeadGroup, tokens: torch.Tensor, first: Heads | None) -> Heads:
        """q, k and v of one group: views. tokens: [..., features]; first: of the group that brought k and v for all."""
        problem = self.problem
        sizes = [group.q.size * problem.head_dim]
        if group.brings_kv:
            sizes += [group.kv.size * problem.head_dim, group.kv.size * problem.value_dim]
        q, *kv = tokens.split(sizes, dim=-1)
        queries = q.unflatten(-1, (group.q.size, problem.head_dim))
        if not kv:
            assert first is not None
            return Heads(queries, first.k, first.v)
        k, v = (part.unflatten(-1, (group.kv.size, -1)) for part in kv)
        return Heads(queries, k, v)

    def heads(self, flat: torch.Tensor) -> list[Heads]:
        """q, k and v [S, B, heads, features] of every group in what arrived of all: views."""
        found: list[Heads] = []
        for group, tokens in zip(self.groups, self._tokens(flat, self.features_in), strict=True):
            found.append(self.in_tokens(group, tokens, found[0] if found else None))
        return found

    def attended(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """[S, B, heads, D_v] of every group in what is computed of all: views."""
        value_dim = self.problem.value_dim
        parts = self._tokens(flat, lambda group: group.q.size * value_dim)
        return [part.unflatten(-1, (-1, value_dim)) for part in parts]

    def features_in(self, group: HeadGroup) -> int:
        """Features per token of q, k and v of a group."""
        problem = self.problem
        both = problem.head_dim + problem.value_dim
        return group.q.size * problem.head_dim + group.brings_kv * group.kv.size * both

    def _tokens(self, flat: torch.Tensor, features: Callable[[HeadGroup], int]) -> Iterator[torch.Tensor]:
        problem = self.problem
        parts = flat.view(-1).split([problem.M * features(group) for group in self.groups])
        return (part.view(problem.rows, problem.batch, -1) for part in parts)

    def at_home(self, reads: Sequence[torch.Tensor]) -> list[Piece]:
        """What "unpack" reads: of the other ranks, one behind the other, and this rank's own runs."""
        me, batch, size = self.group_rank, self.problem.batch, self.problem.group_size
        arrived, *own = reads
        others = arrived.view(size - 1, self.own_rows, batch, -1)
        found, start = [Piece(slice(0, me), slice(None), others[:me], "arrived")], 0
        for run in own:
            tokens = run.view(1, -1, batch, others.size(-1))
            found.append(Piece(slice(me, me + 1), slice(start, start + tokens.size(1)), tokens, "a"))
            start += tokens.size(1)
        return [*found, Piece(slice(me + 1, size), slice(None), others[me:], "arrived")]


def pack_copies(
    target: torch.Tensor, heads: torch.Tensor, chosen: RowRange, ranks: range, group_size: int, names: tuple[str, str]
) -> list[CopyPair]:
    """What takes those heads that each of some ranks needs to target [ranks, rows, B, heads, features].

    heads: [rows, B, H, features]. chosen: which of each rank's own heads. names: of what the two are views into. Of
    fewer heads than ranks several ranks get the same.
    """
    if not target.numel():
        return []
    number = heads.size(2)
    if number % group_size == 0:
        by_rank = _by_rank(heads, group_size)[ranks.start : ranks.stop, :, :, chosen.start : chosen.stop]
        return [CopyPair(target, by_rank, names)]
    own = [rank * number // group_size for rank in ranks]
    return [CopyPair(each, heads[:, :, at : at + 1], names) for each, at in zip(target, own, strict=True)]


def unpack_copies(target: torch.Tensor, chosen: RowRange, pieces: Sequence[Piece], name: str) -> list[CopyPair]:
    """What takes pieces of some heads of each rank to target [S_r, B, H, features], the operand `name`."""
    by_rank = _by_rank(target, _ranks_of(pieces))
    return [
        CopyPair(
            by_rank[piece.ranks, piece.rows, :, chosen.start : chosen.stop],
            _by_head(piece, chosen.size, target.size(3)),
            (name, piece.name),
        )
        for piece in pieces
        if piece.tokens.numel()
    ]


def sum_pieces(target: torch.Tensor, pieces: Sequence[Piece]) -> None:
    """Fill target [S_r, B, H, features], of fewer heads than ranks, with the sums of what the ranks that attended with
    the same head give: in fp32 (fp64), in the order of ranks, rounded once."""
    size, number = _ranks_of(pieces), target.size(2)
    sums = torch.zeros_like(target, dtype=torch.float64 if target.dtype == torch.float64 else torch.float32)
    for piece in pieces:
        heads, first = _by_head(piece, 1, target.size(3)), piece.ranks.start or 0
        for index in range(heads.size(0)):
            sums[piece.rows, :, (first + index) * number // size] += heads[index, :, :, 0]
    target.copy_(sums)


def _by_head(piece: Piece, number: int, features: int) -> torch.Tensor:
    tokens = piece.tokens
    return tokens if tokens.dim() > 4 else tokens.unflatten(-1, (number, features))


def _ranks_of(pieces: Sequence[Piece]) -> int:
    return pieces[-1].tokens.size(0) + (pieces[-1].ranks.start or 0)


def _by_rank(heads: torch.Tensor, group_size: int) -> torch.Tensor:
    """[S_r, B, H, features] -> [R, S_r, B, H / R, features], a view."""
    return heads.unflatten(2, (group_size, heads.size(2) // group_size)).permute(2, 0, 1, 3, 4)
