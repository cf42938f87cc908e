"""Backward passes that ask for some of the gradients: nothing else is computed, added anywhere or sent."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import ShapeError
from tests.harness import on_ranks
from tests.harness.contexts import in_context
from tests.harness.linear_cases import LINEARS, Case, draw_own, drawn, linear_config
from tests.threaded import test_query_split_attention as attention

CONFIGS = {
    "direct": linear_config(), "ring": linear_config("ring", 2), "kept": linear_config(keep_gathered_input=True),
    "sequential": linear_config(path="sequential"),
}  # fmt: skip


def backward_passes(context: OverlapContext) -> dict[str, int]:
    """How many passes asked for what."""
    return {p.problem.needs: p.calls for p in context._prepared.values() if p.problem.pass_name == "backward"}


def prepare(op, group, context, rows=8) -> SimpleNamespace:
    """Leaves, their call, what it is to give, and where the weight's gradient is added; asked: how often it was."""
    case, asked = Case(op=op, rows=rows), []
    operands, expected = drawn(case, group)
    leaves, main_grad = operands.copies(), torch.zeros(case.N, case.K)
    extra = {"total_rows": rows} if op == "all_gather_linear" else {}

    def call(x=leaves.x, *, is_added=True):
        target = ops.WeightGradTarget(main_grad, lambda: asked.append(None)) if is_added else None
        return getattr(ops, op)(x, leaves.weight, leaves.bias, context=context, weight_grad=target, **extra)

    return SimpleNamespace(**vars(leaves), call=call, expected=expected, main_grad=main_grad, asked=asked)


def assert_gradients(given, of_weight, others) -> None:
    """So many times what the reference gives."""
    assert torch.equal(given.main_grad, of_weight * given.expected["weight.grad"])
    for name in ("x", "bias"):
        leaf = getattr(given, name)
        assert (leaf.grad is None) if others == 0 else torch.equal(leaf.grad, others * given.expected[f"{name}.grad"])


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@in_context(3, "config")
def test_a_weight_gradient_is_added_where_it_is_asked_for(group, context, op):
    """Fails without the question what the engine runs: `autograd.grad` of x added it too."""
    given = prepare(op, group, context, rows=9)
    y = given.call()
    (grad_x,) = torch.autograd.grad(y, [given.x], given.grad_y, retain_graph=True)
    assert torch.equal(grad_x, given.expected["x.grad"])
    assert not given.main_grad.any()
    assert not given.asked
    y.backward(given.grad_y, inputs=[given.weight], retain_graph=True)
    assert_gradients(given, 1, 0)
    assert len(given.asked) == 1
    assert given.weight.grad is None
    assert backward_passes(context) == {"input": 1, "weight": 1}
    y.backward(given.grad_y)
    assert_gradients(given, 2, 1)


@pytest.mark.parametrize("names", [("x",), ("weight",), ("bias",), ("x", "weight"), ("x", "bias"), ("weight", "bias")])
@pytest.mark.parametrize("op", LINEARS)
@in_context(2)
def test_every_choice_of_gradients_is_right_and_no_more_than_it(group, context, op, names):
    given = prepare(op, group, context, rows=7)
    found = torch.autograd.grad(given.call(is_added=False), [getattr(given, name) for name in names], given.grad_y)
    for name, gradient in zip(names, found, strict=True):
        assert torch.equal(gradient, given.expected[f"{name}.grad"]), name
    # What only a bias is due for needs nothing of other ranks.
    needs = "+".join({"x": "input"}.get(name, name) for name in names if name != "bias")
    assert backward_passes(context) == ({needs: 1} if needs else {})


@pytest.mark.parametrize("op", LINEARS)
@in_context(2)
def test_gradients_of_what_leaves_were_made_into(group, context, op):
    """As schedules that split a backward pass ask: by tensors between, or by edges of the graph."""
    given = prepare(op, group, context)
    between = given.x * 1
    y = given.call(between)
    for wanted in (between, torch.autograd.graph.get_gradient_edge(between), given.x):
        (gradient,) = torch.autograd.grad(y, [wanted], given.grad_y, retain_graph=True)
        assert torch.equal(gradient, given.expected["x.grad"])
    assert not given.main_grad.any()
    of_weight = torch.autograd.graph.get_gradient_edge(given.weight)
    torch.autograd.grad(y, [of_weight], given.grad_y, allow_unused=True)
    assert_gradients(given, 1, 0)
    assert backward_passes(context) == {"input": 3, "weight": 1}


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("use_reentrant", [True, False])
@in_context(2)
def test_checkpoints_and_tied_weights_get_everything(group, context, op, use_reentrant):
    given = prepare(op, group, context)
    twice = checkpoint(given.call, given.x, use_reentrant=use_reentrant) + given.call()
    twice.backward(given.grad_y)
    assert_gradients(given, 2, 2)
    assert backward_passes(context) == {"input+weight": 2}


