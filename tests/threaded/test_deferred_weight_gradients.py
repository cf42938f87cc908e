"""Weight gradients that are computed after their backward passes: equal numbers, in order, with nothing sent."""

import itertools

import pytest
import torch

from commfuse_megatron import ops
from commfuse_megatron.errors import CommFuseError, ShapeError
from commfuse_megatron.ops import DeferredWeightGrad, WeightGradQueue, WeightGradTarget
from tests.harness.contexts import in_context
from tests.harness.emulated_gpu import tapes_of
from tests.harness.linear_cases import ALL_REDUCES, LINEARS, Case, draw_own, drawn
from tests.threaded import test_query_split_attention as attention
from tests.threaded.test_copy_engine_emulated import PATHS, config_for, in_copy_context
from tests.threaded.test_gathered_input import CONFIGS
from tests.threaded.test_partial_gradients import PATHS as PATHS_OF_ATTENTION

MICRO_BATCHES = 4


def check(op, group, context, rows=9, N=6, K=5, *, has_target=True, frozen=()) -> None:
    """Several micro-batches wait at a time."""
    queue, main_grad, results = WeightGradQueue(), torch.zeros(N, K), []
    target = WeightGradTarget(main_grad, lambda: results.append(len(results)) or torch.ones(1)) if has_target else None
    expected = []
    for seed in range(MICRO_BATCHES):
        case = Case(op=op, rows=rows, N=N, K=K, seed=seed)
        extra = {"total_rows": case.rows} if op == "all_gather_linear" else {}
        operands, results_of_reference = drawn(case, group)
        expected.append(results_of_reference)
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


@pytest.mark.parametrize("group_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("op", "name"), [each for each in itertools.product(LINEARS, CONFIGS) if each != (LINEARS[1], "async")]
)
@in_context("group_size", lambda name: CONFIGS[name])
def test_linears(group, context, op):
    for has_target in (True, False):
        for frozen in ((), ("x",), ("weight",), ("x", "bias")):
            check(op, group, context, has_target=has_target, frozen=frozen)
    check(op, group, context, rows=1)


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize(("path", "algorithm", "m"), PATHS)
@pytest.mark.parametrize("stepwise", [-1, 3])
@in_copy_context("group_size", lambda path, algorithm, m: config_for(path, algorithm, m), stepwise="stepwise")
def test_linears_over_the_copy_engine(group, context, op, algorithm):
    for rows in (16, 13, 2):
        for has_target in (True, False):
            check(op, group, context, rows, 16, 8, has_target=has_target)
    check(op, group, context, 16, 16, 8, frozen=("x",))
    tapes = tapes_of(context)
    assert bool(tapes) == (algorithm == "direct" or op in ALL_REDUCES)
    assert None not in tapes


@pytest.mark.parametrize("due", [attention.NAMES, ("out_weight",), ("q", "k", "v")], ids=["all", "weight", "heads"])
@pytest.mark.parametrize("config", PATHS_OF_ATTENTION.values(), ids=PATHS_OF_ATTENTION)
@pytest.mark.parametrize("over_copies", [False, True])
@in_context(2, "config", over_copies="over_copies")
def test_attention(group, context, due, config, over_copies):
    limit = 1e-5  # rounding in fp32 is some 1e-7 of sums of about 10; a wrong split errs by order 1
    queue, weights = WeightGradQueue(), []
    for seed in range(3):
        # Heads of four numbers, so that rows are as aligned as tapes want them.
        case = attention.Case(seed=seed, head_dim=4, value_dim=4, N=8, rows=8, dtype=torch.float32)
        operands, grad_y = attention.draw(case, group.rank(), group.size())
        expected = attention.run(operands, grad_y, ops.reference.query_split_attention, group=group)
        weights.append({"out_weight.grad": expected["out_weight.grad"]})
        leaves = {name: t.clone().requires_grad_(name in due) for name, t in operands.items()}
        y = ops.query_split_attention(*leaves.values(), context=context, weight_grad=DeferredWeightGrad(queue))
        y.backward(grad_y)
        assert leaves["out_weight"].grad is None
        names = [f"{name}.grad" for name in due if name != "out_weight"]
        found = {f"{name}.grad": leaf.grad for name, leaf in leaves.items()}
        attention.assert_close(found, {name: expected[name] for name in names}, limit)
    assert len(queue) == (3 if "out_weight" in due else 0)
    for _, weight in zip(range(len(queue)), weights, strict=False):
        attention.assert_close({"out_weight.grad": queue.pop()()}, weight, limit)
    if over_copies:
        assert bool(tapes_of(context)) == (config.attention.path != "sequential")


