"""The passes of linears and of the embedding as programs: see `program`.

    forward    all_gather_linear      gather under GEMMs      linear_reduce_scatter  GEMMs over a scatter
    backward   linear_reduce_scatter  gather under GEMMs      all_gather_linear      GEMMs over a scatter

So the backward pass of one is the other's with other operands, and the weight's gradient behind it. Both gradients of
an all-gather linear need the rows of all ranks again: they are gathered along with what is scattered.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from commfuse_megatron.schedule.actions import Algorithm
from commfuse_megatron.schedule.binding import BoundSchedule
from commfuse_megatron.schedule.lowering import Lowering, Policy
from commfuse_megatron.schedule.pieces import cut_into_pieces
from commfuse_megatron.schedule.program import GATHER, Compute, Program, Rows, Sum, WeightGrad

_AGAIN = "re-gather of the input"

#: The kind of `Compute` that looks up rows.
LOOK_UP = "look up"


class Asked(NamedTuple):
    """What a call asks of a pass.

    is_backward: of the operation. has_product: whether rows times weight are due; else only the weight's gradient is.
    weight_grad: "now", "later" (leave the caller what it is made of), or not at all. accumulates: that gradient is
    added to what is there. is_bulk: as few GEMMs as possible. has_x: the rows that an all-gather linear's weight
    gradient needs are at hand. keeps_gathered: leave what was gathered to the caller. has_bias, has_addend: what is
    added, to the result and to every partial. attends: an attention's backward pass in one piece belongs to it.
    pauses: the caller computes between its parts, what is sent of the next group of heads or what came home of one.
    """

    is_backward: bool = False
    has_product: bool = True
    weight_grad: Literal["none", "now", "later"] = "none"
    accumulates: bool = False
    is_bulk: bool = False
    has_x: bool = False
    keeps_gathered: bool = False
    has_bias: bool = False
    has_addend: bool = False
    attends: bool = False
    pauses: bool = False


def lower_gather_pass(
    gather: BoundSchedule,
    policy: Policy,
    asked: Asked,
    before_weight_gradient: Callable[[Lowering], None] | None = None,
) -> Program:
    """out [M, n] = all-gather(shard) @ weight (+ bias), every shard multiplied while the next one travels.

    Operands: shard [M_r, k], out [M, n]; for the weight's gradient x [M, K]; kept [M, k], if rows are left to the
    caller and windows are the context's.
    """
    label = "all-gather" if asked.has_product else "all-gather of the output gradient"
    low = Lowering(policy, gather, gather_label=label)
    needs_all = asked.keeps_gathered or asked.weight_grad != "none"
    if not asked.has_product:
        _gather_alone(low)
    elif asked.is_bulk or policy.pieces:
        copies_late = _copy_own_first(low, needs_all=needs_all)
        _gather_in_pieces(low, gather, asked, copies_late=copies_late)
    else:
        copies_late = _copy_own_first(low, needs_all=needs_all)
        low.fork()
        low.gather_under(
            lambda chunk: low.gemm(
                low.gathered_chunk(chunk),
                low.chunk("out", chunk),
                has_bias=asked.has_bias,
                is_forward=not asked.is_backward,
                chunk=chunk,
            ),
            is_ahead=low.can_gather_ahead and asked.is_backward,
            before_last=lambda: low.copy_own_rows(is_beside=True) if copies_late else None,
        )
        low.join()
    if before_weight_gradient is not None:
        before_weight_gradient(low)
    if asked.weight_grad != "none":
        low.weight_gradient("gathered", "x", asked.accumulates, is_later=asked.weight_grad == "later")
    elif asked.keeps_gathered:
        low.complete_gather()
        low.keep_gathered()
    if before_weight_gradient is not None:
        low.join()
    return low.program()


def _copy_own_first(low: Lowering, *, needs_all: bool) -> bool:
    """Whether the own rows are still to be copied, beside the last GEMM: by then the transfers before them are over.

    That copy is a kernel, and gets SMs when the GEMM beside it ends, with all that is behind it on the copy stream; and
    with one hardware queue, GEMMs that are submitted behind it wait for those transfers, too.
    """
    if needs_all and not low.policy.has_windows:
        low.copy_own_rows(is_beside=False)
    return needs_all and low.policy.has_windows


def _gather_alone(low: Lowering) -> None:
    low.copy_own_rows(is_beside=low.policy.has_windows)
    low.issue_gather()


def lower_gather_alone(gather: BoundSchedule, policy: Policy, label: str, *, keeps_gathered: bool) -> Program:
    """The rows of all ranks, with nothing to compute meanwhile. Operands: shard; gathered, or kept where windows are
    the context's."""
    low = Lowering(policy, gather, gather_label=label)
    _gather_alone(low)
    low.complete_gather()
    if keeps_gathered:
        low.keep_gathered()
    return low.program()


