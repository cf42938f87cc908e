"""What the copy engine asks of the CUDA driver and of PyTorch: all in one place, so that tests can stand in for it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import distributed as dist

from commfuse_megatron.transport import stream_memory
from commfuse_megatron.transport.stream_memory import (
    Batch,
    FlagPage,
    MemoryOp,
    OwnStream,
    StreamEvent,
    StreamGraph,
    StreamMemory,
)

__all__ = ["CUDA", "Driver"]


class _Mapping(Protocol):
    @property
    def buffer_ptrs(self) -> Sequence[int]: ...


class Driver:
    """Streams, events, flags and mapped memory of CUDA devices; see `stream_memory`, where each is described.

    Streams are the driver's handles, as integers.
    """

    def memory(self) -> StreamMemory:
        """What enqueues copies, and waits for and writes of flags."""
        return StreamMemory()

    def batch(self, ops: Iterable[MemoryOp]) -> Batch:
        """Operations for `memory().run`, in order."""
        return stream_memory.batch(ops)

    def event(self) -> StreamEvent:
        """A new event."""
        return StreamEvent()

    def new_stream(self, device: torch.device, *, is_high_priority: bool) -> OwnStream:
        """A stream that nobody else is handed."""
        return OwnStream(device, is_high_priority=is_high_priority)

    def borrow_stream(self, device: torch.device) -> OwnStream:
        """A stream that nobody else uses until it is given back."""
        return stream_memory.borrow_stream(device)

    def give_stream_back(self, device: torch.device, stream: OwnStream) -> None:
        """Leave it to others."""
        stream_memory.give_stream_back(device, stream)

    def graph(self, stream: OwnStream, tell: Callable[[], None]) -> StreamGraph:
        """What a stream is told, to be launched as often as wanted."""
        return StreamGraph(stream, tell)

    def flag_page(self, flags: torch.Tensor) -> FlagPage:
        """A look at flags while streams are blocked."""
        return FlagPage(flags)

    def free_memory_bytes(self) -> int:
        """What is free of the current device's memory."""
        return stream_memory.free_memory_bytes()

    def current_stream(self, device: torch.device) -> int:
        """PyTorch's current one."""
        return torch._C._cuda_getCurrentRawStream(device.index)

    def wait_for_current_stream(self, device: torch.device) -> None:
        """Let the host wait until PyTorch's current stream has done what it was told."""
        torch.cuda.current_stream(device).synchronize()

    def is_capturing(self) -> bool:
        """Whether somebody captures a CUDA graph on PyTorch's current stream."""
        return bool(torch._C._cuda_isCurrentStreamCapturing())

    def allocate_shared(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory that can be mapped; bytes."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        return symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)

    def share(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> _Mapping:
        """Map the memory of all ranks of `group`, which bring equally large tensors; collective."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        mapping: Any = symmetric_memory.rendezvous(tensor, group.group_name)
        return mapping


CUDA = Driver()
