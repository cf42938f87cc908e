"""The memory of calls that became CUDA graphs, as the device sees it: many lengths, and as many layers as a model has.

To see the numbers: `python -c` with `run_spawned(2, many_lengths, backend="nccl")`, or `many_layers`.
"""

import random
import time

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import TransportConfig
from tests.gpu.test_transports import linear_config
from tests.harness import run_spawned
from tests.harness.linear_cases import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20
FEATURES = 256
LONGEST = 1024
# What the driver and PyTorch take meanwhile for anything else.
SLACK_MIB = 24


def _integers(*shape, device):
    return torch.randint(-2, 3, shape, device=device).to(torch.bfloat16)


def _used_mib():
    """Of the device's memory, without what PyTorch's allocator holds."""
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return (total_bytes - free_bytes - torch.cuda.memory_reserved()) / MIB


def many_lengths(group, device, most_mib=32):
    """A known length, a thousand of random ones, the known one again; what there was then."""
    x = _integers(LONGEST, 1, FEATURES, device=device)
    weight = _integers(FEATURES, FEATURES, device=device)

    def call(rows):
        shard = x[: rows // group.size()]
        return (
            ops.all_gather_linear(shard, weight, context=context),
            ops.linear_reduce_scatter(x[:rows], weight, context=context),
        )

    def graphs_of_known():
        found = [p for p in context._prepared.values() if p.problem.rows == LONGEST]
        return [len(tape.graphs) for p in found for tape in p.tapes if tape is not None]

    lengths = range(64, LONGEST, 8)
    with torch.no_grad():
        stepwise = TransportConfig(graph_memory_mib=0)
        with OverlapContext(group, linear_config("copy_engine", transport=stepwise)) as context:
            for rows in lengths:  # kernels are loaded when they are first used
                call(rows)
        bounded = TransportConfig(graph_memory_mib=most_mib)
        with OverlapContext(group, linear_config("copy_engine", transport=bounded)) as context:
            for _ in range(3):
                call(LONGEST)
            used_mib = _used_mib()
            for _ in range(3):
                call(LONGEST)
            at_first = graphs_of_known()
            most_used_mib = 0.0
            draw = random.Random(0)  # the same lengths on all ranks
            for number in range(1000):
                call(draw.choice(lengths))
                if number % 50 == 49:
                    most_used_mib = max(most_used_mib, _used_mib() - used_mib)
            meanwhile = graphs_of_known()
            for _ in range(16):
                found = call(LONGEST)
            most_used_mib = max(most_used_mib, _used_mib() - used_mib)  # before NCCL takes its buffers, for `expected`
            graphs = context.link.transport.graphs
            expected = (
                ops.reference.all_gather_linear(x[: LONGEST // group.size()], weight, group=group),
                ops.reference.linear_reduce_scatter(x, weight, group=group),
            )
            return {
                "known": (at_first, meanwhile, graphs_of_known()),
                "is_right": all(map(torch.equal, found, expected)),
                "num_alive": graphs.num_alive,
                "size_mib": graphs.size_bytes / MIB,
                "most_used_mib": most_used_mib,
            }


def test_after_a_thousand_lengths_a_known_one_is_a_graph_again():
    for found in run_spawned(2, many_lengths, backend="nccl"):
        at_first, meanwhile, at_last = found["known"]
        assert min(at_first) > 0 == max(meanwhile) < min(at_last), found
        assert found["is_right"], found
        assert found["num_alive"] >= 16, found
        assert found["size_mib"] <= 32, found
        assert found["most_used_mib"] <= 32 + SLACK_MIB, found


def many_layers(group, device, num_layers=108):
    """Forward and backward passes of two linears per layer, over and over: 432 graphs; what there was at the end."""
    rows = 512
    shard = rows // group.size()
    layers = []
    for _ in range(num_layers):
        tensors = [_integers(size, 1, FEATURES, device=device) for size in (shard, rows)]
        tensors.append(_integers(FEATURES, FEATURES, device=device))
        layers.append([tensor.requires_grad_() for tensor in tensors])
    grads = [_integers(size, 1, FEATURES, device=device) for size in (rows, shard)]

    def step():
        for *inputs, weight in layers:
            for op, x, grad_y in zip(OPS, inputs, grads, strict=True):
                y = getattr(ops, op)(x, weight, context=context)
                torch.autograd.grad(y, (x, weight), grad_y)
                del y  # its memory is the next one's

    with OverlapContext(group, linear_config("copy_engine", m=2)) as context:
        graphs = context.link.transport.graphs
        num_alive, calls_us = [], []
        for number in range(10):
            if number == 3:
                used_mib = _used_mib()
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            step()
            calls_us.append((time.perf_counter() - start_s) * 1e6 / (4 * num_layers))
            num_alive.append(graphs.num_alive)
        return {
            "num_alive": num_alive,
            "size_mib": graphs.size_bytes / MIB,
            "used_mib": _used_mib() - used_mib,
            "calls_us": calls_us,
        }


def test_the_graphs_of_a_model_of_32_layers_have_room():
    most_mib = TransportConfig().graph_memory_mib
    for found in run_spawned(2, many_layers, backend="nccl"):
        assert found["num_alive"][-1] == found["num_alive"][-2] >= 432, found
        assert found["size_mib"] <= most_mib, found
        assert found["used_mib"] <= most_mib + SLACK_MIB, found
