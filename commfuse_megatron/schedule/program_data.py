"""What rows hold while the programs of a group are carried out, and whether that is at last what a pass promises.

Rows hold sums of terms, such as the product of row 3 of "a" on rank 1. Knows no order: `program_checks` carries out
the ops of each rank one by one, and hands over what arrives.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NoReturn

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule.actions import Algorithm
from commfuse_megatron.schedule.lower_attention import ADD_GRADIENTS, ATTEND, ATTEND_BACKWARD, SUM_SLABS
from commfuse_megatron.schedule.lower_linear import LOOK_UP, Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Compute, Copy, Gemm, Op, Program, Rows, Sum, WeightGrad, rows_read
from commfuse_megatron.schedule.program_text import render_program, say_rows

#: Of whom, and which row: ("shard", row of all) or (operand, rank, row); ("product", rank, term, is_forward).
Term = tuple[object, ...]
Value = tuple[Term, ...]

#: The bias, which is added to a sum.
BIAS: Term = ("bias",)
_BROUGHT = ("shard", "a", "x", "x_full", "addend")

# Enough to see what comes before an op and behind it.
_MAX_OPS = 17


class Checked:
    """One rank's program: what its operands hold, and what is asked of it.

    attends: whether attention is a part of the pass, see `lower_attention`.
    products: (number of the op, whether the rows are this rank's own) of all that makes products, in order.
    """

    def __init__(self, rank: int, programs: Sequence[Program], policy: Policy, asked: Asked, *, attends: bool) -> None:
        self.rank, self.program, self.policy, self.asked = rank, programs[rank], policy, asked
        self._ranks, self._attends = range(len(programs)), attends
        self.gather, self.scatter = self.program.gather, self.program.scatter
        bound = self.bound = self.scatter or self.gather
        # Where nothing is sent there is no schedule, which would say how many rows there are.
        ends = [rows.start + rows.count for op in self.program.ops for rows in rows_read(op)]
        total = bound.total_rows if bound is not None else max(ends, default=0)
        self._chunk_rows = bound.chunk_rows if bound is not None else ()
        self.num_chunks = len(self._chunk_rows)
        own = bound.own_rows if bound is not None else 0
        self._own = range(0) if bound is None else range(bound.own_start, bound.own_start + own)
        is_ring = bound is not None and bound.schedule.algorithm is Algorithm.RING
        self.sizes = dict.fromkeys(("gathered", "kept", "a", "x", "x_full", "addend"), total)
        self.sizes |= {"shard": own, "sent": total - own, "own": max(self._chunk_rows) if is_ring else own}
        self.sizes |= {"arrived": self.scatter.arrived_rows if self.scatter is not None else 0}
        self.sizes |= {"running": own, "out": total if self.scatter is None else own}
        self._total = total
        is_forward = attends and not asked.is_backward
        self._brought = tuple(name for name in _BROUGHT if not (is_forward and name == "a"))
        self._held: dict[tuple[str, int], tuple[Value, int]] = {}  # and the op that put it there
        self._unread: set[tuple[str, int]] = set()
        self._computed: dict[tuple[str, Term], int] = {}
        self._weight_grads: list[tuple[int, WeightGrad, list[tuple[Value, Value]]]] = []
        self._slabs: dict[int, list[Term]] = {}
        self._attended: Counter[Term] = Counter()
        self.products: list[tuple[int, bool]] = []
        self.product_of: dict[int, int] = {}  # by row

    def fail(self, op: int, sentence: str) -> NoReturn:
        """Raise ScheduleError about an op of this rank."""
        table = render_program(self.program, mark=op, max_ops=_MAX_OPS)
        raise ScheduleError(f"rank {self.rank}, op {op}: {sentence}\n\n{table}")

    # -- rows ---------------------------------------------------------------------------------------------------------

    def read(self, op: int, rows: Rows) -> list[Value]:
        """What rows hold; an op reads them."""
        return [self._read(op, rows.operand, row) for row in range(rows.start, rows.start + rows.count)]

    def _read(self, op: int, operand: str, row: int) -> Value:
        if operand == "shard":
            return (("shard", self._own.start + row),)
        if operand in self._brought:
            return ((operand, self.rank, row),)
        if (operand, row) not in self._held:
            self.fail(op, f"reads {operand}[{row}], where nothing was put.")
        self._unread.discard((operand, row))
        return self._held[operand, row][0]

    def write(self, op: int, rows: Rows, values: Iterable[Value]) -> None:
        """Put values into rows, which are as many."""
        if rows.operand in self._brought:
            self.fail(op, f"writes {say_rows(rows)}, which the call brought.")
        for row, value in enumerate(values, start=rows.start):
            place = (rows.operand, row)
            if place in self._unread:
                self.fail(op, f"writes over {rows.operand}[{row}], which nobody has read.")
            self._held[place] = value, op
            self._unread.add(place)

    # -- ops ----------------------------------------------------------------------------------------------------------

    def carry_out(self, number: int, op: Op) -> None:
        """Do what an op does to rows, all transfers apart."""
        match op:
            case Copy():
                self._require_counts(number, op.target, op.source)
                self.write(number, op.target, self.read(number, op.source))
            case Sum():
                self._require_counts(number, op.out, op.own, *op.adds)
                self.write(number, op.out, self._added(number, self.read(number, op.own), op.adds, op.has_bias))
            case Gemm():
                self._require_counts(number, op.out, op.a, *op.adds)
                found = [self._single(number, value) for value in self.read(number, op.a)]
                products: list[Value] = [(("product", self.rank, term, op.is_forward),) for term in found]
                self._note_products(number, op.chunk, found)
                self.write(number, op.out, self._added(number, products, op.adds, op.has_bias))
            case WeightGrad():
                self._require_counts(number, op.grad, op.x)
                pairs = zip(self.read(number, op.grad), self.read(number, op.x), strict=True)
                self._weight_grads.append((number, op, list(pairs)))
            case Compute():
                self._compute(number, op)

    def _compute(self, number: int, op: Compute) -> None:
        start = sum(self._chunk_rows[: op.chunk]) if op.chunk >= 0 else 0
        if op.chunk < 0 and any(rows.count < self._total for rows in (*op.reads, *op.writes)):
            self.fail(number, "works on rows of a chunk, and does not say of which.")
        match op.kind:
            case kind if kind in (LOOK_UP, ATTEND):
                target = self._only(number, op.writes)
                self._require_counts(number, target, *op.reads)
                name = "a" if kind == LOOK_UP else "attended"
                found: list[Term] = [(name, self.rank, start + row) for row in range(target.count)]
                self._note_computed(number, kind, found)
                self._require_chunk(number, op.chunk, found)
                values: list[Value] = [(term,) for term in found]
                if kind == LOOK_UP:
                    self._note_products(number, op.chunk, found)
                    values = [(("product", self.rank, term, True),) for term in found]
                self.write(number, target, self._added(number, values, op.reads, has_bias=False))
            case kind if kind == ATTEND_BACKWARD:
                grads = self._only(number, op.reads)
                found = [self._single(number, value) for value in self.read(number, grads)]
                for row, term in enumerate(found, start=start):
                    if term != ("product", self.rank, ("shard", row), False):
                        self.fail(number, f"takes {_say((term,))} for the gradient of row {row} of its queries.")
                self._note_computed(number, kind, found)
                self._require_chunk(number, op.chunk, [term[2] for term in found])  # type: ignore[misc]
                if op.chunk >= 0:
                    self._slabs[op.chunk] = found
                else:
                    self._attended.update(found)
            case kind if kind in (ADD_GRADIENTS, SUM_SLABS):
                self._note_computed(number, kind, [("chunk", op.chunk)])
                for chunk in (op.chunk,) if kind == ADD_GRADIENTS else tuple(self._slabs):
                    if chunk not in self._slabs:
                        self.fail(number, f"adds gradients of chunk {chunk}, which are not there.")
                    self._attended.update(self._slabs.pop(chunk))
            case _:
                self.fail(number, f"nothing is known of a computation {op.kind!r}.")

    def _only(self, op: int, ranges: tuple[Rows, ...]) -> Rows:
        if len(ranges) != 1:
            self.fail(op, f"{len(ranges)} ranges of rows, where one belongs.")
        return ranges[0]

    def _require_counts(self, op: int, *ranges: Rows) -> None:
        if len({rows.count for rows in ranges}) > 1:
            self.fail(op, f"works on {' and '.join(map(say_rows, ranges))}, which are not equally many rows.")

    def _added(self, op: int, values: list[Value], adds: tuple[Rows, ...], has_bias: bool) -> list[Value]:
        added = [self.read(op, rows) for rows in adds]
        return [sum(terms, ()) + (BIAS,) * has_bias for terms in zip(values, *added, strict=True)]

    def _single(self, op: int, value: Value) -> Term:
        if len(value) > 1:
            self.fail(op, f"reads {_say(value)}, a sum, where rows of one operand belong.")
        return value[0]

    def _note_computed(self, op: int, kind: str, terms: list[Term]) -> None:
        for term in terms:
            earlier = self._computed.setdefault((kind, term), op)
            if earlier != op:
                self.fail(op, f"computes what op {earlier} did for {_say((term,))}.")

    def _note_products(self, op: int, chunk: int, terms: list[Term]) -> None:
        self._note_computed(op, "product", terms)
        self._require_chunk(op, chunk, terms)
        self.products += [(op, is_own) for is_own in {term[-1] in self._own for term in terms}]
        self.product_of |= {term[-1]: op for term in terms}  # type: ignore[misc]

    def _require_chunk(self, op: int, chunk: int, terms: list[Term]) -> None:
        if chunk >= 0:
            start = sum(self._chunk_rows[:chunk])
            stop = start + self._chunk_rows[chunk]
            if [term[-1] for term in terms] != list(range(start, stop)):
                rows = ", ".join(map(_say_term, terms))
                self.fail(op, f"computes {rows} as chunk {chunk}, which is rows {start} to {stop - 1}.")

    # -- what is promised ---------------------------------------------------------------------------------------------

    def check_results(self) -> None:
        """Fail if the pass has not left all that is asked of it, and nothing else."""
        last = len(self.program.ops) - 1
        asked, everything = self.asked, range(self._total)
        arrived = [row for row in everything if row not in self._own] if self.gather is not None else []
        self._require("gathered", {row: [("shard", row)] for row in arrived})
        if self.gather is not None and (asked.keeps_gathered or asked.weight_grad == "later"):
            left = "kept" if self.policy.has_windows else "gathered"
            self._require(left, {row: [("shard", row)] for row in everything})
        self._require("out", dict(enumerate(self._result())), is_all=True)
        self._check_order_of_addition()
        self._check_weight_gradient(last)
        due = everything if self._attends and asked.is_backward and asked.has_product else ()
        if self._attended != Counter(("product", self.rank, ("shard", row), False) for row in due):
            self.fail(last, "the gradients of heads are not those of all queries.")

    def _result(self) -> list[list[Term]]:
        asked, is_forward, bias = self.asked, not self.asked.is_backward, [BIAS] * self.asked.has_bias
        if not asked.has_product:
            return []
        if self.scatter is None:
            return [[("product", self.rank, ("shard", row), is_forward), *bias] for row in range(self._total)]
        source = "attended" if self._attends else "a"
        return [
            [("product", rank, (source, rank, row), is_forward) for rank in self._ranks]
            + [("addend", rank, row) for rank in self._ranks if asked.has_addend]
            + bias
            for row in self._own
        ]

    def _require(self, operand: str, expected: dict[int, list[Term]], *, is_all: bool = False) -> None:
        rows = {row for name, row in self._held if name == operand} if is_all else set()
        for row in sorted(rows | expected.keys()):
            value, op = self._held.get((operand, row), ((), len(self.program.ops) - 1))
            due = tuple(expected.get(row, ()))
            if Counter(value) != Counter(due):
                self.fail(op, f"at the end {operand}[{row}] holds {_say(value)}, and not {_say(due)}.")

    def _check_order_of_addition(self) -> None:
        """Fail where a direct reduce-scatter adds partials in another order than own ones, then as they are sent."""
        bound = self.scatter
        if bound is None or bound.schedule.algorithm is Algorithm.RING:
            return
        received = [step.receive.peer for step in bound.steps if step.receive is not None]
        due = [self.rank, *dict.fromkeys(received)]
        for row in range(len(self._own) if self.asked.has_product else 0):
            value, op = self._held["out", row]
            found = [term[1] for term in value if term[0] == "product"]
            if found != due:
                self.fail(op, f"adds the partials of out[{row}] in the order of ranks {found}, and not {due}.")

    def _check_weight_gradient(self, last: int) -> None:
        count = int(self.asked.weight_grad == "now")
        if len(self._weight_grads) != count:
            self.fail(last, f"the weight's gradient is computed {len(self._weight_grads)} times, and not {count}.")
        due = [
            [tuple((self._term(name, row),) for name in names) for row in range(self._total)]
            for names in self._factors()
        ]
        for number, op, pairs in self._weight_grads:
            if op.accumulates != self.asked.accumulates:
                self.fail(number, f"accumulates is {op.accumulates}, and not {self.asked.accumulates}.")
            if pairs not in due:
                self.fail(number, "the weight's gradient is not that of all rows, each by its own.")

    def _factors(self) -> list[tuple[str, str]]:
        """What the weight's gradient may be the product of: of the output's gradients, and of the input."""
        possible = [("a", "x_full")] if self.gather is None else [("a", "shard"), ("shard", "x")]
        if self.asked.has_product and self.gather is not None:
            possible = possible[:1] if self.scatter is not None else possible[1:]
        return possible

    def _term(self, name: str, row: int) -> Term:
        return (name, row) if name == "shard" else (name, self.rank, row)


def _say(value: Value) -> str:
    return " + ".join(map(_say_term, value)) or "nothing"


def _say_term(term: Term) -> str:
    match term:
        case ("product", rank, factor, is_forward):
            return f"rank {rank}'s {'' if is_forward else 'backward '}product of {_say_term(factor)}"  # type: ignore[arg-type]
        case (name, rank, row):
            return f"{name}[{row}] of rank {rank}"
        case (name, row):
            return f"row {row} of all shards"
    return f"{term[0]}"
