"""Transport by copies into the peers' memory: GPUs that reach each other, ranks of one host. No kernel, no SM.

Every rank maps the windows of all others (PyTorch symmetric memory; multicast is never used). A message is a
device-to-device copy on a stream of our own, between stream memory operations on 32-bit flags:

    sender's copy stream      wait free, clear it | copy into the peer's window | write full there, sent here
    receiver's stream                                                  wait full, sent ...   release: clear, write free

`free` lies at the sender, one per peer: that peer's windows may be written. `full` lies at the receiver, `sent` at the
sender, one per message. They are set once and cleared once per operation, by values that do not change from call to
call, so a captured CUDA graph replays them. A wait changes nothing, so it may be repeated, on any stream.

Beware: between two releases all messages to a peer go out under one grant, which the peer gives anew in every release.
So a rank must release each operation, also one that sends and receives nothing, in the same order as the others. A
grant says that the peer has read all that arrived, whoever sent it: the next operation may lay its windows out
differently. Therefore a rank without a message for a peer takes the grant, too, and says so by a flag of its own, for
which the peer waits before it grants again: else a grant of an earlier operation would be left over.
"""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import override

import torch
from torch import distributed as dist

from commfuse_megatron.errors import TransportError
from commfuse_megatron.transport.base import Place, Transfer, Transport, Window
from commfuse_megatron.transport.copy_flags import NO_MESSAGE, CopyFlags, Key, bytes_of_flags, clear_flags
from commfuse_megatron.transport.copy_steps import BoundOperation, Ref, Step
from commfuse_megatron.transport.mapped_window import MappedWindow, leave_multicast_alone, map_window
from commfuse_megatron.transport.stream_memory import (
    CUDA,
    Batch,
    Driver,
    OwnStream,
    StreamEvent,
    allow_calls_during_capture,
)
from commfuse_megatron.transport.tape_graphs import TapeGraphs

logger = logging.getLogger(__name__)

# Streams blocked by a peer that never came are let go in rounds, since queued work clears flags again.
_ABORT_ROUND_S = 0.005
_ABORT_IDLE_ROUNDS = 20
_ABORT_LIMIT_S = 60.0


class _Operation:
    """What is between two releases; a graph may have ended it."""

    __slots__ = ("done", "is_done", "is_released", "release")

    def __init__(self) -> None:
        self.release: Batch | None = None  # None: nothing was run
        self.is_released = False
        self.done: StreamEvent | None = None
        self.is_done = False


class _Batches(Transfer):
    """Some batches of an operation."""

    __slots__ = ("_keys", "_operation", "_transport")

    def __init__(self, transport: "CopyEngineTransport", keys: tuple[Key, ...], operation: _Operation) -> None:
        self._transport, self._keys, self._operation = transport, keys, operation

    @override
    def wait(self) -> None:
        transport = self._transport
        transport.bind_wait(self._keys)((), transport.current_stream())

    @override
    def is_complete(self) -> bool:
        done = self._operation.done  # re-recorded for a later operation only once this one is done
        return self._operation.is_done or (done is not None and done.query())

    @override
    def has_arrived(self) -> bool:
        return self.is_complete() or all(map(self._transport.has_arrived, self._keys))


