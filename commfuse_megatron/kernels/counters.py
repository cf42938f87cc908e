"""Tile counters for the work-stealing order: zero before every launch, without a memset.

Owns the memory that the counters lie in; must not know the kernel. The contract that bites: two launches that may run
at the same time never share a counter. Launches on one stream cannot, so a stream keeps one counter for its eager
launches. A captured launch can run again at any time, on any stream, so it keeps a counter of its own for as long as
the process lives.
"""

import threading
from typing import NamedTuple

import torch

__all__ = ["TileCounters", "TileShare"]


class TileShare(NamedTuple):
    """One of two launches that compute the tiles of one product together, each taking the next free one.

    For SMs that become free while the product runs: the first launch takes the SMs that are free at once, the second is
    put on another stream behind whatever occupies the rest. Both launches must be made, with equal operands.

    counter_at: address of a counter that is zero, and that no other pair uses before both launches are done.
    first_sms, second_sms: blocks of the two launches. is_second: which one this is.
    """

    counter_at: int
    first_sms: int
    second_sms: int
    is_second: bool


class TileCounters:
    """Hands out addresses of counter pairs on one device; the kernel leaves every pair at zero when it ends.

    A counter is two int32: the next free tile, and the number of blocks that found none. It takes a sector (32 bytes),
    so that streams do not share one. A stream handle that the driver hands out again after its stream was destroyed is
    taken for the same stream.
    """

    INTS_PER_COUNTER = 8
    COUNTERS_PER_SLAB = 4096  # 128 KiB

    def __init__(self, device_index: int) -> None:
        self._device = torch.device("cuda", device_index)
        self._slabs: list[torch.Tensor] = []  # never freed: captured graphs hold addresses into them
        self._free: list[int] = []
        self._of_stream: dict[int, int] = {}
        self._lock = threading.Lock()

    def address(self, stream_handle: int) -> int | None:
        """A counter for one launch on the current stream, whose handle is given.

        None while a graph is being captured and no free counter is left, since memory cannot be cleared then: the
        caller captures a cleared counter of its own. A slab is added by eager launches when less than half a slab is
        left, so this needs more than 2048 captured launches without an eager one between them, or no eager launch at
        all before.
        """
        if torch.cuda.is_current_stream_capturing():
            with self._lock:
                return self._free.pop() if self._free else None
        address = self._of_stream.get(stream_handle)
        if address is None or len(self._free) < self.COUNTERS_PER_SLAB // 2:
            with self._lock:
                if len(self._free) < self.COUNTERS_PER_SLAB // 2:
                    self._add_slab()
                address = self._of_stream.get(stream_handle)
                if address is None:
                    address = self._of_stream[stream_handle] = self._free.pop()
        return address

    def _add_slab(self) -> None:
        slab = torch.zeros(self.COUNTERS_PER_SLAB * self.INTS_PER_COUNTER, dtype=torch.int32, device=self._device)
        # Cleared on this stream, used on any: wait here, once per slab.
        torch.cuda.current_stream(self._device).synchronize()
        self._slabs.append(slab)
        step = self.INTS_PER_COUNTER * slab.element_size()
        self._free.extend(range(slab.data_ptr(), slab.data_ptr() + slab.nbytes, step))
