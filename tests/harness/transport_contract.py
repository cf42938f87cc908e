"""What every transport must do: checks `check(box, group_rank, group_size, device)`, all run by `run_contract`.

A box is a transport with a window. Messages have places, which two-sided transports do not look at. Over the copy
engine, whose operations are bound before they run, a box runs each step of one when it is bound.
"""

import itertools
import time
from typing import NamedTuple

import torch

from commfuse_megatron.transport.base import Message, Place, Transfer, Transport
from commfuse_megatron.transport.copy_steps import BoundOperation, GraphTable, Ref

CHECKS = []

_WINDOW_BYTES = 1 << 24


class Parcel(NamedTuple):
    """A message and where it arrives."""

    tensor: torch.Tensor
    peer: int
    tag: int
    place: Place

    @property
    def message(self) -> Message:
        return Message(*self[:3])


class Box:
    """A transport and a window in it; message number n of up to `slot_bytes` bytes goes to slot n."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport = transport
        self._window = transport.window(_WINDOW_BYTES, device)
        # Of the operation under way, over the copy engine: what was sent is kept, since copies read it later.
        self._keys, self._granted, self._sent = [], set(), []

    def slot(self, tensor: torch.Tensor, number: int, slot_bytes: int = 0) -> tuple[torch.Tensor, Place]:
        offset = number * max(slot_bytes, -(-tensor.nbytes // 16) * 16)
        view = self._window.tensor[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return view, Place(self._window, offset, number)

    def exchange(self, send: Parcel | None, receive: Parcel | None) -> Transfer:
        if self.transport.is_one_sided:
            return self._copy(send, receive)
        return self.transport.exchange(*(parcel and parcel.message for parcel in (send, receive)))

    def release(self) -> None:
        if self.transport.is_one_sided:
            told, awaited = self.transport.bind_no_message(tuple(self._keys))
            if told is not None:
                self._run(told)
            keys = (*self._keys, *awaited)
            release = self.transport.bind_release(keys, awaited)
            operation = BoundOperation((), keys, (), release, (), GraphTable())
            self.transport.replay(operation, (), is_capturing=False, may_launch=False)
            self._keys, self._granted, self._sent = [], set(), []
        self.transport.release(is_capturing=False)

    def _copy(self, send: Parcel | None, receive: Parcel | None) -> Transfer:
        transport, key = self.transport, [-1, -1, -1, -1]
        if send is not None:
            self._run(*transport.bind_order())
            if send.peer not in self._granted:
                self._granted.add(send.peer)
                self._run(transport.bind_take(send.peer))
            self._sent.append(send.tensor)
            source = Ref(0, send.tensor.data_ptr())
            self._run(transport.bind_push(send.peer, send.place, source, send.tensor.nbytes))
            key[2:] = send.peer, send.place.flag
        if receive is not None:
            key[:2] = receive.peer, receive.place.flag
        self._keys.append(tuple(key))
        return transport.batches(tuple(key))

    def _run(self, *steps) -> None:
        for step in steps:
            step((0,), self.transport.current_stream())

    def shift(self, rank: int, size: int, tensor: torch.Tensor, *, distance: int = 1, number: int = 0, slot_bytes=0):
        """Send `tensor` `distance` ranks on and receive as much from that far back; (transfer, received)."""
        received, place = self.slot(tensor, number, slot_bytes)
        to_rank, from_rank = (rank + distance) % size, (rank - distance) % size
        sent = Parcel(tensor, to_rank, number, place)
        return self.exchange(sent, Parcel(received, from_rank, number, place)), received


def run_contract(transport: Transport, rank: int, size: int, device: torch.device) -> None:
    """All checks, one operation each."""
    for check in CHECKS:
        box = Box(transport, device)
        check(box, rank, size, device)
        box.release()


def contract(check):
    CHECKS.append(check)
    return check


@contract
def values_arrive_for_every_distance_and_dtype(box, rank, size, device):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
    for distance in range(1, size):
        for index, dtype in enumerate(dtypes):
            tensor = torch.full((5, 4), rank + 1, device=device, dtype=dtype)
            number = distance * len(dtypes) + index
            # As large for all: a peer that is ahead must not write into what is compared here.
            transfer, received = box.shift(rank, size, tensor, distance=distance, number=number, slot_bytes=160)
            transfer.wait()
            assert torch.equal(received, torch.full_like(received, (rank - distance) % size + 1))


@contract
def equal_sized_messages_in_flight_do_not_cross(box, rank, size, device):
    sent = [torch.full((4,), 100 * rank + number, device=device) for number in range(8)]
    flights = [box.shift(rank, size, tensor, number=number) for number, tensor in enumerate(sent)]
    for number, (transfer, received) in enumerate(flights):
        transfer.wait()
        assert received.tolist() == [100 * ((rank - 1) % size) + number] * 4


@contract
def more_than_256_batches_may_be_in_flight(box, rank, size, device):
    flights = [
        box.shift(rank, size, torch.full((2,), rank * 1000 + number, device=device), number=number)
        for number in range(300)
    ]
    for number, (transfer, received) in enumerate(flights):
        transfer.wait()
        assert received.tolist() == [(rank - 1) % size * 1000 + number] * 2


@contract
def large_messages_pass_both_ways_at_once(box, rank, size, device):
    tensor = torch.full((1 << 21,), float(rank), device=device)
    transfer, received = box.shift(rank, size, tensor)
    transfer.wait()
    assert bool((received == (rank - 1) % size).all())


@contract
def a_batch_may_only_send_or_only_receive(box, rank, size, device):
    tensor = torch.full((3,), 42, device=device)
    received, place = box.slot(tensor, 0)
    if rank == 0:
        box.exchange(Parcel(tensor, 1, 0, place), None).wait()
    elif rank == 1:
        box.exchange(None, Parcel(received, 0, 0, place)).wait()
        assert torch.equal(received, tensor)


@contract
def waiting_twice_is_waiting_once(box, rank, size, device):
    transfer, received = box.shift(rank, size, torch.full((3,), rank, device=device))
    transfer.wait()
    transfer.wait()
    assert received.tolist() == [(rank - 1) % size] * 3


@contract
def what_was_sent_may_be_overwritten_after_the_wait(box, rank, size, device):
    buffer = torch.full((1 << 18,), float(rank), device=device)
    for number in range(5):
        transfer, received = box.shift(rank, size, buffer, number=number)
        transfer.wait()
        expected = buffer[0].item() - rank + (rank - 1) % size
        buffer.add_(10)
        assert bool((received == expected).all())


@contract
def a_slow_rank_only_delays(box, rank, size, device):
    if rank == 0:
        time.sleep(0.3)  # the delay under test, not a synchronisation
    transfer, received = box.shift(rank, size, torch.full((3,), rank, device=device))
    transfer.wait()
    assert received.tolist() == [(rank - 1) % size] * 3


@contract
def a_message_fills_its_place_and_nothing_else(box, rank, size, device):
    shape = torch.empty(4, 8, device=device)
    buffer, _ = box.slot(shape, 0)
    buffer.zero_()
    # Its zeros must be there before anything arrives: so tell the one who will send.
    ready, _ = box.shift(rank, size, torch.zeros(4, device=device), distance=size - 1, number=100)
    ready.wait()
    sent = torch.full((2, 8), float(rank), device=device)
    _, place = box.slot(shape, 0)
    place = place._replace(offset=place.offset + sent.nbytes // 2)
    transfer = box.exchange(Parcel(sent, (rank + 1) % size, 0, place), Parcel(buffer[1:3], (rank - 1) % size, 0, place))
    transfer.wait()
    expected = torch.zeros(4, 8)
    expected[1:3] = (rank - 1) % size
    assert torch.equal(buffer.cpu(), expected)


@contract
def places_may_be_used_again_after_a_release(box, rank, size, device):
    for round_number in range(20):
        tensor = torch.full((1 << 16,), float(100 * rank + round_number), device=device)
        flights = [box.shift(rank, size, tensor, distance=distance, number=distance) for distance in range(1, size)]
        for distance, (transfer, received) in enumerate(flights, start=1):
            transfer.wait()
            assert bool((received == 100 * ((rank - distance) % size) + round_number).all())
        box.release()


@contract
def what_arrived_stays_until_the_release_whoever_sends_next(box, rank, size, device):
    """One operation after the other, in each of which one rank sends to one other, always to the same place."""
    for receiver, sender in itertools.permutations(range(size), 2):
        tensor = torch.full((1 << 10,), float(sender), device=device)
        received, place = box.slot(tensor, 0)
        if rank == sender:
            box.exchange(Parcel(tensor, receiver, 0, place), None).wait()
        elif rank == receiver:
            box.exchange(None, Parcel(received, sender, 0, place)).wait()
            time.sleep(0.02)  # the delay under test: the next sender is ready by now
            assert bool((received == sender).all())
        box.release()