class CopyEngineTransport(Transport):
    """Copies between the members of one process group, all of which reach each other's memory."""

    name = "copy_engine"
    needs_watchdog = True
    is_one_sided = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        exchange: Callable[[str], list[str]] | None = None,
        *,
        graph_memory_mib: int = 0,
        driver: Driver = CUDA,
    ) -> None:
        """Collective over `group`. exchange: hands one string of every rank to all; None: they never lack memory.

        graph_memory_mib: for replayed calls whose addresses were seen before, to be launched as one CUDA graph each.
        """
        leave_multicast_alone()
        self._is_closed = self._is_aborted = self._has_let_go = False
        self._group = group
        self._exchange = exchange
        self.device = device
        self._rank, self._size = group.rank(), group.size()
        self._driver, self._memory = driver, driver.memory()
        self._stream = driver.new_stream(device, is_high_priority=True)
        self._issued, self._copied = driver.event(), driver.event()
        self._graph_stream: OwnStream | None = None
        #: None: every call is made step by step.
        self.graphs: TapeGraphs | None = None
        if graph_memory_mib:
            self._graph_stream = driver.borrow_stream(device)
            self.graphs = TapeGraphs(driver, self._graph_stream, self._stream, self._memory.run, graph_memory_mib << 20)
        clear = functools.partial(clear_flags, group_size=self._size)
        try:
            window = map_window(driver, group, device, bytes_of_flags(self._size), exchange, clear)
            self._flags = CopyFlags(self._memory, window, self._rank)
            self._page = driver.flag_page(self._flags.tensor)
        except BaseException:
            self._give_streams_back()
            raise
        self._operation = _Operation()
        self._in_flight: deque[_Operation] = deque()

    def current_stream(self) -> int:
        """The handle of PyTorch's current stream."""
        return self._driver.current_stream(self.device)

    @property
    def copies(self) -> int:
        """The handle of the stream of all copies."""
        return int(self._stream.handle)

    @override
    def window(self, size_bytes: int, device: torch.device) -> Window:
        # All that this rank received or sent is ordered before this; after the rendezvous that holds for all ranks.
        self._driver.wait_for_current_stream(self.device)
        return map_window(self._driver, self._group, self.device, size_bytes, self._exchange)

    def replay(
        self, tape: BoundOperation, addresses: tuple[int, ...], *, is_capturing: bool, may_launch: bool
    ) -> Transfer:
        """Run a bound operation on the current stream; `release` is still due. Returns all its batches.

        is_capturing: somebody else's graph is being captured. may_launch: as a graph of ours.
        """
        self._require_open()
        operation = self._operation
        operation.release = tape.release
        stream = self.current_stream()
        if may_launch and self.graphs is not None and self.graphs.run(tape, addresses, stream):
            operation.is_released = True
        elif is_capturing:
            self._fork(stream)
            for step in tape.captured:
                step(addresses, stream)
        else:
            for step in tape.steps:
                step(addresses, stream)
        return _Batches(self, tape.keys, operation)

    def begin_parts(self, tape: BoundOperation) -> Transfer:
        """Begin a bound operation whose parts are given to `run_steps`. Returns all its batches."""
        self._require_open()
        self._operation.release = tape.release
        return _Batches(self, tape.keys, self._operation)

    def run_steps(self, steps: Iterable[Step], addresses: tuple[int, ...]) -> None:
        """Run some steps of the operation under way on the current stream."""
        self._require_open()
        stream = self.current_stream()
        for step in steps:
            step(addresses, stream)

    def batches(self, *keys: Key) -> Transfer:
        """Some batches of the operation under way."""
        return _Batches(self, keys, self._operation)

    @override
    def release(self, *, is_capturing: bool) -> StreamEvent | None:
        self._require_open()
        operation, self._operation = self._operation, _Operation()
        stream = self.current_stream()
        assert operation.release is not None
        if not operation.is_released:
            self._memory.run(stream, operation.release)
        if is_capturing:  # a forked stream must join again before the capture ends
            self._join(stream)
            return None
        done = self._spare_event()
        done.record(stream)
        operation.done = done  # not before: other threads ask it, and it says "reached" until it is recorded
        self._in_flight.append(operation)
        return done

    @override
    def abort(self) -> None:
        if not self._is_aborted:
            self._is_aborted = True
            try:
                threading.Thread(target=self._let_go, name="commfuse-abort", daemon=True).start()
            except RuntimeError:  # the interpreter ends, and starts no thread any more
                self._let_go()

    @property
    @override
    def has_given_up(self) -> bool:
        return self._has_let_go

    @override
    def close(self) -> None:
        self._is_closed = self._is_aborted = self._has_let_go = True  # there is nothing left to give up
        self._give_streams_back()
        self._page.destroy()

    def _require_open(self) -> None:
        if self._is_closed:
            raise TransportError("the context was closed in another thread")

    def _give_streams_back(self) -> None:
        self._stream.destroy()
        graph_stream, self._graph_stream = self._graph_stream, None
        if graph_stream is not None:
            self._driver.give_stream_back(self.device, graph_stream)

    def _fork(self, stream: int) -> None:
        """The copy stream goes on from where `stream` is."""
        self._issued.record(stream)
        self._issued.wait(self._stream.handle)

    def _join(self, stream: int) -> None:
        """`stream` goes on from where the copy stream is."""
        self._copied.record(self._stream.handle)
        self._copied.wait(stream)

    def _spare_event(self) -> StreamEvent:
        if self._in_flight:
            event = self._in_flight[0].done
            if event is not None and event.query():
                oldest = self._in_flight.popleft()
                oldest.is_done, oldest.done = True, None
                return event
        return self._driver.event()

    # -- binding: see copy_tape -------------------------------------------------------------------------------------

    def bind_order(self) -> tuple[Step, Step]:
        """Mark where one stream has come; let the copy stream go on from there.

        The event is this mark's own: the copy stream is told behind the next kernel, before which another lane may
        have made a mark of its own.
        """
        event, copies = self._driver.event(), self._stream.handle
        record, follow = event.record, event.wait
        return lambda at, stream: record(stream), lambda at, stream: follow(copies)

    def bind_mark(self) -> tuple[Step, Step]:
        """Mark where one stream has come; let others go on from there."""
        event = self._driver.event()
        record, follow = event.record, event.wait
        return lambda at, stream: record(stream), lambda at, stream: follow(stream)

    def bind_copies_mark(self) -> tuple[Step, Step]:
        """Mark where the copy stream has come; let another stream go on from there."""
        event, copies = self._driver.event(), self._stream.handle
        record, follow = event.record, event.wait
        return lambda at, stream: record(copies), lambda at, stream: follow(stream)

    def bind_take(self, peer: int) -> Step:
        """The copy stream goes on when `peer` lets it write."""
        run, copies, ops = self._memory.run, self._stream.handle, self._driver.batch(self._flags.take(peer))
        return lambda at, stream: run(copies, ops)

    def bind_push(self, peer: int, place: Place, source: Ref, size_bytes: int) -> Step:
        """Copy to a place at `peer` and say so there and here."""
        assert isinstance(place.window, MappedWindow)
        ops = self._driver.batch(self._flags.deliver(peer, place.flag))
        return self._bind_copy(Ref(0, place.window.addresses[peer] + place.offset), source, size_bytes, ops)

    def bind_copy(self, target: Ref, source: Ref, size_bytes: int, flag: int) -> Step:
        """Copy within this device on the copy stream; `key_of_copy(flag)` is what to wait for."""
        ops = self._driver.batch(self._flags.copied(self._rank, flag))
        return self._bind_copy(target, source, size_bytes, ops)

    def bind_copy_in_turn(self, target: Ref, source: Ref, size_bytes: int) -> Step:
        """Copy within this device on the stream in use."""
        copy, (target_slot, target_offset), (source_slot, source_offset) = self._memory.copy, target, source
        return lambda at, stream: copy(
            stream, at[target_slot] + target_offset, at[source_slot] + source_offset, size_bytes
        )

    def key_of_copy(self, flag: int) -> Key:
        """The key of a copy within this device."""
        return (-1, -1, self._rank, flag)

    def bind_wait(self, keys: tuple[Key, ...]) -> Step:
        """The current stream goes on when all batches are complete."""
        run = self._memory.run
        ops = self._driver.batch(self._flags.wait(keys))
        return lambda at, stream: run(stream, ops)

    def bind_no_message(self, keys: tuple[Key, ...]) -> tuple[Step | None, tuple[Key, ...]]:
        """What the copy stream tells peers to whom none of these batches goes, and the keys of those who send none."""
        send_ops, wait_keys = self._flags.no_message(keys)
        run, copies, ops = self._memory.run, self._stream.handle, self._driver.batch(send_ops)
        return (lambda at, stream: run(copies, ops)) if send_ops else None, wait_keys

    def bind_release(self, keys: tuple[Key, ...], awaited: tuple[Key, ...]) -> Batch:
        """What ends an operation of these batches, and waits for some of them first."""
        return self._driver.batch([*self._flags.wait(awaited), *self._flags.release(keys)])

    def _bind_copy(self, target: Ref, source: Ref, size_bytes: int, ops: Batch) -> Step:
        copy, run, copies = self._memory.copy, self._memory.run, self._stream.handle
        target_slot, target_offset = target
        source_slot, source_offset = source

        def step(at: tuple[int, ...], stream: int) -> None:
            copy(copies, at[target_slot] + target_offset, at[source_slot] + source_offset, size_bytes)
            run(copies, ops)

        return step

    # -- when a peer does not come ------------------------------------------------------------------------------------

    def has_arrived(self, key: Key) -> bool:
        """Whether the flags of a batch are set now; slow, for diagnosis."""
        return self._flags.are_set(key, self._page.read())

    def silent_peer(self, operation: BoundOperation) -> int | None:
        """A peer that has no message for this rank in the operation and has not said so yet; slow, for diagnosis."""
        waiting = (key[0] for key in operation.keys if key[1] == NO_MESSAGE and not self.has_arrived(key))
        return next(waiting, None)

    def undelivered_peer(self, operation: BoundOperation) -> int | None:
        """A peer to whom a message of the operation has not gone yet; slow, for diagnosis."""
        keys = (key for key in operation.keys if key[2] not in (-1, self._rank))
        return next((key[2] for key in keys if not self.has_arrived((-1, -1, *key[2:]))), None)

    def _is_idle(self) -> bool:
        """Whether nothing of this transport is under way, as far as can be told."""
        try:
            last = self._in_flight[-1].done if self._in_flight else None
            return self._stream.torch.query() and (last is None or last.query())
        except (IndexError, RuntimeError):  # the program goes on; a stream that is being captured must not be asked
            return False

    def _let_go(self) -> None:
        """Set every flag, again and again, until nothing of this transport waits any more."""
        allow_calls_during_capture()
        deadline = time.monotonic() + _ABORT_LIMIT_S
        idle_rounds = 0
        try:
            while time.monotonic() < deadline and idle_rounds < _ABORT_IDLE_ROUNDS:
                self._page.set_all()
                is_idle = self._is_idle()
                idle_rounds = idle_rounds + 1 if is_idle else 0
                time.sleep(_ABORT_ROUND_S)
        except RuntimeError as error:  # of the device: no stream of it waits any more
            logger.error("the flags of the transfers could not be set: %s", error)
            self._has_let_go = True
            return
        self._has_let_go = idle_rounds >= _ABORT_IDLE_ROUNDS
        if not self._has_let_go:
            logger.error("a stream was still blocked %.0f s after the transfers were given up", _ABORT_LIMIT_S)
