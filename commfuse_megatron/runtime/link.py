"""What a running schedule needs of its context: transfers, buffers, tags, marks - and what happens when a peer is late.

The link of a context that failed (or was closed) refuses to start anything.
"""

import copy
import logging
import time
from typing import Any, Literal, NamedTuple, Self

from commfuse_megatron.errors import CommFuseError, TransportError, TransportTimeoutError
from commfuse_megatron.runtime.agreement import Agreement
from commfuse_megatron.runtime.recorder import Recorder
from commfuse_megatron.runtime.watchdog import Watchdog
from commfuse_megatron.schedule import render
from commfuse_megatron.schedule.binding import BoundSchedule
from commfuse_megatron.schedule.program import Batch, Issue, Program
from commfuse_megatron.transport.base import Message, PeerTimeoutError, Transfer, Transport, TwoSidedTransport
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.copy_steps import BoundOperation
from commfuse_megatron.transport.stream_memory import StreamEvent, may_wait_for_device

logger = logging.getLogger(__name__)

# Of a schedule, in a message: enough for a group of four with four chunks per shard.
_MAX_STEPS = 17
# Of an exception: the links all of whose ranks raise.
_RAISED_ON_ALL = "_commfuse_raised_on_all_ranks"

# How long who lost a connection waits for the reason of the peer, which tells it before it lets go.
_REASON_S = 1.0
# How long an exception waits for the transfers of operations before the one that it ended. Not measured.
_LAST_TRANSFERS_S = 2.0


class Peers(NamedTuple):
    """Who this rank is within its group, and the global rank of every member."""

    group_rank: int
    global_ranks: tuple[int, ...]

    def name(self, group_rank: int) -> str:
        """Both ranks of a member, for messages."""
        return f"group rank {group_rank} (global rank {self.global_ranks[group_rank]})"


class Watched(NamedTuple):
    """A batch {send, receive} of a program, without the tensors it holds. label: of its collective."""

    label: str
    bound: BoundSchedule
    batch: Batch
    send_peer: int | None
    receive_peer: int | None

    @classmethod
    def of(cls, program: Program, op: Issue) -> Self:
        """That of one op."""
        peers = op.send and op.send.peer, op.receive and op.receive.peer
        return cls(program.labels[op.channel], program.schedules[op.channel], (op.channel, op.step), *peers)

    @property
    def name(self) -> str:
        """What the recorder calls it."""
        ends = [f"to rank {self.send_peer}"] if self.send_peer is not None else []
        ends += [f"from rank {self.receive_peer}"] if self.receive_peer is not None else []
        return " ".join(ends)

    @property
    def place(self) -> str:
        """Where in the schedule it stands, for errors."""
        return f"{self.label}, step {self.batch[1]} of {len(self.bound.steps)}"


