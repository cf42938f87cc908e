"""Both all-to-alls of attention over a split sequence, bound to sizes: where every piece lies at its two ends.

One takes a rank's tokens of all heads to the ranks that attend those heads, in groups of heads, the other one takes
what they computed home. Rows are units of as many features as any head is a multiple of; of one group they are

    packed     [ranks, own tokens, width]      pieces for each other rank
    gathered   [all tokens, width]             in the order of the sequence: a piece lands where it belongs
    a          [all tokens, width]             what was computed, likewise
    arrived    [other ranks, own tokens, width]

and groups lie one behind the other. Everything is an index; no torch.
"""

import functools
from dataclasses import dataclass
from typing import override

from commfuse_megatron.problem import RowRange
from commfuse_megatron.schedule.all_to_all import build_all_to_all
from commfuse_megatron.schedule.binding import BoundSchedule, BoundStep, Transfer
from commfuse_megatron.schedule.program import Rows


@dataclass(frozen=True, slots=True)
class Exchange:
    """What travels in one direction.

    kept: by rank, the tokens of the sequence that it keeps: as many runs for each, in the rank's own order. widths: of
    each group, units per token, in the order of travel. goes_home: what was computed goes to who keeps its tokens.
    shares_first: to attend a later group takes what came with the first one, too: its keys and values.
    """

    kept: tuple[tuple[RowRange, ...], ...]
    widths: tuple[int, ...]
    goes_home: bool
    shares_first: bool = False

    @property
    def num_tokens(self) -> int:
        """Of all ranks."""
        return sum(map(self.own_tokens, range(len(self.kept))))

    def own_tokens(self, rank: int) -> int:
        """Tokens that a rank keeps."""
        return sum(run.size for run in self.kept[rank])

    def units_before(self, group: int) -> int:
        """Units per token of all groups before one."""
        return sum(self.widths[:group])


@dataclass(frozen=True, slots=True)
class BoundExchange(BoundSchedule):
    """One rank's steps of an exchange; a step is a piece: a group, a peer and a run of tokens."""

    exchange: Exchange

    @property
    @override
    def most_arrived_rows(self) -> int:
        exchange = self.exchange
        largest = max(map(exchange.own_tokens, range(len(exchange.kept))))
        return (len(exchange.kept) - 1) * largest * sum(exchange.widths)

    @property
    def num_groups(self) -> int:
        """Groups of heads."""
        return len(self.exchange.widths)

    @property
    def num_runs(self) -> int:
        """Runs of tokens that each rank keeps."""
        return len(self.exchange.kept[0])

    def steps_of(self, group: int, distance: int | None = None) -> range:
        """The steps of a group's pieces, or of those that go to the rank so far ahead of this one."""
        per_group = (len(self.exchange.kept) - 1) * self.num_runs
        start = group * per_group
        if distance is None:
            return range(start, start + per_group)
        return range(start + (distance - 1) * self.num_runs, start + distance * self.num_runs)

    def chunk(self, group: int, owner: int, run: int) -> int:
        """The flat number of a piece."""
        return owner * self.schedule.chunks_per_shard + group * self.num_runs + run

    def group_and_run(self, chunk: int) -> tuple[int, int]:
        """Of the piece of that number, its group, and which it is of the runs of all owners, one behind the other."""
        return group_and_run(chunk, self.num_groups, self.num_runs)

    def all_tokens(self, operand: str, group: int) -> Rows:
        """A group's rows in an operand of all tokens."""
        tokens, width = self.exchange.num_tokens, self.exchange.widths[group]
        return Rows(operand, tokens * self.exchange.units_before(group), tokens * width)

    def groups_for(self, group: int) -> tuple[int, ...]:
        """The groups that must be here before this one is attended."""
        return (group, 0) if self.exchange.shares_first and group else (group,)

    def piece(self, operand: str, group: int, owner: int, run: int) -> Rows:
        """The rows of a run of tokens that `owner` keeps in an operand of all tokens."""
        tokens, width = self.exchange.kept[owner][run], self.exchange.widths[group]
        return Rows(operand, self.all_tokens(operand, group).start + tokens.start * width, tokens.size * width)

    def packed_for_others(self, group: int) -> tuple[Rows, Rows]:
        """A group's pieces for the ranks before this one, and for those behind it, before they leave."""
        me, size = self.group_rank, len(self.exchange.kept)
        own = self.exchange.own_tokens(me) * self.exchange.widths[group]
        start = self._packed_start(group)
        return Rows("packed", start, me * own), Rows("packed", start + (me + 1) * own, (size - me - 1) * own)

    def packed_for_all(self, group: int) -> Rows:
        """A group's pieces for all ranks; those for this one are packed where all go by a collective, say."""
        count = len(self.exchange.kept) * self.exchange.own_tokens(self.group_rank)
        return Rows("packed", count * self.exchange.units_before(group), count * self.exchange.widths[group])

    def _packed_start(self, group: int) -> int:
        return self.packed_for_all(group).start

    def packed(self, group: int, target: int, run: int) -> Rows:
        """One of those pieces."""
        kept, width = self.exchange.kept[self.group_rank], self.exchange.widths[group]
        before = target * self.exchange.own_tokens(self.group_rank) + sum(each.size for each in kept[:run])
        return Rows("packed", self._packed_start(group) + before * width, kept[run].size * width)

    def arrived_group(self, group: int) -> Rows:
        """A group's pieces from all other ranks, in their order, when they are home."""
        count = (len(self.exchange.kept) - 1) * self.exchange.own_tokens(self.group_rank)
        return Rows("arrived", count * self.exchange.units_before(group), count * self.exchange.widths[group])

    def sent(self, index: int) -> Rows:
        """What a step sends."""
        per_group = max(1, (len(self.exchange.kept) - 1) * self.num_runs)
        (group, within), send = divmod(index, per_group), self.steps[index].send
        assert send is not None
        run = within % self.num_runs
        return self.piece("a", group, send.peer, run) if self.exchange.goes_home else self.packed(group, send.peer, run)


