"""When memory that peers write to is freed: where windows are made or given up, never when garbage is collected."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron.transport import mapped_window
from commfuse_megatron.transport.mapped_window import map_window
from commfuse_megatron.transport.stream_memory import CUDA, captures_excluded

symmetric_memory = pytest.importorskip("torch.distributed._symmetric_memory")

GROUP = SimpleNamespace(rank=lambda: 0, group_name="test")
DEVICE = torch.device("cpu")


class Mapping:
    def __init__(self, tensor):
        self.buffer_ptrs = [tensor.data_ptr()]


@pytest.fixture
def mapped(monkeypatch):
    """Weak references to all mappings, in the order in which they were made."""
    made = []

    def rendezvous(tensor, name):
        mapping = Mapping(tensor)
        made.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(mapped_window, "_mapped", set())
    monkeypatch.setattr(symmetric_memory, "empty", lambda size, **kwargs: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    return made


def are_alive(mapped):
    return [reference() is not None for reference in mapped]


def test_a_window_that_is_given_up_is_freed_at_once(mapped):
    first, second = (map_window(CUDA, GROUP, DEVICE, 64, None) for _ in range(2))
    first.free()
    assert are_alive(mapped) == [False, True]
    second.free()
    assert are_alive(mapped) == [False, False]


def test_garbage_is_freed_when_the_next_window_is_made(mapped):
    garbage = [map_window(CUDA, GROUP, DEVICE, 64, None)]
    garbage.append(garbage)
    del garbage
    gc.collect()
    assert are_alive(mapped) == [True]
    map_window(CUDA, GROUP, DEVICE, 64, None)
    assert are_alive(mapped) == [False, True]


def test_memory_that_is_looked_at_outlives_its_window(mapped):
    window = map_window(CUDA, GROUP, DEVICE, 64, None)
    view = window.tensor[:8].view(torch.int32)
    window.free()
    other = map_window(CUDA, GROUP, DEVICE, 64, None)
    assert are_alive(mapped) == [True, True]
    view.zero_()
    del view
    other.free()
    assert are_alive(mapped) == [False, False]


def test_nothing_is_freed_while_a_graph_is_captured(mapped, monkeypatch):
    map_window(CUDA, GROUP, DEVICE, 64, None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mapped_window._free_unused(torch.device("cuda"))
    assert are_alive(mapped) == [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    mapped_window._free_unused(torch.device("cuda"))
    assert are_alive(mapped) == [False]


def test_peers_are_let_in_when_the_memory_has_been_cleared(monkeypatch):
    """PyTorch clears it on the default stream; what a peer wrote before that was lost, and the sum was wrong."""
    order = []

    class Tensor:
        is_cuda = True

        def untyped_storage(self):
            return torch.empty(1).untyped_storage()

    def empty(size, **keywords):
        order.append("clearing")
        return Tensor()

    def default_stream(device):
        return SimpleNamespace(synchronize=lambda: order.append("cleared"))

    def rendezvous(tensor, name):
        order.append("peers")
        return SimpleNamespace(buffer_ptrs=[0])

    monkeypatch.setattr(mapped_window, "_mapped", set())
    monkeypatch.setattr(symmetric_memory, "empty", empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "default_stream", default_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", default_stream)
    map_window(CUDA, GROUP, DEVICE, 64, None, lambda tensor: order.append("filled"))
    assert order[:3] == ["clearing", "cleared", "filled"]
    assert order[-1] == "peers"


class OnGpu:
    """What keeps memory of a GPU and a mapping."""

    storage = SimpleNamespace(device=torch.device("cuda", 1))
    is_unused = True


@pytest.fixture
def on_gpu(monkeypatch):
    """A weak reference to something mapped on a GPU that nobody uses."""
    each = OnGpu()
    monkeypatch.setattr(mapped_window, "_mapped", {each})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return weakref.ref(each)


def test_the_device_is_waited_for_before_memory_is_freed(on_gpu, monkeypatch):
    """The destructor waits for it, too, but with Python's lock: no watchdog could end a wait for a missing rank."""
    order = []
    weakref.finalize(on_gpu(), order.append, "freed")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(f"waited for {device}"))
    mapped_window._free_unused(torch.device("cuda", 0))
    assert order == ["waited for cuda:1", "freed"]


def test_nothing_is_freed_when_the_device_has_failed(on_gpu, monkeypatch, caplog):
    """The destructor would end the process, without a word of what failed."""

    def synchronize(device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    mapped_window._free_unused(torch.device("cuda", 1))
    assert on_gpu() is not None
    assert "device-side assert" in caplog.text


@pytest.mark.parametrize("error", ["", "pidfd_getfd is forbidden"])
def test_what_was_mapped_to_find_out_whether_it_can_be_is_freed(mapped, error, monkeypatch):
    """At once, or later, where it could not be."""

    def refuse(tensor, name):
        raise RuntimeError(error)

    if error:
        monkeypatch.setattr(symmetric_memory, "rendezvous", refuse)
    said = mapped_window.why_memory_cannot_be_shared(GROUP, DEVICE, lambda text: [text])
    assert error in said if error else said == ""
    assert are_alive(mapped) == ([] if error else [False])
    if error:
        mapped_window._free_unused(DEVICE)
    assert mapped_window._mapped == set()


def test_a_rank_without_memory_is_not_waited_for(mapped):
    """Fails where the others map before they have heard of it: they wait for that rank in the rendezvous."""
    said = mapped_window.why_memory_cannot_be_shared(GROUP, DEVICE, lambda text: [text, "group rank 1 has no memory"])
    assert "group rank 1 has no memory" in said
    assert mapped == []


def test_nothing_is_freed_in_another_threads_capture(on_gpu, monkeypatch):
    """CUDA forbids to wait for a device while a stream of it is captured."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with captures_excluded():
        thread = threading.Thread(target=mapped_window._free_unused, args=(torch.device("cuda", 1),))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert on_gpu() is not None
    thread.join(10.0)
    assert on_gpu() is None
