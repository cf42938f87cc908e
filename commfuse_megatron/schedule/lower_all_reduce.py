"""A product summed over ranks, all rows on every rank: a reduce-scatter and an all-gather in one program.

The rows of one owner are summed there once, in a fixed order, and sent to all others as they are, so results are
bit-identical on all ranks. The second half of the sum starts per chunk, while products of later chunks still run. With
two chunks per shard, on each of two ranks (other: the partial of the peer's chunk; own: of this rank's):

    compute   [other 0][own 0  ][other 1][sum 0][own 1     ][sum 1][copy]
    transfer           [other 0]         [other 1][result 0]       [result 1]

So of all that travels only the results of the last chunks have nothing to hide under, unless the weight's gradient is
due, which needs nothing of other ranks and comes behind them.
"""

import itertools
from collections.abc import Iterator

from commfuse_megatron.schedule.binding import BoundSchedule
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Lowering, Policy
from commfuse_megatron.schedule.program import GATHER, Program, Rows, Sum, WeightGrad


def result_operand(policy: Policy) -> str:
    """The operand that is the result of an all-reduce, where it lies as the rows that a call keeps of a gather do.

    Without windows the others' rows arrive in the result itself. With windows they arrive there, in memory that the
    next call writes into, and have to be copied out: (R - 1) / R of the result is read and written once more. Peers
    cannot write into the result, which is the caller's and mapped nowhere.
    """
    return "kept" if policy.has_windows else "gathered"


def lower_all_reduce(scatter: BoundSchedule, gather: BoundSchedule, policy: Policy, asked: Asked) -> Program:
    """result [M, n] = all-reduce(a [M, k] @ weight) (+ bias, once), partials sent while the next is computed.

    Operands: a, the result (see `result_operand`); for the weight's gradient x_full [M, K].
    """
    low = Lowering(policy, gather, scatter, gather_label="all-gather of the sums")
    return _AllReduce(low, scatter, gather, asked).lower()


class _AllReduce:
    def __init__(self, low: Lowering, scatter: BoundSchedule, gather: BoundSchedule, asked: Asked) -> None:
        self._low, self._scatter, self._gather, self._asked = low, scatter, gather, asked
        self._size, self._chunks = scatter.schedule.group_size, scatter.schedule.chunks_per_shard
        self._result = result_operand(low.policy)
        is_apart = low.policy.keeps_own_apart and self._size > 1
        self._own = low.own_chunk if is_apart else low.chunk
        self._own_operand = "own" if is_apart else self._result
        num_arriving = self._size - 1
        # Not of the last chunk: its own product is what its partials travel under.
        self._may_add = num_arriving <= low.policy.most_adds and low.may_add_arrived(
            has_cover=True, has_bias=asked.has_bias
        )
        self._lanes: dict[int, int | None] = {}

    def lower(self) -> Program:
        low, last = self._low, self._chunks - 1
        low.fork()
        for number in range(self._chunks):
            for distance in range(1, self._size):
                self._send_partial(distance, number)
                # One product later than its own, so that the wait for the last partial stalls nothing.
                if distance == 1 and number:
                    self._finish(number - 1)
            if self._size == 1 or not self._adds(number):
                self._multiply_own(number, ())
        if self._size > 1:
            self._finish(last)
        low.join()
        self._copy_arrived(range(last))
        if self._asked.weight_grad == "now":
            low.ops.append(WeightGrad(low.all_rows("a"), low.all_rows("x_full"), self._asked.accumulates))
        self._copy_arrived(range(last, self._chunks))
        return low.program()

    def _adds(self, number: int) -> bool:
        """Whether the product of own chunk `number` adds what arrived, instead of a sum behind it."""
        return self._may_add and number < self._chunks - 1

    def _send_partial(self, distance: int, number: int) -> None:
        low, bound = self._low, self._scatter
        chunk = (bound.group_rank + distance) % self._size * self._chunks + number
        low.turn()
        self._multiply(chunk, low.partial(chunk))
        low.issue_scatter(self._batch(distance, number) + 1)

    def _multiply_own(self, number: int, arrived: tuple[Rows, ...]) -> None:
        low, chunk = self._low, self._scatter.own_chunks[number]
        if not arrived:
            low.turn()
            self._lanes[number] = low.lane
        is_result = bool(arrived) or self._size == 1
        target = low.chunk(self._result, chunk) if is_result else self._own(self._own_operand, chunk)
        self._multiply(chunk, target, arrived, has_bias=is_result and self._asked.has_bias)

    def _finish(self, number: int) -> None:
        """Sum an own chunk as soon as its partials are here, and send it to all others."""
        low, chunk = self._low, self._scatter.own_chunks[number]
        if not self._adds(number):
            low.on(self._lanes[number])
        if self._scatter.chunk_rows[chunk]:
            arrived = low.wait_for_arrived(number)
            if self._adds(number):
                self._multiply_own(number, arrived)
            else:
                out, own = low.chunk(self._result, chunk), self._own(self._own_operand, chunk)
                low.ops.append(Sum(out, own, arrived, self._asked.has_bias))
        for distance in range(1, self._size):
            index = self._batch(distance, number)
            is_sent = self._gather.steps[index].send is not None
            low.issue(GATHER, self._gather, index, low.chunk(self._result, chunk) if is_sent else None)

    def _copy_arrived(self, numbers: range) -> None:
        """Wait for these chunks of all others, and put them into the result where they are not yet there."""
        low = self._low
        if not low.policy.has_windows or not numbers:
            return
        low.wait((GATHER, self._batch(distance, each)) for distance in range(1, self._size) for each in numbers)
        for rows in self._runs(numbers):
            # In turn, not by the transport: there they would stand in line behind the last sums on their way to others.
            low.copy(Rows(self._result, rows.start, rows.count), rows, is_beside=False)

    def _runs(self, numbers: range) -> Iterator[Rows]:
        """The rows of these chunks of all others, in as few runs as there are."""
        starts, chunks, me = self._low.starts, self._chunks, self._scatter.group_rank
        start = stop = 0
        for owner in itertools.chain(range(me), range(me + 1, self._size)):
            first, behind = starts[owner * chunks + numbers[0]], starts[owner * chunks + numbers[-1] + 1]
            if first != stop:
                if stop > start:
                    yield Rows("gathered", start, stop - start)
                start = first
            stop = behind
        if stop > start:
            yield Rows("gathered", start, stop - start)

    def _batch(self, distance: int, number: int) -> int:
        """The gather's batch that sends own chunk `number` to the rank so far behind; the scatter's is one later."""
        return (distance - 1) * self._chunks + number

    def _multiply(self, chunk: int, target: Rows, arrived: tuple[Rows, ...] = (), *, has_bias: bool = False) -> None:
        is_forward = not self._asked.is_backward
        rows = self._low.chunk("a", chunk)
        self._low.gemm(rows, target, arrived, has_bias=has_bias, is_forward=is_forward, chunk=chunk)
