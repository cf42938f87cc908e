"""More ranks than GPUs over the copy engine: correctness of groups of four and eight."""

import pytest
import torch

from commfuse_megatron import OverlapContext
from tests.gpu.test_transports import linear_config
from tests.harness import run_spawned
from tests.harness.linear_cases import OPS, Case, Operands, assert_equal, draw, overlapped, reference
from tests.harness.transport_contract import run_contract

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(240)]


def _on_shared_gpus(group, _cpu):
    from commfuse_megatron.transport.copy_engine import CopyEngineTransport

    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    transport = CopyEngineTransport(group, device)
    run_contract(transport, group.rank(), group.size(), device)
    torch.cuda.synchronize()
    transport.close()
    for algorithm, m, path in (
        ("direct", 1, "sliced"),
        ("direct", 2, "sliced"),
        ("ring", 2, "sliced"),
        ("direct", 1, "bulk"),
    ):
        with OverlapContext(group, linear_config("copy_engine", algorithm, m, path=path)) as context:
            for op in OPS:
                for rows in (64, 37, 3):
                    # Sums stay below 256, so bf16 holds them exactly and fp32 on the CPU gives the same.
                    case = Case(op=op, rows=rows, N=24, K=16, dtype=torch.float32, seed=rows, has_bias=rows != 64)
                    on_cpu = draw(case, group.rank(), group.size(), torch.device("cpu"))
                    expected = reference(case, on_cpu, group)
                    tensors = (on_cpu.x, on_cpu.weight, on_cpu.bias, on_cpu.grad_y)
                    moved = Operands(*(None if t is None else t.to(device, torch.bfloat16) for t in tensors))
                    found = overlapped(case, moved, context)
                    assert_equal({k: None if v is None else v.float().cpu() for k, v in found.items()}, expected)


@pytest.mark.parametrize("group_size", [4, 8])
def test_groups_larger_than_the_machine(group_size, monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    run_spawned(group_size, _on_shared_gpus)
