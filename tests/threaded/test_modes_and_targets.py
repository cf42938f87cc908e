"""A context used first in inference mode, gradients of every layout into one tape, weights that overlap themselves."""

import dataclasses

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.ops import WeightGradTarget
from commfuse_megatron.ops.arguments import with_unit_stride
from commfuse_megatron.tools.verify.calls import EmbeddingCall
from tests.harness import on_ranks
from tests.harness.contexts import in_context
from tests.harness.linear_cases import LINEARS, Case, check_linear, draw_own, reference

from tests.threaded.test_copy_engine_emulated import config_for  # isort: skip


@pytest.mark.parametrize("case", [*(Case(op=op, rows=8, N=8, K=8) for op in LINEARS), EmbeddingCall(rows=8)])
@in_context(2, OverlapConfig())
def test_training_follows_a_first_call_in_inference_mode(group, context, case):
    for rows in (8, 16):
        call = dataclasses.replace(case, rows=rows)
        leaves = draw_own(call, group).copies(call.needs)
        with torch.inference_mode():
            call.forward(getattr(ops, call.op), leaves, context=context)
        check_linear(call, group, context)


@pytest.mark.parametrize("op", LINEARS)
@in_context(2, config_for("sliced", "direct", 1), over_copies=True)
def test_one_tape_does_not_serve_gradients_of_another_layout(group, context, op):
    case = Case(op=op, rows=16, N=8, K=8, has_bias=False)
    operands = draw_own(case, group)
    expected = reference(case, operands, group)["weight.grad"]
    whole = torch.zeros(8, 16)
    for target in (torch.zeros(8, 8), torch.zeros(8, 8).t(), whole[:, 4:12]):
        leaves = operands.copies()
        added = WeightGradTarget(target, lambda: None)
        getattr(ops, op)(leaves.x, leaves.weight, context=context, weight_grad=added).backward(operands.grad_y)
        assert torch.equal(target, expected.to(target.dtype))
    assert not whole[:, :4].any()
    assert not whole[:, 12:].any()


@pytest.mark.parametrize(("weight", "is_copied"), [
    (torch.zeros(8, 16), False), (torch.zeros(16, 8).t(), False), (torch.zeros(8, 32)[:, :16], False),
    (torch.zeros(1, 16).expand(8, 16), True), (torch.zeros(64).as_strided((8, 16), (2, 1)), True),
    (torch.zeros(8, 32)[:, ::2], True),
])  # fmt: skip
def test_weights_whose_rows_overlap_are_copied(weight, is_copied):
    taken = with_unit_stride(weight)
    assert (taken.data_ptr() != weight.data_ptr()) == is_copied
    assert torch.equal(taken, weight)


@on_ranks(2)
def test_keys_that_are_all_hidden_count_alike_in_single(group, device):
    q, k = torch.randn(8, 1, 2, 4), torch.randn(8, 1, 2, 4)
    hidden = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    config = OverlapConfig.from_dict({"attention": {"path": "query_split"}})
    with OverlapContext(group, config) as context:
        weight = torch.eye(8) / group.size()
        y = ops.query_split_attention(q, k, torch.ones(8, 1, 2, 4), weight, mask=hidden, context=context)
        torch.testing.assert_close(y, torch.ones_like(y), rtol=1e-6, atol=1e-6)
