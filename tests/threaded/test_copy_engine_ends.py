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
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import TransportError
from commfuse_megatron.ops import (
    all_gather_linear,
    linear_reduce_scatter,
)
from commfuse_megatron.runtime import shutdown, tensor_tape
from commfuse_megatron.transport import copy_engine, stream_memory
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from tests.harness import emulated_gpu, run_threads
from tests.harness.emulated_gpu import emulate_copy_engine, on_copy_engine, take_part
from tests.threaded.test_copy_engine_emulated import config_for


@pytest.mark.parametrize("how", ["by an exception", "with its last reference"])
def test_a_context_given_up_is_released_when_transfers_are_done(how, monkeypatch):
    """What is in flight goes on, is still watched, and keeps its streams to itself."""
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(shutdown, "_links", set())
    monkeypatch.setattr(shutdown, "_left", {})
    transport = TransportConfig(backend="copy_engine", timeout_s=3.0)
    config = dataclasses.replace(config_for("sliced", "direct", 1), transport=transport)

    def given_up(group, is_done):
        """The link of a context that was given up with a transfer in flight."""
        context = OverlapContext(group, config)
        all_gather_linear(torch.ones(8, 2, 8), torch.ones(8, 8), context=context)
        link = context.link
        link._watchdog.watch(SimpleNamespace(is_complete=is_done, has_arrived=is_done), 1 - group.rank())
        if how == "by an exception":
            with contextlib.suppress(ValueError), context:
                raise ValueError("a fault of the program")
        finalizer = context._finalizer
        del context
        while finalizer.alive:
            gc.collect()  # does nothing while the other rank's thread is at it
        return link

    def body(group, device):
        with take_part(group):
            answers = [False]
            link = given_up(group, lambda: answers[-1])
            assert link._watchdog._thread.is_alive()
            assert not any(link.transport._graph_stream in spare for spare in stream_memory._spare_streams.values())
            assert not link.is_idle
            answers.append(True)
            shutdown.release_what_is_done()  # or the other rank's thread does
            link._watchdog._thread.join(10.0)
            assert not link._watchdog._thread.is_alive()
            assert link.failure is None
            group.barrier().wait()
            link = given_up(group, lambda: False)
            deadline = time.monotonic() + 10.0
            while link.failure is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert "has nothing to send" in str(link.failure)

    monkeypatch.setattr(CopyEngineTransport, "abort", lambda self: None)
    run_threads(2, body)


def test_who_is_interrupted_while_closing_frees_nothing_in_use(monkeypatch):
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(shutdown, "_links", set())
    monkeypatch.setattr(shutdown, "_left", {})

    def body(group, device):
        with take_part(group):
            context = OverlapContext(group, config_for("sliced", "direct", 1))
            all_gather_linear(torch.ones(8, 2, 8), torch.ones(8, 8), context=context)
            link, answers = context.link, [False]
            link._watchdog.watch(SimpleNamespace(is_complete=lambda: answers[-1]), 1 - group.rank())
            monkeypatch.setattr(context, "synchronize", interrupt)
            with pytest.raises(KeyboardInterrupt):
                context.close()
            assert link.is_in_flight
            assert context.buffer_bytes > 0
            assert link._watchdog._thread.is_alive()
            answers.append(True)
            shutdown.release_what_is_done()
            link._watchdog._thread.join(10.0)
            assert not link._watchdog._thread.is_alive()

    def interrupt():
        raise KeyboardInterrupt

    run_threads(2, body)


def test_a_failed_context_is_forgotten_when_streams_are_let_go(monkeypatch):
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(shutdown, "_links", set())
    monkeypatch.setattr(shutdown, "_left", {})
    run = tensor_tape.TensorTape.run
    monkeypatch.setattr(tensor_tape.TensorTape, "run", lambda *arguments: run(*arguments) or 1 / 0)
    config = config_for("sliced", "ring", 2)

    def body(group, device):
        with take_part(group):
            context = OverlapContext(group, config)
            with pytest.raises(ZeroDivisionError):
                linear_reduce_scatter(torch.ones(12, 2, 8), torch.ones(8, 8), context=context)
            with pytest.raises(TransportError):
                context.close()
            deadline = time.monotonic() + 20.0
            while context.link.is_in_flight:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            shutdown.release_what_is_done()

    run_threads(3, body)
    shutdown.release_what_is_done()
    assert (shutdown._links, shutdown._left) == (set(), {})


