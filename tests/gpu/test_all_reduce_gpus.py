"""The linears that all-reduce on two GPUs: exact on integers, the same bits on both, in tapes and in graphs."""

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapContext
from tests.gpu.test_transports import BACKENDS, linear_config
from tests.harness import on_processes
from tests.harness.linear_cases import ALL_REDUCES, Case, assert_equal, check_linear, draw, overlapped

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(240)]

SUMMED = {"linear_all_reduce": "y", "linear_grad_all_reduce": "x.grad"}


@pytest.mark.parametrize("path", ["sliced", "sequential"])
@BACKENDS
@on_processes(2)
def test_exact_on_integers(group, device, backend, path):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for m in (1, 2, 4):
            with OverlapContext(group, linear_config(backend, m=m, path=path)) as context:
                for op in ALL_REDUCES:
                    for rows, N, K in ((64, 48, 40), (65, 33, 17), (1, 8, 8), (640, 64, 64)):
                        for has_bias in (True, False):
                            case = Case(op=op, rows=rows, N=N, K=K, dtype=dtype, seed=rows, has_bias=has_bias)
                            check_linear(case, group, context)
                assert {record.path for record in context.report()} == {"local", "sliced", path}


@BACKENDS
@on_processes(2)
def test_a_hundred_runs_are_bit_identical_on_both(group, device, backend):
    for op in ALL_REDUCES:
        case = Case(op=op, rows=1024, N=512, K=768, dtype=torch.bfloat16, exact=False)
        operands = draw(case, group.rank(), group.size(), device)
        with OverlapContext(group, linear_config(backend, m=2)) as context:
            first = overlapped(case, operands, context)
            both = [torch.empty_like(first[SUMMED[op]]) for _ in range(2)]
            dist.all_gather(both, first[SUMMED[op]].contiguous(), group=group)
            assert torch.equal(*both)
            for number in range(99):
                if number % 2 == group.rank():
                    torch.cuda._sleep(1_000_000)  # this rank's stream runs behind
                assert_equal(overlapped(case, operands, context), first)
            modes = {mode for record in context.report() for mode in record.modes}
            assert "graph" in modes or backend != "copy_engine"
