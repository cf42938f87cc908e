"""The vocabulary of schedules: what one rank sends, receives and multiplies, step by step.

Frozen data without torch. A schedule says nothing of streams, events or bytes; `runtime` gives it those. Beware: the
transfers of a step are issued *before* its computation, as one batch, and both ends of a transfer stand in the same
step.
"""

from dataclasses import dataclass
from enum import StrEnum

from commfuse_megatron.errors import ScheduleError


class Collective(StrEnum):
    """The collective whose place the schedule takes."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


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
    """Send `chunk` (a reduce-scatter: its partial, or running sum) to group rank `to_rank`."""

    chunk: Chunk
    to_rank: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive `chunk` (a reduce-scatter: its partial, or running sum) from group rank `from_rank`."""

    chunk: Chunk
    from_rank: int


@dataclass(frozen=True, slots=True)
class Step:
    """One position in one rank's order: `send` and `receive` are issued together, then `chunk` is multiplied beside.

    needs: the step that receives what is multiplied (all-gather), or the running sum to add (ring reduce-scatter);
    None: nothing.
    """

    index: int
    send: Send | None
    receive: Receive | None
    chunk: Chunk
    needs: int | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of all ranks of a group: `steps[group_rank]` are that rank's, in order.

    A direct reduce-scatter also sums, after its last step, the partials that have arrived; the ring adds them on the
    way. Raises ScheduleError where a size is below 1.
    """

    collective: Collective
    algorithm: Algorithm
    group_size: int
    chunks_per_shard: int
    steps: tuple[tuple[Step, ...], ...]

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.chunks_per_shard < 1:
            raise ScheduleError(
                f"a schedule for group_size={self.group_size}, chunks_per_shard={self.chunks_per_shard} was asked for: "
                "both must be at least 1."
            )