def test_a_call_interrupted_at_its_end_keeps_its_messages(monkeypatch):
    """Its flags are set still: the next call took what arrived for this one, and went on with the rows before."""
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(shutdown, "_links", set())
    monkeypatch.setattr(shutdown, "_left", {})

    def interrupt(**arguments):
        raise KeyboardInterrupt

    def body(group, device):
        def gather(value):
            return all_gather_linear(torch.full((4, 1, 8), value + group.rank()), torch.eye(8), context=context)

        with take_part(group):
            context = OverlapContext(group, config_for("sliced", "direct", 1))
            gather(10.0)
            if group.rank() == 1:
                gather(20.0)
                return
            release = context.link.transport.release
            context.link.transport.release = interrupt
            with pytest.raises(KeyboardInterrupt):
                gather(20.0)
            context.link.transport.release = release
            with pytest.raises(TransportError, match="interrupted by KeyboardInterrupt"):
                gather(30.0)

    run_threads(2, body)


def test_a_released_transport_is_not_given_up(monkeypatch):
    """A signal's handler may close contexts in the middle of an exchange, which then fails: streams are destroyed."""
    emulate_copy_engine(monkeypatch)
    aborted = []
    monkeypatch.setattr(CopyEngineTransport, "_let_go", lambda transport: aborted.append(transport))

    def body(group, device):
        with take_part(group):
            context = OverlapContext(group, config_for("sliced", "direct", 1))
            all_gather_linear(torch.ones(8, 2, 8), torch.ones(8, 8), context=context)

            def close_and_end(*arguments, **keywords):
                context.close()
                raise SystemExit(1)

            monkeypatch.setattr(context.consensus._agreement, "exchange", close_and_end)
            with pytest.raises(SystemExit):
                context.consensus.exchange("mine", topic="a question")
            assert not context.link.is_in_flight

    run_threads(2, body)
    assert aborted == []


def test_the_end_of_a_call_is_recorded_before_others_may_ask(monkeypatch):
    """An event says "reached" until it is recorded: the watchdog dropped the call, and windows were freed under it."""
    machine = emulate_copy_engine(monkeypatch)
    asked = []

    class Watched(emulated_gpu._Event):
        def record(self, stream):
            current = transports.get(threading.get_ident())
            if current is not None:
                asked.extend(operation.done is self for operation in made)
            super().record(stream)

    class Operation(copy_engine._Operation):
        def __init__(self):
            super().__init__()
            made.append(self)

    made, transports = [], {}
    monkeypatch.setattr(machine.driver, "event", Watched)
    monkeypatch.setattr(copy_engine, "_Operation", Operation)

    def body(group, device):
        with take_part(group), OverlapContext(group, config_for("sliced", "direct", 1)) as context:
            transports[threading.get_ident()] = context.link.transport
            for _ in range(3):
                all_gather_linear(torch.ones(8, 2, 8), torch.ones(8, 8), context=context)

    run_threads(1, body)
    assert asked
    assert not any(asked)


def test_a_context_on_a_failed_device_fails_and_says_of_what(monkeypatch):
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(shutdown, "_links", set())
    monkeypatch.setattr(shutdown, "_left", {})

    def fail():
        raise TransportError("cuEventQuery failed: CUDA_ERROR_ASSERT")

    def body(group, device):
        with take_part(group):
            context = OverlapContext(group, config_for("sliced", "direct", 1))
            all_gather_linear(torch.ones(8, 2, 8), torch.ones(8, 8), context=context)
            context.link._watchdog.watch(SimpleNamespace(is_complete=fail), 1 - group.rank())
            with pytest.raises(TransportError, match=rf"group rank {group.rank()} .*CUDA_ERROR_ASSERT"):
                context.synchronize()
            assert not context.is_usable

    run_threads(2, body)


@pytest.mark.parametrize("is_left", [True, False])
@on_copy_engine(2)
def test_contexts_know_that_they_were_left_by_an_error(group, device, is_left):
    """The exit of the program then waits for other ranks for a short time only."""
    context = OverlapContext(group, config_for("sliced", "direct", 1))
    with contextlib.suppress(ValueError), context:
        if is_left:
            raise ValueError("a fault of the program")
    assert context.link.is_left_by_error == is_left
