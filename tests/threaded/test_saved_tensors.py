"""What operations keep for their backward passes: what those need, and no more."""

import gc
import itertools
import weakref

import pytest
import torch

from commfuse_megatron import ops
from tests.harness.contexts import in_context
from tests.harness.linear_cases import LINEARS, Case, drawn, linear_config
from tests.threaded import test_query_split_attention as attention

CONFIGS = {
    "sliced": linear_config(),
    "kept": linear_config(keep_gathered_input=True),
    "sequential": linear_config(path="sequential"),
}


def saved_by(call) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a call gives, and all that autograd keeps of it."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return call(), saved


def bytes_of(*tensors) -> int:
    """Of memory that they hold, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@in_context(2, "config")
def test_linears(group, context, op, config):
    """Fails without the choice of what is saved: a frozen weight kept its input.

    Stock Megatron keeps x and the weight; of a frozen weight the weight alone.
    """
    case = Case(op=op, rows=8)
    operands, expected = drawn(case, group)
    keeps = config.linear.wgrad.keep_gathered_input and op == "all_gather_linear"
    for frozen_x, frozen_weight, bias in itertools.product((False, True), (False, True), ("due", "frozen", "")):
        leaves = operands.copies()
        leaves.x.requires_grad_(not frozen_x)
        leaves.weight.requires_grad_(not frozen_weight)
        leaves.bias.requires_grad_(bias == "due")
        given = [leaves.x, leaves.weight, leaves.bias if bias else None]
        y, saved = saved_by(lambda: getattr(ops, op)(*given, context=context))  # noqa: B023
        for_input = 0 if frozen_x else bytes_of(leaves.weight)
        for_weight = 0 if frozen_weight else bytes_of(leaves.x) * (group.size() if keeps else 1)
        assert bytes_of(*saved) == for_input + for_weight, (frozen_x, frozen_weight, bias)
        if not keeps:
            stock = bytes_of(leaves.weight, *([] if frozen_weight else [leaves.x]))
            assert bytes_of(*saved) <= stock
        if not y.requires_grad:
            continue
        y.backward(operands.grad_y)
        for name in ("x", "weight", "bias")[: len(given) if bias else 2]:
            leaf = getattr(leaves, name)
            assert leaf.grad is None or torch.equal(leaf.grad, expected[f"{name}.grad"])
            assert (leaf.grad is None) != leaf.requires_grad


@pytest.mark.parametrize("op", LINEARS)
@in_context(2)
def test_the_input_of_a_frozen_weight_may_change_and_go(group, context, op):
    """Fails without the choice of what is saved, where autograd finds that x was changed in place."""
    case = Case(op=op, rows=8)
    operands, expected = drawn(case, group)
    leaves = operands.copies()
    leaves.weight.requires_grad_(False)
    x = leaves.x * 1
    y = getattr(ops, op)(x, leaves.weight, leaves.bias, context=context)
    with torch.no_grad():
        x.add_(1)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    y.backward(operands.grad_y)
    assert torch.equal(leaves.x.grad, expected["x.grad"])
    assert torch.equal(leaves.bias.grad, expected["bias.grad"])


@pytest.mark.parametrize("path", ["query_split", "row_parallel", "sequential"])
@pytest.mark.parametrize("masked", [False, True])
@in_context(2, lambda path: attention.attention_config(path))
def test_attention(group, context, masked):
    """Fails without the choice of what is saved: frozen heads were kept, with masks and states."""
    operands, grad_y = attention.draw(attention.Case(), group.rank(), group.size())
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1).view(1, 1, 12, 12) if masked else None

    def kept(*due: str) -> int:
        leaves = [operands[name].clone().requires_grad_(name in due) for name in attention.NAMES]
        y, saved = saved_by(lambda: ops.query_split_attention(*leaves, not masked, mask=mask, context=context))
        if due:
            y.backward(grad_y)
        return bytes_of(*saved)

    heads = ("q", "k", "v")
    attended = operands["q"].nbytes
    everything = kept(*attention.NAMES)
    assert kept() == kept("out_bias") == 0
    assert kept("out_weight") == kept("out_weight", "out_bias") == attended
    assert everything == kept(*heads) == kept("k")
    # q, k, v and what they gave are of one size here; the plain kernel keeps nothing else.
    assert everything == 4 * attended + operands["out_weight"].nbytes + (mask.nbytes if masked else 0)


@pytest.mark.parametrize("path", ["query_split", "row_parallel", "sequential"])
@in_context(2, lambda path: attention.attention_config(path))
def test_a_view_keeps_the_rest_only_where_all_is_needed(group, context):
    """As of values where queries and keys went through rotary embedding; stock makes all contiguous then."""
    operands, grad_y = attention.draw(attention.Case(), group.rank(), group.size())
    names = ("q", "k", "v")

    def run(*views: str) -> tuple[int, list[torch.Tensor]]:
        fused = torch.cat([operands[name] for name in names], dim=-1).requires_grad_()
        parts = dict(zip(names, fused.chunk(3, dim=-1), strict=True))
        heads = [parts[name] if name in views else parts[name] * 1 for name in names]
        weight, bias = operands["out_weight"].clone().requires_grad_(), operands["out_bias"]
        y, saved = saved_by(lambda: ops.query_split_attention(*heads, weight, bias, context=context))
        y.backward(grad_y)
        return bytes_of(*saved), [y.detach(), fused.grad, weight.grad]

    size, expected = run()
    assert size == 4 * operands["q"].nbytes + operands["out_weight"].nbytes
    for views in (("v",), ("k", "v"), names):
        found_size, found = run(*views)
        assert found_size == size, views
        assert all(map(torch.equal, found, expected))


@in_context(2)
def test_embedding(group, context):
    """A look-up keeps where it looked: no vectors."""
    ids, weight = torch.arange(8).view(2, 4), torch.randn(4, 64, requires_grad=True)
    _, saved = saved_by(lambda: ops.embedding_reduce_scatter(ids, weight, 4 * group.rank(), context=context))
    assert bytes_of(*saved) == ids.nbytes + ids.numel()  # rows, and whether another rank has them
    _, saved = saved_by(lambda: ops.embedding_reduce_scatter(ids, weight.detach(), 4 * group.rank(), context=context))
    assert not saved
