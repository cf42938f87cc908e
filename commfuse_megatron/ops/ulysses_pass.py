"""What both passes of attention over a split sequence have in common, whatever the path.

Knows prepared passes and kernels; must not know what is computed in which order.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import distributed as dist

from commfuse_megatron.kernels.attention import Dropout
from commfuse_megatron.ops.split_attention import SplitAttention, apart
from commfuse_megatron.ops.ulysses_pieces import CopyPair, HeadPieces, Piece
from commfuse_megatron.ops.ulysses_tapes import FindCopies, copy_kernel
from commfuse_megatron.problem import HeadGroup, RowRange, UlyssesProblem
from commfuse_megatron.runtime.prepared import CallNumbers, PreparedPass
from commfuse_megatron.runtime.tape_program import TapeKernel
from commfuse_megatron.runtime.tensor_program import Kernel
from commfuse_megatron.schedule.exchange import BoundExchange
from commfuse_megatron.schedule.lower_ulysses import PACK, PLACE, UNPACK

__all__ = ["Marked", "UlyssesCall", "UlyssesPass", "attention_of", "copy_all", "problem_of"]


class UlyssesCall(NamedTuple):
    """One call: its forward pass, and what differs between calls of one problem."""

    forward: PreparedPass
    scale: float
    dropout: Dropout | None

    @property
    def numbers(self) -> CallNumbers:
        """What all ranks must bring alike, since each attends heads of all."""
        return ("scale", self.scale), ("dropout", 0.0 if self.dropout is None else float(self.dropout.probability))


class UlyssesPass:
    """What both passes have in common."""

    def __init__(self, p: PreparedPass, call: UlyssesCall) -> None:
        self.p, self.call, self.problem = p, call, problem_of(p)
        self.pieces = HeadPieces(self.problem, p.plan.chunks_per_shard, p.group_rank)
        self.groups = self.pieces.groups
        assert isinstance(p.gather, BoundExchange)
        assert isinstance(p.scatter, BoundExchange)
        self.arriving, self.leaving = p.gather, p.scatter
        #: Rows of every piece that goes to an owner, flat.
        self.runs = [run for rank in range(self.problem.group_size) for run in self.problem.kept_rows(rank)]
        self.memory: dict[str, torch.Tensor]
        #: Of every group: split 0 is the whole sequence, the others are the runs.
        self.attention: list[SplitAttention]
        if call.dropout is None:
            self.attention = p.remember(("attention", call.scale), self._attention_of_groups)
        else:
            self.attention = self._attention_of_groups()

    def _attention_of_groups(self) -> list[SplitAttention]:
        made = []
        for number, group in enumerate(self.groups):
            dropout = self.call.dropout and apart(self.call.dropout, number)
            made.append(attention_of(self.call._replace(dropout=dropout), self.problem, group, self.runs))
        return made

    def to_tokens(self, number: int, tokens: torch.Tensor, ranks: range, rows: slice, operand: str) -> list[CopyPair]:
        """What takes those heads of some of this rank's rows that each of some ranks attends in a group, or turn, to
        tokens [ranks, rows, B, features], which lie in `operand`."""
        raise NotImplementedError

    def pack_copies(self, number: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> list[CopyPair]:
        """What "pack" does."""
        me, shape, found = self.p.group_rank, (self.pieces.own_rows, self.problem.batch, -1), list[CopyPair]()
        for target, ranks in zip(writes, (range(me), range(me + 1, self.problem.group_size)), strict=True):
            if target.numel():
                found += self.to_tokens(number, target.view(len(ranks), *shape), ranks, slice(None), "packed")
        return found

    def place_copies(
        self, number: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> list[CopyPair]:
        """What "place" does."""
        me, start, found = self.p.group_rank, 0, list[CopyPair]()
        for target, run in zip(writes, self.problem.kept_rows(me), strict=True):
            rows = slice(start, start + run.size)
            if run.size:
                tokens = target.view(1, run.size, self.problem.batch, -1)
                found += self.to_tokens(number, tokens, range(me, me + 1), rows, "gathered")
            start = rows.stop
        return found

    def unpack_copies(self, number: int, reads: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> list[CopyPair]:
        """What "unpack" does."""
        raise NotImplementedError

    def pack_for_all(self) -> torch.Tensor:
        """The pieces of the only group for all ranks, packed."""
        packed, ranks = self.memory["packed"], range(self.problem.group_size)
        if packed.numel():
            tokens = packed.view(len(ranks), self.pieces.own_rows, self.problem.batch, -1)
            copy_all(self.to_tokens(0, tokens, ranks, slice(None), "packed"))
        return packed

    def kernels(self) -> dict[str, Kernel]:
        """What moves rows, on tensors."""
        found = {PACK: self.pack_copies, PLACE: self.place_copies, UNPACK: self.unpack_copies}
        return {kind: functools.partial(_copy_found, find) for kind, find in found.items()}

    def tape_kernels(self) -> dict[str, TapeKernel]:
        """The same, on tapes."""
        found = {PACK: self.pack_copies, PLACE: self.place_copies, UNPACK: self.unpack_copies}
        return {kind: copy_kernel(find) for kind, find in found.items()}

    @property
    def may_replay(self) -> bool:
        """Whether the pass may be on a tape, its kernel taking addresses."""
        kernel = self.p.attention
        return self.p.can_replay and self.call.dropout is None and kernel is not None and kernel.can_bind

    def exchanged(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Memory for what is packed and computed, by name."""
        arriving, leaving = self.arriving.exchange, self.leaving.exchange
        packed = self.problem.group_size * arriving.own_tokens(self.p.group_rank) * sum(arriving.widths)
        computed = leaving.num_tokens * sum(leaving.widths)
        return {"packed": self.units(like, packed), "a": self.units(like, computed)}

    def units(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Memory for what is exchanged."""
        return like.new_empty(count, self.problem.unit)

    def all_pieces(self, received: torch.Tensor) -> list[Piece]:
        """What `exchange` takes home of the only group."""
        problem, (width,) = self.problem, self.leaving.exchange.widths
        shape = (problem.group_size, self.pieces.own_rows, problem.batch, width * problem.unit)
        return [Piece(slice(None), slice(None), received.view(shape), "")]

    def exchange(self, exchange: BoundExchange, source: torch.Tensor) -> torch.Tensor:
        """One group's exchange by the group's own collective, from and to where the schedule has its pieces.

        Towards the heads: packed -> all tokens. Home: all tokens -> the pieces of all ranks, own ones too.
        """
        me, ranks, bound = self.p.group_rank, range(self.problem.group_size), exchange.exchange
        (width,) = bound.widths
        own = [bound.own_tokens(me) * width] * len(ranks)
        everyone = [bound.own_tokens(rank) * width for rank in ranks]
        places = [exchange.piece("", 0, rank, run) for rank in ranks for run in range(exchange.num_runs)]
        if bound.goes_home and exchange.num_runs > 1:
            source = torch.cat([source[place.start : place.start + place.count] for place in places])
        sizes, target_sizes = (everyone, own) if bound.goes_home else (own, everyone)
        target = source.new_empty(sum(target_sizes), source.size(1))
        dist.all_to_all_single(target, source, target_sizes, sizes, group=self.p.context.group)
        if not bound.goes_home and exchange.num_runs > 1:
            parts = target.split([place.count for place in places])
            target = torch.cat([parts[at] for at in sorted(range(len(places)), key=lambda at: places[at].start)])
        return target


class Marked:
    """For a with-block that is recorded as a computation."""

    def __init__(self, p: PreparedPass, name: str) -> None:
        self._link, self._name = p.context.link, name

    def __enter__(self) -> None:
        self._mark = self._link.mark()

    def __exit__(self, *ended: object) -> None:
        self._link.note_compute(self._name, self._mark, None)


def _copy_found(find: FindCopies, number: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
    copy_all(find(number, reads, writes))


def copy_all(pairs: Sequence[CopyPair]) -> None:
    """Copy, pair by pair."""
    for target, source, _ in pairs:
        target.copy_(source)


def attention_of(
    call: UlyssesCall, problem: UlyssesProblem, group: HeadGroup, runs: Sequence[RowRange]
) -> SplitAttention:
    """Of a group of heads: split 0 is the whole sequence, the others are these runs."""
    kernel = call.forward.attention
    assert kernel is not None
    splits = [RowRange(0, problem.rows), *runs]
    return SplitAttention(problem.attention(group), kernel, splits, call.scale, None, call.dropout)


def problem_of(p: PreparedPass) -> UlyssesProblem:
    """The problem of a pass of this operation."""
    assert isinstance(p.problem, UlyssesProblem)
    return p.problem
