"""Transport over gloo: CPU tensors, TCP. The reference transport and the one CI runs.

Waiting blocks the calling thread and raises there. Gloo pairs messages by (peer, tag) first in, first out, so messages
whose tags are unique among those in flight cannot cross, at group size 2 either.
"""

import re
from datetime import timedelta
from typing import Any, override

from torch import distributed as dist

from commfuse_megatron.errors import TransportError
from commfuse_megatron.transport.base import Message, PeerTimeoutError, Transfer, TwoSidedTransport

# Gloo tags are 32-bit and must not be negative.
_TAG_LIMIT = 2**31
_TAG_STRIDE = 1_000_003  # odd, so that tags stay apart for the most part; equal ones still pair first in, first out


class _GlooTransfer(Transfer):
    def __init__(self, works: list[tuple[Any, int, str]], timeout_s: float) -> None:
        self._works = works
        self._timeout_s = timeout_s

    @override
    def wait(self) -> None:
        # A gloo receive must be waited for exactly once: a second wait on the same work never returns.
        while self._works:
            work, peer, verb = self._works.pop()
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                if re.search(r"timed? ?out", str(error), re.IGNORECASE):
                    raise PeerTimeoutError(peer, verb, self._timeout_s) from error
                raise TransportError(f"{verb} group rank {peer}: {error}") from error

    @override
    def is_complete(self) -> bool:
        return not self._works


class GlooTransport(TwoSidedTransport):
    """Private gloo group over the members of one process group, built on that group's store."""

    name = "gloo"
    needs_watchdog = False

    def __init__(self, store: dist.Store, group_rank: int, group_size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        try:
            self._group: Any = dist.ProcessGroupGloo(store, group_rank, group_size, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransportError(f"gloo group of {group_size} ranks could not be formed: {error}") from error

    @override
    def exchange(self, send: Message | None, receive: Message | None, turn: int = 0) -> Transfer:
        works: list[tuple[Any, int, str]] = []
        peer = -1
        group = self._group
        if group is None:
            raise TransportError("the context was closed, or failed, in another thread")
        try:
            if send is not None:
                peer = send.peer
                work = group.send([send.tensor], send.peer, _wire_tag(send))
                works.append((work, send.peer, "could not deliver to"))
            if receive is not None:
                peer = receive.peer
                work = group.recv([receive.tensor], receive.peer, _wire_tag(receive))
                works.append((work, receive.peer, "got nothing from"))
        except RuntimeError as error:  # the connection to the peer is gone already
            raise TransportError(f"no connection to group rank {peer}: {error}") from error
        return _GlooTransfer(works, self._timeout_s)

    @override
    def abort(self) -> None:
        self._group = None

    @override
    def close(self) -> None:
        self._group = None


def _wire_tag(message: Message) -> int:
    """The tag on the wire: of tag and size, so that a message never meets a receive of another size.

    Gloo would end the process there; this way both ends time out, which can be reported.
    """
    return (message.tag * _TAG_STRIDE + message.tensor.nbytes) % _TAG_LIMIT
