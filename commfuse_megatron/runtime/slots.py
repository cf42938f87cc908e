"""Buffers of one context, for messages and GEMMs: sized by the largest problem seen, carved for smaller ones.

Peers may write into windows: those grow on all ranks together, so their sizes must follow from what all ranks share.

Which part of a buffer a schedule's slot is, the program says. Memory that a CUDA graph captured is never moved or
freed while the context is open: growth afterwards keeps the old buffer, and growth during capture raises. Any other
buffer that was outgrown is freed at once, so whoever keeps views says so and lets go of them when told.
"""

import math
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from commfuse_megatron.errors import TransportError
from commfuse_megatron.transport.base import Window

# Every buffer's size is a multiple of this: what TMA descriptors and vectorised kernels want.
_ALIGNMENT_BYTES = 256


class ViewKeeper(Protocol):
    """Keeps views of buffers between calls."""

    def drop_views(self) -> None:
        """Let go of all views: the buffers are about to be freed."""


class Slots:
    """Named buffers on one device. Carved tensors are good until `generation` changes: then carve them again."""

    def __init__(self, device: torch.device, make_window: Callable[[int, torch.device], Window]) -> None:
        self.device = device
        self._make_window = make_window
        self._buffers: dict[str, Window] = {}
        self._windows: set[str] = set()  # the names of those that peers write to
        self._retired: list[Window] = []
        self._keepers: weakref.WeakSet[ViewKeeper] = weakref.WeakSet()
        self._is_captured = False
        self.generation = 0

    @property
    def size_bytes(self) -> int:
        """Memory held by all buffers, those kept for captured graphs included."""
        return sum(buffer.tensor.numel() for buffer in [*self._buffers.values(), *self._retired])

    def carve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous [*shape] tensor at the start of buffer `name`, growing it if needed. Contents are undefined."""
        self._reserve(name, math.prod(shape) * dtype.itemsize, is_window=False)
        return self._view(name, shape, dtype)

    def carve_window(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, capacity: int) -> torch.Tensor:
        """The same in memory that peers may write to. capacity: elements, equal on all ranks, that suffice for all."""
        self._reserve(name, capacity * dtype.itemsize, is_window=True)
        return self._view(name, shape, dtype)

    def window(self, name: str) -> Window:
        """What holds the buffer that was carved last under this name."""
        return self._buffers[name]

    def note_views(self, keeper: ViewKeeper) -> None:
        """Remember that `keeper` keeps views; it is told to drop them when a buffer is freed."""
        self._keepers.add(keeper)

    def drop_local(self) -> None:
        """Free what no peer knows of; who uses it next makes it anew. After a trial, what only losing candidates used
        stays free: 64 of 536 MiB that a step took beside stock's (70B, 4 layers, 2 x H200, November 2026)."""
        if self._is_captured:
            return
        local = [name for name in self._buffers if name not in self._windows]
        if local:
            self._drop_views()
        for name in local:
            self._buffers.pop(name).free()

    def release(self) -> None:
        """Free all buffers. On GPUs, the current stream comes after everything that uses them."""
        buffers = [*self._buffers.values(), *self._retired]
        self._buffers.clear()
        self._retired.clear()
        self._drop_views()
        for buffer in buffers:
            buffer.free()

    def note_capture(self) -> None:
        """Remember that a CUDA graph now uses these buffers."""
        self._is_captured = True

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph uses these buffers, or did."""
        return self._is_captured

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers[name].tensor[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _reserve(self, name: str, size_bytes: int, *, is_window: bool) -> None:
        old = self._buffers.get(name)
        if old is not None and old.tensor.numel() >= size_bytes:
            return
        # What is new and no peer knows may lie in the graph's own memory: it is kept like any other.
        is_of_graph = old is None and not is_window
        if not is_of_graph and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise TransportError(
                f'buffer "{name}" would have to grow to {size_bytes} bytes during CUDA graph capture; '
                "run the same shapes once before capturing"
            )
        rounded = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        with torch.inference_mode(False):  # a call that trains uses it next
            if is_window:
                self._windows.add(name)
                self._buffers[name] = self._make_window(rounded, self.device)
            else:
                self._buffers[name] = Window(torch.empty(rounded, dtype=torch.uint8, device=self.device))
        if old is None:
            return
        self._drop_views()
        if self._is_captured:
            self._retired.append(old)
        else:
            old.free()

    def _drop_views(self) -> None:
        self.generation += 1
        for keeper in self._keepers:
            keeper.drop_views()
        self._keepers.clear()
