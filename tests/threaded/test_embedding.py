"""The embedding with a reduce-scatter against its reference on ranks as threads: values, gradient, sizes, dtypes."""

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import ShapeError
from commfuse_megatron.tools.verify.calls import EmbeddingCall
from tests.harness import on_ranks
from tests.harness.contexts import in_context
from tests.harness.linear_cases import check_linear, draw_own, drawn, linear_config


def call(rows: int = 8, **others) -> EmbeddingCall:
    """Some ids are nobody's."""
    return EmbeddingCall(rows=rows, **{"N": 10, "batch": 3, "dtype": torch.float64, **others})


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2])
@in_context("group_size", lambda algorithm, m: linear_config(algorithm, m))
def test_equals_the_reference_exactly(group, context, group_size, m):
    for seed, rows in enumerate([4 * group_size * m, 4 * group_size + 1, group_size, 1, 2 * group_size]):
        check_linear(call(rows, seed=seed), group, context)
    records = context.report()
    assert {record.path for record in records} == {"sliced" if group_size > 1 else "local"}
    assert {record.pass_name: record.op for record in records} == dict.fromkeys(
        ("fprop", "backward"), "embedding_reduce_scatter"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks(2)
def test_other_dtypes_and_options(group, device, dtype):
    for chosen in (linear_config(), linear_config("ring", 2), linear_config(path="sequential")):
        with OverlapContext(group, chosen) as context:
            check_linear(call(dtype=dtype), group, context)
            operands, expected = drawn(call(dtype=dtype, seed=1), group)
            weight = operands.weight.requires_grad_()
            shifted = operands.x + 7, weight, 7
            y = ops.embedding_reduce_scatter(*shifted, context=context, is_deterministic=True)
            y.backward(operands.grad_y)
            assert y.is_contiguous()
            assert torch.equal(y, expected["y"])
            assert torch.equal(weight.grad, expected["weight.grad"])


@in_context(2, linear_config())
def test_without_gradients_and_frozen(group, context):
    operands, expected = drawn(call(), group)
    y = ops.embedding_reduce_scatter(operands.x, operands.weight, 0, context=context)
    assert not y.requires_grad
    with torch.inference_mode():
        again = ops.embedding_reduce_scatter(operands.x, operands.weight, 0, context=context)
    assert torch.equal(y, expected["y"])
    assert torch.equal(again, expected["y"])


@in_context(2, linear_config())
def test_two_calls_in_flight_keep_their_own_values(group, context):
    # Both outputs, and a gradient, must survive what the next call puts into the shared buffers.
    cases = [drawn(call(seed=seed), group) for seed in range(3)]
    leaves = [operands.copies(("weight",)) for operands, _ in cases]
    outputs = [ops.embedding_reduce_scatter(leaf.x, leaf.weight, 0, context=context) for leaf in leaves]
    for output, leaf in zip(outputs, leaves, strict=True):
        output.backward(leaf.grad_y)
    for output, leaf, (_, expected) in zip(outputs, leaves, cases, strict=True):
        assert torch.equal(output, expected["y"])
        assert torch.equal(leaf.weight.grad, expected["weight.grad"])


@pytest.mark.parametrize(("change", "words"), [
    (lambda ids, weight: (ids[0], weight), r"ids must be \[B, S\]"),
    (lambda ids, weight: (ids.double(), weight), "ids must be int64 or int32"),
    (lambda ids, weight: (ids, weight[0]), r"weight must be \[V, N\]"),
    (lambda ids, weight: (ids, weight.long()), "dtype torch.int64 is not supported"),
])  # fmt: skip
@in_context(2, linear_config())
def test_bad_arguments_raise_on_all_ranks(group, context, change, words):
    operands = draw_own(call(), group)
    good = operands.x, operands.weight
    with pytest.raises(ShapeError, match=words):
        ops.embedding_reduce_scatter(*(change(*good) if group.rank() == 1 else good), 0, context=context)
    check_linear(call(), group, context)
