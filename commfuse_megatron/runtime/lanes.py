"""Side streams between which independent pieces of work take turns, so that the end of one fills up with the next.

    current stream  [start]-----------------[after 0]--------[after 1]...
    lane 0                \\ [piece 0       ]/     [piece 2   ...
    lane 1                 \\          [piece 1      ]/

An attention kernel's last blocks leave most of a GPU idle: 8 slices of a causal attention take 1.15 times as long as
one call, and 1.01 to 1.06 over two streams (2 x H200, 16 and 32 heads, November 2026). Pieces that do not fill a GPU
need more of them: of 4 heads, eight slices of 1024 queries, with their GEMMs, take 0.339 ms over two, 0.257 over
three, 0.216 over four, and 0.230 as one call (H200). On the CPU pieces run in place.

The contract that bites: the streams are this context's own. On one of PyTorch's pool somebody else's work could be
what a flag waits for, and libraries would give both the same scratch memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from commfuse_megatron.plan.attention import MOST_AT_A_TIME, attention_blocks
from commfuse_megatron.transport.stream_memory import OwnStream, borrow_stream, give_stream_back

__all__ = ["Lanes", "choose_num_lanes"]

_FEWEST = 2
_ASSUMED_SMS = 132


def choose_num_lanes(queries: int, heads: int, device: torch.device) -> int:
    """How many pieces are to run at a time: enough to fill the device, and one that fills up its end.

    Not more: the first piece is done, and its transfer begins, the later the more run beside it.

    Args:
        queries: of one piece.
        heads: of one rank, of the whole batch.
    """
    num_sms = _ASSUMED_SMS
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(MOST_AT_A_TIME, max(_FEWEST, 1 + -(-num_sms // attention_blocks(queries, heads))))


class Lanes:
    """The lanes of one context. `begin`, then a `turn` for every piece; what follows on the current stream waits for
    the pieces so far.

    A piece is ordered after what was on the current stream at `begin` and after the pieces before it on its lane.
    Memory that a piece allocates belongs to its lane: it may go on living, but must not be freed while another stream
    uses it before the next `begin`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._borrowed: list[OwnStream] = []
        self._streams: list[torch.cuda.Stream] = []
        self._done: list[torch.cuda.Event] = []
        self._begun: torch.cuda.Event | None = None
        self._turn = 0
        self._num = _FEWEST

    def begin(self, num_lanes: int = _FEWEST) -> None:
        """Order all pieces to come after what the current stream holds now; they take turns on that many lanes."""
        self._turn, self._num = 0, num_lanes
        if self._device.type != "cuda":
            return
        self._make(num_lanes)
        assert self._begun is not None
        self._begun.record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Leave the streams to other contexts; not after a failure, when a flag may still be waited for on one."""
        while self._borrowed:
            give_stream_back(self._device, self._borrowed.pop())
        self._streams, self._done, self._begun = [], [], None

    def handles(self, num_lanes: int = _FEWEST) -> tuple[int, ...]:
        """The driver's handles of lanes; none on the CPU. Who uses them orders what it puts there."""
        if self._device.type != "cuda":
            return ()
        self._make(num_lanes)
        return tuple(stream.cuda_stream for stream in self._streams[:num_lanes])

    def _make(self, num_lanes: int) -> None:
        while len(self._streams) < num_lanes:
            self._borrowed.append(borrow_stream(self._device))
            self._streams.append(self._borrowed[-1].torch)
            self._done.append(torch.cuda.Event())
        if self._begun is None:
            self._begun = torch.cuda.Event()

    @contextmanager
    def turn(self, *, waits_for_current: bool = False) -> Iterator[None]:
        """Run what is in the with-block on the next lane; the current stream waits for its end.

        waits_for_current: the piece needs what came onto the current stream since `begin`.
        """
        if self._device.type != "cuda":
            yield
            return
        lane = self._turn % self._num
        stream, done = self._streams[lane], self._done[lane]
        current = torch.cuda.current_stream(self._device)
        if waits_for_current:
            stream.wait_stream(current)
        elif self._turn < self._num:
            assert self._begun is not None
            stream.wait_event(self._begun)
        torch.cuda.set_stream(stream)
        try:
            yield
            done.record(stream)
        finally:
            torch.cuda.set_stream(current)
        current.wait_event(done)
        self._turn += 1

    def wait_for_previous(self) -> None:
        """Inside a turn: order what follows after the piece of the turn before, and all that this was ordered after."""
        if self._device.type == "cuda" and self._turn:
            self._streams[self._turn % self._num].wait_event(self._done[(self._turn - 1) % self._num])
