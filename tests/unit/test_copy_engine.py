"""What of the copy engine can be seen without a GPU: how ranks lack memory together, how transfers are given up."""

import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron.errors import TransportError
from commfuse_megatron.transport import copy_engine
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.mapped_window import map_window
from commfuse_megatron.transport.stream_memory import CUDA, Driver

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
        map_window(CUDA, group, torch.device("cpu"), 3 << 20, lambda own: [own, elsewhere])


def bare_transport(**attributes) -> CopyEngineTransport:
    """Without a device: what gives transfers up."""
    transport = object.__new__(CopyEngineTransport)
    page = SimpleNamespace(set_all=lambda: None)
    usual = {"_page": page, "_is_aborted": False, "_has_let_go": False, "_in_flight": deque()}
    vars(transport).update(usual | attributes)
    return transport


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(copy_engine, "_ABORT_ROUND_S", 0.0)


@pytest.mark.usefixtures("hasty")
def test_transfers_are_given_up_also_while_a_graph_is_captured():
    """A stream that is being captured refuses to say whether it is idle, which is no reason to let go of nothing."""
    answers = iter([RuntimeError("operation not permitted when stream is capturing"), False, *[True] * 20])

    def query():
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    rounds = []
    stream = SimpleNamespace(torch=SimpleNamespace(query=query))
    bare_transport(_stream=stream, _page=SimpleNamespace(set_all=lambda: rounds.append(1)))._let_go()
    assert len(rounds) == 22


@pytest.mark.parametrize("kind", [TransportError, RuntimeError])
def test_a_device_that_has_failed_holds_nobody_up(kind, caplog):
    """Its flags cannot be set, and need not: who gives up waited for that at the exit."""

    def set_all():  # PyTorch says so where another device than the first is made the current one
        raise kind("cuMemcpyHtoDAsync failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    transport = bare_transport(_page=SimpleNamespace(set_all=set_all))
    transport._let_go()
    assert transport.has_given_up
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text


@pytest.mark.usefixtures("hasty")
def test_who_lets_go_of_streams_may_do_so_whatever_is_captured(monkeypatch):
    asked = []
    monkeypatch.setattr(
        copy_engine, "allow_calls_during_capture", lambda: asked.append(threading.current_thread().name)
    )
    monkeypatch.setattr(CopyEngineTransport, "_is_idle", lambda transport: True)
    transport = bare_transport()
    transport.abort()
    deadline = time.monotonic() + 10.0
    while not transport.has_given_up:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert asked == ["commfuse-abort"]


def test_a_transport_that_cannot_be_made_gives_its_streams_back():
    given_back, destroyed = [], []

    class WithoutMemory(Driver):
        def memory(self):
            return SimpleNamespace(run=None)

        def event(self):
            return None

        def new_stream(self, device, **_):
            return SimpleNamespace(handle=1, destroy=lambda: destroyed.append(device))

        borrow_stream = new_stream

        def give_stream_back(self, device, stream):
            given_back.append(stream)

        def allocate_shared(self, size_bytes, device):
            raise RuntimeError("no memory")

    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    with pytest.raises(TransportError, match="no memory"):
        CopyEngineTransport(group, torch.device("cpu"), graph_memory_mib=4, driver=WithoutMemory())
    assert (len(given_back), len(destroyed)) == (1, 1)


def refuse_to_start(**_):
    def start():
        raise RuntimeError("can't create new thread at interpreter shutdown")

    return SimpleNamespace(start=start)


def test_transfers_are_given_up_at_the_exit_too(monkeypatch):
    """Where no thread can be started any more."""
    let_go = []
    monkeypatch.setattr(copy_engine, "threading", SimpleNamespace(Thread=refuse_to_start))
    monkeypatch.setattr(CopyEngineTransport, "_let_go", lambda transport: let_go.append(transport))
    transport = bare_transport()
    transport.abort()
    assert let_go == [transport]
