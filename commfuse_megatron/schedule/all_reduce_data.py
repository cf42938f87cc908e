"""What rows hold while the programs of an all-reduce are carried out, and what covers its transfers: `program_data`."""

from collections.abc import Iterable, Sequence
from typing import override

from commfuse_megatron.schedule.lower_all_reduce import result_operand
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import SCATTER, Issue, Program, WeightGrad
from commfuse_megatron.schedule.program_data import BIAS, Checked, Term


class CheckedAllReduce(Checked):
    """One rank's program, with both schedules, of which the gather's rows are the sums."""

    def __init__(self, rank: int, programs: Sequence[Program], policy: Policy, asked: Asked, *, attends: bool) -> None:
        super().__init__(rank, programs, policy, asked, attends=attends)
        self.sizes |= {"shard": 0, "out": 0, "kept": self._total if policy.has_windows else 0}

    @override
    def check_results(self) -> None:
        """Fail if a row of the result is not the sum of all ranks' products, on any rank, or more is left."""
        rows = {row: self._sum_of(row) for row in range(self._total)}
        self._require(result_operand(self.policy), rows, is_all=True)
        self._require("out", {}, is_all=True)
        self._check_weight_gradient(len(self.program.ops) - 1)

    def _sum_of(self, row: int) -> list[Term]:
        products: Iterable[Term] = (
            ("product", rank, ("a", rank, row), not self.asked.is_backward) for rank in self._ranks
        )
        return [*products, *([BIAS] * self.asked.has_bias)]

    @override
    def _factors(self) -> list[tuple[str, str]]:
        return [("a", "x_full")]

    def check_cover(self) -> None:
        """Own chunks are multiplied behind the others' of their number, each partial leaves at once, and the sums of a
        number begin to travel before the own product of the next, those of the last before the weight's gradient."""
        ops, bound = self.program.ops, self.scatter
        assert bound is not None
        per_shard, starts = bound.schedule.chunks_per_shard, [0]
        for count in bound.chunk_rows:
            starts.append(starts[-1] + count)
        product_of = {
            chunk: self.product_of[starts[chunk]] for chunk in range(self.num_chunks) if bound.chunk_rows[chunk]
        }
        own_of = {number: product_of.get(chunk) for number, chunk in enumerate(bound.own_chunks)}
        for chunk, product in product_of.items():
            own = own_of[chunk % per_shard]
            if own is not None and own < product:
                self.fail(own, f"own rows are to be multiplied behind the others', but op {product} is one of those.")
        numbers = sorted(product_of.values())
        for issue, op in enumerate(ops):
            if not isinstance(op, Issue) or op.send is None:
                continue
            number = op.send.chunk % per_shard
            if op.channel == SCATTER:
                sent = product_of[op.send.chunk]
                cover = next((other for other in numbers if other > sent), None)
            elif number + 1 < per_shard:
                cover = own_of[number + 1]
            else:
                cover = next((at for at, each in enumerate(ops) if isinstance(each, WeightGrad)), None)
            if cover is not None and issue > cover:
                self.fail(issue, f"begins behind op {cover}, which is to cover it.")
