"""Proof that the programs of all ranks of a group are one correct pass, whoever runs them.

Only what a program says counts: lanes are queues that nothing but its ops order, what arrives may be written at any
time before it is waited for, and what is sent is read until the end. What rows hold `program_data` follows. In time
that grows with the square of the number of ops: for tests and tools, not for calls.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule import program as prog
from commfuse_megatron.schedule.all_reduce_data import CheckedAllReduce
from commfuse_megatron.schedule.exchange import BoundExchange
from commfuse_megatron.schedule.exchange_data import CheckedExchange
from commfuse_megatron.schedule.lower_attention import ADD_GRADIENTS, ATTEND_BACKWARD, SUM_SLABS
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program_data import Checked, Value
from commfuse_megatron.schedule.program_text import say_batch, say_rows


def validate_programs(
    programs: Sequence[prog.Program],
    policy: Policy,
    asked: Asked,
    *,
    attends: bool = False,
    all_reduces: bool = False,
) -> None:
    """Return if the programs of all ranks of a group, by group rank, do what is asked of a pass.

    Proven: every send has its receive, in the same order at both ends; nobody waits for ever, even where one queue
    runs everything and the batches of a rank complete in order; nothing is read before it is there or overwritten
    while it may be read; every row of the result is the sum that it should be, the weight's gradient is that of all
    rows, and what is to be left to the caller is; own rows are multiplied first in a gather, before anything arrives,
    and last in a scatter, behind the last transfer; no transfer begins behind all that could cover it. Of attention
    over a split sequence: every unit of every piece is attended in its place, and comes home to its place, once.

    Args:
        policy, asked: what the programs were lowered for. attends: by `lower_attention`; all_reduces: by
            `lower_all_reduce`, whose result is the whole sum on all ranks.

    Raises:
        ScheduleError: what is wrong, on which rank and in which op, with that line marked in the printed program.
    """
    _check_group(programs)
    kind: type[Checked] = CheckedExchange if isinstance(programs[0].gather, BoundExchange) else Checked
    kind = CheckedAllReduce if all_reduces else kind
    ranks = [kind(rank, programs, policy, asked, attends=attends) for rank in range(len(programs))]
    _check_messages(ranks)
    done_before = [_check_order(rank) for rank in ranks]
    _carry_out(ranks)
    for rank, before in zip(ranks, done_before, strict=True):
        rank.check_results()
        if isinstance(rank, CheckedExchange):
            rank.check_cover(before)
        elif isinstance(rank, CheckedAllReduce):
            rank.check_cover()
        else:
            _check_cover(rank, before)


def _check_group(programs: Sequence[prog.Program]) -> None:
    """All programs belong to the same schedules, and each is that of its rank."""
    for rank, program in enumerate(programs):
        if program.schedules.keys() != programs[0].schedules.keys():
            raise ScheduleError(f"rank {rank} has other schedules than rank 0.")
        for channel, bound in program.schedules.items():
            first = programs[0].schedules[channel]
            if (bound.group_rank, bound.schedule.group_size) != (rank, len(programs)):
                where = f"rank {bound.group_rank} of {bound.schedule.group_size}"
                raise ScheduleError(f"the program of rank {rank} of {len(programs)} has the {channel} of {where}.")
            if (bound.schedule, bound.chunk_rows) != (first.schedule, first.chunk_rows):
                raise ScheduleError(f"the {channel} of rank {rank} is of another schedule or size than that of rank 0.")


# -- messages ---------------------------------------------------------------------------------------------------------


class _End(NamedTuple):
    """What both ends of a message agree on, and then whose end it is: (rank, op)."""

    batch: prog.Batch
    chunk: int
    num_rows: int
    at_row: int
    rank: Checked
    op: int

    def __str__(self) -> str:
        return f"chunk {self.chunk} in {say_batch(self.batch)}, {self.num_rows} rows at row {self.at_row}"


def _check_messages(ranks: list[Checked]) -> None:
    """Every message has two equal ends, and between two ranks they come in the same order at both."""
    sent, received = defaultdict[tuple[int, int], list[_End]](list), defaultdict[tuple[int, int], list[_End]](list)
    for rank in ranks:
        issued: set[prog.Batch] = set()
        for number, op in enumerate(rank.program.ops):
            if not isinstance(op, prog.Issue):
                continue
            batch = (op.channel, op.step)
            if batch in issued:
                rank.fail(number, f"issues {say_batch(batch)} a second time.")
            issued.add(batch)
            if op.send is None and op.receive is None:
                rank.fail(number, "issues a batch of nothing.")
            if op.send is not None:
                sent[rank.rank, op.send.peer].append(_end(rank, number, batch, op.send, len(ranks)))
            if op.receive is not None:
                received[op.receive.peer, rank.rank].append(_end(rank, number, batch, op.receive, len(ranks)))
                target = prog.Rows(prog.ARRIVES_IN[op.channel], op.receive.at_row, op.receive.rows.count)
                if op.receive.rows != target:
                    rank.fail(number, f"receives at {say_rows(op.receive.rows)} what is written to {say_rows(target)}.")
    for pair in sent.keys() | received.keys():
        for ours, theirs in itertools.zip_longest(sent[pair], received[pair]):
            if ours is None:
                theirs.rank.fail(theirs.op, f"receives {theirs} from rank {pair[0]}, which does not send it.")
            if theirs is None or ours[:4] != theirs[:4]:
                other = f"takes {theirs}" if theirs is not None else "does not receive it"
                ours.rank.fail(ours.op, f"sends {ours} to rank {pair[1]}, which {other}.")


def _end(rank: Checked, number: int, batch: prog.Batch, message: prog.Message, group_size: int) -> _End:
    if message.peer not in range(group_size) or message.peer == rank.rank:
        rank.fail(number, f"rank {message.peer} is no peer in a group of {group_size}.")
    if message.rows.count < 1:
        rank.fail(number, "a message of no rows.")
    return _End(batch, message.chunk, message.rows.count, message.at_row, rank, number)


# -- order ------------------------------------------------------------------------------------------------------------


class _Access(NamedTuple):
    """Of rows by an op, which may begin once `after`, a set of bits, is done.

    ends: whether the bit of the op says that the access is over; what is sent is read until the end of the program.
    """

    op: int
    rows: prog.Rows
    writes: bool
    after: int
    ends: bool = True

    def is_before(self, other: "_Access") -> bool:
        return self.ends and bool(other.after >> self.op & 1)


def _check_order(rank: Checked) -> list[int]:
    """Fail where ops that conflict are not ordered. Returns, for each op, which are done before it: bits by number.

    The bit of a batch says that what it brings is here; that of a copy beside, that it is done.
    """
    held: dict[int | None, int] = {None: 0}  # by lane: what is done before its next op
    lane: int | None = None
    brings: dict[prog.Batch, int] = {}
    accesses = defaultdict[str, list[_Access]](list)
    before = []
    last = len(rank.program.ops) - 1
    for number, op in enumerate(rank.program.ops):
        before.append(held[lane])
        _check_op(rank, number, op)
        for access in _accesses(number, op, held[lane]):
            accesses[access.rows.operand].append(access)
        match op:
            case prog.Issue():
                if op.receive is not None:
                    brings[op.channel, op.step] = number
            case prog.Copy() if op.is_beside:
                brings[prog.COPIES, op.number] = number
            case prog.Wait():
                for batch in op.batches:
                    if batch not in brings:
                        rank.fail(number, f"waits for {say_batch(batch)}, which has not been issued or brings nothing.")
                    held[lane] |= 1 << brings[batch]
            case prog.Fork():
                if lane is not None:
                    rank.fail(number, "only the main lane forks.")
                held |= {fresh: held.get(fresh, 0) | held[None] for fresh in range(op.lanes)}
            case prog.On() | prog.After():
                if op.lane not in held:
                    rank.fail(number, f"there is no lane {op.lane}.")
                if isinstance(op, prog.On):
                    lane = op.lane
                else:
                    held[lane] |= held[op.lane]
            case prog.Join():
                for joined in range(op.lanes):
                    if joined not in held:
                        rank.fail(number, f"there is no lane {joined}.")
                    held[None] |= held.pop(joined)
                lane = None
            case prog.Finish():
                if number != last or lane is not None or len(held) > 1:
                    rank.fail(number, "the end is not the last op of the main lane, with all others joined.")
            case prog.Pause():
                if lane is not None or len(held) > 1:
                    rank.fail(number, "only the main lane pauses, with all others joined.")
                held[lane] |= 1 << number
            case _:
                held[lane] |= 1 << number
    if rank.program.schedules and not isinstance(rank.program.ops[-1], prog.Finish):
        rank.fail(last, "the program does not wait for the end of its transfers.")
    for found in accesses.values():
        _check_accesses(rank, found)
    return before


def _accesses(number: int, op: prog.Op, held: int) -> list[_Access]:
    reads, writes = prog.rows_read(op), prog.rows_written(op)
    if isinstance(op, prog.Compute):
        # What attention's backward kernels share besides rows: gradients of keys and values.
        slab, sums = prog.Rows("slabs", op.chunk, 1), prog.Rows("sums", 0, 1)
        slabs = prog.Rows("slabs", 0, 1 << 30)
        hidden = {
            ATTEND_BACKWARD: (slab if op.chunk >= 0 else sums,),
            ADD_GRADIENTS: (slab, sums),
            SUM_SLABS: (slabs, sums),
        }
        writes = (*writes, *hidden.get(op.kind, ()))
    is_beside = isinstance(op, prog.Issue) or (isinstance(op, prog.Copy) and op.is_beside)
    found = [_Access(number, rows, False, held, ends=not isinstance(op, prog.Issue)) for rows in reads]
    found += [_Access(number, rows, True, 0 if is_beside else held) for rows in writes]
    return [access for access in found if access.rows.count]


def _check_accesses(rank: Checked, found: list[_Access]) -> None:
    """Of one operand: two that overlap are ordered, unless both read."""
    found.sort(key=lambda access: access.rows.start)
    for index, one in enumerate(found):
        for other in itertools.islice(found, index + 1, None):
            if other.rows.start >= one.rows.start + one.rows.count:
                break
            if not (one.writes or other.writes) or one.is_before(other) or other.is_before(one):
                continue
            op = rank.program.ops[one.op]
            if (
                one.op == other.op
                and isinstance(op, prog.Sum)
                and op.own == op.out
                and one.rows == other.rows == op.out
            ):
                continue
            first, second = sorted((one, other), key=lambda access: access.op)
            what = [f"{'writes' if access.writes else 'reads'} {say_rows(access.rows)}" for access in (first, second)]
            rank.fail(second.op, f"{what[1]} while op {first.op} {what[0]}: nothing orders them.")


def _check_op(rank: Checked, number: int, op: prog.Op) -> None:
    """Rows lie in their operands, chunks exist, and whoever runs the op can."""
    for rows in (*prog.rows_read(op), *prog.rows_written(op)):
        size = rank.sizes.get(rows.operand, 0)
        if rows.count < 0 or not 0 <= rows.start <= size - rows.count:
            rank.fail(number, f"{say_rows(rows)} lies outside of the {size} rows of {rows.operand!r}.")
    if isinstance(op, prog.Gemm | prog.Compute) and not -1 <= op.chunk < rank.num_chunks:
        rank.fail(number, f"there is no chunk {op.chunk}.")
    if isinstance(op, prog.Gemm) and len(op.adds) > max(1, rank.policy.most_adds):
        rank.fail(number, f"adds {len(op.adds)} partials, and a GEMM adds {rank.policy.most_adds}.")
    if isinstance(op, prog.Gemm) and op.adds and op.has_bias and not rank.policy.adds_bias_too:
        rank.fail(number, "adds a bias beside partials.")
    if isinstance(op, prog.Gemm | prog.Sum):
        distances = {b.start - a.start for a, b in itertools.pairwise(op.adds)}
        if len(distances) > 1 or len({rows.operand for rows in op.adds}) > 1:
            rank.fail(number, "what is added lies in several operands, or not at equal distances.")


# -- the run ----------------------------------------------------------------------------------------------------------


def _carry_out(ranks: list[Checked]) -> None:
    """Run all programs: the ops of a rank one by one, whatever their lane, and its batches one after the other."""
    positions = [0] * len(ranks)
    queues: list[list[prog.Issue]] = [[] for _ in ranks]  # of batches that are not complete
    complete: set[tuple[int, prog.Batch]] = set()
    values: dict[tuple[int, prog.Batch], list[Value]] = {}
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in ranks:
            ops, queue = rank.program.ops, queues[rank.rank]
            while positions[rank.rank] < len(ops):
                number = positions[rank.rank]
                op = ops[number]
                if _is_blocked(rank.rank, op, queue, complete):
                    break
                if isinstance(op, prog.Issue):
                    queue.append(op)
                    if op.send is not None:
                        values[rank.rank, (op.channel, op.step)] = rank.read(number, op.send.rows)
                rank.carry_out(number, op)
                positions[rank.rank] += 1
                has_moved = True
        begun = complete | {(number, (queue[0].channel, queue[0].step)) for number, queue in enumerate(queues) if queue}
        for rank in ranks:
            queue = queues[rank.rank]
            if queue and all((peer, (queue[0].channel, queue[0].step)) in begun for peer in _peers(queue[0])):
                op = queue.pop(0)
                complete.add((rank.rank, (op.channel, op.step)))
                if op.receive is not None:
                    number = rank.program.ops.index(op)
                    rank.write(number, op.receive.rows, values[op.receive.peer, (op.channel, op.step)])
                has_moved = True
    for rank in ranks:
        if positions[rank.rank] < len(rank.program.ops):
            first = queues[rank.rank][0]
            others = " and ".join(f"rank {peer}" for peer in _peers(first))
            what = f"waits for ever: {say_batch((first.channel, first.step))} waits for {others}"
            rank.fail(positions[rank.rank], f"{what}, where another batch comes first.")


def _is_blocked(rank: int, op: prog.Op, queue: list[prog.Issue], complete: set[tuple[int, prog.Batch]]) -> bool:
    match op:
        case prog.Wait():
            return any(batch[0] != prog.COPIES and (rank, batch) not in complete for batch in op.batches)
        case prog.Finish():
            return bool(queue)
    return False


def _peers(op: prog.Issue) -> list[int]:
    return [message.peer for message in (op.send, op.receive) if message is not None]


# -- what covers transfers --------------------------------------------------------------------------------------------


def _check_cover(rank: Checked, before: list[int]) -> None:
    """Own work is first in a gather and last in a scatter, and something is computed beside each transfer."""
    ops, bound, products, is_gather = rank.program.ops, rank.bound, rank.products, rank.scatter is None
    if bound is None or not products:
        return
    for (_, is_own), (number, is_own_next) in itertools.pairwise(products):
        if is_own != is_own_next and is_own_next is is_gather:
            rank.fail(number, f"own rows are to be multiplied {'first in a gather' if is_gather else 'last'}.")
    waits_for_nothing = {number for number, is_own in products if is_own and is_gather}
    if bound.steps[0].compute is not None:
        waits_for_nothing.add(products[0][0])
    numbers = sorted({number for number, _ in products})
    for issue, op in enumerate(ops):
        if not isinstance(op, prog.Issue):
            continue
        for number in waits_for_nothing:
            if before[number] >> issue & 1:
                rank.fail(number, f"is behind what op {issue} brings, and needs nothing of others.")
        # In bulk all that is sent comes of products that nothing covers but those of own rows.
        is_bulk_scatter = rank.asked.is_bulk and not is_gather
        covers = [number for number, is_own in products if is_own] if is_bulk_scatter else numbers
        first = 0 if is_bulk_scatter else sum(step.compute is not None for step in bound.steps[: op.step])
        if rank.policy.pieces and not rank.asked.is_bulk:
            first = _cover_of_pieces(rank, op, bound.chunk_rows, numbers, is_gather=is_gather)
        if first < len(covers) and issue > covers[first]:
            rank.fail(issue, f"begins behind op {covers[first]}, which is to cover it.")


def _cover_of_pieces(
    rank: Checked, op: prog.Issue, chunk_rows: Sequence[int], numbers: list[int], *, is_gather: bool
) -> int:
    """Which product is the last that a batch may begin before: the one before that of the rows it brings, or behind
    that of the rows it sends."""
    message = op.receive if op.channel == prog.GATHER else op.send
    if message is None or not message.rows.count:
        return len(numbers)
    if not is_gather and op.channel == prog.GATHER:
        return 0
    row = sum(chunk_rows[: message.chunk])
    return numbers.index(rank.product_of[row]) + (-1 if is_gather else 1)
