"""Calls of the copy engine that became CUDA graphs: new data at the same addresses, late ranks, hardware queues."""

import os

import pytest
import torch

from commfuse_megatron import OverlapContext
from tests.gpu.test_transports import linear_config
from tests.harness import run_spawned
from tests.harness.linear_cases import OPS, Case, assert_equal, draw, overlapped, reference

pytestmark = pytest.mark.gpu

CALLS = 10


def _calls_at_the_same_addresses(group, device):
    for path, m in (("sliced", 1), ("sliced", 2), ("bulk", 1)):
        with OverlapContext(group, linear_config("copy_engine", m=m, path=path)) as context:
            for op in OPS:
                for has_bias in (True, False):
                    case = Case(op=op, rows=512, N=64, K=64, dtype=torch.bfloat16, has_bias=has_bias)
                    for seed in range(CALLS):
                        operands = draw(
                            Case(op=op, rows=512, N=64, K=64, dtype=torch.bfloat16, has_bias=has_bias, seed=seed),
                            group.rank(),
                            group.size(),
                            device,
                        )
                        if seed % group.size() == group.rank():
                            torch.cuda._sleep(5_000_000)  # this rank's stream runs some milliseconds behind
                        found = overlapped(case, operands, context)
                        expected = reference(case, operands, group)
                        assert_equal(found, expected)
                        del operands, found, expected  # so that the allocator hands the same memory out again
            tapes = [tape.operation for p in context._prepared.values() for tape in p.tapes.values()]
            graphs = [made for tape in tapes for made in tape.graphs.values() if not isinstance(made, int)]
            assert len(graphs) >= len(tapes), f"{len(graphs)} graphs of {len(tapes)} tapes"


@pytest.mark.parametrize("connections", ["1", "8", None])
def test_calls_at_the_same_addresses_see_new_data(connections, monkeypatch):
    if connections is None:
        monkeypatch.delitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    else:
        monkeypatch.setitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", connections)
    run_spawned(2, _calls_at_the_same_addresses, backend="nccl")
