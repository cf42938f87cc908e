"""Every kind of mistake that `validate_programs` claims to find is made in correct programs, and found."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import (
    After,
    Compute,
    Copy,
    Finish,
    Fork,
    Gemm,
    Issue,
    Join,
    On,
    Op,
    Pause,
    Program,
    Rows,
    Sum,
    Wait,
    WeightGrad,
)
from tests.harness.programs import ANY_NUMBER, Case, change

NCCL = Policy(has_windows=False, most_adds=ANY_NUMBER, keeps_own_apart=True)
WINDOWS = Policy(has_windows=True, most_adds=ANY_NUMBER)
TAPE = Policy(has_windows=True, most_adds=1, adds_bias_too=True, is_tape=True)
LANES = replace(TAPE, lanes=2)
TENSOR_LANES = replace(NCCL, lanes=2)
RING, DIRECT = Algorithm.RING, Algorithm.DIRECT

FORWARD, WITH_BIAS, BACKWARD = Asked(), Asked(has_bias=True), Asked(True, weight_grad="now")

GATHER = Case("all_gather_linear", NCCL, Asked(has_bias=True, keeps_gathered=True), RING, 3, 2, 13)
GATHER_LANES = Case("all_gather_linear", LANES, Asked(keeps_gathered=True), DIRECT, 4, 1, 10)
TRANSFERS = Case("transfers", NCCL, Asked(has_product=False), DIRECT, 3, 1, 6)
PAIR = Case("transfers", NCCL, Asked(has_product=False), DIRECT, 2, 2, 8)
SCATTER = Case("linear_reduce_scatter", NCCL, WITH_BIAS, DIRECT, 3, 1, 10)
RUNNING_SUM = Case("linear_reduce_scatter", NCCL, FORWARD, RING, 3, 2, 13)
ON_THE_WAY = Case("linear_reduce_scatter", replace(TAPE, sums_on_the_way=True), FORWARD, DIRECT, 5, 1, 10)
IN_EPILOGUE = Case("linear_reduce_scatter", replace(WINDOWS, adds_bias_too=True), WITH_BIAS, DIRECT, 3, 2, 12)
BULK = Case("all_gather_linear backward", TAPE, BACKWARD._replace(is_bulk=True, has_addend=True), DIRECT, 3, 1, 10)
LATER = Case("all_gather_linear backward", WINDOWS, Asked(True, weight_grad="later"), RING, 3, 1, 10)
DY = Case("linear_reduce_scatter backward", WINDOWS, BACKWARD._replace(accumulates=True), DIRECT, 3, 1, 10)
SUM = Case("linear_all_reduce", TAPE, WITH_BIAS, DIRECT, 3, 2, 14)
SUM_ON_TENSORS = Case("linear_all_reduce", NCCL, WITH_BIAS, DIRECT, 2, 2, 8)
SUM_OF_DX = Case("linear_grad_all_reduce backward", TAPE, BACKWARD, DIRECT, 2, 3, 12)
EMBEDDING = Case("embedding", NCCL, FORWARD, RING, 3, 1, 10)
ATTENTION = Case("query split", LANES, WITH_BIAS, DIRECT, 3, 2, 10)
BACK = Case("query split backward", LANES, BACKWARD, DIRECT, 3, 2, 10)
BACK_ON_TENSORS = Case("query split backward", TENSOR_LANES, BACKWARD, DIRECT, 3, 2, 10)
AT_ONCE = Case("at once backward", TAPE, BACKWARD, DIRECT, 3, 1, 10)
EXCHANGE = Case("ulysses", NCCL, FORWARD, DIRECT, 3, 2, 7)
PARTS = Case("ulysses in parts", NCCL, Asked(pauses=True), DIRECT, 3, 2, 7)
PARTS_BACK = Case("ulysses backward in parts", NCCL, Asked(is_backward=True, pauses=True), DIRECT, 2, 2, 4)
EXCHANGE_BACK = Case("ulysses zigzag backward", TAPE, Asked(is_backward=True), DIRECT, 2, 2, 4)

CASES = {
    "gather, ring": GATHER, "gather on lanes": GATHER_LANES,
    "gather in bulk": Case("linear_reduce_scatter backward", TAPE, BACKWARD._replace(is_bulk=True), DIRECT, 3, 1, 10),
    "gather, later": Case("linear_reduce_scatter backward", WINDOWS, Asked(True, weight_grad="later"), DIRECT, 3, 1,
     9),
    "frozen weight's gather": Case("all_gather_linear backward", TAPE, Asked(True, False, "now"), DIRECT, 3, 1, 10),
    "scatter": SCATTER, "scatter, ring": Case("linear_reduce_scatter", NCCL, WITH_BIAS, RING, 3, 1, 10),
    "scatter, ring of chunks": RUNNING_SUM,
    "scatter on lanes": Case("linear_reduce_scatter", LANES, WITH_BIAS, DIRECT, 2, 2, 10),
    "all-reduce": SUM, "all-reduce on tensors": SUM_ON_TENSORS, "all-reduce of a gradient": SUM_OF_DX,
    "all-reduce on lanes": Case("linear_all_reduce", LANES, FORWARD, DIRECT, 3, 1, 10),
    "all-reduce, apart": Case("linear_grad_all_reduce backward", replace(WINDOWS, keeps_own_apart=True),
     BACKWARD._replace(accumulates=True), DIRECT, 3, 1, 7),
    "adding in the epilogue": IN_EPILOGUE, "scatter in bulk": BULK, "scatter, later": LATER, "embedding": EMBEDDING,
    "embedding backward": Case("embedding backward", TAPE, Asked(has_product=False, keeps_gathered=True), DIRECT, 3),
    "attention": ATTENTION, "attention on tensors": Case("query split", TENSOR_LANES, WITH_BIAS, DIRECT, 3, 2, 10),
    "attention backward": BACK, "attention backward on tensors": BACK_ON_TENSORS,
    "attention backward at once": AT_ONCE, "exchange": EXCHANGE, "exchange backward": EXCHANGE_BACK,
    "exchange, zigzag": Case("ulysses zigzag", TAPE, Asked(keeps_gathered=True), DIRECT, 2, 2, 4),
    "exchange on lanes": Case("ulysses", LANES, Asked(keeps_gathered=True), DIRECT, 2, 3, 4),
    "exchange of one key on lanes": Case("ulysses zigzag", LANES, Asked(keeps_gathered=True), DIRECT, 2, 3, 12),
    "exchange of one key on tensors": Case("ulysses zigzag", TENSOR_LANES, Asked(), DIRECT, 3, 3, 12),
    "exchange backward on lanes": Case("ulysses backward", TENSOR_LANES, Asked(is_backward=True), DIRECT, 2, 4, 4),
    "exchange in parts": PARTS, "exchange backward in parts": PARTS_BACK,
    "exchange in parts on lanes": Case("ulysses in parts", LANES, Asked(pauses=True), DIRECT, 2, 3, 4),
    "exchange, kept": Case("ulysses", NCCL, Asked(keeps_gathered=True), DIRECT, 2, 1, 3),
    "exchange, dropout": Case("ulysses dropout", TAPE, Asked(keeps_gathered=True), DIRECT, 3, 1, 5),
}  # fmt: skip

Programs = list[Program]
Break = Callable[[Programs], Programs]


def find(programs: Programs, rank: int, kind: type, number: int = 0) -> int:
    """The index of one op of a kind; negative numbers count from the end."""
    return [index for index, op in enumerate(programs[rank].ops) if isinstance(op, kind)][number]


def edit(programs: Programs, rank: int, kind: type, number: int = 0, /, **changes: object) -> Programs:
    """The same with another op there; changes: functions of what the fields hold now, or what they are to hold."""
    index = find(programs, rank, kind, number)
    op = programs[rank].ops[index]
    values = {name: new(getattr(op, name)) if callable(new) else new for name, new in changes.items()}
    return put(programs, rank, index, replace(op, **values))


def put(programs: Programs, rank: int, index: int, *ops: Op) -> Programs:
    """The same with these ops in the place of one."""
    old = programs[rank].ops
    return change(programs, rank, [*old[:index], *ops, *old[index + 1 :]])


def drop(programs: Programs, rank: int, kind: type, number: int = 0) -> Programs:
    """The same without an op."""
    return put(programs, rank, find(programs, rank, kind, number))


def insert(programs: Programs, rank: int, index: int, op: Op) -> Programs:
    """The same with one more op before that one; negative indices count from the end."""
    ops = list(programs[rank].ops)
    ops.insert(index, op)
    return change(programs, rank, ops)


def repeat(programs: Programs, rank: int, kind: type, number: int = 0) -> Programs:
    """The same with an op twice."""
    index = find(programs, rank, kind, number)
    return put(programs, rank, index, programs[rank].ops[index], programs[rank].ops[index])


def move(programs: Programs, rank: int, kind: type, number: int, to: int) -> Programs:
    """The same with an op taken out and put before what is then op `to`."""
    index = find(programs, rank, kind, number)
    return insert(drop(programs, rank, kind, number), rank, to, programs[rank].ops[index])


def shift(rows: Rows, by: int = 1) -> Rows:
    """As many rows, further behind."""
    return replace(rows, start=rows.start + by)


def in_message(**changes: object) -> Callable:
    """Changes fields of a message."""
    return lambda message: message._replace(**changes)


def both_ends(programs: Programs, step: int, sender: int, receiver: int, **changes: object) -> Programs:
    """The same with both ends of a message changed."""
    for rank, name in ((sender, "send"), (receiver, "receive")):
        index = next(i for i, op in enumerate(programs[rank].ops) if isinstance(op, Issue) and op.step == step)
        op = programs[rank].ops[index]
        programs = put(programs, rank, index, replace(op, **{name: getattr(op, name)._replace(**changes)}))
    return programs


def beside(programs: Programs) -> Programs:
    """Own rows are copied where a message is still to arrive."""
    return edit(programs, 1, Copy, target=Rows("gathered", 1, 3))


BROKEN: dict[str, tuple[Case, Break, str]] = {
    # Whose programs these are.
    "another channel": (BULK, lambda p: [p[0], replace(p[1], gather=None), p[2]],
     r"rank 1 has other schedules than rank 0"),
    "programs of ranks crossed": (SCATTER, lambda p: [p[1], p[0], p[2]],
     r"the program of rank 0 of 3 has the scatter of rank 1 of 3"),
    "a program of another size": (SCATTER, lambda p: [*p[:2], replace(SCATTER, rows=11).programs()[2]],
     r"the scatter of rank 2 is of another schedule or size"),
    # Messages.
    "no receive": (GATHER, lambda p: edit(p, 1, Issue, 2, receive=None),
     r"rank 0, op \d+: sends chunk 4 in gather 2, 2 rows at row 9 to rank 1, which (takes|does not receive it)"),
    "no receive, last": (TRANSFERS, lambda p: edit(p, 1, Issue, 0, receive=None),
     r"rank 0, op 0: sends chunk 0 .* to rank 1, which does not receive it"),
    "no send": (TRANSFERS, lambda p: edit(p, 0, Issue, 0, send=None),
     r"rank 1, op 0: receives chunk 0 .* from rank 0, which does not send it"),
    "another chunk": (SCATTER, lambda p: edit(p, 0, Issue, send=in_message(chunk=2)),
     r"rank 0, op 1: sends chunk 2 in scatter 1, 3 rows at row 0 to rank 1, which takes chunk 1"),
    "another step": (SCATTER, lambda p: edit(p, 0, Issue, step=7), r"in scatter 7, .* takes chunk 1 in scatter 1"),
    "fewer rows": (SCATTER, lambda p: edit(p, 0, Issue, send=in_message(rows=Rows("sent", 0, 2))),
     r"sends chunk 1 in scatter 1, 2 rows at row 0 to rank 1, which takes chunk 1 in scatter 1, 3 rows"),
    "another row": (SCATTER, lambda p: edit(p, 0, Issue, send=in_message(at_row=1)),
     r"3 rows at row 1 to rank 1, which takes .* 3 rows at row 0"),
    "another order": (PAIR, lambda p: move(p, 0, Issue, 1, 0),
     r"rank [01], op 0: sends chunk . in gather ., .* which takes chunk . in gather ."),
    "a peer that is not": (SCATTER, lambda p: edit(p, 0, Issue, send=in_message(peer=3)), r"rank 3 is no peer"),
    "itself as peer": (SCATTER, lambda p: edit(p, 0, Issue, send=in_message(peer=0)), r"rank 0 is no peer"),
    "a message of nothing": (SCATTER, lambda p: edit(p, 0, Issue, send=in_message(rows=Rows("sent", 0, 0))),
     r"rank 0, op 1: a message of no rows"),
    "a batch of nothing": (SCATTER, lambda p: insert(p, 0, 0, Issue("scatter", 9, None, None)),
     r"rank 0, op 0: issues a batch of nothing"),
    "a batch twice": (SCATTER, lambda p: repeat(p, 0, Issue), r"rank 0, op 2: issues scatter 1 a second time"),
    "received elsewhere": (SCATTER, lambda p: edit(p, 0, Issue, receive=in_message(rows=Rows("arrived", 1, 4))),
     r"rank 0, op 1: receives at arrived\[1:5\] what is written to arrived\[0:4\]"),
    # Nobody waits for ever.
    "a circle": (TRANSFERS, lambda p: move(p, 1, Issue, 1, 0),
     r"rank 0, op 2: waits for ever: gather 0 waits for rank 1 and rank 2, where another batch comes first"),
    "waits before it is issued": (GATHER, lambda p: move(p, 0, Wait, 0, 1),
     r"rank 0, op 1: waits for gather 0, which has not been issued or brings nothing"),
    # Lanes.
    "forks elsewhere": (GATHER_LANES, lambda p: insert(p, 0, 3, Fork(2)), r"rank 0, op 3: only the main lane forks"),
    "a lane that is not": (GATHER_LANES, lambda p: edit(p, 0, On, lane=2), r"there is no lane 2"),
    "behind a lane that is not": (ATTENTION, lambda p: edit(p, 0, After, lane=2), r"there is no lane 2"),
    "joins one more": (GATHER_LANES, lambda p: edit(p, 0, Join, lanes=3), r"there is no lane 2"),
    "joins one less": (GATHER_LANES, lambda p: edit(p, 0, Join, lanes=1), r"with all others joined"),
    "ends on a lane": (BACK, lambda p: move(p, 0, Finish, 0, 3), r"the end is not the last op of the main lane"),
    "does not end": (SCATTER, lambda p: drop(p, 0, Finish), r"does not wait for the end of its transfers"),
    # What conflicts is ordered.
    "read before it arrives": (GATHER, lambda p: drop(p, 0, Wait),
     r"rank 0, op 5: reads gathered\[9:11\] while op 1 writes gathered\[9:11\]: nothing orders them"),
    "read before it is computed": (BACK, lambda p: insert(p, 0, find(p, 0, Compute), On(1)),
     r"reads out\[.*\] while op \d+ writes out"),
    "sums before they arrive": (SCATTER, lambda p: drop(p, 0, Wait), r"reads arrived\[0:4\] while op 1 writes"),
    "sums not behind each other": (ATTENTION, lambda p: drop(p, 0, After), r"reads arrived.* while op \d+ writes"),
    "written over while it is sent": (SCATTER, lambda p: edit(p, 0, Gemm, 1, out=Rows("sent", 2, 3)),
     r"writes sent\[2:5\] while op 1 reads sent\[0:3\]"),
    "two messages in one place": (TRANSFERS, lambda p: both_ends(p, 1, 1, 0, at_row=4, rows=Rows("gathered", 4, 2)),
     r"writes gathered\[4:6\] while op 0 writes gathered\[4:6\]"),
    "copied where it arrives": (Case("embedding backward", TAPE, Asked(has_product=False, keeps_gathered=True),
     DIRECT, 3, 1, 9), beside, r"rank 1, op 1: writes gathered\[0:3\] while op 0 writes gathered\[1:4\]"),
    "a copy not waited for": (DY, lambda p: edit(p, 0, Wait, -1, batches=lambda batches: batches[:-1]),
     r"reads gathered\[0:10\] while op \d+ writes gathered\[0:4\]"),
    "gradients added side by side": (BACK_ON_TENSORS, lambda p: drop(p, 0, After),
     r"writes sums\[0:1\] while op \d+ writes sums\[0:1\]"),
    "slabs not joined": (BACK, lambda p: move(p, 0, Compute, -1, find(p, 0, Join)), r"sums?\b|slabs\["),
    "one op over itself": (SCATTER, lambda p: edit(p, 0, Sum, out=lambda rows: replace(rows, operand="arrived"),
     own=Rows("arrived", 1, 4)), r"nothing orders them"),
    # What an op names is there, and who runs it can.
    "outside": (SCATTER, lambda p: edit(p, 0, Gemm, -1, a=Rows("a", 7, 4)), r"a\[7:11\] lies outside of the 10 rows"),
    "an operand that is not": (SCATTER, lambda p: edit(p, 0, Gemm, a=Rows("b", 0, 3)),
     r"b\[0:3\] lies outside of the 0 rows of 'b'"),
    "a chunk that is not": (EMBEDDING, lambda p: edit(p, 0, Compute, chunk=3), r"there is no chunk 3"),
    "adds too many": (replace(IN_EPILOGUE, policy=replace(TAPE, most_adds=1)), lambda p: IN_EPILOGUE.programs(),
     r"adds 2 partials, and a GEMM adds 1"),
    "a bias beside partials": (replace(IN_EPILOGUE, policy=WINDOWS), lambda p: IN_EPILOGUE.programs(),
     r"adds a bias beside partials"),
    "distances": (Case("linear_reduce_scatter", NCCL, FORWARD, DIRECT, 4, 1, 8), lambda p: edit(p, 0, Sum,
     adds=lambda adds: (adds[0], adds[2], adds[1])), r"not at equal distances"),
    "several operands": (SCATTER, lambda p: edit(p, 0, Sum, adds=lambda adds: (adds[0], Rows("own", 0, 4))),
     r"what is added lies in several operands"),
    # What rows hold.
    "nothing was put": (SCATTER, lambda p: drop(p, 0, Gemm), r"rank 0, op 0: reads sent\[0\], where nothing was put"),
    "writes what the call brought": (SCATTER, lambda p: insert(p, 0, -1,
     Copy(Rows("a", 0, 1), Rows("out", 0, 1), 0, is_beside=False)), r"writes a\[0:1\], which the call brought"),
    "writes over what nobody read": (SCATTER, lambda p: repeat(p, 0, Sum), r"writes over out\[0\], which nobody has"),
    "unequal numbers of rows": (SCATTER, lambda p: edit(p, 0, Gemm, a=Rows("a", 4, 2)),
     r"works on sent\[0:3\] and a\[4:6\], which are not equally many rows"),
    "a product of a sum": (RUNNING_SUM, lambda p: insert(p, 0, -1, Gemm(Rows("arrived", 4, 1), Rows("out", 0, 1))),
     r"a sum, where rows of one operand belong"),
    "computed twice": (Case("all_gather_linear", NCCL, FORWARD, DIRECT, 3), lambda p: edit(p, 0, Gemm, 1,
     a=Rows("shard", 0, 2), chunk=-1), r"op 4: computes what op 1 did for row 0 of all shards"),
    "as another chunk": (SCATTER, lambda p: edit(p, 0, Gemm, chunk=2), r"computes a\[4\] .* as chunk 2, which is"),
    "as no chunk": (EMBEDDING, lambda p: edit(p, 0, Compute, chunk=-1), r"works on rows of a chunk, and does not say"),
    "looks up nowhere": (EMBEDDING, lambda p: edit(p, 0, Compute, writes=()), r"0 ranges of rows, where one belongs"),
    "an unknown computation": (EMBEDDING, lambda p: edit(p, 0, Compute, kind="guess"),
     r"nothing is known of .* 'guess'"),
    "the wrong queries attend": (replace(BACK, policy=TAPE), lambda p: edit(p, 0, Compute, chunk=1),
     r"takes rank 0's backward product of row 0 of all shards for the gradient of row 2"),
    "gradients added too early": (replace(BACK_ON_TENSORS, policy=NCCL), lambda p: move(p, 0, Compute, 1,
     find(p, 0, Compute)), r"adds gradients of chunk 0, which are not there"),
    "gradients not added": (BACK_ON_TENSORS, lambda p: drop(p, 0, Compute, -1),
     r"the gradients of heads are not those of all queries"),
    "attends twice": (ATTENTION, lambda p: repeat(p, 0, Compute), r"computes what op 2 did for attended\[4\]"),
    "slabs added twice": (BACK, lambda p: repeat(p, 0, Compute, -1), r"computes what op \d+ did"),
    "another order of addition": (ON_THE_WAY, lambda p: edit(p, 0, Sum, adds=lambda adds: adds[::-1]),
     r"adds the partials of out\[0\] in the order of ranks \[0, 3, 4, 2, 1\], and not \[0, 4, 3, 2, 1\]"),
    "a running sum left out": (ON_THE_WAY, lambda p: edit(p, 0, Sum, 1, own=Rows("out", 0, 2)), r"writes over running"),
    "a partial is not added": (SCATTER, lambda p: edit(p, 1, Sum, adds=lambda adds: adds[:1]),
     r"rank 1, op \d+: at the end out\[0\] holds rank 1's product of a\[4\] of rank 1 \+ rank 0's .* and not"),
    "a running sum is not added": (RUNNING_SUM, lambda p: edit(p, 0, Gemm, -1, adds=()), r"at the end out\[.\] holds"),
    "no addend": (BULK, lambda p: edit(p, 0, Gemm, adds=()), r"rank \d, .* at the end out\[0\] holds"),
    "no bias": (SCATTER, lambda p: edit(p, 0, Sum, has_bias=False), r"at the end out\[0\] .* and not .* \+ bias"),
    "every partial has the bias": (SCATTER, lambda p: edit(p, 0, Gemm, has_bias=True),
     r"rank 1, .* at the end out\[0\] holds .* bias .* bias"),
    "the transposed weight": (DY, lambda p: edit(p, 0, Gemm, is_forward=True), r"at the end out\[0\] holds"),
    "rows are missing": (Case("all_gather_linear", NCCL, FORWARD, DIRECT, 3), lambda p: drop(p, 2, Gemm, -1),
     r"rank 2, op \d+: at the end out\[.\] holds nothing, and not rank 2's product"),
    "nothing was kept": (GATHER_LANES, lambda p: drop(p, 1, Copy, -1), r"at the end kept\[0\] holds nothing"),
    "own rows are not kept": (GATHER, lambda p: drop(p, 1, Copy), r"at the end gathered\[5\] holds nothing"),
    "rows do not travel": (TRANSFERS, lambda p: edit(edit(p, 0, Issue, send=None), 1, Issue, receive=None),
     r"at the end gathered\[0\] holds nothing"),
    "no weight gradient": (DY, lambda p: drop(p, 0, WeightGrad), r"is computed 0 times, and not 1"),
    "two weight gradients": (DY, lambda p: repeat(p, 0, WeightGrad), r"is computed 2 times, and not 1"),
    "does not accumulate": (DY, lambda p: edit(p, 0, WeightGrad, accumulates=False), r"accumulates is False, and not"),
    "a gradient of some rows": (DY, lambda p: edit(p, 0, WeightGrad, grad=Rows("gathered", 0, 9), x=Rows("x", 0, 9)),
     r"the weight's gradient is not that of all rows"),
    "a gradient of other rows": (DY, lambda p: edit(p, 0, WeightGrad, grad=Rows("x", 0, 10),
     x=Rows("gathered", 0, 10)), r"the weight's gradient is not that of all rows"),
    # What covers transfers.
    "own rows not first": (Case("all_gather_linear", NCCL, FORWARD, DIRECT, 3), lambda p: move(p, 0, Gemm, 0,
     find(p, 0, Finish) - 1), r"own rows are to be multiplied first in a gather"),
    "own rows not last": (SCATTER, lambda p: move(p, 0, Gemm, -1, 0), r"own rows are to be multiplied last"),
    "own rows wait": (Case("all_gather_linear", NCCL, FORWARD, DIRECT, 3), lambda p: insert(p, 0, 1,
     Wait((("gather", 0),))), r"rank 0, op 2: is behind what op 0 brings, and needs nothing of others"),
    "the first product waits": (LATER, lambda p: insert(p, 0, find(p, 0, Gemm), Wait((("gather", 0),))),
     r"is behind what op 0 brings, and needs nothing of others"),
    "a transfer without cover": (Case("linear_reduce_scatter", NCCL, FORWARD, DIRECT, 3), lambda p: move(p, 0, Issue,
     -1, find(p, 0, Gemm, -1)), r"rank 0, op \d+: begins behind op \d+, which is to cover it"),
    "a transfer behind the bulk": (BULK, lambda p: move(p, 0, Issue, -1, find(p, 0, Gemm, -1)),
     r"rank 0, op \d+: begins behind op \d+, which is to cover it"),
    # Of an all-reduce.
    "sent before it is summed": (SUM_ON_TENSORS, lambda p: move(p, 0, Sum, 0, find(p, 0, Gemm, -1)),
     r"writes gathered\[\d:\d\] while op \d+ reads gathered"),
    "the result is not copied": (SUM, lambda p: drop(p, 1, Copy), r"at the end kept\[0\] holds nothing"),
    "summed twice": (SUM_ON_TENSORS, lambda p: edit(p, 0, Sum, adds=lambda adds: (adds[0], adds[0])),
     r"distances|holds"),
    "every partial with a bias": (SUM_ON_TENSORS, lambda p: edit(p, 0, Gemm, 0, has_bias=True),
     r"holds .* bias .* bias"),
    "own rows of a number first": (SUM_ON_TENSORS, lambda p: move(p, 0, Gemm, 1, 0),
     r"own rows are to be multiplied behind the others', but op \d+ is one of those"),
    "a partial leaves late": (SUM_ON_TENSORS, lambda p: move(p, 0, Issue, 0, find(p, 0, Gemm, 1)),
     r"begins behind op \d+, which is to cover it"),
    "sums leave late": (SUM_ON_TENSORS, lambda p: move(p, 0, Issue, 2, find(p, 0, Gemm, -1)),
     r"begins behind op \d+, which is to cover it"),
    "sums leave behind the weight gradient": (SUM_OF_DX, lambda p: move(p, 0, WeightGrad, 0, find(p, 0, Issue, -1)),
     r"begins behind op \d+, which is to cover it"),
    # Of attention over a split sequence.
    "packs elsewhere": (EXCHANGE, lambda p: edit(p, 0, Compute, chunk=1), r"packs group 1 at other rows"),
    "no such group": (EXCHANGE, lambda p: edit(p, 0, Compute, chunk=2), r"there is no group 2"),
    "unknown to an exchange": (EXCHANGE, lambda p: edit(p, 0, Compute, kind="guess"),
     r"nothing is known of .* 'guess'"),
    "attends to another group": (EXCHANGE, lambda p: edit(p, 0, Compute, 3, reads=(Rows("gathered", 35, 35),)),
     r"reads gathered\[\d+:\d+\] while op \d+ writes gathered"),
    "attends other rows": (EXCHANGE, lambda p: edit(p, 0, Compute, -3, chunk=0),
     r"computes a\[.*\], and says that it is"),
    "tokens in another place": (EXCHANGE, lambda p: edit(p, 0, Compute, 2, writes=(Rows("gathered", 0, 10),)),
     r"places group 0 at other rows than its own"),
    "attends a group twice": (EXCHANGE, lambda p: repeat(p, 0, Compute, 3), r"computes what op \d+ did"),
    "own rows are missing": (EXCHANGE, lambda p: edit(p, 0, Compute, -1, reads=lambda reads: (reads[0],)),
     r"takes other rows for its own of group 1"),
    "unpacks twice": (EXCHANGE, lambda p: repeat(p, 0, Compute, -1), r"unpacks group 1 a second time"),
    "does not unpack": (EXCHANGE, lambda p: drop(p, 0, Compute, -1), r"groups \[0\] are unpacked, of 2"),
    "sends behind attention": (EXCHANGE, lambda p: move(p, 0, Issue, 3, find(p, 0, Compute, 3)),
     r"begins behind an attention that is to cover it"),
    "waits for a later group": (EXCHANGE, lambda p: insert(p, 0, find(p, 0, Compute, 3), Wait((("gather", 2),))),
     r"is behind what op \d+ brings of a later group"),
    "a group leaves late": (EXCHANGE, lambda p: move(p, 0, Issue, 5, find(p, 0, Compute, 5)),
     r"begins behind op \d+, which is to cover it"),
    "own rows are not last": (EXCHANGE, lambda p: move(p, 0, Compute, -3, find(p, 0, Compute, 5)),
     r"own rows are to be computed last"),
    "rows leave behind own ones": (EXCHANGE, lambda p: move(p, 0, Issue, -1, find(p, 0, Compute, -2) - 1),
     r"begins behind the own rows, which are to cover it"),
    # Of one in parts.
    "no pause": (PARTS, lambda p: drop(p, 0, Pause), r"0 pauses, where 1 are asked for"),
    "pauses where nobody asks": (EXCHANGE, lambda p: insert(p, 0, 1, Pause()), r"1 pauses, where 0 are asked for"),
    "pauses on a lane": (replace(PARTS, policy=TENSOR_LANES), lambda p: insert(p, 0, find(p, 0, On) + 1, Pause()),
     r"only the main lane pauses, with all others joined"),
    "packs what is not brought": (PARTS, lambda p: move(p, 0, Pause, 0, find(p, 0, Issue, -1) - 1),
     r"needs group 1, which the caller has not brought"),
    "places what is not brought": (PARTS, lambda p: move(p, 0, Compute, 4, 1),
     r"needs group 1, which the caller has not brought"),
    "a group leaves behind the pause": (PARTS, lambda p: move(p, 0, Pause, 0, find(p, 0, Compute) + 1),
     r"begins behind what the caller computes, which is to cover it"),
    "gradients leave behind the pause": (PARTS_BACK, lambda p: move(p, 0, Pause, 2, find(p, 0, Issue, -1)),
     r"begins behind what the caller computes, which is to cover it"),
    "waits before the pause": (PARTS_BACK, lambda p: move(p, 0, Pause, -1, find(p, 0, Compute, -1) - 1),
     r"waits before the caller has computed what is to cover it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_every_kind_of_mistake_is_found(name):
    case, make, expected = BROKEN[name]
    with pytest.raises(ScheduleError, match=expected) as caught:
        case.validate(make(case.programs()))
    if ", op " in f"{caught.value}":
        assert "\n>" in f"{caught.value}"  # the op in the printed program


def mistakes(ops: tuple[Op, ...]) -> Iterator[tuple[str, list[Op]]]:
    """Every op left out, done twice and changed, in each way that cannot be right."""
    for index, op in enumerate(ops):
        before, behind = list(ops[:index]), list(ops[index + 1 :])
        if not isinstance(op, On):
            yield f"op {index} left out", [*before, *behind]
        if not isinstance(op, On | After | Fork | Wait):
            yield f"op {index} twice", [*before, op, op, *behind]
        for changed in changes(op):
            yield f"{changed} as op {index}", [*before, changed, *behind]


def changes(op: Op) -> Iterator[Op]:
    """An op with one of its fields changed."""
    for name in (field.name for field in fields(op)):
        value = getattr(op, name)
        match value:
            case Rows():
                new = [shift(value), shift(value, -1), replace(value, count=value.count + 1)]
            case bool() if name in ("has_bias", "is_forward", "accumulates"):
                new = [not value]
            case int() if name in ("step", "lanes") or (name == "chunk" and value >= 0):
                new = [value + 1]
            case tuple() if name in ("adds", "reads", "batches"):
                new = [value[:index] + value[index + 1 :] for index in range(len(value))]
            case (rows, peer, chunk, at_row):
                changed = ({"peer": peer + 1}, {"chunk": chunk + 1}, {"at_row": at_row + 1}, {"rows": shift(rows)})
                new = [None, *(value._replace(**fields) for fields in changed)]
            case _:
                new = []
        yield from (replace(op, **{name: each}) for each in new)


@pytest.mark.parametrize("name", CASES)
def test_every_op_matters(name):
    case = CASES[name]
    programs = case.programs()
    case.validate(programs)
    missed = []
    for rank in (0, case.group_size - 1):
        for what, ops in mistakes(programs[rank].ops):
            try:
                case.validate(change(programs, rank, ops))
            except ScheduleError:
                continue
            missed.append(f"rank {rank}: {what}")
    assert not missed, "\n".join(missed)
