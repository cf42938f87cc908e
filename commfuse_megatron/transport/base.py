"""The transport interface: how the bytes of one step reach another rank. Knows no GEMM and no schedule.

With two sides, `exchange` behaves as if it ran on the current stream at the time of the call. It reads the sent tensor,
and overwrites the received one, after all work submitted there before; it does not make that stream wait.
`Transfer.wait` does: work submitted afterwards may read what arrived and overwrite what was sent. On the CPU the
"stream" is the calling thread.

One-sided transports push into the receiver's memory without asking it at that moment. So messages arrive in windows
only, and a window belongs to the peers from `release` (or its creation) until the wait for what arrived there. What is
sent in an operation is bound before it runs: see `copy_tape`.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from commfuse_megatron.transport.stream_memory import StreamEvent

#: Flags of a `Place` are below this.
MOST_FLAGS = 8192
#: Of one collective: an operation may run two.
MOST_CHUNKS = MOST_FLAGS // 2


class Window:
    """Memory of this rank in which messages arrive: `tensor`, bytes. Made by all ranks together, equally large."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def free(self) -> None:
        """Give the memory up. The current stream comes after all that uses it; the window is of no use afterwards."""
        if self.tensor.is_cuda:
            # It may have been used on another stream than the one its memory returns to.
            self.tensor.record_stream(torch.cuda.current_stream(self.tensor.device))


class Place(NamedTuple):
    """Where a message arrives: `offset` bytes into the receiver's window, which is made together with `window`.

    flag: below MOST_FLAGS; no two messages from one sender to one receiver share it before the receiver's `release`.
    """

    window: Window
    offset: int
    flag: int


class Message(NamedTuple):
    """One contiguous tensor to or from group rank `peer`.

    `tag` is equal at both ends and unique among the messages in flight.
    """

    tensor: torch.Tensor
    peer: int
    tag: int


class PeerTimeoutError(Exception):
    """Raised by `Transfer.wait` where waiting blocks the host; the runtime adds op and step."""

    def __init__(self, peer: int, verb: str, timeout_s: float) -> None:
        super().__init__(f"{verb} group rank {peer} for {timeout_s} s")
        self.peer = peer
        self.verb = verb
        self.timeout_s = timeout_s


class Transfer(ABC):
    """One batch {send, receive} in flight. Transfers that share a communicator run one after the other."""

    communicators: tuple[int, ...] = (0,)

    @abstractmethod
    def wait(self) -> None:
        """Order later work of the caller's stream (CPU: the caller) after this transfer. May be called again.

        Raises PeerTimeoutError where waiting blocks the host, TransportError when the connection broke.
        """

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the transfer is known to be complete; never blocks. Gloo learns it in `wait` only."""

    def has_arrived(self) -> bool:
        """The same, but exact and slow: to find which of several transfers in flight is the missing one."""
        return self.is_complete()


class Transport(ABC):
    """Point-to-point transfers within one private group, made once per context, collectively over that group."""

    name: str
    #: True where a wait sits in a stream and cannot raise, so that the context must watch for overdue transfers.
    needs_watchdog: bool
    #: True where peers push into windows: received tensors must lie in one, and every message has a place.
    is_one_sided: bool = False

    def window(self, size_bytes: int, device: torch.device) -> Window:
        """Memory for arrivals, of at least `size_bytes`. Collective; the current stream is done with all transfers."""
        return Window(torch.empty(size_bytes, dtype=torch.uint8, device=device))

    def release(self, *, is_capturing: bool) -> StreamEvent | None:
        """End an operation: what arrived since the last release has been read, in the current stream's order.

        All ranks release the same operations, also those in which they exchange nothing. Returns what was recorded at
        its end on the current stream, if anything was.
        """
        return None

    @abstractmethod
    def abort(self) -> None:
        """Give up all transfers in flight so that no stream and no thread stays blocked. Local; ends the transport."""

    @property
    def has_given_up(self) -> bool:
        """Whether `abort`, once called, has done its work."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Release the group. Local; the caller has seen all transfers complete."""


class TwoSidedTransport(Transport):
    """A transport whose messages are sent and received, both ends being asked."""

    @abstractmethod
    def exchange(self, send: Message | None, receive: Message | None, turn: int = 0) -> Transfer:
        """Start one batch. All ranks must call `exchange` in matching order; equal tags pair up.

        turn: equal at both ends of a message (a schedule's step); several communicators are taken in turn.
        """