class Link:
    """Transfers of one context. `record` is None unless the configuration asks for recording."""

    def __init__(
        self, transport: Transport, peers: Peers, timeout_s: float, recorder: Recorder | None, board: Agreement
    ):
        self.transport = transport
        self.recorder = recorder
        #: Whether there is a recorder; `recorder` is None meanwhile where calls are not the user's.
        self.is_recorded = recorder is not None
        self.failure: Exception | None = None
        #: What an exception of the program ended, and its type, when all transfers of operations before were complete.
        self.interruption: tuple[str, str] | None = None
        #: Whether the failure is another rank's.
        self.is_left_by_peer = False
        #: What to do once the context has failed or is closed.
        self.advice = "To go on, all ranks make a new OverlapContext at the same point and begin with a forward pass."
        self.is_closed = False
        #: Whether the program gave the context up for an error of its own.
        self.is_left_by_error = False
        #: Whether this process was forked from the one that uses it.
        self.is_disowned = False
        self.is_capturing = False
        #: On a stream, where the operation that began last has ended; None on the CPU. The context records it.
        self.last_done: StreamEvent | None = None
        self._peers = peers
        self._board = board
        self.timeout_s = timeout_s
        self._next_tag = 0
        self._has_begun = False  # what all ranks begin: a rank may have nothing to send in it
        self._open: dict[Batch, object] = {}
        self._watchdog = Watchdog(timeout_s, self._overdue, self._broken_device) if transport.needs_watchdog else None

    def next_tags(self, count: int) -> int:
        """First of `count` tags that no message in flight uses; equal on all ranks, which run the same operations."""
        self._has_begun = True
        first = self._next_tag
        self._next_tag += count
        return first

    def start(self, watched: Watched, send: Message | None, receive: Message | None) -> Transfer:
        """Issue one batch."""
        transport = self.transport
        assert isinstance(transport, TwoSidedTransport)
        try:
            transfer = transport.exchange(send, receive, watched.batch[1])
        except TransportError as error:
            raise self.fail(self._broken(watched, error)) from error
        if self._watchdog is not None and not self.is_capturing:
            self._watchdog.watch(transfer, watched)
        if self.recorder is not None:
            self._open[watched.batch] = self.recorder.open_transfer(watched.name, transfer, watched.batch[1])
        return transfer

    def replay(
        self, operation: BoundOperation, addresses: tuple[int, ...], *, may_launch: bool = True
    ) -> Literal["tape", "graph"]:
        """Run a bound operation over the copy engine, all but its release; returns as what it ran.

        may_launch: as a graph, if it is one for these addresses. What is recorded never is.
        """
        transport = self.transport
        assert isinstance(transport, CopyEngineTransport)
        self._has_begun = True
        may_launch = may_launch and self.recorder is None and not self.is_capturing
        transfer = transport.replay(operation, addresses, is_capturing=self.is_capturing, may_launch=may_launch)
        if self._watchdog is not None and operation.keys and not self.is_capturing:
            self._watchdog.watch(transfer, operation)
        return "graph" if may_launch and addresses in operation.graphs else "tape"

    def replay_part(self, operation: BoundOperation, addresses: tuple[int, ...], number: int) -> None:
        """Run one part of a bound operation with pauses, all of which are run, in their order."""
        transport = self.transport
        assert isinstance(transport, CopyEngineTransport)
        if not number:
            self._has_begun = True
            transfer = transport.begin_parts(operation)
            if self._watchdog is not None and operation.keys:
                self._watchdog.watch(transfer, operation)
        transport.run_steps(operation.parts[number], addresses)

    def replay_held(self, operation: BoundOperation, addresses: tuple[int, ...], number: int) -> None:
        """Run what was held back at a pause of the bound operation, unless it has been run."""
        transport = self.transport
        assert isinstance(transport, CopyEngineTransport)
        transport.run_steps(operation.held[number : number + 1], addresses)

    def release(self) -> StreamEvent | None:
        """End an operation; returns what the transport recorded at its end on the current stream, if it did."""
        if not self._has_begun:
            return None
        self._has_begun = False
        return self.transport.release(is_capturing=self.is_capturing)

    def finish(self, watched: Watched, transfer: Transfer) -> None:
        """Order what follows after the batch. Raises TransportTimeoutError or TransportError where that can be seen."""
        try:
            transfer.wait()
        except PeerTimeoutError as error:
            late = self._timeout_error(watched, error.verb, error.peer)
            raise self.fail(self._with_reasons(late)) from error
        except TransportError as error:
            raise self.fail(self._broken(watched, error)) from error
        if self.recorder is not None:
            self.recorder.close_transfer(self._open.pop(watched.batch))

    def mark(self, stream: int | None = None) -> Any:
        """Start of a compute interval on a stream, None being the current one; None when nothing is recorded."""
        return None if self.recorder is None or self.is_capturing else self.recorder.now(stream)

    def note_compute(self, name: str, mark: Any, step: int | None, stream: int | None = None) -> None:
        """End of the compute interval that began at `mark`."""
        if self.recorder is not None and mark is not None:
            self.recorder.add_compute(name, mark, step, stream)

    def note_transfer(self, watched: Watched, mark: Any, transfer: Transfer) -> None:
        """A batch of a tape was issued whose interval began at `mark`."""
        if self.recorder is not None and mark is not None:
            step = watched.batch[1]
            self._open[watched.batch] = self.recorder.open_transfer(watched.name, transfer, step, mark)

    def note_arrival(self, batch: Batch) -> None:
        """What follows on the stream in use comes after this batch of a tape."""
        opened = self._open.pop(batch, None)
        if self.recorder is not None and opened is not None:
            self.recorder.close_transfer(opened)

    def raise_failure(self, why_still: str | None = None) -> None:
        """Raise what made the context fail, if it did, with what to do; why_still: why it could not be renewed."""
        if self.failure is not None:
            error = _without_frames(self.failure)
            error.args = ("\n".join(filter(None, (f"{error}", why_still, self.advice))),)
            raise error

    def require_usable(self) -> None:
        """Raise what made the context fail, if it did, or TransportError if it is closed."""
        self.raise_failure()
        if self.is_closed:
            raise TransportError(f"this OverlapContext is closed. {self.advice}")

    def mark_raised_on_all_ranks[E: BaseException](self, error: E) -> E:
        """Say that all ranks raise in this call, so that none is ahead of another; returns `error`."""
        setattr(error, _RAISED_ON_ALL, (*getattr(error, _RAISED_ON_ALL, ()), self))
        return error

    def note_interruption(self, what: object, error: BaseException) -> None:
        """Mark the context failed, unless all ranks end `what` by `error`: others may go on with it.

        what: in words, or what gives them.
        """
        if self.failure is not None or any(link is self for link in getattr(error, _RAISED_ON_ALL, ())):
            return
        failure = error
        if not isinstance(error, CommFuseError):
            failure = TransportError(f"{what} was interrupted by {type(error).__name__}: {error}")
        assert isinstance(failure, Exception)
        is_lost = isinstance(error, TransportError | TransportTimeoutError)  # which the peers find out as this one did
        try:
            if isinstance(error, Exception) and not is_lost and self._is_without_transfers():
                kind = type(error)
                self.interruption = (f"{what}", f"{kind.__module__}.{kind.__qualname__}")
            if not is_lost:
                self._board.leave(f"{failure}")
        finally:
            self.fail(failure)
        if error is not failure:
            self._add_advice(error)

    def note_leaving(self, error: BaseException | None) -> None:
        """Tell the peers that the program gives the context up for an error of its own."""
        self.is_left_by_error = True
        if self.failure is None and not self.is_closed:
            self._board.leave(f"the context was left by {type(error).__name__}: {error}")

    def learn_of_peers(self) -> None:
        """Fail if another rank has told that it goes no further."""
        error = self._with_reasons(TransportError("another rank goes no further:"))
        if self.is_left_by_peer:
            self.fail(error)

    def fail(self, error: Exception) -> Exception:
        """Mark the context failed and give up its transfers; returns `error` for raising."""
        if self.failure is None:
            self.failure = _without_frames(error)
            self.transport.abort()
            self._add_advice(error)
        return error

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is known to be in flight."""
        return self._watchdog is None or self._watchdog.is_idle

    @property
    def is_in_flight(self) -> bool:
        """Whether streams may still be at transfers; after a failure, until they were let go."""
        if self.is_disowned:
            return False
        return not self.is_idle if self.failure is None else not self.transport.has_given_up

    def stop_watching(self) -> None:
        """End the watchdog thread."""
        if self._watchdog is not None:
            self._watchdog.stop()

    def _broken_device(self, error: TransportError) -> None:
        if self.failure is None:
            self.fail(TransportError(f"{self._peers.name(self._peers.group_rank)}: the device has failed: {error}"))

    def _is_without_transfers(self) -> bool:
        """Whether all that was sent and received is complete, so that giving up the transport takes nothing away."""
        if self._watchdog is None:  # every operation waits for its own
            return True
        deadline = time.monotonic() + min(_LAST_TRANSFERS_S, self.timeout_s)
        while not self._has_begun and self.failure is None and may_wait_for_device():
            if self._watchdog.is_idle:
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(1e-3)
        return False

    def _add_advice(self, error: BaseException) -> None:
        error.add_note(f"The OverlapContext has failed by this. {self.advice}")

    def _with_reasons[E: Exception](self, error: E, wait_s: float = 0.0) -> E:
        """The same, with what peers have told of why they go no further."""
        reasons = self._board.reasons_of_leaving(wait_s)
        if not reasons:
            return error
        self.is_left_by_peer = True
        return type(error)("\n".join([f"{error}", *(f"  {self._peers.name(r)}: {why}" for r, why in reasons.items())]))

    def _overdue(self, watched: Watched | BoundOperation | int) -> None:
        error = self._with_reasons(self._overdue_error(watched))
        logger.error("%s\n%s", error, self.advice)
        self.fail(error)

    def _overdue_error(self, watched: Watched | BoundOperation | int) -> TransportTimeoutError:
        """What to say of a batch, of a call from a tape, or of a peer that has nothing to send and does not come."""
        if isinstance(watched, BoundOperation):
            return self._missing_error(watched)
        if isinstance(watched, int):
            return self._never_came_error(watched)
        if watched.receive_peer is not None:
            verb, peer = "got nothing from", watched.receive_peer
        else:
            verb, peer = "could not deliver to", watched.send_peer if watched.send_peer is not None else -1
        return self._timeout_error(watched, verb, peer)

    def _missing_error(self, operation: BoundOperation) -> TransportTimeoutError:
        transport = self.transport
        assert isinstance(transport, CopyEngineTransport)
        for key, note in operation.notes:
            if not transport.has_arrived(key):
                assert isinstance(note, Watched)
                return self._overdue_error(note)
        if (peer := transport.silent_peer(operation)) is not None:
            return self._never_came_error(peer)
        me = self._peers.name(self._peers.group_rank)
        if (peer := transport.undelivered_peer(operation)) is not None:
            return TransportTimeoutError(f"{me} could not deliver to {self._peers.name(peer)} for {self.timeout_s} s")
        return TransportTimeoutError(
            f"{me}: all messages of a call are here, but it did not end in {self.timeout_s} s: "
            "something else holds up its stream"
        )

    def _broken(self, watched: Watched, error: TransportError) -> TransportError:
        me = self._peers.name(self._peers.group_rank)
        broken = TransportError(f"{watched.place}: {me}: {error}")
        if self.is_closed or self.failure is not None:  # in another thread: no peer is to blame
            return broken
        return self._with_reasons(broken, _REASON_S)

    def _never_came_error(self, peer: int) -> TransportTimeoutError:
        me = self._peers.name(self._peers.group_rank)
        return TransportTimeoutError(
            f"{me} waited {self.timeout_s} s for {self._peers.name(peer)}, which has nothing to send in this call but "
            "must come to it: it has not, or the call before has not ended there"
        )

    def _timeout_error(self, watched: Watched, verb: str, peer: int) -> TransportTimeoutError:
        me = self._peers.group_rank
        grid = render(watched.bound.schedule, mark=(me, watched.batch[1]), max_steps=_MAX_STEPS)
        return TransportTimeoutError(
            f"{watched.place}: {self._peers.name(me)} {verb} {self._peers.name(peer)} for {self.timeout_s} s. "
            f"Schedule:\n{grid}"
        )


def _without_frames(error: Exception) -> Exception:
    """The same to be kept, or raised once more: frames keep what their calls worked on, and the context itself."""
    if not isinstance(error, CommFuseError):
        return TransportError(f"{type(error).__name__}: {error}")
    kept = copy.copy(error)
    kept.__dict__.pop(_RAISED_ON_ALL, None)
    kept.__dict__.pop("__notes__", None)
    return kept
