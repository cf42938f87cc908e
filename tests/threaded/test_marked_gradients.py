"""Gradients, and what hooks give back, negative or zero by a mark beside their memory, which no kernel looks at."""

import pytest
import torch

from commfuse_megatron import OverlapConfig, ops
from tests.harness.contexts import in_context


def linear(op, **options):
    def call(x, weight, **where):
        return op(x, weight, **options, **where)

    return call, lambda: [torch.randn(16, 2, 16), torch.randn(16, 16)]


def draw_attention():
    return [*torch.randn(3, 16, 2, 4, 4), torch.randn(16, 16)]


def split_attention(*operands, **where):
    return ops.query_split_attention(*operands, **where)


def attention_of_rows(q, k, v, _, **where):
    return ops.ulysses_attention(q, k, v, **where)


def embedding(weight, **where):
    return ops.embedding_reduce_scatter(torch.arange(32).view(2, 16) % 9, weight, 0, **where)


#: By name: the call, and what draws its operands.
CALLS = {
    "all-gather": linear(ops.all_gather_linear),
    "with gathered": linear(lambda *given, **where: ops.all_gather_linear(*given, return_gathered=True, **where)),
    "reduce-scatter": linear(ops.linear_reduce_scatter),
    "query split": (split_attention, draw_attention),
    "ulysses": (attention_of_rows, draw_attention),
    "embedding": (embedding, lambda: [torch.randn(9, 16)]),
}
#: What is told of a gradient by a mark.
MARKS = {"negated": lambda grad: torch._neg_view(-grad), "zero": lambda grad: torch._efficientzerotensor(grad.shape)}


def config(path: str) -> OverlapConfig:
    passes = {name: {"path": path} for name in ("fprop", "dgrad")}
    attention = {"path": "query_split" if path == "sliced" else "sequential"}
    split = {"path": "overlapped" if path == "sliced" else "sequential"}
    return OverlapConfig.from_dict({"linear": passes, "attention": attention, "ulysses": split})


def drawn(name):
    """Operands of a call, and those of them that get gradients."""
    operands = [each.requires_grad_() for each in CALLS[name][1]()]
    return operands, [each for each in operands if name != "ulysses" or each.dim() == 4]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("path", "is_emulated"), [("sliced", False), ("sliced", True), ("sequential", False)])
@in_context(2, config, over_copies="is_emulated")
def test_what_a_mark_says_of_a_gradient_counts(group, context, name, mark):
    """Fails without the fix: what lay in memory was sent and multiplied, with the other sign or from address 0."""
    operands, needed = drawn(name)
    y = CALLS[name][0](*operands, context=context)
    results = y if isinstance(y, tuple) else (y,)
    grads = [torch.zeros_like(each) if mark == "zero" else torch.randn_like(each) for each in results]
    expected = torch.autograd.grad(results, needed, grads, retain_graph=True)
    found = torch.autograd.grad(results, needed, [MARKS[mark](grad) for grad in grads])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert any(each.any() for each in expected) == (mark != "zero")


@pytest.mark.parametrize("name", CALLS)
@in_context(2, config("sliced"), over_copies=True)
def test_what_hooks_give_back_may_be_marked(group, context, name):
    """Fails without the fix, as above."""
    (operands, needed), found = drawn(name), []
    for back in (lambda each: each, lambda each: torch._neg_view(-each) if each.is_floating_point() else each):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each.detach(), back):
            y = CALLS[name][0](*operands, context=context)
        y = y[0] if isinstance(y, tuple) else y
        found.append(torch.autograd.grad(y, needed, torch.ones_like(y)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
