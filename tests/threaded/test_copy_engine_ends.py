"""The copy engine emulated on the CPU: how contexts over it end, are given up, interrupted and fail."""

import contextlib
import dataclasses
import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron import OverlapContext
from commfuse_megatron.errors import TransportError
from commfuse_megatron.ops import all_gather_linear, linear_reduce_scatter
from commfuse_megatron.runtime import shutdown, tensor_tape
from commfuse_megatron.transport import copy_engine, stream_memory
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from tests.harness import emulated_gpu, run_threads
from tests.harness.emulated_gpu import on_copy_engine
from tests.threaded.test_copy_engine_emulated import COPIES, config_for

CONFIG = config_for("sliced")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """By other tests, at the exit."""
    monkeypatch.setattr(shutdown, "_links", set())
    monkeypatch.setattr(shutdown, "_left", {})


def gather(context, value=1.0):
    return all_gather_linear(torch.full((8, 2, 8), value), torch.eye(8), context=context)


def used_context(group, config=CONFIG):
    context = OverlapContext(group, config)
    gather(context)
    return context


def in_flight(is_complete, **others):
    return SimpleNamespace(is_complete=is_complete, **others)


def interrupt(**_):
    raise KeyboardInterrupt


def expect_stopped(link):
    shutdown.release_what_is_done()  # or the other rank's thread does
    link._watchdog._thread.join(10.0)
    assert not link._watchdog._thread.is_alive()


def wait_until(is_so, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def no_abort(monkeypatch):
    monkeypatch.setattr(CopyEngineTransport, "abort", lambda self: None)


@pytest.mark.parametrize("how", ["by an exception", "with its last reference"])
@pytest.mark.usefixtures("no_abort")
@on_copy_engine(2)
def test_a_context_given_up_is_released_when_transfers_are_done(group, device, how):
    """What is in flight goes on, is still watched, and keeps its streams to itself."""

    def given_up(is_done, timeout_s):
        """The link of a context that was given up with a transfer in flight."""
        context = used_context(group, config_for("sliced", transport=dataclasses.replace(COPIES, timeout_s=timeout_s)))
        link = context.link
        link._watchdog.watch(in_flight(is_done, has_arrived=is_done), 1 - group.rank())
        if how == "by an exception":
            with contextlib.suppress(ValueError), context:
                raise ValueError("a fault of the program")
        finalizer = context._finalizer
        del context
        while finalizer.alive:
            gc.collect()  # does nothing while the other rank's thread is at it
        return link

    answers = [False]
    link = given_up(lambda: answers[-1], 60.0)  # collecting garbage takes seconds on a busy machine
    assert link._watchdog._thread.is_alive()
    assert not any(link.transport._graph_stream in spare for spare in stream_memory._spare_streams.values())
    assert not link.is_idle
    answers.append(True)
    expect_stopped(link)
    assert link.failure is None
    group.barrier().wait()
    link = given_up(lambda: False, 3.0)
    wait_until(lambda: link.failure is not None, 10.0)
    assert "has nothing to send" in str(link.failure)


@on_copy_engine(2)
def test_who_is_interrupted_while_closing_frees_nothing_in_use(group, device):
    context, answers = used_context(group), [False]
    context.link._watchdog.watch(in_flight(lambda: answers[-1]), 1 - group.rank())
    context.synchronize = interrupt
    with pytest.raises(KeyboardInterrupt):
        context.close()
    assert context.link.is_in_flight
    assert context.buffer_bytes > 0
    assert context.link._watchdog._thread.is_alive()
    answers.append(True)
    expect_stopped(context.link)


def test_a_failed_context_is_forgotten_when_streams_are_let_go(monkeypatch):
    run = tensor_tape.TensorTape.run
    monkeypatch.setattr(tensor_tape.TensorTape, "run", lambda *arguments: run(*arguments) or 1 / 0)

    @on_copy_engine(3)
    def fail(group, device):
        context = OverlapContext(group, config_for("sliced", "ring", 2))
        with pytest.raises(ZeroDivisionError):
            linear_reduce_scatter(torch.ones(12, 2, 8), torch.ones(8, 8), context=context)
        with pytest.raises(TransportError):
            context.close()
        wait_until(lambda: not context.link.is_in_flight)
        shutdown.release_what_is_done()

    fail(monkeypatch=monkeypatch)
    shutdown.release_what_is_done()
    assert (shutdown._links, shutdown._left) == (set(), {})


@on_copy_engine(2)
def test_a_call_interrupted_at_its_end_keeps_its_messages(group, device):
    """Its flags are set still: the next call took what arrived for this one, and went on with the rows before."""
    context = used_context(group)
    if group.rank() == 1:
        gather(context, 21.0)
        return
    release = context.link.transport.release
    context.link.transport.release = interrupt
    with pytest.raises(KeyboardInterrupt):
        gather(context, 20.0)
    context.link.transport.release = release
    with pytest.raises(TransportError, match="interrupted by KeyboardInterrupt"):
        gather(context, 30.0)


@pytest.fixture
def let_go(monkeypatch):
    """Nobody: the transports that should be."""
    found = []
    monkeypatch.setattr(CopyEngineTransport, "_let_go", lambda transport: found.append(transport))
    yield found
    assert found == []


@pytest.mark.usefixtures("let_go")
@on_copy_engine(2)
def test_a_released_transport_is_not_given_up(group, device):
    """A signal's handler may close contexts in the middle of an exchange, which then fails: streams are destroyed."""
    context = used_context(group)

    def close_and_end(*arguments, **keywords):
        context.close()
        raise SystemExit(1)

    context.consensus._agreement.exchange = close_and_end
    with pytest.raises(SystemExit):
        context.consensus.exchange("mine", topic="a question")
    assert not context.link.is_in_flight


def test_the_end_of_a_call_is_recorded_before_others_may_ask(monkeypatch):
    """An event says "reached" until it is recorded: the watchdog dropped the call, and windows were freed under it."""
    machine = emulated_gpu.emulate_copy_engine(monkeypatch)
    asked, made, transports = [], [], {}

    class Watched(emulated_gpu._Event):
        def record(self, stream):
            if transports.get(threading.get_ident()) is not None:
                asked.extend(operation.done is self for operation in made)
            super().record(stream)

    class Operation(copy_engine._Operation):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(machine.driver, "event", Watched)
    monkeypatch.setattr(copy_engine, "_Operation", Operation)

    def body(group, device):
        with emulated_gpu.take_part(group), OverlapContext(group, CONFIG) as context:
            transports[threading.get_ident()] = context.link.transport
            for _ in range(3):
                gather(context)

    run_threads(1, body)
    assert asked
    assert not any(asked)


@on_copy_engine(2)
def test_a_context_on_a_failed_device_fails_and_says_of_what(group, device):
    def fail():
        raise TransportError("cuEventQuery failed: CUDA_ERROR_ASSERT")

    context = used_context(group)
    context.link._watchdog.watch(in_flight(fail), 1 - group.rank())
    with pytest.raises(TransportError, match=rf"group rank {group.rank()} .*CUDA_ERROR_ASSERT"):
        context.synchronize()
    assert not context.is_usable


@pytest.mark.parametrize("is_left", [True, False])
@on_copy_engine(2)
def test_contexts_know_that_they_were_left_by_an_error(group, device, is_left):
    """The exit of the program then waits for other ranks for a short time only."""
    context = OverlapContext(group, CONFIG)
    with contextlib.suppress(ValueError), context:
        if is_left:
            raise ValueError("a fault of the program")
    assert context.link.is_left_by_error == is_left
