"""Backward passes that ask for some of the gradients: nothing else is computed, added anywhere or sent."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import ShapeError
from tests.harness import on_ranks, run_threads
from tests.harness.contexts import in_context
from tests.harness.linear_cases import OPS, Case, draw, drawn, linear_config
from tests.threaded import test_query_split_attention as attention

CONFIGS = {
    "direct": linear_config(),
    "ring": linear_config("ring", 2),
    "kept": linear_config(keep_gathered_input=True),
    "sequential": linear_config(path="sequential"),
}


def backward_passes(context: OverlapContext) -> dict[str, int]:
    """How many passes asked for what."""
    return {p.problem.needs: p.calls for p in context._prepared.values() if p.problem.pass_name == "backward"}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@in_context(3, "config")
def test_a_weight_gradient_is_added_where_it_is_asked_for(group, context, op):
    """Fails without the question what the engine runs: `autograd.grad` of x added it too."""
    case = Case(op=op, rows=9)
    operands, expected = drawn(case, group)
    leaves = operands.copies()
    main_grad, results = torch.zeros(case.N, case.K), []
    target = ops.WeightGradTarget(main_grad, lambda: results.append(None))
    y = getattr(ops, op)(leaves.x, leaves.weight, leaves.bias, context=context, weight_grad=target)
    (grad_x,) = torch.autograd.grad(y, [leaves.x], operands.grad_y, retain_graph=True)
    assert torch.equal(grad_x, expected["x.grad"])
    assert not main_grad.any()
    assert not results
    y.backward(operands.grad_y, inputs=[leaves.weight], retain_graph=True)
    assert torch.equal(main_grad, expected["weight.grad"])
    assert len(results) == 1
    assert leaves.x.grad is leaves.bias.grad is leaves.weight.grad is None
    assert backward_passes(context) == {"input": 1, "weight": 1}
    y.backward(operands.grad_y)
    assert torch.equal(main_grad, 2 * expected["weight.grad"])
    assert torch.equal(leaves.x.grad, expected["x.grad"])
    assert torch.equal(leaves.bias.grad, expected["bias.grad"])


@pytest.mark.parametrize("op", OPS)
def test_every_choice_of_gradients_is_right_and_no_more_than_it(op):
    choices = [("x",), ("weight",), ("bias",), ("x", "weight"), ("x", "bias"), ("weight", "bias")]

    def body(group, device):
        case = Case(op=op, rows=7)
        extra = {"total_rows": case.rows} if op == "all_gather_linear" else {}
        operands, expected = drawn(case, group, device)
        for names in choices:
            with OverlapContext(group) as context:
                leaves = operands.copies()
                y = getattr(ops, op)(leaves.x, leaves.weight, leaves.bias, context=context, **extra)
                inputs = [getattr(leaves, name) for name in names]
                found = torch.autograd.grad(y, inputs, operands.grad_y)
                for name, gradient in zip(names, found, strict=True):
                    assert torch.equal(gradient, expected[f"{name}.grad"]), name
                # What only a bias is due for needs nothing of other ranks.
                needs = "+".join({"x": "input"}.get(name, name) for name in names if name != "bias")
                assert backward_passes(context) == ({needs: 1} if needs else {})

    run_threads(2, body)


@pytest.mark.parametrize("op", OPS)
@in_context(2)
def test_gradients_of_what_leaves_were_made_into(group, context, op):
    """As schedules that split a backward pass ask: by tensors between, or by edges of the graph."""
    case = Case(op=op, rows=8)
    operands, expected = drawn(case, group)
    leaves = operands.copies()
    between = leaves.x * 1
    main_grad = torch.zeros(case.N, case.K)
    target = ops.WeightGradTarget(main_grad, lambda: None)
    y = getattr(ops, op)(between, leaves.weight, leaves.bias, context=context, weight_grad=target)
    edge = torch.autograd.graph.get_gradient_edge(between)
    for wanted in (between, edge, leaves.x):
        (gradient,) = torch.autograd.grad(y, [wanted], operands.grad_y, retain_graph=True)
        assert torch.equal(gradient, expected["x.grad"])
    assert not main_grad.any()
    of_weight = torch.autograd.graph.get_gradient_edge(leaves.weight)
    torch.autograd.grad(y, [of_weight], operands.grad_y, allow_unused=True)
    assert torch.equal(main_grad, expected["weight.grad"])
    assert backward_passes(context) == {"input": 3, "weight": 1}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("use_reentrant", [True, False])
@in_context(2)
def test_checkpoints_and_tied_weights_get_everything(group, context, op, use_reentrant):
    case = Case(op=op, rows=8)
    operands, expected = drawn(case, group)
    leaves = operands.copies()
    main_grad = torch.zeros(case.N, case.K)
    target = ops.WeightGradTarget(main_grad, lambda: None)

    def call(x):
        return getattr(ops, op)(x, leaves.weight, leaves.bias, context=context, weight_grad=target)

    twice = checkpoint(call, leaves.x, use_reentrant=use_reentrant) + call(leaves.x)
    twice.backward(operands.grad_y)
    assert torch.equal(main_grad, 2 * expected["weight.grad"])
    assert torch.equal(leaves.x.grad, 2 * expected["x.grad"])
    assert torch.equal(leaves.bias.grad, 2 * expected["bias.grad"])
    assert backward_passes(context) == {"input+weight": 2}


@pytest.mark.parametrize("op", OPS)
@in_context(2)
def test_who_calls_the_backward_pass_by_himself_gets_everything(group, context, op):
    case = Case(op=op, rows=8)
    operands, expected = drawn(case, group)
    leaves = operands.copies()
    y = getattr(ops, op)(leaves.x, leaves.weight, leaves.bias, context=context)
    found = y.grad_fn.apply(operands.grad_y)
    for gradient, name in zip(found[:3], ("x", "weight", "bias"), strict=True):
        assert torch.equal(gradient, expected[f"{name}.grad"]), name


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


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_ranks_that_ask_for_different_gradients_raise(group, device, op):
    leaves = draw(Case(op=op, rows=8), group.rank(), group.size(), device).copies()
    context = OverlapContext(group)
    y = getattr(ops, op)(leaves.x, leaves.weight, leaves.bias, context=context)
    asked_for = leaves.weight if group.rank() else leaves.x
    for refused in (lambda: torch.autograd.grad(y, [asked_for], leaves.grad_y), context.close):
        with pytest.raises(ShapeError, match=r"rank 0: .* needs input,.*\n.*rank 1: .* needs weight,"):
            refused()
