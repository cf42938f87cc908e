"""Memory of this GPU that the other ranks of a group write to by address: PyTorch's symmetric memory.

Mapping is collective. Multicast is never used.

Beware: PyTorch waits for the device when such memory is freed, in a destructor, with Python's lock held: no watchdog
runs meanwhile, and an error of the device ends the process, as does a CUDA graph that is being captured. Garbage
collection must not choose that moment. So what is mapped is kept here, and freed only where windows are made or given
up, once nothing looks at it any more and the device was waited for where that can raise.
"""

import atexit
import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any, override

import torch
from torch import distributed as dist

from commfuse_megatron.errors import TransportError
from commfuse_megatron.transport.base import Window
from commfuse_megatron.transport.stream_memory import CUDA, Driver, captures_excluded, may_wait_for_device

logger = logging.getLogger(__name__)

#: Hands one string of every rank to all.
Exchange = Callable[[str], list[str]]


class MappedWindow(Window):
    """A window and the addresses at which this process sees those of all ranks."""

    __slots__ = ("addresses",)

    def __init__(self, tensor: torch.Tensor, addresses: list[int]) -> None:
        super().__init__(tensor)
        self.addresses = addresses

    @override
    def free(self) -> None:
        device = self.tensor.device
        del self.tensor
        _free_unused(device)


def map_window(
    driver: Driver,
    group: dist.ProcessGroup,
    device: torch.device,
    size_bytes: int,
    exchange: Exchange | None,
    fill: Callable[[torch.Tensor], None] | None = None,
) -> MappedWindow:
    """A new window; collective over `group`. fill: writes what the peers are to find.

    Raises TransportError on all ranks if one has no memory left; without `exchange` on that one alone.
    """
    _free_unused(device)
    tensor, complaint = None, ""
    try:
        tensor = driver.allocate_shared(max(size_bytes, 1), device)
    except RuntimeError as error:  # out of memory: the others must not wait for this rank in the rendezvous
        complaint = f"group rank {group.rank()} has no {size_bytes / 2**20:.0f} MiB of symmetric memory: {error}"
    complaints = [complaint] if exchange is None else exchange(complaint)
    if any(complaints) or tensor is None:
        raise TransportError(next(text for text in complaints if text))
    if tensor.is_cuda:
        # PyTorch clears the memory on the default stream and does not wait for that: behind other work, or on a GPU
        # that is shared, what the peers write first would be cleared.
        torch.cuda.default_stream(device).synchronize()
    if fill is not None:  # before the rendezvous: afterwards the peers may write there
        fill(tensor)
        driver.wait_for_current_stream(device)
    return MappedWindow(tensor, _map(driver, tensor, group))


def _map(driver: Driver, tensor: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    """The addresses of all ranks' tensors; collective."""
    mapped = _Mapped(tensor.untyped_storage())
    _mapped.add(mapped)
    mapped.mapping = driver.share(tensor, group)
    return list(mapped.mapping.buffer_ptrs)


class _Mapped:
    """What frees memory when it is dropped: that of this rank, and this process's view of the peers'."""

    __slots__ = ("mapping", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.mapping: Any = None

    @property
    def is_unused(self) -> bool:
        """Whether no tensor, however derived, lies in it."""
        return bool(torch._C._storage_Use_Count(self.storage._cdata) == 1)


# Without a lock: garbage collection may come here while this thread is here already.
_mapped: set[_Mapped] = set()
# To the end of the process, when the driver frees everything without waiting for streams that nobody will let go.
atexit.register(ctypes.pythonapi.Py_IncRef, ctypes.py_object(_mapped))


def _free_unused(device: torch.device) -> None:
    """Free what was mapped and is not looked at any more; not while a graph is captured, and not if a device fails."""
    if device.type == "cuda" and not may_wait_for_device():
        return
    unused = [each for each in list(_mapped) if each.is_unused]
    with captures_excluded():
        try:
            for where in {each.storage.device for each in unused if each.storage.device.type == "cuda"}:
                torch.cuda.synchronize(where)
        except RuntimeError as error:  # the program will meet it, too
            logger.warning("memory that peers wrote to is not freed: %s", error)
            return
        _mapped.difference_update(unused)
        del unused[:]


def why_memory_cannot_be_shared(group: dist.ProcessGroup, device: torch.device, exchange: Exchange) -> str:
    """What PyTorch says when the ranks of `group` map a little of each other's memory, "" if they can. Collective.

    Some containers forbid what that takes (`pidfd_getfd`), which no property of a GPU tells.
    """
    leave_multicast_alone()
    try:
        map_window(CUDA, group, device, 4, exchange).free()
    except RuntimeError as error:
        return f"group rank {group.rank()} cannot share memory with the others: {error}"
    return ""


def leave_multicast_alone() -> None:
    """Before the first rendezvous of the process, when PyTorch reads it.

    We never need multicast, and on some machines making a multicast object takes the whole fabric down.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
