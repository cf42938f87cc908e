"""The vocabulary of schedules: what one rank sends, receives and multiplies, step by step.

Frozen data without torch. A schedule says nothing of streams, events or bytes; `runtime` gives it those. The contract
that bites: the transfers of a step are issued *before* its computation, as one batch.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Algorithm", "Chunk", "Collective", "Compute", "Receive", "Schedule", "Send", "Step"]


class Collective(StrEnum):
    """The collective whose place the schedule takes."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


class Algorithm(StrEnum):
    """How chunks travel: to the neighbour, hop by hop, or straight between owner and user."""

    RING = "ring"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """Piece `index` (0 .. chunks_per_shard-1) of the shard that group rank `owner_rank` keeps."""

    owner_rank: int
    index: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send `chunk` to group rank `to_rank`.

    slot: all-gather: the receive slot forwarded from, None for the rank's own shard;
    reduce-scatter: the send slot that holds the partial.
    """

    chunk: Chunk
    to_rank: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive `chunk` from group rank `from_rank` into receive slot `slot`."""

    chunk: Chunk
    from_rank: int
    slot: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Multiply `chunk`.

    receive_slot: all-gather: where the input lies, None for the own shard;
    ring reduce-scatter: the arrived running sum to add, None at the head of the chain; direct reduce-scatter: None.
    send_slot: reduce-scatter: where the partial is put for sending, None when the result is this rank's own output.
    Always None in an all-gather.
    """

    chunk: Chunk
    receive_slot: int | None
    send_slot: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """One position of one rank's program: `transfers` are issued together, then `compute` runs beside them."""

    index: int
    transfers: tuple[Send | Receive, ...]
    compute: Compute


@dataclass(frozen=True, slots=True)
class Schedule:
    """Programs of all ranks of a group: `programs[group_rank]` is that rank's list of steps.

    A direct reduce-scatter also sums, after its last step, the partials that arrived in its receive slots;
    the ring folds them in on the way.
    """

    collective: Collective
    algorithm: Algorithm
    group_size: int
    chunks_per_shard: int
    num_receive_slots: int
    num_send_slots: int
    programs: tuple[tuple[Step, ...], ...]
