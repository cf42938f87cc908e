"""Events, streams and graphs of the driver, which is made up here: what is asked, given back and never asked twice."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as bindings

from commfuse_megatron.errors import TransportError
from commfuse_megatron.transport import stream_memory

SUCCESS = bindings.CUresult.CUDA_SUCCESS
GRAPH = 7


class Driver:
    """Answers what `answers` says, SUCCESS by default, and notes what was called with which arguments."""

    def __init__(self) -> None:
        self.called: list[tuple] = []
        self.answers: dict[str, tuple] = {
            "cuEventCreate": (SUCCESS, "event"),
            "cuStreamEndCapture": (SUCCESS, GRAPH),
            "cuGraphInstantiate": (SUCCESS, "executable"),
            "cuCtxGetStreamPriorityRange": (SUCCESS, 0, -5),
            "cuStreamCreateWithPriority": (SUCCESS, 11),
            "cuThreadExchangeStreamCaptureMode": (SUCCESS, "mode of the thread"),
        }

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            return getattr(bindings, name)

        def call(*arguments):
            self.called.append((name, *arguments))
            return self.answers.get(name, (SUCCESS,))

        return call

    def names(self) -> list[str]:
        return [name for name, *_ in self.called]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(stream_memory, "_driver", lambda: found)
    return found


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_garbage_is_collected_during_a_capture(is_enabled, fails, driver):
    """What is freed then may wait for the device, which ends the process."""
    seen = []

    def tell():
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("refused")

    before = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(ValueError, match="refused") if fails else contextlib.nullcontext():
            stream_memory.StreamGraph(SimpleNamespace(handle=1), tell)
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False]


@pytest.mark.parametrize("how", ["well", "told wrongly", "interrupted", "no executable"])
def test_a_capture_leaves_nothing_behind_however_it_ends(how, driver):
    """The stream is lent to the next context, and graphs that were told are destroyed, also by Ctrl-C."""
    errors = {"told wrongly": TransportError, "interrupted": KeyboardInterrupt, "no executable": TransportError}

    def tell():
        if how in ("told wrongly", "interrupted"):
            raise errors[how]

    if how == "no executable":
        driver.answers["cuGraphInstantiate"] = (bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    with contextlib.nullcontext() if how == "well" else pytest.raises(errors[how]):
        graph = stream_memory.StreamGraph(SimpleNamespace(handle=1), tell)
        graph.launch(2)
        assert driver.called[-1] == ("cuGraphLaunch", "executable", 2)
    assert driver.names()[:2] == ["cuStreamBeginCapture", "cuStreamEndCapture"]
    assert ("cuGraphDestroy", GRAPH) in driver.called


def test_a_capture_that_does_not_begin_is_not_told_anything(driver):
    driver.answers["cuStreamBeginCapture"] = (bindings.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
    driver.answers["cuStreamEndCapture"] = (bindings.CUresult.CUDA_ERROR_ILLEGAL_STATE, None)
    with pytest.raises(TransportError, match="cuStreamBeginCapture failed: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        stream_memory.StreamGraph(SimpleNamespace(handle=1), pytest.fail)
    assert "cuGraphDestroy" not in driver.names()


def test_a_graph_is_destroyed_as_captures_allow(driver):
    """Garbage is found in the middle of captures, too, which CUDA breaks over a graph that is destroyed otherwise."""
    graph = stream_memory.StreamGraph(SimpleNamespace(handle=1), lambda: None)
    del driver.called[:], graph
    assert driver.called == [
        ("cuThreadExchangeStreamCaptureMode", bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED),
        ("cuGraphExecDestroy", "executable"),
        ("cuThreadExchangeStreamCaptureMode", "mode of the thread"),
    ]


def test_free_memory_is_what_is_left_and_not_all_there_is(driver):
    driver.answers["cuMemGetInfo"] = (SUCCESS, 3, 8)
    assert stream_memory.free_memory_bytes() == 3
    driver.answers["cuMemGetInfo"] = (bindings.CUresult.CUDA_ERROR_LAUNCH_FAILED, None, None)
    with pytest.raises(TransportError, match="cuMemGetInfo failed: CUDA_ERROR_LAUNCH_FAILED"):
        stream_memory.free_memory_bytes()


@pytest.mark.parametrize(("status", "answer"), [
    ("CUDA_SUCCESS", True), ("CUDA_ERROR_NOT_READY", False), ("CUDA_ERROR_CAPTURED_EVENT", False),
    ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", False), ("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", False),
    ("CUDA_ERROR_ILLEGAL_ADDRESS", TransportError), ("CUDA_ERROR_ASSERT", TransportError),
    ("CUDA_ERROR_LAUNCH_FAILED", TransportError),
])  # fmt: skip
def test_a_device_that_has_failed_is_not_one_that_is_still_at_it(status, answer, driver):
    """It was: contexts were in flight for good, and the exit waited for that.

    Events are given back: a tape has some for every slice, and lengths that vary make many tapes.
    """
    driver.answers["cuEventQuery"] = (getattr(bindings.CUresult, status),)
    event = stream_memory.StreamEvent()
    if answer is TransportError:
        with pytest.raises(TransportError, match=f"cuEventQuery failed: {status}"):
            event.query()
    else:
        assert event.query() is answer
        assert "cuEventDestroy" not in driver.names()
        del event
        assert driver.called[-1] == ("cuEventDestroy", "event")


def test_a_stream_is_destroyed_once(driver, monkeypatch):
    monkeypatch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.ExternalStream", lambda handle, device: handle)
    stream = stream_memory.OwnStream("cuda:0", is_high_priority=True)
    for _ in range(2):
        stream.destroy()
    assert driver.names().count("cuStreamDestroy") == 1
    assert driver.called[-1] == ("cuStreamDestroy", 11)


def test_streams_of_closed_contexts_serve_later_ones(monkeypatch):
    monkeypatch.setattr(stream_memory, "OwnStream", lambda device, *, is_high_priority: object())
    monkeypatch.setattr(stream_memory, "_spare_streams", {})
    first, second = stream_memory.borrow_stream("cuda:0"), stream_memory.borrow_stream("cuda:0")
    assert first is not second
    stream_memory.give_stream_back("cuda:0", first)
    assert stream_memory.borrow_stream("cuda:1") is not first
    assert stream_memory.borrow_stream("cuda:0") is first
