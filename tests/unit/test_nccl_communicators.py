"""How the NCCL transport spreads messages over its communicators, checked without GPUs: both ends must agree."""

import itertools
from collections import deque

import pytest
import torch

from commfuse_megatron.schedule import Algorithm, Collective
from commfuse_megatron.schedule.binding import bind
from commfuse_megatron.transport import nccl
from commfuse_megatron.transport.base import Message
from commfuse_megatron.transport.nccl import NcclTransport


class FakeWork:
    def wait(self):
        pass

    def is_completed(self):
        return True


class FakeBackend:
    """Records one communicator's batches of one rank as (sent, received), each (peer, elements, values)."""

    def __init__(self):
        self.batches = []

    def _start_coalescing(self):
        self._open = [None, None]

    def send(self, tensors, peer, tag):
        self._open[0] = (peer, tensors[0])

    def recv(self, tensors, peer, tag):
        self._open[1] = (peer, tensors[0])

    def _end_coalescing(self):
        self.batches.append(tuple(self._open))
        return FakeWork()


def make_transport(communicators):
    transport = NcclTransport.__new__(NcclTransport)
    transport._communicators = [FakeBackend() for _ in range(communicators)]
    return transport


def deliver(transports):
    """Move the bytes as NCCL would: per communicator and pair of ranks first in, first out; sizes must match."""
    for communicator in range(len(transports[0]._communicators)):
        queues = {}
        for rank, transport in enumerate(transports):
            for sent, _ in transport._communicators[communicator].batches:
                if sent is not None:
                    queues.setdefault((rank, sent[0]), deque()).append(sent[1])
        for rank, transport in enumerate(transports):
            for _, received in transport._communicators[communicator].batches:
                if received is not None:
                    tensor = queues[received[0], rank].popleft()
                    assert tensor.numel() == received[1].numel()
                    received[1].copy_(tensor)
        assert not any(queues.values())


@pytest.mark.parametrize("communicators", [1, 2, 3])
@pytest.mark.parametrize("least_bytes", [0, 30, 10**9])
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_uneven_schedules_deliver_every_chunk_whatever_is_cut(communicators, least_bytes, algorithm, monkeypatch):
    monkeypatch.setattr(nccl, "_LEAST_BYTES_TO_CUT", least_bytes)
    for group_size, m, rows in itertools.product([2, 3, 4], [1, 2, 3], [1, 5, 11, 24]):
        transports = [make_transport(communicators) for _ in range(group_size)]
        expected = []
        for rank, transport in enumerate(transports):
            bound = bind(Collective.ALL_GATHER, algorithm, group_size, rank, m, rows, 1)
            for index, step in enumerate(bound.steps):
                send = receive = None
                if step.send is not None:
                    chunk, peer, _ = step.send
                    send = Message(torch.full((bound.chunk_rows[chunk], 3), float(chunk)), peer, chunk)
                if step.receive is not None:
                    chunk, peer, _ = step.receive
                    receive = Message(torch.full((bound.chunk_rows[chunk], 3), -1.0), peer, chunk)
                    expected.append((receive.tensor, chunk))
                if send is not None or receive is not None:
                    transport.exchange(send, receive, index).wait()
        deliver(transports)
        assert all(bool((tensor == chunk).all()) for tensor, chunk in expected)


def test_small_messages_take_turns_large_ones_use_all(monkeypatch):
    monkeypatch.setattr(nccl, "_LEAST_BYTES_TO_CUT", 64)
    transport = make_transport(2)
    for turn in range(4):
        transport.exchange(Message(torch.zeros(4), 1, 0), None, turn)
    transport.exchange(Message(torch.zeros(17), 1, 0), None, 0)
    sizes = [[sent[1].numel() for sent, _ in communicator.batches] for communicator in transport._communicators]
    assert sizes == [[4, 4, 9], [4, 4, 8]]
