"""Plans on two GPUs: every rank measures and chooses alike, results are right, nothing else is disturbed."""

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import PlanConfig, TransportConfig
from tests.harness import run_spawned
from tests.harness.linear_cases import OPS, Case, assert_equal, drawn, overlapped

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(180)]


def _planned(group, device, backend, measure):
    config = OverlapConfig(transport=TransportConfig(backend=backend), plan=PlanConfig(measure=measure))
    before = torch.cuda.get_rng_state()
    with OverlapContext(group, config) as context:
        for op in OPS:
            for rows in (64, 65, 4096):
                case = Case(op=op, rows=rows, N=64, K=64, dtype=torch.bfloat16, has_bias=rows != 65, seed=rows)
                operands, expected = drawn(case, group, device)
                for _ in range(2):
                    assert_equal(overlapped(case, operands, context), expected)
        assert torch.equal(torch.cuda.get_rng_state(), before)
        assert set(context.planner.machines) == (set() if measure == "never" else {"bfloat16"})
        return context.report(), context.planner.machines


@pytest.mark.parametrize("backend", ["nccl", "copy_engine"])
@pytest.mark.parametrize("measure", ["auto", "always", "never"])
def test_all_ranks_choose_alike_and_results_are_exact(backend, measure):
    first, second = run_spawned(2, _planned, backend, measure, backend="nccl")
    assert first == second
    records, machines = first
    assert [record.calls for record in records] == [2] * len(records) == [2] * 12
    for record in records:
        assert record.reason.startswith({"always": "measured", "never": "predicted from assumed"}.get(measure, ""))
        assert record.predicted_us is not None
        assert (record.measured_us is not None) == record.reason.startswith("measured")
    for machine in machines.values():
        assert machine.source == "measured"
        assert 50 < machine.gemm.tflops < 3000
        assert machine.link.bandwidth_gb_s > 1
