"""What adapters and delayed weight gradients ask of the operations, over the copy engine: two ranks, on one GPU or two.

Integers small enough for bf16 to hold every sum, so results must be those of fp32 on the CPU. Every call is made often
enough to be stepped, replayed from a tape and launched as a graph.
"""

import itertools

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.ops import DeferredWeightGrad, WeightGradQueue
from tests.gpu.test_transports import linear_config
from tests.harness import run_spawned
from tests.harness.linear_cases import OPS, Case, Operands, assert_equal, draw, reference
from tests.threaded.test_gathered_input import OUTPUTS, draw_gathered, results

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]

REPEATS = 6
PATHS = (("direct", 1, "sliced"), ("direct", 2, "sliced"), ("direct", 1, "bulk"))


def _to_device(operands: Operands, device: torch.device) -> Operands:
    tensors = (operands.x, operands.weight, operands.bias, operands.grad_y)
    return Operands(*(None if t is None else t.to(device, torch.bfloat16) for t in tensors))


def _back(found: dict) -> dict:
    return {name: value.float().cpu() for name, value in found.items()}


def _gathered(group, device, context):
    for rows, frozen, outputs in itertools.product((64, 37), ((), ("weight",)), OUTPUTS):
        case = Case(op="all_gather_linear", rows=rows, N=24, K=16, dtype=torch.float32, seed=rows)
        on_cpu, grad = draw(case, group.rank(), group.size(), torch.device("cpu")), draw_gathered(case, group.rank())
        options = {"frozen": frozen, "outputs": outputs}
        expected = results(case, on_cpu, grad, ops.reference.all_gather_linear, group=group, **options)
        moved, moved_grad = _to_device(on_cpu, device), grad.to(device, torch.bfloat16)
        for _ in range(REPEATS):
            found = results(case, moved, moved_grad, ops.all_gather_linear, context=context, **options)
            assert_equal(_back(found), expected)


def _deferred_and_partial(group, device, context):
    for op in OPS:
        case = Case(op=op, rows=48, N=24, K=16, dtype=torch.float32, seed=5)
        on_cpu = draw(case, group.rank(), group.size(), torch.device("cpu"))
        expected = reference(case, on_cpu, group)
        moved, call = _to_device(on_cpu, device), getattr(ops, op)
        for _ in range(REPEATS):
            leaves, queue = moved.copies(), WeightGradQueue()
            y = call(leaves.x, leaves.weight, leaves.bias, context=context, weight_grad=DeferredWeightGrad(queue))
            y.backward(moved.grad_y)
            assert leaves.weight.grad is None
            found = {"x.grad": leaves.x.grad, "bias.grad": leaves.bias.grad, "weight.grad": queue.pop()()}
            assert_equal(_back(found), {name: expected[name] for name in found})
            leaves = moved.copies()
            y = call(leaves.x, leaves.weight, leaves.bias, context=context)
            (grad_x,) = torch.autograd.grad(y, [leaves.x], moved.grad_y, retain_graph=True)
            y.backward(moved.grad_y, inputs=[leaves.weight])
            assert leaves.x.grad is None
            found = {"x.grad": grad_x, "weight.grad": leaves.weight.grad}
            assert_equal(_back(found), {name: expected[name] for name in found})


def _on_gpus(group, _cpu):
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for algorithm, m, path in PATHS:
        with OverlapContext(group, linear_config("copy_engine", algorithm, m, path=path)) as context:
            _gathered(group, device, context)
            _deferred_and_partial(group, device, context)


@pytest.mark.parametrize("group_size", [2, 3])
def test_exact_on_integers_step_by_step_from_tapes_and_as_graphs(group_size, monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    run_spawned(group_size, _on_gpus)
