"""Calls of a tape with addresses that were seen before, launched as one CUDA graph.

A training loop brings the same addresses to the same layer in every step, since PyTorch's allocator repeats itself. So
a call is made step by step at first, then once on a stream of our own, where libraries make what they keep for a
stream, and then as a graph of what that stream was told: one driver call instead of five for every slice.

The contract that bites: in a graph the driver chooses which of two independent branches goes first, and with one
hardware queue a wait could hold up the push that a peer's wait needs. Each wait therefore depends on the push of its
own batch (`CopyTape` keeps such steps), which it needs anyway before the operation ends.
"""

import logging
import weakref
from collections.abc import Callable

from commfuse_megatron.transport.copy_tape import BoundOperation
from commfuse_megatron.transport.stream_memory import Batch, OwnStream, StreamEvent, StreamGraph

__all__ = ["TapeGraphs"]

logger = logging.getLogger(__name__)

# How often a call is made step by step before it is worth a graph: addresses that come once or twice may not return.
_STEPWISE = 2
_NEVER = -1
# Of one tape: addresses that never came again must not fill the memory.
_MOST_SEEN = 4096


class TapeGraphs:
    """The graphs of one transport's tapes; a tape that is forgotten takes its graphs with it.

    Args:
        stream, copies: our own, for what goes to the current stream and for copies.
        run: enqueues a batch of memory operations.
        most: graphs at a time; who comes first has one.
    """

    def __init__(self, stream: OwnStream, copies: OwnStream, run: Callable[[int, Batch], None], most: int) -> None:
        self._stream, self._copies, self._run = stream, copies, run
        self._handle = int(stream.handle)
        self._before, self._after = StreamEvent(), StreamEvent()
        self._fork, self._join = StreamEvent(), StreamEvent()
        self._most = most
        self._alive: weakref.WeakSet[StreamGraph] = weakref.WeakSet()

    def run(self, tape: BoundOperation, addresses: tuple[int, ...], stream: int) -> bool:
        """Make the whole call, its release included; False, and nothing done, where it is to be made step by step."""
        known = tape.graphs
        found = known.get(addresses, 0)
        if found.__class__ is not int:
            found.launch(stream)
            return True
        if found == _NEVER:
            return False
        if found < _STEPWISE:
            if len(known) >= _MOST_SEEN:
                for seen in [key for key, value in known.items() if value.__class__ is int]:
                    del known[seen]
            known[addresses] = found + 1
            return False
        if found == _STEPWISE:
            self._rehearse(tape, addresses, stream)
            known[addresses] = found + 1
            return True
        if len(self._alive) >= self._most:
            return False
        graph = self._capture(tape, addresses)
        known[addresses] = _NEVER if graph is None else graph
        if graph is not None:
            graph.launch(stream)
        return graph is not None

    def _rehearse(self, tape: BoundOperation, addresses: tuple[int, ...], stream: int) -> None:
        self._before.record(stream)
        self._before.wait(self._handle)
        for step in tape.steps:
            step(addresses, self._handle)
        self._run(self._handle, tape.release)
        self._after.record(self._handle)
        self._after.wait(stream)

    def _capture(self, tape: BoundOperation, addresses: tuple[int, ...]) -> StreamGraph | None:
        """None where the driver refuses."""

        def tell() -> None:
            self._fork.record(self._handle)
            self._fork.wait(self._copies.handle)
            for step in tape.captured:
                step(addresses, self._handle)
            self._run(self._handle, tape.release)
            self._join.record(self._copies.handle)
            self._join.wait(self._handle)

        try:
            graph = StreamGraph(self._stream, tell)
        except Exception as error:  # nothing was run, and the call can be made without
            logger.warning("a call is not launched as a CUDA graph: %s", error)
            return None
        self._alive.add(graph)
        return graph
