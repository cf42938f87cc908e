"""Weight gradients that are computed after their backward passes: equal numbers, in order, with nothing sent."""

import dataclasses

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import CommFuseError, ShapeError
from commfuse_megatron.ops import DeferredWeightGrad, WeightGradQueue, WeightGradTarget
from commfuse_megatron.transport import tape_graphs
from tests.harness import on_ranks, run_threads
from tests.harness.contexts import in_context
from tests.harness.emulated_gpu import emulate_copy_engine, take_part, tapes_of
from tests.harness.linear_cases import OPS, Case, draw, draw_own, drawn, reference
from tests.threaded import test_query_split_attention as attention
from tests.threaded.test_copy_engine_emulated import PATHS, config_for
from tests.threaded.test_gathered_input import CONFIGS
from tests.threaded.test_partial_gradients import PATHS as PATHS_OF_ATTENTION

MICRO_BATCHES = 4


def check(op, group, device, context, rows=9, N=6, K=5, *, has_target=True, frozen=()) -> WeightGradQueue:
    """Several micro-batches wait at a time; returns the queue, with nothing but them in it, after two were taken."""
    queue, main_grad, results = WeightGradQueue(), torch.zeros(N, K), []
    target = WeightGradTarget(main_grad, lambda: results.append(len(results)) or torch.ones(1)) if has_target else None
    expected = []
    for seed in range(MICRO_BATCHES):
        case = Case(op=op, rows=rows, N=N, K=K, seed=seed)
        extra = {"total_rows": case.rows} if op == "all_gather_linear" else {}
        operands = draw(case, group.rank(), group.size(), device)
        expected.append(reference(case, operands, group))
        leaves = operands.copies()
        for name in frozen:
            getattr(leaves, name).requires_grad_(False)
        deferred = DeferredWeightGrad(queue, target)
        y = getattr(ops, op)(leaves.x, leaves.weight, leaves.bias, context=context, weight_grad=deferred, **extra)
        y.backward(operands.grad_y.clone())
        assert leaves.weight.grad is None
        for name in ("x", "bias"):
            assert name in frozen or torch.equal(getattr(leaves, name).grad, expected[-1][f"{name}.grad"]), name
    assert len(queue) == (0 if "weight" in frozen else MICRO_BATCHES)
    assert not main_grad.any()
    assert not results
    total = torch.zeros(N, K)
    for seed in range(len(queue)):
        found = queue.pop()()
        total += expected[seed]["weight.grad"]
        if has_target:
            assert torch.equal(found, torch.ones(1))
            assert len(results) == seed + 1
            assert torch.equal(main_grad, total)
        else:
            assert torch.equal(found, expected[seed]["weight.grad"])
    return queue


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group_size", [1, 2, 3])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_linears(op, group_size, config):
    if op == "linear_reduce_scatter" and config is CONFIGS["async"]:
        pytest.skip("no path of a row-parallel linear")

    def body(group, device):
        with OverlapContext(group, config) as context:
            for has_target in (True, False):
                for frozen in ((), ("x",), ("weight",), ("x", "bias")):
                    check(op, group, device, context, has_target=has_target, frozen=frozen)
            check(op, group, device, context, rows=1)

    run_threads(group_size, body)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize(("path", "algorithm", "m"), PATHS)
@pytest.mark.parametrize("stepwise", [-1, 3])
def test_linears_over_the_copy_engine(op, group_size, path, algorithm, m, stepwise, monkeypatch):
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", stepwise)  # -1: every call is a graph

    def body(group, device):
        with take_part(group), OverlapContext(group, config_for(path, algorithm, m)) as context:
            for rows in (16, 13, 2):
                for has_target in (True, False):
                    check(op, group, device, context, rows, 16, 8, has_target=has_target)
            check(op, group, device, context, 16, 16, 8, frozen=("x",))
            tapes = tapes_of(context)
            assert bool(tapes) == (algorithm == "direct")
            assert None not in tapes

    run_threads(group_size, body)


