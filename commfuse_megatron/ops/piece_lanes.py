"""Pieces of one tape that take turns on the lanes of the context: see `runtime/lanes.py` for what that gains.

Of GEMMs alone two lanes save the end of one and the beginning of the next, in which a GPU is half idle: slices of a
linear take 1 to 3 % less (H200, November 2026).

Knows tapes; must not know kernels. The contract that bites: with one hardware queue, as Megatron has it, what waits at
its head holds up everything behind it, so what can run beside a piece must be submitted before what must wait for it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from commfuse_megatron.ops.replay import Build
from commfuse_megatron.transport.copy_tape import CopyTape, Step

__all__ = ["PieceLanes"]


class PieceLanes:
    """Pieces take turns on so many lanes; without lanes, as on the CPU, all stay on the current stream.

    `begin`, then `next` or `turn` before each piece, then `join`.
    """

    def __init__(self, build: Build, num_lanes: int) -> None:
        self._tape: CopyTape = build.tape
        self._handles = build.p.context.lanes.handles(num_lanes)
        self._piece = -1

    @property
    def num(self) -> int:
        """How many pieces may run at a time."""
        return max(1, len(self._handles))

    def begin(self) -> None:
        """Let the lanes go on from where the current stream is."""
        if self._handles:
            self._tape.fork(self._handles)

    def next(self) -> None:
        """What follows is the next piece."""
        self.turn(self._piece + 1)

    def turn(self, piece: int) -> None:
        """What follows belongs to that piece, counted from 0."""
        self._piece = piece
        if self._handles:
            self._tape.on(self._handles[piece % len(self._handles)])

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Put what is in the with-block beside all pieces; the one in hand goes on afterwards."""
        self._tape.on(None)
        yield
        self.turn(self._piece)

    def attend_ahead(self, attend: Sequence[Step | None]) -> Callable[[], None]:
        """What begins the next piece: submits what of `attend`, in the order of the pieces, is to run beside it, and
        leaves its lane for its GEMM."""
        pieces, begun = itertools.count(), itertools.count()

        def begin() -> None:
            piece = next(pieces)
            for ahead in itertools.islice(begun, self.num if piece == 0 else 1):
                if ahead < len(attend) and (step := attend[ahead]) is not None:
                    self.turn(ahead)
                    self._tape.compute(step)
            self.turn(piece)

        return begin

    def join(self) -> None:
        """What follows is on the current stream, after all pieces."""
        if self._handles:
            self._tape.join(self._handles)
