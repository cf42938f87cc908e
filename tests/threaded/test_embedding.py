"""The embedding with a reduce-scatter against its reference on ranks as threads: values, gradient, sizes, dtypes."""

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import ShapeError
from tests.harness import on_ranks
from tests.harness.contexts import in_context
from tests.harness.linear_cases import linear_config

V, N, B = 24, 10, 3


def draw(group, rows: int, dtype: torch.dtype = torch.float64, seed: int = 0):
    """Ids equal on all ranks, some of nobody; this rank's part of the vocabulary; a gradient. Integers sum exactly."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V + 2, (B, rows), generator=generator)
    generator.manual_seed(100 * seed + group.rank() + 1)
    weight = torch.randint(-8, 9, (V // group.size(), N), generator=generator).to(dtype)
    own = torch.tensor_split(torch.empty(rows), group.size())[group.rank()].size(0)
    grad = torch.randint(-1, 2, (own, B, N), generator=generator).to(dtype)
    return ids, weight, group.rank() * weight.size(0), grad


def run(op, ids, weight, first_id, grad, **where):
    weight = weight.clone().requires_grad_()
    y = op(ids, weight, first_id, **where)
    y.backward(grad)
    return y.detach(), weight.grad


def check(group, context, rows, dtype=torch.float64, seed=0, **options):
    operands = draw(group, rows, dtype, seed)
    found = run(ops.embedding_reduce_scatter, *operands, context=context, **options)
    expected = run(ops.reference.embedding_reduce_scatter, *operands, group=group)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert found[0].is_contiguous()


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2])
@in_context("group_size", lambda algorithm, m: linear_config(algorithm, m))
def test_equals_the_reference_exactly(group, context, group_size, m):
    for seed, rows in enumerate([4 * group_size * m, 4 * group_size + 1, group_size, 1, 2 * group_size]):
        check(group, context, rows, seed=seed)
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
            check(group, context, 8, dtype)
            check(group, context, 8, dtype, seed=1, is_deterministic=True)


@in_context(2, linear_config())
def test_without_gradients_and_frozen(group, context):
    ids, weight, first_id, _ = draw(group, 8)
    expected = ops.reference.embedding_reduce_scatter(ids, weight, first_id, group=group)
    y = ops.embedding_reduce_scatter(ids, weight, first_id, context=context)
    assert not y.requires_grad
    with torch.inference_mode():
        again = ops.embedding_reduce_scatter(ids, weight, first_id, context=context)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


@in_context(2, linear_config())
def test_two_calls_in_flight_keep_their_own_values(group, context):
    # Both outputs, and a gradient, must survive what the next call puts into the shared buffers.
    operands = [draw(group, 8, seed=seed) for seed in range(3)]
    weights = [weight.clone().requires_grad_() for _, weight, _, _ in operands]
    outputs = [
        ops.embedding_reduce_scatter(ids, weight, first_id, context=context)
        for (ids, _, first_id, _), weight in zip(operands, weights, strict=True)
    ]
    for output, (*_, grad) in zip(outputs, operands, strict=True):
        output.backward(grad)
    for output, weight, each in zip(outputs, weights, operands, strict=True):
        y, gradient = run(ops.reference.embedding_reduce_scatter, *each, group=group)
        torch.testing.assert_close(output, y, rtol=0, atol=0)
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0)


@pytest.mark.parametrize(("change", "words"), [
    (lambda ids, weight: (ids[0], weight), r"ids must be \[B, S\]"),
    (lambda ids, weight: (ids.double(), weight), "ids must be int64 or int32"),
    (lambda ids, weight: (ids, weight[0]), r"weight must be \[V, N\]"),
    (lambda ids, weight: (ids, weight.long()), "dtype torch.int64 is not supported"),
])  # fmt: skip
@in_context(2, linear_config())
def test_bad_arguments_raise_on_all_ranks(group, context, change, words):
    ids, weight, first_id, _ = draw(group, 8)
    bad = change(ids, weight) if group.rank() == 1 else (ids, weight)
    with pytest.raises(ShapeError, match=words):
        ops.embedding_reduce_scatter(*bad, first_id, context=context)
    check(group, context, 8)