@pytest.mark.parametrize("config", PATHS_OF_ATTENTION.values(), ids=PATHS_OF_ATTENTION)
@pytest.mark.parametrize("over_copies", [False, True])
def test_attention(config, over_copies, monkeypatch):
    if over_copies:
        emulate_copy_engine(monkeypatch)

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            for due in (attention.NAMES, ("out_weight",), ("q", "k", "v")):
                queue, expected = WeightGradQueue(), []
                for seed in range(3):
                    # Heads of four numbers, so that rows are as aligned as tapes want them.
                    case = attention.Case(seed=seed, head_dim=4, value_dim=4, N=8, rows=8, dtype=torch.float32)
                    operands, grad_y = attention.draw(case, group.rank(), group.size())
                    expected.append(attention.run(operands, grad_y, ops.reference.query_split_attention, group=group))
                    leaves = {name: t.clone().requires_grad_(name in due) for name, t in operands.items()}
                    deferred = DeferredWeightGrad(queue)
                    y = ops.query_split_attention(*leaves.values(), context=context, weight_grad=deferred)
                    y.backward(grad_y)
                    assert leaves["out_weight"].grad is None
                    names = [name for name in due if name != "out_weight"]
                    attention.assert_close(
                        {f"{name}.grad": leaves[name].grad for name in names},
                        {f"{name}.grad": expected[-1][f"{name}.grad"] for name in names},
                        1e-5,  # rounding in fp32 is some 1e-7 of sums of about 10; a wrong split errs by order 1
                    )
                assert len(queue) == (3 if "out_weight" in due else 0)
                for seed in range(len(queue)):
                    found = {"out_weight.grad": queue.pop()()}
                    attention.assert_close(found, {name: expected[seed][name] for name in found}, 1e-5)
            if over_copies:
                tapes = tapes_of(context)
                assert bool(tapes) == (config.attention.path != "sequential")

    run_threads(2, body)


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_only_what_a_backward_pass_is_asked_for_is_queued(group, device, op):
    """As a schedule that sends dx on its way before it computes dw."""
    with OverlapContext(group) as context:
        case, queue = Case(op=op, rows=8), WeightGradQueue()
        operands, expected = drawn(case, group, device)
        leaves = operands.copies()
        deferred = DeferredWeightGrad(queue)
        y = getattr(ops, op)(leaves.x, leaves.weight, leaves.bias, context=context, weight_grad=deferred)
        (grad_x,) = torch.autograd.grad(y, [leaves.x], operands.grad_y, retain_graph=True)
        assert torch.equal(grad_x, expected["x.grad"])
        assert not len(queue)
        y.backward(operands.grad_y, inputs=[leaves.weight])
        assert len(queue) == 1
        compute = queue.pop()
    assert torch.equal(compute(), expected["weight.grad"])  # the context is closed: nothing can be sent


@pytest.mark.parametrize("op", OPS)
@in_context(2)
def test_operands_that_changed_since_are_refused(group, context, op):
    case = Case(op=op, rows=8)
    for which in ("grad_y", "x"):
        operands, queue = draw_own(case, group), WeightGradQueue()
        leaves, grad_y = operands.copies(), operands.grad_y
        x = leaves.x * 1
        y = getattr(ops, op)(x, leaves.weight, leaves.bias, context=context, weight_grad=DeferredWeightGrad(queue))
        y.backward(grad_y)
        with torch.no_grad():
            (x if which == "x" else grad_y).add_(1)
        # What was gathered is a copy.
        is_copied = which == ("x" if op == "all_gather_linear" else "grad_y")
        if is_copied:
            assert torch.equal(
                queue.pop()(), reference(case, draw(case, group.rank(), 2, context.device), group)["weight.grad"]
            )
        else:
            with pytest.raises(CommFuseError, match="was changed in place after the backward pass"):
                queue.pop()()


def test_an_empty_queue_and_queues_of_another_kind():
    with pytest.raises(CommFuseError, match="in which none is waiting"):
        WeightGradQueue().pop()

    def body(group, device):
        with OverlapContext(group) as context:
            leaves = draw(Case(op=OPS[1], rows=8), group.rank(), group.size(), device).copies()
            bad = WeightGradTarget(torch.zeros(2, 2), lambda: None)
            for weight_grad, complaint in (
                (DeferredWeightGrad([]), r"weight_grad.queue must be a WeightGradQueue, got \[\]"),
                (DeferredWeightGrad(WeightGradQueue(), bad), r"weight_grad.accumulate is \[2, 2\]"),
                (WeightGradQueue(), "weight_grad must be a WeightGradTarget or a DeferredWeightGrad or None, got"),
            ):
                ops.linear_reduce_scatter(leaves.x, leaves.weight, context=context)  # its arguments are known then
                with pytest.raises(ShapeError, match=complaint):
                    ops.linear_reduce_scatter(leaves.x, leaves.weight, context=context, weight_grad=weight_grad)

    run_threads(2, body)


@in_context(2)
def test_a_deferred_half_gradient_is_added_into_a_wider_tensor(group, context):
    for op in OPS:
        case = dataclasses.replace(Case(op=op, rows=8), dtype=torch.bfloat16)
        operands, queue = draw_own(case, group), WeightGradQueue()
        main_grad = torch.full((case.N, case.K), 3.0)
        leaves = operands.copies()
        deferred = DeferredWeightGrad(queue, WeightGradTarget(main_grad, lambda: None))
        getattr(ops, op)(leaves.x, leaves.weight, context=context, weight_grad=deferred).backward(operands.grad_y)
        assert queue.pop()() is None
        assert torch.equal(main_grad, 3 + reference(case, operands, group)["weight.grad"].float())
