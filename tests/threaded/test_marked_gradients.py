"""Gradients, and what hooks give back, negative or zero by a mark beside their memory, which no kernel looks at."""

import functools

import pytest
import torch

from commfuse_megatron import OverlapConfig, ops
from commfuse_megatron.tools.verify.calls import AttentionCall, EmbeddingCall, UlyssesCall
from tests.harness.contexts import in_context
from tests.harness.linear_cases import Case, draw_own

LINEAR = {"rows": 32, "N": 16, "K": 16, "has_bias": False, "exact": False}
HEADS = {"rows": 16, "head_dim": 4, "kv_heads": 4}
GATHER = Case(op="all_gather_linear", **LINEAR)
#: By name: the call, and the operation.
CALLS = {
    "all-gather": (GATHER, ops.all_gather_linear),
    "with gathered": (GATHER, functools.partial(ops.all_gather_linear, return_gathered=True)),
    "reduce-scatter": (Case(op="linear_reduce_scatter", **LINEAR), ops.linear_reduce_scatter),
    "query split": (AttentionCall(N=16, has_bias=False, **HEADS), ops.query_split_attention),
    "ulysses": (UlyssesCall(**HEADS), ops.ulysses_attention),
    "embedding": (EmbeddingCall(rows=32, N=16), ops.embedding_reduce_scatter),
}
#: What is told of a gradient by a mark.
MARKS = {"negated": lambda grad: torch._neg_view(-grad), "zero": lambda grad: torch._efficientzerotensor(grad.shape)}


def config(path: str) -> OverlapConfig:
    passes = {name: {"path": path} for name in ("fprop", "dgrad")}
    attention = {"path": "query_split" if path == "sliced" else "sequential"}
    split = {"path": "overlapped" if path == "sliced" else "sequential"}
    return OverlapConfig.from_dict({"linear": passes, "attention": attention, "ulysses": split})


def results_of(name, group, context):
    """What a call gives, one or several, and its operands that get gradients."""
    call, op = CALLS[name]
    leaves = draw_own(call, group).copies(call.needs)
    found = call.forward(op, leaves, context=context)
    needed = [leaf for leaf in leaves.leaves.values() if leaf.requires_grad]
    return found if isinstance(found, tuple) else (found,), needed


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("path", "is_emulated"), [("sliced", False), ("sliced", True), ("sequential", False)])
@in_context(2, config, over_copies="is_emulated")
def test_what_a_mark_says_of_a_gradient_counts(group, context, name, mark):
    """Fails without the fix: what lay in memory was sent and multiplied, with the other sign or from address 0."""
    results, needed = results_of(name, group, context)
    grads = [torch.zeros_like(each) if mark == "zero" else torch.randn_like(each) for each in results]
    expected = torch.autograd.grad(results, needed, grads, retain_graph=True)
    found = torch.autograd.grad(results, needed, [MARKS[mark](grad) for grad in grads])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert any(each.any() for each in expected) == (mark != "zero")


@pytest.mark.parametrize("name", CALLS)
@in_context(2, config("sliced"), over_copies=True)
def test_what_hooks_give_back_may_be_marked(group, context, name):
    """Fails without the fix, as above."""
    found = []
    for back in (lambda each: each, lambda each: torch._neg_view(-each) if each.is_floating_point() else each):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each.detach(), back):
            (y, *_), needed = results_of(name, group, context)
        found.append(torch.autograd.grad(y, needed, torch.ones_like(y)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
