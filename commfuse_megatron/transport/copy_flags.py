"""The copy engine's flags: which there are, where this process sees every rank's, and what is done with them.

Each is 32 bits, set once and cleared once per operation; `copy_engine` says by whom. In one window per rank lie

    full [sender, flag]      a message of that sender is here
    sent [receiver, flag]    the message to that receiver has left; of the own rank: a copy within this device is done
    free [receiver]          that receiver's windows may be written

A flag number stands for one message of an operation; the last one for all of those that there are not.
"""

from collections.abc import Iterable

import torch

from commfuse_megatron.transport.base import MOST_FLAGS
from commfuse_megatron.transport.mapped_window import MappedWindow
from commfuse_megatron.transport.stream_memory import MemoryOp, StreamMemory

_FLAG_BYTES = 4
_CLEAR, _SET = 0, 1
#: The flag that stands for all messages of an operation in which there are none.
NO_MESSAGE = MOST_FLAGS
_FLAGS_PER_PEER = MOST_FLAGS + 1

#: Both ends of a batch: (peer received from, its flag, peer sent to, flag there); -1 where there is none.
Key = tuple[int, int, int, int]


def bytes_of_flags(group_size: int) -> int:
    """Size of the window of one rank."""
    return (2 * _FLAGS_PER_PEER + 1) * group_size * _FLAG_BYTES


def clear_flags(window: torch.Tensor, group_size: int) -> None:
    """As they are before the first operation: nothing is here, all may write."""
    flags = window.view(torch.int32)
    flags.zero_()
    flags[2 * group_size * _FLAGS_PER_PEER :].fill_(_SET)


class CopyFlags:
    """The flags of all ranks of a group, as rank `rank` of it uses them; `memory` makes the operations."""

    def __init__(self, memory: StreamMemory, window: MappedWindow, rank: int) -> None:
        self._memory = memory
        self._window = window  # kept: it holds the mappings
        self._rank, self._size = rank, len(window.addresses)

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's flags, int32."""
        return self._window.tensor.view(torch.int32)

    def take(self, peer: int) -> list[MemoryOp]:
        """Go on when `peer` may be written to, once."""
        at = self._free_at(self._rank, peer)
        return [self._memory.wait_for(at, _SET), self._memory.write_value(at, _CLEAR)]

    def deliver(self, peer: int, flag: int) -> list[MemoryOp]:
        """Say there and here that the message of this flag has gone."""
        return [self._memory.write_value(self._full_at(peer, self._rank, flag), _SET), *self.copied(peer, flag)]

    def copied(self, receiver: int, flag: int) -> list[MemoryOp]:
        """Say here that a copy to `receiver`, which may be this rank, is done."""
        return [self._memory.write_value(self._sent_at(receiver, flag), _SET)]

    def wait(self, keys: Iterable[Key]) -> list[MemoryOp]:
        """Go on when both ends of all batches are done. Changes nothing."""
        return [self._memory.wait_for(at, _SET) for key in keys for at in self._own_flags(key)]

    def release(self, keys: tuple[Key, ...]) -> list[MemoryOp]:
        """Clear what the batches of an operation have set, and let those who sent any write again."""
        clears = [self._memory.write_value(at, _CLEAR) for key in keys for at in self._own_flags(key)]
        sources = sorted({key[0] for key in keys if key[0] >= 0})
        return [*clears, *(self._memory.write_value(self._free_at(source, self._rank), _SET) for source in sources)]

    def no_message(self, keys: tuple[Key, ...]) -> tuple[list[MemoryOp], tuple[Key, ...]]:
        """Of these batches: what tells the peers that get no message, and the flags of those from whom none comes."""
        senders, receivers = {key[0] for key in keys}, {key[2] for key in keys}
        peers = [peer for peer in range(self._size) if peer != self._rank]
        send_ops: list[MemoryOp] = []
        for peer in peers:
            if peer not in receivers:
                send_ops += self.take(peer)
                send_ops.append(self._memory.write_value(self._full_at(peer, self._rank, NO_MESSAGE), _SET))
        return send_ops, tuple((peer, NO_MESSAGE, -1, -1) for peer in peers if peer not in senders)

    def are_set(self, key: Key, seen: torch.Tensor) -> bool:
        """Whether both ends of a batch are done in `seen`, a copy of `tensor`."""
        base = self._window.addresses[self._rank]
        return all(int(seen[(at - base) // _FLAG_BYTES]) == _SET for at in self._own_flags(key))

    def _own_flags(self, key: Key) -> list[int]:
        from_rank, received_flag, to_rank, sent_flag = key
        addresses = [] if from_rank < 0 else [self._full_at(self._rank, from_rank, received_flag)]
        return addresses if to_rank < 0 else [*addresses, self._sent_at(to_rank, sent_flag)]

    def _full_at(self, receiver: int, sender: int, flag: int) -> int:
        return self._window.addresses[receiver] + (sender * _FLAGS_PER_PEER + flag) * _FLAG_BYTES

    def _sent_at(self, receiver: int, flag: int) -> int:
        base = self._window.addresses[self._rank] + self._size * _FLAGS_PER_PEER * _FLAG_BYTES
        return base + (receiver * _FLAGS_PER_PEER + flag) * _FLAG_BYTES

    def _free_at(self, sender: int, receiver: int) -> int:
        return self._window.addresses[sender] + (2 * self._size * _FLAGS_PER_PEER + receiver) * _FLAG_BYTES
