"""Operations over the copy engine, bound once and replayed: what `exchange`, `wait` and `release` do, without asking.

A tape is a list of steps that each make one or two driver calls; all that differs from call to call is a tuple of
addresses, which steps index. Knows no GEMM: the runtime puts its own steps between these.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from commfuse_megatron.transport.base import Place
from commfuse_megatron.transport.stream_memory import Batch

if TYPE_CHECKING:
    from commfuse_megatron.transport.copy_engine import CopyEngineTransport, Key

__all__ = ["BoundOperation", "CopyTape", "Ref", "Step"]

#: (addresses of this call, handle of the current stream)
Step = Callable[[tuple[int, ...], int], None]


class Ref(NamedTuple):
    """An address: `offset` bytes into what the call brings as address number `slot`. Slot 0 always holds 0."""

    slot: int
    offset: int

    def plus(self, size_bytes: int) -> "Ref":
        """The address that many bytes further."""
        return Ref(self.slot, self.offset + size_bytes)


class BoundOperation(NamedTuple):
    """A finished tape: the steps, the batches whose flags the release clears, and what the caller notes of arrivals.

    release: what ends the operation: the last wait, if nothing comes after it, and the release of all `keys`.
    """

    steps: tuple[Step, ...]
    keys: tuple["Key", ...]
    notes: tuple[tuple["Key", object], ...]
    release: Batch


class CopyTape:
    """Steps of one operation. Between `order` and the next change of what is sent, pushes need no further ordering."""

    def __init__(self, transport: "CopyEngineTransport") -> None:
        self._transport = transport
        self._granted: set[int] = set()
        self.steps: list[Step] = []
        self.keys: list[Key] = []
        self._last_wait: tuple[int, tuple[Key, ...]] = (-1, ())  # how many steps there were after it, and its keys
        self.notes: list[tuple[Key, object]] = []

    def order(self) -> None:
        """What is pushed from here on was computed by what comes before."""
        self.steps.append(self._transport.bind_order())

    def push(self, peer: int, place: Place, source: Ref, size_bytes: int) -> None:
        """Copy into the peer's window."""
        if peer not in self._granted:
            self._granted.add(peer)
            self.steps.append(self._transport.bind_take(peer))
        self.steps.append(self._transport.bind_push(peer, place, source, size_bytes))

    def copy(self, target: Ref, source: Ref, size_bytes: int, flag: int) -> "Key":
        """Copy within this device, beside what is computed; returns what to wait for."""
        self.steps.append(self._transport.bind_copy(target, source, size_bytes, flag))
        key = self._transport.key_of_copy(flag)
        self.keys.append(key)
        return key

    def note(self, key: "Key") -> None:
        """Tell of a batch {send, receive}, so that the end of the operation clears its flags."""
        self.keys.append(key)

    def wait(self, *keys: "Key") -> None:
        """What comes next needs these batches."""
        if keys:
            self.steps.append(self._transport.bind_wait(keys))
            self._last_wait = (len(self.steps), keys)

    def finish(self) -> BoundOperation:
        """The tape, bound."""
        steps, keys = self.steps, tuple(self.keys)
        length, awaited = self._last_wait
        if length == len(steps):  # one call of the driver for both
            steps = steps[:-1]
        else:
            awaited = ()
        return BoundOperation(tuple(steps), keys, tuple(self.notes), self._transport.bind_release(keys, awaited))
