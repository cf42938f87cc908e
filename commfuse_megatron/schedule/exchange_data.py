"""What rows hold while the programs of attention over a split sequence are carried out: see `program_data`.

A unit of a piece is ("piece", whose token, for which rank's heads, group, token, unit); what is computed of it is
("result", by which rank, group, token, unit). How features of the two belong together the kernels know.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import override

from commfuse_megatron.schedule.exchange import BoundExchange
from commfuse_megatron.schedule.lower_attention import ATTEND
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lower_ulysses import ATTEND_GROUP, PACK, PLACE, UNPACK
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import GATHER, SCATTER, Compute, Issue, Pause, Program, Rows, Wait
from commfuse_megatron.schedule.program_data import Checked, Term
from commfuse_megatron.schedule.program_text import say_rows


class CheckedExchange(Checked):
    """One rank's program."""

    def __init__(self, rank: int, programs: Sequence[Program], policy: Policy, asked: Asked, *, attends: bool) -> None:
        super().__init__(rank, programs, policy, asked, attends=attends)
        assert isinstance(self.gather, BoundExchange)
        assert isinstance(self.scatter, BoundExchange)
        self._arriving, self._leaving = self.gather, self.scatter
        width = sum(self._arriving.exchange.widths)
        total = self._arriving.exchange.num_tokens * width
        self.sizes = {"packed": len(programs) * self._arriving.exchange.own_tokens(rank) * width}
        self.sizes |= {"gathered": total, "kept": total, "arrived": self._leaving.arrived_rows}
        self.sizes |= {"a": self._leaving.exchange.num_tokens * sum(self._leaving.exchange.widths)}
        self._brought = ()
        self._unpacked: set[int] = set()
        self._attends_of: list[tuple[int, int, Rows]] = []  # number of the op, group, what it writes
        self._pauses = [number for number, op in enumerate(self.program.ops) if isinstance(op, Pause)]

    @override
    def _compute(self, number: int, op: Compute) -> None:
        me, arriving = self.rank, self._arriving
        if op.kind != ATTEND and not 0 <= op.chunk < arriving.num_groups:
            self.fail(number, f"there is no group {op.chunk}.")
        match op.kind:
            case kind if kind == PACK:
                if op.writes != arriving.packed_for_others(op.chunk):
                    self.fail(number, f"packs group {op.chunk} at other rows than those of its pieces.")
                for target, to_ranks in zip(op.writes, (self._ranks[:me], self._ranks[me + 1 :]), strict=True):
                    pieces = (self._pieces(me, to_rank, op.chunk) for to_rank in to_ranks)
                    self.write(number, target, ((term,) for terms in pieces for term in terms))
            case kind if kind == PLACE:
                runs = range(arriving.num_runs)
                if op.writes != tuple(arriving.piece("gathered", op.chunk, me, run) for run in runs):
                    self.fail(number, f"places group {op.chunk} at other rows than its own.")
                terms = iter(self._pieces(me, me, op.chunk))
                for target in op.writes:
                    self.write(number, target, ((term,) for term in itertools.islice(terms, target.count)))
            case kind if kind in (ATTEND_GROUP, ATTEND):
                self._attend(number, op)
            case kind if kind == UNPACK:
                arrived, *own = op.reads or (Rows("arrived", 0, 0),)
                others = [self._results(rank, me, op.chunk) for rank in self._ranks if rank != me]
                self._require_values(number, arrived, [term for terms in others for term in terms])
                found = [value for rows in own for value in self.read(number, rows)]
                if found != [(term,) for term in self._results(me, me, op.chunk)]:
                    self.fail(number, f"takes other rows for its own of group {op.chunk}.")
                if op.chunk in self._unpacked:
                    self.fail(number, f"unpacks group {op.chunk} a second time.")
                self._unpacked.add(op.chunk)
            case _:
                self.fail(number, f"nothing is known of a computation {op.kind!r}.")

    def _attend(self, number: int, op: Compute) -> None:
        me, leaving, tokens = self.rank, self._leaving, self._leaving.exchange.num_tokens
        target = self._only(number, op.writes)
        if op.kind == ATTEND_GROUP:
            group, expected, first, count = op.chunk, leaving.all_tokens("a", op.chunk), 0, tokens
        else:
            owner, piece = divmod(op.chunk, leaving.schedule.chunks_per_shard)
            group, run = divmod(piece, leaving.num_runs)
            kept = leaving.exchange.kept[owner][run]
            expected, first, count = leaving.piece("a", group, owner, run), kept.start, kept.size
        if target != expected:
            self.fail(number, f"computes {say_rows(target)}, and says that it is {say_rows(expected)}.")
        needed = self._arriving.groups_for(group)
        if len(op.reads) != len(needed):
            self.fail(number, f"needs {len(needed)} groups of what arrived, and reads {len(op.reads)}.")
        for rows, other in zip(op.reads, needed, strict=True):
            self._require_values(number, rows, self._gathered(other))
        width = leaving.exchange.widths[group]
        found: list[Term] = [
            ("result", me, group, token, unit) for token in range(first, first + count) for unit in range(width)
        ]
        self._note_computed(number, op.kind, found)
        self._attends_of.append((number, group, target))
        self.write(number, target, ((term,) for term in found))

    def _require_values(self, number: int, rows: Rows, expected: list[Term]) -> None:
        found = self.read(number, rows)
        if found != [(term,) for term in expected]:
            self.fail(number, f"reads {say_rows(rows)}, which does not hold what belongs there, each in its place.")

    def _tokens(self, rank: int) -> Iterator[int]:
        return (token for run in self._arriving.exchange.kept[rank] for token in range(run.start, run.stop))

    def _pieces(self, sender: int, receiver: int, group: int) -> list[Term]:
        units = range(self._arriving.exchange.widths[group])
        return [("piece", sender, receiver, group, token, unit) for token in self._tokens(sender) for unit in units]

    def _results(self, rank: int, owner: int, group: int) -> list[Term]:
        units = range(self._leaving.exchange.widths[group])
        return [("result", rank, group, token, unit) for token in self._tokens(owner) for unit in units]

    def _gathered(self, group: int) -> list[Term]:
        """In the order of the sequence."""
        everything = [term for rank in self._ranks for term in self._pieces(rank, self.rank, group)]
        return sorted(everything, key=lambda term: term[-2:])

    @override
    def check_results(self) -> None:
        last, exchange = len(self.program.ops) - 1, self._arriving.exchange
        groups = range(len(exchange.widths))
        if self._unpacked != (set(groups) if exchange.own_tokens(self.rank) else set()):
            self.fail(last, f"groups {sorted(self._unpacked)} are unpacked, of {len(groups)}.")
        if sum(rows.count for _, _, rows in self._attends_of) != self.sizes["a"]:
            self.fail(last, "not all rows are computed.")
        if self.asked.keeps_gathered:
            left = "kept" if self.policy.has_windows else "gathered"
            everything = [term for group in groups for term in self._gathered(group)]
            self._require(left, {row: [term] for row, term in enumerate(everything)}, is_all=True)

    def _check_pauses(self, before: Sequence[int]) -> None:
        """Fail unless the caller has brought what is packed, may cover what travels, and takes what has come home."""
        groups, is_backward, pauses = self._arriving.num_groups, self.asked.is_backward, self._pauses
        expected = (2 * groups if is_backward else groups - 1) if self.asked.pauses else 0
        if len(pauses) != expected:
            self.fail(len(self.program.ops) - 1, f"{len(pauses)} pauses, where {expected} are asked for.")
        if not pauses:
            return
        per_group = (len(self._ranks) - 1) * self._arriving.num_runs
        for number, op in enumerate(self.program.ops):
            if isinstance(op, Compute) and op.kind in (PACK, PLACE):
                if not all(before[number] >> pause & 1 for pause in pauses[: op.chunk]):
                    self.fail(number, f"needs group {op.chunk}, which the caller has not brought.")
            elif isinstance(op, Issue) and op.channel == GATHER:
                if number > [*pauses, number][op.step // per_group]:
                    self.fail(number, "begins behind what the caller computes, which is to cover it.")
            elif is_backward and isinstance(op, Issue):
                if number > pauses[groups]:
                    self.fail(number, "begins behind what the caller computes, which is to cover it.")
            elif is_backward and isinstance(op, Wait):
                for channel, step in op.batches:
                    if channel == SCATTER and number < pauses[groups + step // per_group]:
                        self.fail(number, "waits before the caller has computed what is to cover it.")

    def check_cover(self, before: Sequence[int]) -> None:
        """Fail where transfers stand behind what is to hide them. before: see `program_checks`."""
        self._check_pauses(before)
        ops, attends = self.program.ops, self._attends_of
        if not attends or len(self._ranks) == 1:
            return
        per_group = (len(self._ranks) - 1) * self._arriving.num_runs
        issues = [(number, op) for number, op in enumerate(ops) if isinstance(op, Issue)]
        for issue, op in issues:
            group = op.step // per_group
            if op.channel == GATHER and issue > attends[0][0]:
                self.fail(issue, "begins behind an attention that is to cover it.")
            for number, attended, _ in attends:
                if op.channel == GATHER and attended < group and before[number] >> issue & 1:
                    self.fail(number, f"is behind what op {issue} brings of a later group.")
                if op.channel == SCATTER and attended > group and number < issue:
                    self.fail(issue, f"begins behind op {number}, which is to cover it.")
        sends = [issue for issue, op in issues if op.channel == SCATTER]
        me, (number, group, own_last) = self.rank, attends[-1]
        splits = any(isinstance(op, Compute) and op.kind == ATTEND for op in ops)
        if splits and self._arriving.exchange.own_tokens(me):
            runs = [self._leaving.piece("a", group, me, run) for run in range(self._leaving.num_runs)]
            if own_last not in runs:
                self.fail(number, "own rows are to be computed last.")
            if sends and max(sends) > min(at for at, _, rows in attends if rows in runs):
                self.fail(max(sends), "begins behind the own rows, which are to cover it.")
