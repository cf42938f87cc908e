"""Calls of the copy engine that became CUDA graphs: new data, late ranks, hardware queues, garbage meanwhile."""

import dataclasses
import gc
import os
import threading

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.transport.stream_memory import (
    StreamEvent,
    StreamGraph,
    StreamMemory,
    borrow_stream,
    give_stream_back,
)
from tests.gpu.test_transports import linear_config
from tests.harness import on_processes, run_spawned
from tests.harness.linear_cases import LINEARS, OPS, Case, assert_equal, draw, drawn, overlapped, reference

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(180)]

CALLS = 10


def _calls_at_the_same_addresses(group, device):
    for path, m in (("sliced", 1), ("sliced", 2), ("bulk", 1)):
        with OverlapContext(group, linear_config("copy_engine", m=m, path=path)) as context:
            for op in LINEARS:
                for has_bias in (True, False):
                    case = Case(op=op, rows=512, N=64, K=64, dtype=torch.bfloat16, has_bias=has_bias)
                    for seed in range(CALLS):
                        case = dataclasses.replace(case, seed=seed)
                        operands = draw(case, group.rank(), group.size(), device)
                        if seed % group.size() == group.rank():
                            torch.cuda._sleep(5_000_000)  # this rank's stream runs some milliseconds behind
                        found = overlapped(case, operands, context)
                        expected = reference(case, operands, group)
                        assert_equal(found, expected)
                        del operands, found, expected  # so that the allocator hands the same memory out again
            tapes = [tape for p in context._prepared.values() for tape in p.tapes if tape is not None]
            num_graphs = sum(len(tape.graphs) for tape in tapes)
            assert num_graphs >= len(tapes), f"{num_graphs} graphs of {len(tapes)} tapes"


@pytest.mark.parametrize("connections", ["1", "8", None])
def test_calls_at_the_same_addresses_see_new_data(connections, monkeypatch):
    if connections is None:
        monkeypatch.delitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", connections)
    run_spawned(2, _calls_at_the_same_addresses, backend="nccl")


@on_processes(2)
def test_garbage_that_is_found_during_a_capture_does_no_harm(group, device):
    case = Case(op=OPS[0], rows=512, N=64, K=64, dtype=torch.bfloat16)
    operands, expected = drawn(case, group, device)
    gc.collect()
    gc.freeze()  # collections look at what follows only, or take long
    thresholds = gc.get_threshold()
    try:
        with OverlapContext(group, linear_config("copy_engine", m=2)) as context:
            for _ in range(3):
                garbage = [context.link.transport.window(1 << 20, device)]  # what a context leaves that has outgrown it
                garbage.append(garbage)
                gc.set_threshold(1, 1, 1)
                for _ in range(8):  # step by step, rehearsed, captured, and as a graph
                    del garbage
                    assert_equal(overlapped(case, operands, context), expected)
                    garbage = []
                gc.set_threshold(*thresholds)
            garbage = [context.link.transport.window(1 << 20, device)]
            garbage.append(garbage)
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                del garbage
                gc.collect()
                y = ops.all_gather_linear(operands.x, operands.weight, operands.bias, context=context)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, expected["y"])
            assert context.link.transport.graphs.num_alive
            del graph
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _in_another_thread(do):
    def run():
        thread = threading.Thread(target=do)
        thread.start()
        thread.join()

    return run


@on_processes(2)
def test_graphs_may_be_destroyed_while_another_is_captured(group, device):
    """As garbage collection may, in any thread: a tape that is found then takes its graphs and events with it."""
    source, target = torch.arange(8.0, device=device), torch.zeros(8, device=device)
    stream, memory = borrow_stream(device), StreamMemory()
    sizes = target.data_ptr(), source.data_ptr(), source.nbytes
    made = []
    for _ in range(8):
        made.append((StreamGraph(stream, lambda: memory.copy(stream.handle, *sizes)), StreamEvent()))
        made[-1][0].launch(torch.cuda.current_stream().cuda_stream)
        made[-1][1].record(stream.handle)
    torch.cuda.synchronize()
    assert torch.equal(source, target)
    for mode in ("global", "thread_local"):
        for destroy in (made.pop, _in_another_thread(made.pop)):
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, capture_error_mode=mode):
                destroy()
                target.mul_(2)
            captured.replay()
            torch.cuda.synchronize()
    assert torch.equal(16 * source, target)
    del made
    give_stream_back(device, stream)
