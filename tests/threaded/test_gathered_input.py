"""The gathered input as a second result: values, gradients, and that nothing else is sent for it."""

import itertools

import pytest
import torch

from commfuse_megatron import OverlapConfig, ops
from commfuse_megatron.config import LinearConfig, PassConfig, WgradConfig
from commfuse_megatron.errors import ShapeError
from commfuse_megatron.ops import WeightGradTarget
from commfuse_megatron.problem import shard_range
from tests.harness.contexts import in_context
from tests.harness.emulated_gpu import tapes_of
from tests.harness.linear_cases import Case, assert_equal, draw_own, drawn, linear_config
from tests.threaded.test_copy_engine_emulated import PATHS, config_for, in_copy_context, number_of_graphs

CONFIGS = {
    "direct": linear_config(), "direct 2": linear_config(m=2), "ring": linear_config("ring"),
    "ring 2": linear_config("ring", 2), "kept": linear_config(keep_gathered_input=True),
    "sequential": linear_config(path="sequential"),
    "sequential, kept": linear_config(path="sequential", keep_gathered_input=True),
    "async": OverlapConfig(linear=LinearConfig(dgrad=PassConfig(path="async"))),
    "bulk": OverlapConfig(linear=LinearConfig(dgrad=PassConfig(path="bulk", algorithm="direct", chunks_per_shard=1))),
}  # fmt: skip
OUTPUTS = [("y", "gathered"), ("y",), ("gathered",)]


