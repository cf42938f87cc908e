"""Gradients, and what hooks give back, negative or zero by a mark beside their memory, which no kernel looks at."""

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from tests.harness import run_threads
from tests.harness.emulated_gpu import emulate_copy_engine, take_part


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
MARKS = {
    "negated": lambda grad: torch._neg_view(-grad),
    "zero": lambda grad: torch._efficientzerotensor(grad.shape),
}


def config(path: str) -> OverlapConfig:
    passes = {name: {"path": path} for name in ("fprop", "dgrad")}
    attention = {"path": "query_split" if path == "sliced" else "sequential"}
    split = {"path": "overlapped" if path == "sliced" else "sequential"}
    return OverlapConfig.from_dict({"linear": passes, "attention": attention, "ulysses": split})


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("path", "is_emulated"), [("sliced", False), ("sliced", True), ("sequential", False)])
def test_what_a_mark_says_of_a_gradient_counts(path, is_emulated, name, mark, monkeypatch):
    """Fails without the fix: what lay in memory was sent and multiplied, with the other sign or from address 0."""
    if is_emulated:
        emulate_copy_engine(monkeypatch)
    call, draw = CALLS[name]

    def body(group, device):
        with take_part(group), OverlapContext(group, config(path)) as context:
            operands = [each.requires_grad_() for each in draw()]
            y = call(*operands, context=context)
            results = y if isinstance(y, tuple) else (y,)
            needed = [each for each in operands if name != "ulysses" or each.dim() == 4]
            grads = [torch.zeros_like(each) if mark == "zero" else torch.randn_like(each) for each in results]
            expected = torch.autograd.grad(results, needed, grads, retain_graph=True)
            found = torch.autograd.grad(results, needed, [MARKS[mark](grad) for grad in grads])
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            assert any(each.any() for each in expected) == (mark != "zero")

    run_threads(2, body)


@pytest.mark.parametrize("name", CALLS)
def test_what_hooks_give_back_may_be_marked(name, monkeypatch):
    """Fails without the fix, as above."""
    emulate_copy_engine(monkeypatch)
    call, draw = CALLS[name]

    def body(group, device):
        with take_part(group), OverlapContext(group, config("sliced")) as context:
            operands = [each.requires_grad_() for each in draw()]
            found = []
            for back in (lambda each: each, lambda each: torch._neg_view(-each) if each.is_floating_point() else each):
                with torch.autograd.graph.saved_tensors_hooks(lambda each: each.detach(), back):
                    y = call(*operands, context=context)
                y = y[0] if isinstance(y, tuple) else y
                needed = [each for each in operands if name != "ulysses" or each.dim() == 4]
                found.append(torch.autograd.grad(y, needed, torch.ones_like(y)))
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    run_threads(2, body)
