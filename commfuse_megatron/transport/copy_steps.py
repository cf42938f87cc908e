"""What a bound operation over the copy engine is made of: see `copy_tape`, which makes them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from commfuse_megatron.transport.copy_flags import Key
from commfuse_megatron.transport.stream_memory import Batch

#: (addresses of this call, handle of the current stream)
Step = Callable[[tuple[int, ...], int], None]


class Ref(NamedTuple):
    """An address: `offset` bytes into what the call brings as address number `slot`. Slot 0 always holds 0."""

    slot: int
    offset: int

    def plus(self, size_bytes: int) -> "Ref":
        """The address that many bytes further."""
        return Ref(self.slot, self.offset + size_bytes)


class HeldSteps:
    """Steps of the copy stream that wait for a kernel of the caller, and are run once in each call."""

    __slots__ = ("_is_due", "_steps")

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._steps, self._is_due = steps, False

    def begin(self, at: tuple[int, ...], stream: int) -> None:
        """From here on they are due."""
        self._is_due = True

    def run(self, at: tuple[int, ...], stream: int) -> None:
        """Run them, if they are."""
        if self._is_due:
            self._is_due = False
            for step in self._steps:
                step(at, stream)


class GraphTable(dict[tuple[int, ...], Any]):
    """The calls of a tape that are graphs, by their addresses; see `transport.tape_graphs`."""

    __slots__ = ("__weakref__",)


class BoundOperation(NamedTuple):
    """A finished tape: the steps, the batches whose flags the release clears, and what the caller notes of arrivals.

    release: what ends the operation: the last wait, if nothing comes after it, and the release of all `keys`.
    captured: the steps for a graph, the copy stream being forked already.
    parts: the steps between pauses, of most tapes all. held: by pause, what the copy stream has not been told by then.
    """

    steps: tuple[Step, ...]
    keys: tuple[Key, ...]
    notes: tuple[tuple[Key, object], ...]
    release: Batch
    captured: tuple[Step, ...]
    graphs: GraphTable
    parts: tuple[tuple[Step, ...], ...] = ()
    held: tuple[Step, ...] = ()