def results(case, operands, grad_gathered, call, *, frozen=(), outputs=OUTPUTS[0], **where):
    """Forward and backward, with gradients of some of the results; what nobody asked for counts as zeros."""
    leaves = operands.copies()
    for name in frozen:
        getattr(leaves, name).requires_grad_(False)
    y, gathered = call(leaves.x, leaves.weight, leaves.bias, case.rows, return_gathered=True, **where)
    assert gathered.requires_grad == leaves.x.requires_grad
    assert gathered.is_contiguous()
    of = {"y": (y, operands.grad_y), "gathered": (gathered, grad_gathered)}
    torch.autograd.backward(*zip(*(of[name] for name in outputs), strict=True))
    found = {"y": y.detach(), "gathered": gathered.detach()}
    for name in ("x", "weight", "bias"):
        leaf = getattr(leaves, name)
        if name != "x" and "y" not in outputs:
            assert leaf.grad is None, "no part of the product was asked for"
        elif leaf.requires_grad:
            found[f"{name}.grad"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        else:
            assert leaf.grad is None
    return found


def draw_gathered(case: Case, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(77 * case.seed + rank)
    shape = (case.rows, case.batch, case.K)
    return torch.randint(-2, 3, shape, generator=generator).to(case.dtype)


def check(case, group, context, **others) -> None:
    operands, grad = draw_own(case, group), draw_gathered(case, group.rank())
    found = results(case, operands, grad, ops.all_gather_linear, context=context, **others)
    expected = results(case, operands, grad, ops.reference.all_gather_linear, group=group, **others)
    assert_equal(found, expected)


def check_all(group, context, rows, frozen, **sizes) -> None:
    """With so many rows each, so many operands frozen, and gradients of either result or both."""
    for (seed, each), names, outputs in itertools.product(enumerate(rows), frozen, OUTPUTS):
        case = Case(op="all_gather_linear", rows=each, seed=seed, **sizes)
        check(case, group, context, frozen=names, outputs=outputs)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@in_context("group_size", "config")
def test_every_result_is_exact_on_integers(group, context, group_size):
    rows = (4 * group_size, 2 * group_size + 1, 1)
    check_all(group, context, rows, ((), ("weight",), ("weight", "bias")))
    check(Case(op="all_gather_linear", rows=7, N=0), group, context)
    check(Case(op="all_gather_linear", rows=0), group, context)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("path", "algorithm", "m"), PATHS)
@pytest.mark.parametrize("stepwise", [-1, 3])
@in_copy_context("group_size", lambda path, algorithm, m: config_for(path, algorithm, m), stepwise="stepwise")
def test_over_the_copy_engine(group, context, algorithm, stepwise):
    check_all(group, context, (16, 13, 2), ((), ("weight",)), N=16, K=8)
    if algorithm == "direct" and group.size() > 1:
        assert tapes_of(context)
        assert None not in tapes_of(context)
        assert bool(number_of_graphs(context)) == (stepwise < 0)


KEPT = OverlapConfig(linear=LinearConfig(wgrad=WgradConfig(keep_gathered_input=True)))


@pytest.mark.parametrize("over_copies", [False, True])
@in_context(2, KEPT, over_copies="over_copies")
def test_kept_input_over_the_copy_engine_and_not(group, context):
    """What is returned and what is kept are one tensor; without the return value it is kept all the same."""
    case = Case(op="all_gather_linear", rows=8, N=16, K=8)
    check(case, group, context)
    leaves, saved = draw_own(case, group).copies(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, gathered = ops.all_gather_linear(leaves.x, leaves.weight, context=context, return_gathered=True)
    assert {tensor.data_ptr() for tensor in saved} == {gathered.data_ptr(), leaves.weight.data_ptr()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@in_context(2, "config")
def test_without_a_gradient_nothing_is_added_to_a_target(group, context):
    """Fails where zeros count as a gradient: `main_grad` was said to hold one, and optimizers made a step of it."""
    leaves = draw_own(Case(op="all_gather_linear", rows=8), group).copies()
    total, asked = torch.ones_like(leaves.weight), []
    target = WeightGradTarget(total, lambda: asked.append(1))
    for is_mixed in (False, True):  # or without one on this rank only
        y, gathered = ops.all_gather_linear(
            leaves.x, leaves.weight, context=context, return_gathered=True, weight_grad=target
        )
        (y if is_mixed and group.rank() == 1 else gathered).sum().backward()
        assert len(asked) == (is_mixed and group.rank() == 1)
        assert bool((total == 1).all()) != bool(asked)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@in_context(3, "config")
def test_some_ranks_without_a_gradient_of_what_was_gathered(group, context):
    check(Case(op="all_gather_linear", rows=9), group, context, outputs=OUTPUTS[group.rank()])


@in_context(2)
def test_nothing_else_is_sent_for_it(group, context):
    counts, start, sent = [], context.link.start, []
    context.link.start = lambda watched, send, receive: (
        sent.append(0 if send is None else send.tensor.nbytes) or start(watched, send, receive)
    )
    operands = draw_own(Case(op="all_gather_linear", rows=8), group)
    gradients = [operands.grad_y, draw_gathered(Case(op="all_gather_linear", rows=8), 0)]
    for returns in (False, True):
        sent.clear()
        leaves = operands.copies()
        found = ops.all_gather_linear(leaves.x, leaves.weight, context=context, return_gathered=returns)
        torch.autograd.backward(found if returns else [found], gradients[: 1 + returns])
        counts.append(sum(sent))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("config", [linear_config(), linear_config(path="sequential")], ids=["sliced", "sequential"])
@in_context("group_size", "config")
def test_what_is_returned_is_the_callers_own(group, context):
    """It may be changed in place, and neither x nor the next call does."""
    case = Case(op="all_gather_linear", rows=4 * group.size())
    operands, expected = drawn(case, group)
    leaves = operands.copies()
    y, gathered = ops.all_gather_linear(leaves.x, leaves.weight, context=context, return_gathered=True)
    own = shard_range(case.rows, group.size(), group.rank())
    assert torch.equal(gathered[own.start : own.stop], operands.x)
    with torch.no_grad():
        gathered.fill_(7)
        ops.all_gather_linear(leaves.x, leaves.weight, context=context)
    assert (gathered == 7).all()
    assert torch.equal(leaves.x, operands.x)
    y.backward(operands.grad_y)
    assert torch.equal(leaves.weight.grad, expected["weight.grad"])


@in_context(2)
def test_a_frozen_input_and_calls_without_gradients(group, context):
    case = Case(op="all_gather_linear", rows=8)
    check(case, group, context, frozen=("x",), outputs=("y",))
    leaves = draw_own(case, group).copies()
    with torch.no_grad():
        found = ops.all_gather_linear(leaves.x, leaves.weight, context=context, return_gathered=True)
    expected = ops.reference.all_gather_linear(leaves.x, leaves.weight, group=group, return_gathered=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert not ours.requires_grad
        assert torch.equal(ours, theirs)


@in_context(2)
def test_an_answer_of_another_kind_is_refused(group, context):
    with pytest.raises(ShapeError, match="return_gathered must be True or False, got 'yes'"):
        ops.all_gather_linear(torch.zeros(2, 4), torch.zeros(3, 4), context=context, return_gathered="yes")
    assert ops.all_gather_linear(torch.zeros(2, 4), torch.zeros(3, 4), context=context).shape == (4, 3)
