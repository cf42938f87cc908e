"""The transport interface: how the bytes of one step reach another rank. Knows no GEMM and no schedule.

Stream semantics, the contract that bites: `exchange` behaves as if it ran on the current stream at the time of the
call. It reads the sent tensor, and overwrites the received one, after all work submitted there before; it does not make
that stream wait. `Transfer.wait` does: work submitted afterwards may read what arrived and overwrite what was sent.
On the CPU the "stream" is the calling thread.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

__all__ = ["Message", "PeerTimeoutError", "Transfer", "Transport"]


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
    """One batch {send, receive} in flight. Transfers that share a lane run one after the other."""

    lanes: tuple[int, ...] = (0,)

    @abstractmethod
    def wait(self) -> None:
        """Order later work of the caller's stream (CPU: the caller) after this transfer. May be called again.

        Raises PeerTimeoutError where waiting blocks the host, TransportError when the connection broke.
        """

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the transfer is known to be complete; never blocks. Gloo learns it in `wait` only."""


class Transport(ABC):
    """Point-to-point transfers within one private group, made once per context, collectively over that group."""

    name: str
    #: True where a wait sits in a stream and cannot raise, so that the context must watch for overdue transfers.
    needs_watchdog: bool

    @abstractmethod
    def exchange(self, send: Message | None, receive: Message | None, turn: int = 0) -> Transfer:
        """Start one batch. All ranks must call `exchange` in matching order; equal tags pair up.

        turn: equal at both ends of a message (a schedule's step); a transport with several lanes takes them in turn.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give up all transfers in flight so that no stream and no thread stays blocked. Local; ends the transport."""

    @abstractmethod
    def close(self) -> None:
        """Release the group. Local; the caller has seen all transfers complete."""