def lower_transfers(gather: BoundSchedule, policy: Policy, label: str) -> Program:
    """The messages of an all-gather alone, as they are timed. Operands: shard."""
    low = Lowering(policy, gather, gather_label=label)
    low.issue_gather()
    return low.program()


def _gather_in_pieces(low: Lowering, gather: BoundSchedule, asked: Asked, *, copies_late: bool) -> None:
    """Own rows, then those of several owners at a time. In bulk all transfers begin before; else those that bring a
    piece begin with the one before it."""
    is_ahead = asked.is_bulk or (low.can_gather_ahead and asked.is_backward)
    me, size = gather.group_rank, gather.schedule.group_size
    others = [(me - far) % size for far in range(1, size)]
    pieces = [range(me, me + 1), *cut_into_pieces(others, _sizes(len(others), low.policy, asked))]
    pieces = [owners for owners in pieces if low.rows_of("out", owners).count]
    batches = [[(me - owner) % size - 1 for owner in reversed(owners) if owner != me] for owners in pieces]
    if is_ahead:
        low.issue_gather()
    low.fork(0 if asked.is_bulk else None)
    for number, owners in enumerate(pieces):
        if copies_late and number == len(pieces) - 1:
            low.copy_own_rows(is_beside=True)
        if not is_ahead:
            low.issue_gather(range(max(batches[number + 1], default=0) + 1 if number + 1 < len(pieces) else size - 1))
        low.turn()
        low.wait((GATHER, index) for index in batches[number])
        rows = low.rows_of("gathered", owners)
        low.gemm(
            Rows("shard", 0, gather.own_rows) if me in owners else rows,
            low.rows_of("out", owners),
            has_bias=asked.has_bias,
            is_forward=not asked.is_backward,
        )
    low.join()


def _sizes(count: int, policy: Policy, asked: Asked) -> tuple[int, ...]:
    """In bulk there are as few pieces as possible."""
    if asked.is_bulk:
        return (count,) if count else ()
    return policy.pieces


def lower_scatter_pass(scatter: BoundSchedule, gather: BoundSchedule | None, policy: Policy, asked: Asked) -> Program:
    """out [M_r, n] = reduce-scatter(a [M, k] @ weight (+ addend)) (+ bias), partials sent while the next is computed.

    gather: of the rows that the weight's gradient needs again, None where they are at hand as `x_full` [M, K].
    Operands: a, out, addend [M, n]; shard [M_r, K] of the gather, or x_full; kept, as in `lower_gather_pass`.
    """
    if not asked.has_product:
        is_later = asked.weight_grad == "later"
        if gather is None:  # nothing is sent
            grad, x = (Rows(name, 0, scatter.total_rows) for name in ("a", "x_full"))
            return Program(() if is_later else (WeightGrad(grad, x, asked.accumulates),), None, None)
        low = Lowering(policy, gather, gather_label=_AGAIN)
        _gather_alone(low)
        low.weight_gradient("a", "gathered", asked.accumulates, is_later=is_later)
        return low.program()
    low = Lowering(policy, gather, scatter, gather_label=_AGAIN)
    return _ScatterPass(low, scatter, asked, regathers=gather is not None).lower()


