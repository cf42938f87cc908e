"""Transport over NCCL point-to-point: any GPU link, many nodes.

NCCL backends of its own on the group's store, so that sub-groups can make theirs alone and no other traffic shares the
communicators. They run on their own high-priority streams; `nccl_channels` bounds the SMs that each one's kernel takes.
Every batch is one coalesced {send, receive}: un-coalesced point-to-point calls would create a communicator per pair,
lazily, and could deadlock against other groups. Waits sit in streams and cannot raise: the context's watchdog watches.

With several communicators a large message is cut into as many parts, one for each, and small ones take them in turn:
two kernels at once get more out of a slow link than one with twice the channels. All ranks issue all of them in the
same order, and communicators times channels SMs are kept free for them, so none can block another.
"""

import time
from datetime import timedelta
from typing import Any, override

import torch
from torch import distributed as dist

from commfuse_megatron.transport.base import Message, Transfer, TwoSidedTransport

# Two rounds of PyTorch's watchdog thread, which sleeps 0.1 s between them.
_PYTORCH_WATCHDOG_ROUNDS_S = 0.25

# The context's watchdog reports and aborts first; PyTorch's own would take the process down.
_BACKEND_TIMEOUT = timedelta(days=7)

# Messages from this size on are cut. Through host memory, two communicators (2 x H200, November 2026): eight messages
# of 8 MiB take 3.0 ms cut in halves, but one of 64 MiB 2.26 cut and 2.83 whole; a reduce-scatter of 16 MiB messages
# 2.82 cut, of 8 MiB messages 3.56 cut and 2.65 in turn.
_LEAST_BYTES_TO_CUT = 16 << 20


class _NcclTransfer(Transfer):
    def __init__(self, works: list[Any], communicators: tuple[int, ...] = (0,)) -> None:
        self._works = works
        self.communicators = communicators

    @override
    def wait(self) -> None:
        for work in self._works:
            work.wait()

    @override
    def is_complete(self) -> bool:
        return all(work.is_completed() for work in self._works)


class NcclTransport(TwoSidedTransport):
    """Private NCCL communicators over the members of one process group."""

    name = "nccl"
    needs_watchdog = True

    def __init__(
        self,
        store: dist.Store,
        group_rank: int,
        group_size: int,
        *,
        channels: int,
        device: torch.device,
        communicators: int = 1,
    ) -> None:
        self._communicators: list[Any] = []
        self._has_given_up = False
        for number in range(communicators):
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = _BACKEND_TIMEOUT
            options.config.min_ctas = channels
            options.config.max_ctas = channels
            backend = dist.ProcessGroupNCCL(
                dist.PrefixStore(f"communicator-{number}", store), group_rank, group_size, options
            )
            backend.eager_connect_single_device(device)
            self._communicators.append(backend)
        self._connect_pairs(group_rank, group_size, device)

    def _connect_pairs(self, group_rank: int, group_size: int, device: torch.device) -> None:
        # NCCL opens the channels of a pair at its first message; a CUDA graph must not be what triggers that.
        token, arrived = torch.zeros(1, device=device), torch.empty(1, device=device)
        for distance in range(1, group_size):
            to_rank, from_rank = (group_rank + distance) % group_size, (group_rank - distance) % group_size
            for backend in self._communicators:
                _exchange(backend, Message(token, to_rank, 0), Message(arrived, from_rank, 0)).wait()
        torch.cuda.current_stream(device).synchronize()

    @override
    def exchange(self, send: Message | None, receive: Message | None, turn: int = 0) -> Transfer:
        if len(self._communicators) == 1:
            return _NcclTransfer([_exchange(self._communicators[0], send, receive)])
        sends, receives = self._spread(send, turn), self._spread(receive, turn)
        used = tuple(number for number in range(len(self._communicators)) if number in sends or number in receives)
        works = [_exchange(self._communicators[number], sends.get(number), receives.get(number)) for number in used]
        return _NcclTransfer(works, used)

    @override
    def abort(self) -> None:
        for backend in self._communicators:
            backend.abort()
        self._has_given_up = True

    @property
    @override
    def has_given_up(self) -> bool:
        return self._has_given_up

    @override
    def close(self) -> None:
        # Aborting is local; destroying a communicator is collective within a node. But PyTorch's watchdog reports
        # finished work that it has not yet struck off its list as failed when the communicator is gone (seen once in
        # about fifty closings), so let it pass over that list first.
        time.sleep(_PYTORCH_WATCHDOG_ROUNDS_S)
        self.abort()

    def _spread(self, message: Message | None, turn: int) -> dict[int, Message]:
        """What travels by which communicator: size and turn decide, which both ends share."""
        communicators = len(self._communicators)
        if message is None:
            return {}
        if message.tensor.nbytes < _LEAST_BYTES_TO_CUT:
            return {turn % communicators: message}
        parts = message.tensor.view(-1).tensor_split(communicators)
        return {number: Message(part, message.peer, message.tag) for number, part in enumerate(parts)}


def _exchange(backend: Any, send: Message | None, receive: Message | None) -> Any:
    backend._start_coalescing()
    if send is not None:
        backend.send([send.tensor], send.peer, 0)
    if receive is not None:
        backend.recv([receive.tensor], receive.peer, 0)
    return backend._end_coalescing()
