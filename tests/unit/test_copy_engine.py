"""What of the copy engine can be seen without a GPU: how ranks lack memory together, how transfers are given up."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron.errors import TransportError
from commfuse_megatron.transport import copy_engine
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.mapped_window import map_window

symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory")


@pytest.mark.parametrize("is_here", [True, False])
def test_a_rank_without_memory_stops_all_before_the_rendezvous(is_here, monkeypatch):
    def empty(size, **kwargs):
        if is_here:
            raise RuntimeError("out of memory")
        return torch.empty(size, dtype=torch.uint8)

    def rendezvous(*args):
        raise AssertionError("nobody may wait here")

    monkeypatch.setattr(symmetric_memory, "empty", empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    group = SimpleNamespace(rank=lambda: 0)
    elsewhere = "" if is_here else "group rank 1 has no 3 MiB of symmetric memory: out of memory"
    with pytest.raises(TransportError, match=f"group rank {0 if is_here else 1} has no 3 MiB of symmetric memory"):
        map_window(group, torch.device("cpu"), 3 << 20, lambda own: [own, elsewhere])


def test_transfers_are_given_up_also_while_a_graph_is_captured(monkeypatch):
    """A stream that is being captured refuses to say whether it is idle, which is no reason to let go of nothing."""
    monkeypatch.setattr(copy_engine, "_ABORT_ROUND_S", 0.0)
    transport = object.__new__(CopyEngineTransport)
    answers = iter([RuntimeError("operation not permitted when stream is capturing"), False, *[True] * 20])

    def query():
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    rounds = []
    transport._stream = SimpleNamespace(torch=SimpleNamespace(query=query))
    transport._page = SimpleNamespace(set_all=lambda: rounds.append(1))
    transport._in_flight = deque()
    transport._let_go()
    assert len(rounds) == 22