@pytest.mark.parametrize("op", LINEARS)
@in_context(2)
def test_who_calls_the_backward_pass_by_himself_gets_everything(group, context, op):
    given = prepare(op, group, context)
    y = given.call(is_added=False)
    found = y.grad_fn.apply(given.grad_y)
    for gradient, name in zip(found[:3], ("x", "weight", "bias"), strict=True):
        assert torch.equal(gradient, given.expected[f"{name}.grad"]), name


PATHS = {
    "query_split": attention.attention_config(),
    "two splits": attention.attention_config(m=2),
    "row_parallel after splits": attention.attention_config(backward="row_parallel"),
    "row_parallel": attention.attention_config("row_parallel"),
    "sequential": attention.attention_config("sequential"),
}


@pytest.mark.parametrize("config", PATHS.values(), ids=PATHS)
@in_context(2, "config")
def test_attention(group, context):
    """Fails without the question what the engine runs: `autograd.grad` of q, k and v added the weight's gradient."""
    case = attention.Case()
    operands, grad_y = attention.draw(case, group.rank(), group.size())
    expected = attention.run(operands, grad_y, ops.reference.query_split_attention, group=group)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in operands.items()}
    main_grad = torch.zeros_like(operands["out_weight"])
    target = ops.WeightGradTarget(main_grad, lambda: None)
    y = ops.query_split_attention(*leaves.values(), context=context, weight_grad=target)

    def gradients(*names):
        found = torch.autograd.grad(y, [leaves[name] for name in names], grad_y, retain_graph=True)
        attention.assert_close(
            {f"{name}.grad": gradient for name, gradient in zip(names, found, strict=True)},
            {f"{name}.grad": expected[f"{name}.grad"] for name in names},
        )

    gradients("out_bias")
    assert not backward_passes(context)
    gradients("q", "k", "v")
    gradients("k")
    assert not main_grad.any()
    y.backward(grad_y, inputs=[leaves["out_weight"]], retain_graph=True)
    attention.assert_close({"main_grad": main_grad}, {"main_grad": expected["out_weight.grad"]})
    y.backward(grad_y)
    attention.assert_close({"main_grad": main_grad / 2}, {"main_grad": expected["out_weight.grad"]})
    found = {f"{name}.grad": leaves[name].grad for name in ("q", "k", "v", "out_bias")}
    attention.assert_close(found, {name: expected[name] for name in found})
    assert leaves["out_weight"].grad is None


@pytest.mark.parametrize("keywords", [{"mask": torch.ones(12, 12).triu(1).bool().view(1, 1, 12, 12)}, {"dropout": 0.5}])
@in_context(2, attention.attention_config())
def test_parts_of_masked_attention_and_dropout_are_the_wholes(group, context, keywords):
    case = attention.Case()
    operands, grad_y = attention.draw(case, group.rank(), group.size())
    leaves = [tensor.clone().requires_grad_() for tensor in operands.values()]
    causal = "mask" not in keywords
    y = ops.query_split_attention(*leaves, causal, **keywords, context=context)
    whole = torch.autograd.grad(y, leaves, grad_y, retain_graph=True)
    for leaf, expected in zip(leaves, whole, strict=True):
        (found,) = torch.autograd.grad(y, [leaf], grad_y, retain_graph=True)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("op", LINEARS)
@on_ranks(2)
def test_ranks_that_ask_for_different_gradients_raise(group, device, op):
    leaves = draw_own(Case(op=op, rows=8), group).copies()
    context = OverlapContext(group)
    y = getattr(ops, op)(leaves.x, leaves.weight, leaves.bias, context=context)
    asked_for = leaves.weight if group.rank() else leaves.x
    for refused in (lambda: torch.autograd.grad(y, [asked_for], leaves.grad_y), context.close):
        with pytest.raises(ShapeError, match=r"rank 0: .* needs input,.*\n.*rank 1: .* needs weight,"):
            refused()
