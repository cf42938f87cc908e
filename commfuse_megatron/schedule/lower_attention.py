"""The passes of query-split attention as programs: see `program`.

The pieces of a forward pass, attention and projection of one chunk of queries, take turns on lanes:

    lane 0   [attend 1][project 1]          [attend own][project own + arrived]
    lane 1             [attend 2][project 2]
    main                                           [sum of what arrived]

Where a GEMM adds what arrived, no pass over the output follows; of more than two ranks, what arrived is added up
first, beside the attention of the own queries. With one hardware queue, as Megatron has it, a GEMM that waits for its
attention holds up everything behind it: pieces submitted one by one would hardly run side by side, so those that are to
run beside each other are submitted as attend 1, attend 2, project 1, attend own, project 2, ...

Backward the pieces are the dgrad of one chunk's rows and the attention backward of its queries. The gradients of keys
and values are sums over chunks: of slabs at the end, or added up in the order of the pieces.
"""

import itertools
from collections.abc import Callable, Iterator

from commfuse_megatron.schedule.binding import BoundSchedule
from commfuse_megatron.schedule.lower_linear import Asked, lower_gather_pass
from commfuse_megatron.schedule.lowering import Lowering, Policy
from commfuse_megatron.schedule.program import Compute, Program, Rows, Sum

#: Kinds of `Compute`.
ATTEND, ATTEND_BACKWARD = "attend", "attend backward"
ADD_GRADIENTS, SUM_SLABS = "add gradients", "sum slabs"


def lower_query_split(scatter: BoundSchedule, policy: Policy, *, has_bias: bool) -> Program:
    """out [M_r, N] = reduce-scatter(a [M, K] @ weight) (+ bias), `a` computed by "attend", chunk by chunk.

    On a tape, attention goes before the GEMMs of the pieces that it runs beside, and sums before the own GEMMs.
    """
    low = Lowering(policy, scatter=scatter)
    has_cover = policy.is_tape or scatter.schedule.chunks_per_shard > 1
    adds_in_epilogue = low.may_add_arrived(has_cover=has_cover, has_bias=has_bias)
    is_summed_ahead = adds_in_epilogue and scatter.schedule.group_size - 1 > policy.most_adds
    order = [step.compute for step in scatter.steps if step.compute is not None]
    attend_ahead = _attend_ahead(low, order) if policy.is_tape else None

    def produce(chunk: int, target: Rows, arrived: tuple[Rows, ...]) -> None:
        if attend_ahead is None:
            _attend(low, chunk)
        is_last = bool(arrived) or scatter.schedule.group_size == 1
        rows = low.chunk("a", chunk)
        low.gemm(rows, target, arrived, has_bias=has_bias and is_last, is_forward=True, chunk=chunk)

    def add_up(own_number: int) -> tuple[Rows, ...]:
        lane = low.lane
        low.on(None)
        first, *rest = low.wait_for_arrived(own_number)
        if first.count:
            low.ops.append(Sum(first, first, tuple(rest)))
        low.on(lane)
        low.after(None)
        return (first,)

    low.fork()
    low.scatter_from(
        produce,
        adds_in_epilogue=adds_in_epilogue,
        before_piece=attend_ahead,
        find_arrived=add_up if is_summed_ahead else None,
    )
    low.join()
    if scatter.arrived_rows and not adds_in_epilogue:
        low.sum_own(has_bias=has_bias)
    return low.program()


def _attend(low: Lowering, chunk: int) -> None:
    rows = low.chunk("a", chunk)
    if rows.count:
        low.ops.append(Compute(ATTEND, chunk, (), (rows,)))


def _attend_ahead(low: Lowering, order: list[int]) -> Callable[[], None]:
    """What comes before each piece: submits the attention of what is to run beside it, each on its lane."""
    pieces: Iterator[int] = itertools.count()
    begun = enumerate(order)

    def begin() -> None:
        piece = next(pieces)
        for number, chunk in itertools.islice(begun, max(1, low.num_lanes) if piece == 0 else 1):
            low.turn(number)
            _attend(low, chunk)
        low.turn(piece)

    return begin


def lower_query_split_backward(gather: BoundSchedule, policy: Policy, asked: Asked) -> Program:
    """out [M, K], the gradient of what attention gave, and the gradients of heads by "attend backward".

    Operands: shard [M_r, N], x [M, K]. On a tape chunks leave their gradients of keys and values in slabs, which "sum
    slabs" adds up at the end; else "add gradients" adds each to what is there, in the order of the pieces.
    """
    label = "all-gather of the output gradient"
    low = Lowering(policy, gather, gather_label=label)
    has_weight = asked.weight_grad != "none"
    if not policy.is_tape:
        low.copy_own_rows(is_beside=False)
    pieces = [step.compute for step in gather.steps if step.compute is not None]
    previous: list[int | None] = []

    def consume(chunk: int) -> None:
        rows = low.chunk("out", chunk)
        low.gemm(low.gathered_chunk(chunk), rows, is_forward=False, chunk=chunk)
        low.ops.append(Compute(ATTEND_BACKWARD, chunk, (rows,), ()))
        if not policy.is_tape:
            if previous and low.num_lanes:  # all of them add to the same sums
                low.after(previous[0])
            low.ops.append(Compute(ADD_GRADIENTS, chunk, (), ()))
            previous[:] = [low.lane]
        elif has_weight and chunk == pieces[-1]:
            lane = low.lane
            low.on(None)
            low.weight_gradient("gathered", "x", asked.accumulates, is_later=asked.weight_grad == "later")
            low.on(lane)

    low.fork()
    low.gather_under(
        consume,
        is_ahead=low.can_gather_ahead,
        before_last=lambda: low.copy_own_rows(is_beside=True) if policy.is_tape and has_weight else None,
    )
    low.join()
    if policy.is_tape:
        low.ops.append(Compute(SUM_SLABS, -1, (), ()))
    elif has_weight:
        low.weight_gradient("gathered", "x", asked.accumulates, is_later=asked.weight_grad == "later")
    return low.program()


def lower_at_once_backward(gather: BoundSchedule, policy: Policy, asked: Asked) -> Program:
    """The projection's backward pass as of a linear of its own, and then attention's in one piece, beside the weight's
    gradient. Operands as in `lower_query_split_backward`."""

    def attend(low: Lowering) -> None:
        low.fork(2 if policy.is_tape else 0)
        low.turn(0)
        low.ops.append(Compute(ATTEND_BACKWARD, -1, (low.all_rows("out"),), ()))
        low.turn(1)

    return lower_gather_pass(gather, policy, asked, before_weight_gradient=attend)
