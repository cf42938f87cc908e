"""Side streams between which independent pieces of work take turns, so that the end of one fills up with the next.

    main    [before]--fork                               join--[after all pieces]
    lane 0                [piece 0      ][piece 2   ]...
    lane 1                [piece 1  ][piece 3       ]...

An attention kernel's last blocks leave most of a GPU idle: 8 slices of a causal attention take 1.15 times as long as
one call, and 1.01 to 1.06 over two streams (2 x H200, 16 and 32 heads, November 2026). Pieces that do not fill a GPU
need more of them: of 4 heads, eight slices of 1024 queries, with their GEMMs, take 0.339 ms over two, 0.257 over
three, 0.216 over four, and 0.230 as one call (H200). On the CPU pieces run in place.

The streams are this context's own. On one of PyTorch's pool somebody else's work could be what a flag waits for, and
libraries would give both the same scratch memory.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from commfuse_megatron.plan import attention
from commfuse_megatron.transport.stream_memory import OwnStream, borrow_stream, give_stream_back

_FEWEST = 2
_ASSUMED_SMS = 132


def choose_num_lanes(queries: int, heads: int, device: torch.device) -> int:
    """How many pieces are to run at a time on `device`: see `plan.attention.choose_num_lanes`."""
    num_sms = _ASSUMED_SMS
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return attention.choose_num_lanes(queries, heads, num_sms)


class Lanes:
    """The lanes of one context: streams beside the current one. On the CPU there are none, and all work is in order.

    Memory that a piece allocates belongs to its lane: it may go on living, but must not be freed while another stream
    uses it before the next `fork`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._borrowed: list[OwnStream] = []
        self._streams: list[torch.cuda.Stream] = []
        self._main: torch.cuda.Stream | None = None

    def close(self) -> None:
        """Leave the streams to other contexts; not after a failure, when a flag may still be waited for on one."""
        while self._borrowed:
            give_stream_back(self._device, self._borrowed.pop())
        self._streams, self._main = [], None

    def handles(self, num_lanes: int = _FEWEST) -> tuple[int, ...]:
        """The driver's handles of lanes; none on the CPU. Who uses them orders what it puts there."""
        if self._device.type != "cuda":
            return ()
        self._make(num_lanes)
        return tuple(stream.cuda_stream for stream in self._streams[:num_lanes])

    def stream(self, handle: int) -> AbstractContextManager[object]:
        """For a with-block in which PyTorch's work goes to the lane of this handle."""
        found = [stream for stream in self._streams if stream.cuda_stream == handle]
        return torch.cuda.stream(found[0]) if found else nullcontext()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For a with-block in which lanes are chosen by the methods below; the current stream is the main lane."""
        if self._device.type != "cuda":
            yield
            return
        main = self._main = torch.cuda.current_stream(self._device)
        try:
            yield
        finally:
            torch.cuda.set_stream(main)

    def fork(self, num_lanes: int) -> None:
        """So many lanes go on from where the main one is."""
        if self._main is not None:
            self._make(num_lanes)
            for stream in self._streams[:num_lanes]:
                stream.wait_stream(self._main)

    def on(self, lane: int | None) -> None:
        """What follows goes to this lane; None: to the main one."""
        if self._main is not None:
            torch.cuda.set_stream(self._stream(lane))

    def after(self, lane: int | None) -> None:
        """What follows on the lane in use comes after all that `lane` holds."""
        if self._main is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream(lane))

    def join(self, num_lanes: int) -> None:
        """The main lane, which is in use from here on, goes on when so many others have come this far."""
        if self._main is not None:
            torch.cuda.set_stream(self._main)
            for stream in self._streams[:num_lanes]:
                self._main.wait_stream(stream)

    def _stream(self, lane: int | None) -> torch.cuda.Stream:
        assert self._main is not None
        return self._main if lane is None else self._streams[lane]

    def _make(self, num_lanes: int) -> None:
        while len(self._streams) < num_lanes:
            self._borrowed.append(borrow_stream(self._device))
            self._streams.append(self._borrowed[-1].torch)