@pytest.mark.parametrize("op", LINEARS)
@in_context(2)
def test_only_what_a_backward_pass_is_asked_for_is_queued(group, context, op):
    """As a schedule that sends dx on its way before it computes dw."""
    (operands, expected), queue = drawn(Case(op=op, rows=8), group), WeightGradQueue()
    leaves = operands.copies()
    deferred = DeferredWeightGrad(queue)
    y = getattr(ops, op)(leaves.x, leaves.weight, leaves.bias, context=context, weight_grad=deferred)
    (grad_x,) = torch.autograd.grad(y, [leaves.x], operands.grad_y, retain_graph=True)
    assert torch.equal(grad_x, expected["x.grad"])
    assert not len(queue)
    y.backward(operands.grad_y, inputs=[leaves.weight])
    assert len(queue) == 1
    context.close()  # nothing can be sent any more
    assert torch.equal(queue.pop()(), expected["weight.grad"])


@pytest.mark.parametrize("which", ["grad_y", "x"])
@pytest.mark.parametrize("op", LINEARS)
@in_context(2)
def test_operands_that_changed_since_are_refused(group, context, op, which):
    (operands, expected), queue = drawn(Case(op=op, rows=8), group), WeightGradQueue()
    leaves, grad_y = operands.copies(), operands.grad_y
    x = leaves.x * 1
    y = getattr(ops, op)(x, leaves.weight, leaves.bias, context=context, weight_grad=DeferredWeightGrad(queue))
    y.backward(grad_y)
    with torch.no_grad():
        (x if which == "x" else grad_y).add_(1)
    # What was gathered is a copy; where all ranks hold all rows, nothing is.
    if which == {"all_gather_linear": "x", "linear_reduce_scatter": "grad_y"}.get(op):
        assert torch.equal(queue.pop()(), expected["weight.grad"])
    else:
        with pytest.raises(CommFuseError, match="was changed in place after the backward pass"):
            queue.pop()()


def test_an_empty_queue():
    with pytest.raises(CommFuseError, match="in which none is waiting"):
        WeightGradQueue().pop()


@pytest.mark.parametrize(("weight_grad", "complaint"), [
    (DeferredWeightGrad([]), r"weight_grad.queue must be a WeightGradQueue, got \[\]"),
    (DeferredWeightGrad(WeightGradQueue(), WeightGradTarget(torch.zeros(2, 2), lambda: None)),
     r"weight_grad.accumulate is \[2, 2\]"),
    (WeightGradTarget(torch.zeros(4, 8), lambda: None), r"weight_grad.accumulate is \[4, 8\]"),
    (WeightGradQueue(), "weight_grad must be a WeightGradTarget or a DeferredWeightGrad or None, got"),
], ids=["no queue", "deferred", "shape", "queue"])  # fmt: skip
@pytest.mark.parametrize("op", LINEARS)
@in_context(2)
def test_targets_and_queues_of_another_kind(group, context, op, weight_grad, complaint):
    leaves = draw_own(Case(op=op, rows=8), group).copies()
    for is_known in (False, True):
        with pytest.raises(ShapeError, match=complaint):
            getattr(ops, op)(leaves.x, leaves.weight, context=context, weight_grad=weight_grad)
        if not is_known:
            getattr(ops, op)(leaves.x, leaves.weight, context=context)


@pytest.mark.parametrize("op", LINEARS)
@in_context(2)
def test_a_deferred_half_gradient_is_added_into_a_wider_tensor(group, context, op):
    operands, expected = drawn(Case(op=op, rows=8, dtype=torch.bfloat16), group)
    main_grad, queue, leaves = torch.full((6, 5), 3.0), WeightGradQueue(), operands.copies()
    deferred = DeferredWeightGrad(queue, WeightGradTarget(main_grad, lambda: None))
    y = getattr(ops, op)(leaves.x, leaves.weight, leaves.bias, context=context, weight_grad=deferred)
    y.backward(operands.grad_y)
    assert queue.pop()() is None
    assert torch.equal(main_grad, 3 + expected["weight.grad"].float())
