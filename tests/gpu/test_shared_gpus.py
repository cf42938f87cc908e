"""More ranks than GPUs over the copy engine: correctness of larger groups on two GPUs, or on one; adapters' calls."""

import dataclasses
import itertools

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import TransportTimeoutError
from commfuse_megatron.ops import DeferredWeightGrad, WeightGradQueue
from commfuse_megatron.transport.select import take_gpu
from tests.gpu.test_query_split import CASES as ATTENTION_CASES
from tests.gpu.test_query_split import config as attention_config
from tests.gpu.test_transports import linear_config
from tests.harness import on_processes
from tests.harness.linear_cases import LINEARS, OPS, Case, Operands, assert_equal, draw, overlapped, reference
from tests.harness.mixed_calls import MixedCalls, draw_cases
from tests.harness.transport_contract import run_contract
from tests.threaded.test_gathered_input import OUTPUTS, draw_gathered, results
from tests.threaded.test_query_split_attention import Case as AttentionCase
from tests.threaded.test_query_split_attention import draw as draw_attention
from tests.threaded.test_query_split_attention import run

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]

PATHS = (("direct", 1, "sliced"), ("direct", 2, "sliced"), ("direct", 1, "bulk"))


@pytest.fixture(autouse=True)
def _gpus_may_be_shared(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def to_bf16(operands, device):
    tensors = (operands.x, operands.weight, operands.bias, operands.grad_y)
    return Operands(*(None if t is None else t.to(device, torch.bfloat16) for t in tensors))


def back(found):
    return {name: None if value is None else value.float().cpu() for name, value in found.items()}


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("group_size", [4, 8])
@on_processes("group_size", backend="gloo")
def test_groups_larger_than_the_machine(group, cpu, group_size):
    from commfuse_megatron.transport.copy_engine import CopyEngineTransport

    device = take_gpu(group.rank())
    transport = CopyEngineTransport(group, device)
    run_contract(transport, group.rank(), group.size(), device)
    torch.cuda.synchronize()
    transport.close()
    for algorithm, m, path in (*PATHS, ("ring", 2, "sliced")):
        with OverlapContext(group, linear_config("copy_engine", algorithm, m, path=path)) as context:
            for op in LINEARS:
                for rows in (64, 37, 3):
                    # Sums stay below 256, so bf16 holds them exactly and fp32 on the CPU gives the same.
                    case = Case(op=op, rows=rows, N=24, K=16, dtype=torch.float32, seed=rows, has_bias=rows != 64)
                    on_cpu = draw(case, group.rank(), group.size(), torch.device("cpu"))
                    expected = reference(case, on_cpu, group)
                    assert_equal(back(overlapped(case, to_bf16(on_cpu, device), context)), expected)


@pytest.mark.parametrize("group_size", [3, 4])
@on_processes("group_size", backend="gloo")
def test_attention_of_groups_larger_than_the_machine(group, cpu, group_size):
    """Small splits, hence four lanes, and of more than two ranks, so that what arrived is added up beside attention."""
    device = take_gpu(group.rank())
    long = AttentionCase(rows=1024, batch=1, heads=4, kv_heads=2, head_dim=128, value_dim=128, N=256)
    for m in (1, 2):
        with OverlapContext(group, attention_config("copy_engine", m=m)) as context:
            for repeat in range(6):  # from the fourth on as CUDA graphs
                for case in (*ATTENTION_CASES[:2], long):
                    case = dataclasses.replace(case, seed=repeat % 2, dtype=torch.bfloat16)
                    operands, grad_y = draw_attention(case, group.rank(), group.size())
                    moved = {name: None if t is None else t.to(device) for name, t in operands.items()}
                    wide = {name: None if t is None else t.double() for name, t in operands.items()}
                    found = run(moved, grad_y.to(device), ops.query_split_attention, context=context, **case.keywords)
                    exact = run(
                        wide, grad_y.double(), ops.reference.query_split_attention, group=group, **case.keywords
                    )
                    for name, value in exact.items():
                        if value is None:
                            assert found[name] is None
                        elif value.numel():
                            error = (found[name].double().cpu() - value).abs().max() / value.abs().max().clamp(min=1e-3)
                            assert error.item() <= 0.05, (case, m, name, error.item())
            records = [record for record in context.report() if record.op == "query_split_attention"]
            assert {record.path for record in records} == {"query_split"}


@pytest.mark.parametrize("group_size", [3, 4])
@on_processes("group_size", backend="gloo")
def test_calls_of_other_shapes_follow_at_once(group, cpu, group_size):
    take_gpu(group.rank())
    calls = MixedCalls(draw_cases(group.size(), head_dim=64), group)
    direct = linear_config("copy_engine")
    for linear in (
        direct.linear,
        dataclasses.replace(direct.linear, fprop=linear_config("copy_engine", "ring", 2).linear.fprop),
    ):
        both = dataclasses.replace(attention_config("copy_engine"), linear=linear)
        with OverlapContext(group, both) as context:
            for _ in range(6):  # from the second on without agreement, from the fourth on as CUDA graphs
                calls.check(context, dtype=torch.bfloat16, limit=0.05)


@on_processes(3, backend="gloo")
def test_a_rank_that_sends_nothing_and_does_not_come_is_named(group, cpu):
    """Two ranks have no rows for each other; one of them does not come."""
    device = take_gpu(group.rank())
    config = linear_config("copy_engine", transport=TransportConfig(timeout_s=3.0))
    rank = group.rank()
    context = OverlapContext(group, config)
    x = torch.ones(1 if rank == 0 else 0, 1, 16, device=device, dtype=torch.bfloat16)
    weight = torch.ones(8, 16, device=device, dtype=torch.bfloat16)
    for _ in range(6):
        ops.all_gather_linear(x, weight, total_rows=1, context=context)
    torch.cuda.synchronize()
    if rank != 2:
        ops.all_gather_linear(x, weight, total_rows=1, context=context)
        torch.cuda.synchronize()
        with pytest.raises(TransportTimeoutError) as error:
            context.synchronize()
        assert f"group rank {rank} " in str(error.value)
        assert "group rank 2 " in str(error.value)
    group.barrier().wait()


# --- what adapters and delayed weight gradients ask of the operations -------------------------------------------------

# Often enough to be stepped, replayed from a tape and launched as a graph.
REPEATS = 6


def _gathered(group, device, context):
    for rows, frozen, outputs in itertools.product((64, 37), ((), ("weight",)), OUTPUTS):
        case = Case(op="all_gather_linear", rows=rows, N=24, K=16, dtype=torch.float32, seed=rows)
        on_cpu, grad = draw(case, group.rank(), group.size(), torch.device("cpu")), draw_gathered(case, group.rank())
        options = {"frozen": frozen, "outputs": outputs}
        expected = results(case, on_cpu, grad, ops.reference.all_gather_linear, group=group, **options)
        moved, moved_grad = to_bf16(on_cpu, device), grad.to(device, torch.bfloat16)
        for _ in range(REPEATS):
            found = results(case, moved, moved_grad, ops.all_gather_linear, context=context, **options)
            assert_equal(back(found), expected)


def _deferred_and_partial(group, device, context):
    for op in OPS:
        case = Case(op=op, rows=48, N=24, K=16, dtype=torch.float32, seed=5)
        on_cpu = draw(case, group.rank(), group.size(), torch.device("cpu"))
        expected = reference(case, on_cpu, group)
        moved, call = to_bf16(on_cpu, device), getattr(ops, op)
        for _ in range(REPEATS):
            leaves, queue = moved.copies(), WeightGradQueue()
            y = call(leaves.x, leaves.weight, leaves.bias, context=context, weight_grad=DeferredWeightGrad(queue))
            y.backward(moved.grad_y)
            assert leaves.weight.grad is None
            found = {"x.grad": leaves.x.grad, "bias.grad": leaves.bias.grad, "weight.grad": queue.pop()()}
            assert_equal(back(found), {name: expected[name] for name in found})
            leaves = moved.copies()
            y = call(leaves.x, leaves.weight, leaves.bias, context=context)
            (grad_x,) = torch.autograd.grad(y, [leaves.x], moved.grad_y, retain_graph=True)
            y.backward(moved.grad_y, inputs=[leaves.weight])
            assert leaves.x.grad is None
            found = {"x.grad": grad_x, "weight.grad": leaves.weight.grad}
            assert_equal(back(found), {name: expected[name] for name in found})


@pytest.mark.parametrize("group_size", [2, 3])
@on_processes("group_size", backend="gloo")
def test_exact_on_integers_step_by_step_from_tapes_and_as_graphs(group, cpu, group_size):
    """Small enough for bf16 to hold every sum, so results must be those of fp32 on the CPU."""
    device = take_gpu(group.rank())
    for algorithm, m, path in PATHS:
        with OverlapContext(group, linear_config("copy_engine", algorithm, m, path=path)) as context:
            _gathered(group, device, context)
            _deferred_and_partial(group, device, context)