def group_and_run(chunk: int, num_groups: int, num_runs: int) -> tuple[int, int]:
    """See `BoundExchange.group_and_run`. num_runs: of each owner."""
    owner, number = divmod(chunk, num_groups * num_runs)
    group, run = divmod(number, num_runs)
    return group, owner * num_runs + run


@functools.lru_cache(maxsize=1024)
def bind_exchange(exchange: Exchange, group_rank: int) -> BoundExchange:
    """Bind the exchange to one rank."""
    group_size, runs, widths = len(exchange.kept), len(exchange.kept[0]), exchange.widths
    schedule = build_all_to_all(group_size, len(widths), runs, is_numbered_by_receiver=exchange.goes_home)
    chunk_rows = tuple(run.size * width for kept in exchange.kept for width in widths for run in kept)

    def arrives_at(sender: int, receiver: int, group: int, run: int) -> int:
        before, width = exchange.units_before(group), widths[group]
        if not exchange.goes_home:
            return exchange.num_tokens * before + exchange.kept[sender][run].start * width
        own, number = exchange.own_tokens(receiver), sender - (sender > receiver)
        earlier = sum(each.size for each in exchange.kept[receiver][:run])
        return (group_size - 1) * own * before + (number * own + earlier) * width

    def transfer(sender: int, receiver: int, number: int) -> Transfer | None:
        group, run = divmod(number, runs)
        chunk = (receiver if exchange.goes_home else sender) * schedule.chunks_per_shard + number
        peer = receiver if sender == group_rank else sender
        return Transfer(chunk, peer, arrives_at(sender, receiver, group, run)) if chunk_rows[chunk] else None

    steps = []
    for step in schedule.steps[group_rank]:
        assert step.send is not None
        assert step.receive is not None
        number = step.send.chunk.index
        send = transfer(group_rank, step.send.to_rank, number)
        receive = transfer(step.receive.from_rank, group_rank, number)
        steps.append(BoundStep(send, receive, compute=None, needs=None))
    per_rank = schedule.chunks_per_shard
    own = range(group_rank * per_rank, (group_rank + 1) * per_rank)
    received = (step.receive for step in steps if step.receive is not None)
    arrived = sum(chunk_rows[each.chunk] for each in received)
    return BoundExchange(schedule, group_rank, tuple(steps), chunk_rows, own, arrived, exchange)
