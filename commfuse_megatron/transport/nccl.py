"""Transport over NCCL point-to-point: any GPU link, many nodes.

A NCCL backend of its own on the group's store, so that sub-groups can make theirs alone and no other traffic shares the
communicator. It runs on its own high-priority stream; `nccl_channels` bounds the SMs its kernel takes. Every batch is
one coalesced {send, receive}: un-coalesced point-to-point calls would create a communicator per pair, lazily, and could
deadlock against other groups. Waits sit in streams and cannot raise: the context's watchdog watches.
"""

from datetime import timedelta
from typing import Any, override

import torch
from torch import distributed as dist

from commfuse_megatron.transport.base import Message, Transfer, Transport

__all__ = ["NcclTransport"]

# The context's watchdog reports and aborts first; PyTorch's own would take the process down.
_BACKEND_TIMEOUT = timedelta(days=7)


class _NcclTransfer(Transfer):
    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    @override
    def wait(self) -> None:
        self._work.wait()

    @override
    def is_complete(self) -> bool:
        return self._work.is_completed()


class NcclTransport(Transport):
    """Private NCCL communicator over the members of one process group."""

    name = "nccl"
    needs_watchdog = True

    def __init__(
        self, store: dist.Store, group_rank: int, group_size: int, *, channels: int, device: torch.device
    ) -> None:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = _BACKEND_TIMEOUT
        options.config.min_ctas = channels
        options.config.max_ctas = channels
        self._backend: Any = dist.ProcessGroupNCCL(store, group_rank, group_size, options)
        self._backend.eager_connect_single_device(device)
        self._connect_pairs(group_rank, group_size, device)

    def _connect_pairs(self, group_rank: int, group_size: int, device: torch.device) -> None:
        # NCCL opens the channels of a pair at its first message; a CUDA graph must not be what triggers that.
        token, arrived = torch.zeros(1, device=device), torch.empty(1, device=device)
        for distance in range(1, group_size):
            to_rank, from_rank = (group_rank + distance) % group_size, (group_rank - distance) % group_size
            self.exchange(Message(token, to_rank, 0), Message(arrived, from_rank, 0)).wait()
        torch.cuda.current_stream(device).synchronize()

    @override
    def exchange(self, send: Message | None, receive: Message | None) -> Transfer:
        backend = self._backend
        backend._start_coalescing()
        if send is not None:
            backend.send([send.tensor], send.peer, 0)
        if receive is not None:
            backend.recv([receive.tensor], receive.peer, 0)
        return _NcclTransfer(backend._end_coalescing())

    @override
    def abort(self) -> None:
        self._backend.abort()

    @override
    def close(self) -> None:
        self._backend.abort()