class _ScatterPass:
    def __init__(self, low: Lowering, scatter: BoundSchedule, asked: Asked, *, regathers: bool) -> None:
        self._low, self._scatter, self._asked, self._regathers = low, scatter, asked, regathers
        self._is_ring = scatter.schedule.algorithm is Algorithm.RING
        has_cover = (asked.is_bulk and asked.weight_grad == "now") or scatter.schedule.chunks_per_shard > 1
        num_arriving = scatter.schedule.group_size - 1
        self._adds_in_epilogue = low.may_add_arrived(has_cover=has_cover, has_bias=asked.has_bias) and (
            num_arriving <= low.policy.most_adds
        )

    def lower(self) -> Program:
        low, asked, regathers = self._low, self._asked, self._regathers
        copies_late = regathers and _copy_own_first(low, needs_all=True)
        in_pieces = asked.is_bulk or bool(low.policy.pieces)
        if regathers and (low.can_gather_ahead or in_pieces):
            low.issue_gather()

        def copy_late() -> None:
            if copies_late:
                low.copy_own_rows(is_beside=True)

        low.fork()
        if asked.is_bulk:
            copy_late()
            self._produce_others_in_pieces()
            self._weight_gradient()
        elif low.policy.pieces:
            self._produce_others_in_pieces()
            copy_late()
        low.scatter_from(
            self._produce,
            adds_in_epilogue=self._adds_in_epilogue,
            gathers_too=regathers,
            is_only_own=in_pieces,
            before_last=copy_late,
        )
        low.join()
        if not asked.is_bulk:
            self._weight_gradient()
        if self._is_ring:
            if asked.has_bias:
                low.add_bias()
        elif not self._adds_in_epilogue and self._scatter.arrived_rows:
            low.sum_own(has_bias=asked.has_bias)
        return low.program()

    def _weight_gradient(self) -> None:
        if self._asked.weight_grad != "none":
            x = "gathered" if self._regathers else "x_full"
            is_later = self._asked.weight_grad == "later"
            self._low.weight_gradient("a", x, self._asked.accumulates, is_later=is_later)

    def _produce(self, chunk: int, target: Rows, arrived: tuple[Rows, ...]) -> None:
        self._multiply(self._low.chunk("a", chunk), target, arrived, chunk)

    def _multiply(self, rows: Rows, target: Rows, arrived: tuple[Rows, ...] = (), chunk: int = -1) -> None:
        asked = self._asked
        addend = (Rows("addend", rows.start, rows.count),) if asked.has_addend else ()
        is_result = not self._is_ring and (bool(arrived) or self._scatter.schedule.group_size == 1)
        self._low.gemm(
            rows,
            target,
            arrived or addend,
            has_bias=is_result and asked.has_bias,
            is_forward=not asked.is_backward,
            chunk=chunk,
        )
        if arrived and addend and target.count:  # a GEMM adds the one or the other
            self._low.ops.append(Sum(target, target, addend))

    def _produce_others_in_pieces(self) -> None:
        """The partials of several owners at a time, sent when they are done: the pieces of a gather, backwards."""
        low, bound = self._low, self._scatter
        me, size = bound.group_rank, bound.schedule.group_size
        order = [(me + far) % size for far in range(size - 1, 0, -1)]
        for owners in reversed(cut_into_pieces(order, _sizes(len(order), low.policy, self._asked))):
            if not self._asked.is_bulk:
                low.turn()
            self._multiply(low.rows_of("a", owners), low.partials(owners))
            for owner in owners:
                low.issue_scatter((owner - me) % size)


def lower_embedding(scatter: BoundSchedule, policy: Policy) -> Program:
    """out [M_r, N] = reduce-scatter of the rows looked up, those of other ranks' ids being zeros. Operands: out.

    "look up" computes a chunk; all that it adds on the way is a ring's running sum.
    """
    low = Lowering(policy, scatter=scatter)

    def look_up(chunk: int, target: Rows, arrived: tuple[Rows, ...]) -> None:
        if target.count:
            low.ops.append(Compute(LOOK_UP, chunk, arrived, (target,)))

    low.scatter_from(look_up, adds_in_epilogue=False)
    if scatter.schedule.algorithm is not Algorithm.RING and scatter.arrived_rows:
        low.sum_own(has_bias=False)
    return low.program()
