"""What every transport must do: checks `check(transport, group_rank, group_size, device)`, run on all ranks."""

import time

import torch

from commfuse_megatron.transport.base import Message, Transport

CHECKS = []


def contract(check):
    CHECKS.append(check)
    return check


def shift(transport: Transport, rank: int, size: int, tensor: torch.Tensor, *, distance: int = 1, tag: int = 0):
    """Send `tensor` `distance` ranks on and receive as much from that far back; (transfer, received)."""
    received = torch.full_like(tensor, -7)
    to_rank, from_rank = (rank + distance) % size, (rank - distance) % size
    return transport.exchange(Message(tensor, to_rank, tag), Message(received, from_rank, tag)), received


@contract
def values_arrive_for_every_distance_and_dtype(transport, rank, size, device):
    for distance in range(1, size):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
            tensor = torch.full((5, 3), rank + 1, device=device, dtype=dtype)
            transfer, received = shift(transport, rank, size, tensor, distance=distance)
            transfer.wait()
            assert torch.equal(received, torch.full_like(received, (rank - distance) % size + 1))


@contract
def equal_sized_messages_in_flight_do_not_cross(transport, rank, size, device):
    sent = [torch.full((4,), 100 * rank + number, device=device) for number in range(8)]
    flights = [shift(transport, rank, size, tensor, tag=number) for number, tensor in enumerate(sent)]
    for number, (transfer, received) in enumerate(flights):
        transfer.wait()
        assert received.tolist() == [100 * ((rank - 1) % size) + number] * 4


@contract
def more_than_256_batches_may_be_in_flight(transport, rank, size, device):
    flights = [
        shift(transport, rank, size, torch.full((2,), rank * 1000 + number, device=device), tag=number)
        for number in range(300)
    ]
    for number, (transfer, received) in enumerate(flights):
        transfer.wait()
        assert received.tolist() == [(rank - 1) % size * 1000 + number] * 2


@contract
def large_messages_pass_both_ways_at_once(transport, rank, size, device):
    tensor = torch.full((1 << 21,), float(rank), device=device)
    transfer, received = shift(transport, rank, size, tensor)
    transfer.wait()
    assert bool((received == (rank - 1) % size).all())


@contract
def a_batch_may_only_send_or_only_receive(transport, rank, size, device):
    tensor = torch.full((3,), 42, device=device)
    if rank == 0:
        transport.exchange(Message(tensor, 1, 0), None).wait()
    elif rank == 1:
        received = torch.zeros_like(tensor)
        transport.exchange(None, Message(received, 0, 0)).wait()
        assert torch.equal(received, tensor)


@contract
def waiting_twice_is_waiting_once(transport, rank, size, device):
    transfer, received = shift(transport, rank, size, torch.full((3,), rank, device=device))
    transfer.wait()
    transfer.wait()
    assert received.tolist() == [(rank - 1) % size] * 3


@contract
def what_was_sent_may_be_overwritten_after_the_wait(transport, rank, size, device):
    buffer = torch.full((1 << 18,), float(rank), device=device)
    for _ in range(5):
        transfer, received = shift(transport, rank, size, buffer)
        transfer.wait()
        expected = buffer[0].item() - rank + (rank - 1) % size
        buffer.add_(10)
        assert bool((received == expected).all())


@contract
def a_slow_rank_only_delays(transport, rank, size, device):
    if rank == 0:
        time.sleep(0.3)  # the delay under test, not a synchronisation
    transfer, received = shift(transport, rank, size, torch.full((3,), rank, device=device))
    transfer.wait()
    assert received.tolist() == [(rank - 1) % size] * 3


@contract
def received_tensors_may_be_views_into_a_larger_buffer(transport, rank, size, device):
    buffer = torch.zeros(4, 6, device=device)
    transfer = transport.exchange(
        Message(torch.full((2, 6), float(rank), device=device), (rank + 1) % size, 0),
        Message(buffer[1:3], (rank - 1) % size, 0),
    )
    transfer.wait()
    expected = torch.zeros(4, 6)
    expected[1:3] = (rank - 1) % size
    assert torch.equal(buffer.cpu(), expected)
