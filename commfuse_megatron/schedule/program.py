"""A pass of an operation on one rank as data: what is issued, waited for, multiplied, copied and summed, in order.

`lowering` makes programs from bound schedules, the `runtime` runs them, `program_checks` proves them over all ranks,
`program_text` prints them. Operands have names; rows of them are ranges. No torch.

    shard     what this rank sends in an all-gather    sent      partials for other ranks, until they have left
    gathered  where an all-gather arrives              arrived   where a reduce-scatter arrives
    own       own partials that are not yet summed     out       the result
    running   their un-rounded sums with what arrived

Other names are the operation's: its lowering says what they are. Work of one lane is in order; lanes are ordered
against each other by `Fork`, `Join`, `After` and by waiting for the same message. Order on other lanes is nobody's
promise, so an op says all that it reads and writes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from commfuse_megatron.schedule.binding import BoundSchedule

#: Which messages a step's number belongs to: an all-gather's, a reduce-scatter's, or copies within the device.
Channel = str
GATHER, SCATTER, COPIES = "gather", "scatter", "copies"

#: The operand in which messages of a channel arrive.
ARRIVES_IN = {GATHER: "gathered", SCATTER: "arrived"}

#: A step of a channel.
Batch = tuple[Channel, int]


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of an operand, from row `start` on."""

    operand: str
    start: int
    count: int


class Message(NamedTuple):
    """One message of a step.

    rows: where it lies here, before it is sent or after it has arrived. chunk: its number in the schedule, equal at
    both ends. at_row: where it arrives, as a row of the receiver's "gathered" or "arrived".
    """

    rows: Rows
    peer: int
    chunk: int
    at_row: int


@dataclass(frozen=True, slots=True)
class Issue:
    """Start the batch {send, receive} of a step: behind what the lane in use holds, which has computed what is sent."""

    channel: Channel
    step: int
    send: Message | None
    receive: Message | None


@dataclass(frozen=True, slots=True)
class Wait:
    """What follows on the lane in use comes after what these batches bring, or after these copies."""

    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end: the main lane goes on when all is here, and all that was sent has left."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy rows within the device. is_beside: by the transport, beside the next computation; `Wait` for step `number`
    of the channel "copies" then. Otherwise it is done when what follows on its lane begins."""

    target: Rows
    source: Rows
    number: int
    is_beside: bool


@dataclass(frozen=True, slots=True)
class Gemm:
    """out = a @ weight (+ all of `adds`, each like `out`) (+ bias), rounded once.

    is_forward: `weight` [N, K] is the right operand transposed, as in a forward pass; else as it is. chunk: whose rows
    these are; -1 where they are several chunks'.
    """

    a: Rows
    out: Rows
    adds: tuple[Rows, ...] = ()
    has_bias: bool = False
    is_forward: bool = True
    chunk: int = -1


@dataclass(frozen=True, slots=True)
class Sum:
    """out = own + all of `adds`, in that order (+ bias), rounded once; `own` may be `out`.

    Into "running" nothing is rounded: it holds what sums accumulate in.
    """

    out: Rows
    own: Rows
    adds: tuple[Rows, ...]
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class WeightGrad:
    """grad_weight [N, K] = (accumulates: +=) grad [M, N] transposed @ x [M, K], from all rows."""

    grad: Rows
    x: Rows
    accumulates: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Anything else that an operation computes: `kind` says what, and the caller brings the kernel for it.

    chunk: of the schedule, whose turn it is; -1 where it belongs to none.
    """

    kind: str
    chunk: int
    reads: tuple[Rows, ...]
    writes: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """Lanes 0 to `lanes` - 1 go on from where the main lane is."""

    lanes: int


@dataclass(frozen=True, slots=True)
class On:
    """What follows goes to this lane; None: the main one."""

    lane: int | None


@dataclass(frozen=True, slots=True)
class After:
    """What follows on the lane in use comes after all that `lane` holds now."""

    lane: int | None


@dataclass(frozen=True, slots=True)
class Pause:
    """The call returns to its caller, who computes and goes on with it: on the main lane, all others joined.

    What was issued last travels beside what the caller computes.
    """


@dataclass(frozen=True, slots=True)
class Join:
    """The main lane goes on when lanes 0 to `lanes` - 1 have come this far; what follows goes to the main lane."""

    lanes: int


#: What a binder makes a kernel's call of.
Computation = Gemm | Sum | WeightGrad | Compute

Op = Issue | Wait | Finish | Copy | Gemm | Sum | WeightGrad | Compute | Fork | On | After | Join | Pause


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's pass, and the schedules that its batches belong to. gather_label, scatter_label: what messages call
    them."""

    ops: tuple[Op, ...]
    gather: BoundSchedule | None
    scatter: BoundSchedule | None
    gather_label: str = "all-gather"
    scatter_label: str = "reduce-scatter"

    @property
    def labels(self) -> dict[Channel, str]:
        """What messages call the schedules, by channel."""
        return {GATHER: self.gather_label, SCATTER: self.scatter_label}

    @property
    def schedules(self) -> dict[Channel, BoundSchedule]:
        """The schedules by channel."""
        found = {GATHER: self.gather, SCATTER: self.scatter}
        return {channel: bound for channel, bound in found.items() if bound is not None}

    @property
    def operands(self) -> tuple[str, ...]:
        """All names of operands, in the order of their first use."""
        found: dict[str, None] = {}
        for op in self.ops:
            for rows in (*rows_read(op), *rows_written(op)):
                found[rows.operand] = None
        return tuple(found)


def rows_read(op: Op) -> tuple[Rows, ...]:
    """What an op reads, the weight, the bias and what an earlier op is waited for by apart."""
    match op:
        case Issue():
            return () if op.send is None else (op.send.rows,)
        case Copy():
            return (op.source,)
        case Gemm():
            return (op.a, *op.adds)
        case Sum():
            return (op.own, *op.adds)
        case WeightGrad():
            return (op.grad, op.x)
        case Compute():
            return op.reads
    return ()


def rows_written(op: Op) -> tuple[Rows, ...]:
    """What an op writes, the weight's gradient apart."""
    match op:
        case Issue():
            return () if op.receive is None else (op.receive.rows,)
        case Copy():
            return (op.target,)
        case Gemm() | Sum():
            return (op.out,)
        case Compute():
            return op.writes
    return ()
