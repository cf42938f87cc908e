"""Calls of a tape with addresses that were seen before, launched as one CUDA graph.

A training loop brings the same addresses to the same layer in every step, since PyTorch's allocator repeats itself. So
a call is made step by step at first, then once on a stream of our own, where libraries make what they keep for a
stream, and then as a graph of what that stream was told: one driver call instead of five for every slice.

In a graph the driver chooses which of two independent branches goes first, and with one hardware queue a wait could
hold up the push that a peer's wait needs. Each wait therefore depends on the push of its own batch (`CopyTape` keeps
such steps), which it needs anyway before the operation ends.
"""

import itertools
import logging
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commfuse_megatron.transport.copy_steps import BoundOperation, GraphTable
from commfuse_megatron.transport.stream_memory import Batch, Driver, OwnStream, StreamGraph

logger = logging.getLogger(__name__)

# How often a call is made step by step before it is worth a graph: addresses that come once or twice may not return.
_STEPWISE = 2
# How many calls more make it worth the end of another graph: about as many as gain what a new one costs (not measured).
_WORTH_ANOTHER = 4
_NEVER = -(1 << 60)
# Calls of all tapes that are no graphs: addresses that never came again must not fill the memory.
_MOST_SEEN = 4096
# A graph took 1.4 MiB with 2 x H200 and 0.8 with 4, November 2026. The first measurements count beside so many guesses.
_GUESSED_BYTES, _GUESSES = 1 << 20, 8
# Less in the mean, and more at once, is what other processes gave back or took.
_LEAST_BYTES, _MOST_AT_ONCE_BYTES = 1 << 18, 1 << 24


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Call:
    """A tape with the addresses of a call.

    count: how often it was made. stamp: when it was launched last; before it is a graph, when that count began.
    """

    table: weakref.ref[GraphTable]
    addresses: tuple[int, ...]
    stamp: int
    count: int = 0
    launch: Any = None


class TapeGraphs:
    """The graphs of one transport's tapes; a tape that is forgotten takes its graphs with it.

    The fourth call with the same addresses makes a graph while there is room. Where there is none, a call goes on step
    by step and counts three times more; the next one takes the place of the graph that was launched the longest ago,
    if that was before all of these, and else counts again. So what is called no more gives way; but of calls that come
    round in a cycle and are too many, those that are graphs remain, and nothing is made over and over.

    A graph's memory is the driver's, which takes it in blocks and may keep it when the graph has gone. So each counts
    as the mean over the most graphs that there were at a time, of what the device's free memory fell by when they came
    to be so many, and when one took the place of another.

    Args:
        stream, copies: our own, for what goes to the current stream and for copies.
        run: enqueues a batch of memory operations.
        limit: bytes of the device's memory that all graphs may take.
    """

    def __init__(
        self, driver: Driver, stream: OwnStream, copies: OwnStream, run: Callable[[int, Batch], None], limit: int
    ) -> None:
        self._driver, self._stream, self._copies, self._run = driver, stream, copies, run
        self._handle = int(stream.handle)
        self._before, self._after, self._fork, self._join = (driver.event() for _ in range(4))
        self._limit = limit
        self._clock = itertools.count()
        self._alive: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._seen: dict[tuple[int, tuple[int, ...]], _Call] = {}  # by the table and the addresses
        self._most_alive, self._total_bytes = 0, _GUESSES * _GUESSED_BYTES

    @property
    def num_alive(self) -> int:
        """Graphs that are kept now."""
        return len(self._alive)

    @property
    def size_bytes(self) -> int:
        """What they take of the device's memory, estimated."""
        return self.num_alive * self._mean_bytes

    @property
    def _mean_bytes(self) -> int:
        return max(_LEAST_BYTES, self._total_bytes // (_GUESSES + self._most_alive))

    def run(self, tape: BoundOperation, addresses: tuple[int, ...], stream: int) -> bool:
        """Make the whole call, its release included; False, and nothing done, where it is to be made step by step."""
        call = tape.graphs.get(addresses)
        if call is None:
            return self._run_new(tape, addresses, stream)
        call.stamp = next(self._clock)
        call.launch(stream)
        return True

    def _run_new(self, tape: BoundOperation, addresses: tuple[int, ...], stream: int) -> bool:
        call = self._look_up(tape.graphs, addresses)
        count, call.count = call.count, call.count + 1
        if count < _STEPWISE:
            return False
        if count == _STEPWISE:
            self._rehearse(tape, addresses, stream)
            return True
        is_full = self.size_bytes + self._mean_bytes > self._limit
        if is_full and count < _STEPWISE + _WORTH_ANOTHER:
            return False
        free_bytes = self._driver.free_memory_bytes()
        if is_full and not self._remove_oldest(before=call.stamp):
            call.count, call.stamp = _STEPWISE + 1, next(self._clock)
            return False
        graph = self._capture(tape, addresses)
        if graph is None:
            call.count = _NEVER
            return False
        graph.launch(stream)  # which may take memory, too
        call.launch, call.stamp = graph.launch, next(self._clock)
        del self._seen[id(tape.graphs), addresses]
        tape.graphs[addresses] = call
        self._alive.add(call)
        if is_full or self.num_alive > self._most_alive:
            self._most_alive = max(self._most_alive, self.num_alive)
            taken_bytes = free_bytes - self._driver.free_memory_bytes()
            self._total_bytes += min(max(taken_bytes, -_MOST_AT_ONCE_BYTES), _MOST_AT_ONCE_BYTES)
            while self.size_bytes > self._limit:
                self._remove_oldest(before=call.stamp)
        return True

    def _look_up(self, table: GraphTable, addresses: tuple[int, ...]) -> _Call:
        call = self._seen.get((id(table), addresses))
        if call is None or call.table() is not table:  # else another one was there, which has gone with its tape
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            call = _Call(weakref.ref(table), addresses, next(self._clock))
            self._seen[id(table), addresses] = call
        return call

    def _remove_oldest(self, before: int) -> bool:
        """Whether there was a graph that has not been launched since. One that is running is freed when it is done."""
        oldest = min(self._alive, key=operator.attrgetter("stamp"), default=None)
        if oldest is None or oldest.stamp > before:
            return False
        self._alive.discard(oldest)
        table = oldest.table()
        if table is not None:
            del table[oldest.addresses]
        return True

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
            return self._driver.graph(self._stream, tell)
        except Exception as error:  # nothing was run, and the call can be made without
            logger.warning("a call is not launched as a CUDA graph: %s", error)
            return None
