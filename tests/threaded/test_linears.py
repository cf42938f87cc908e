"""Both linears against the reference on ranks as threads: forward, every gradient, every kind of size and layout."""

import itertools

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from tests.harness import on_ranks
from tests.harness.contexts import in_context
from tests.harness.linear_cases import (
    LINEARS,
    Case,
    assert_equal,
    check_linear,
    draw,
    draw_own,
    linear_config,
    overlapped,
    reference,
    run_op,
)


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 3])
@in_context("group_size", lambda algorithm, m: linear_config(algorithm, m))
def test_every_result_is_exact_on_integers(group, context, op, group_size, m):
    sends = {"linear_all_reduce": "fprop", "linear_grad_all_reduce": "backward"}
    for seed, rows in enumerate([4 * group_size * m, 4 * group_size + 1, group_size - 1, 1, 2 * group_size]):
        check_linear(Case(op=op, rows=rows, seed=seed), group, context)
    # Of the linears that all-reduce one pass sends nothing.
    records = [record for record in context.report() if record.pass_name == sends.get(op, record.pass_name)]
    assert {record.path for record in records} <= {"sliced" if group_size > 1 else "local", "sequential"}
    assert any(record.path != "sequential" for record in records)


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@on_ranks(4)
def test_random_inputs_err_no_more_than_the_reference(group, device, op, dtype):
    case = Case(op=op, rows=24, batch=3, N=40, K=56, dtype=dtype, exact=False)
    wide = Case(op=op, rows=24, batch=3, N=40, K=56, dtype=torch.float64, exact=False)
    operands = draw(case, group.rank(), group.size(), device)
    in_float64 = draw(wide, group.rank(), group.size(), device)
    for name in ("x", "weight", "bias", "grad_y"):
        setattr(in_float64, name, getattr(operands, name).double())
    oracle = reference(wide, in_float64, group)
    stock = reference(case, operands, group)
    for algorithm, m in itertools.product(["ring", "direct"], [1, 2]):
        with OverlapContext(group, linear_config(algorithm, m)) as context:
            ours = overlapped(case, operands, context)
        for name, exact in oracle.items():
            scale = exact.abs().max()
            error = ((ours[name].double() - exact).abs().max() / scale).item()
            stock_error = ((stock[name].double() - exact).abs().max() / scale).item()
            # Sums of up to 224 products round differently by some eps; a dropped partial or crossed chunk errs by
            # order 1. (For fp64 the oracle is the reference itself, so its own error shows as 0.)
            assert error <= 2 * stock_error + 16 * torch.finfo(dtype).eps, (name, algorithm, m, error, stock_error)


VIEWS = {
    "outer swapped": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 1 else tensor,
    "every second": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
    "first of a row expanded": lambda tensor: tensor[..., :1].expand(tensor.shape),
    "first column expanded": lambda tensor: tensor[:, :1].expand(tensor.shape) if tensor.dim() > 1 else tensor,
    "one number expanded": lambda tensor: tensor.flatten()[0].expand(tensor.shape),  # what y.sum() sends back
}  # fmt: skip


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("config", [linear_config(), linear_config("ring", 2), linear_config(path="sequential")])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@in_context(3, "config")
def test_operands_and_gradients_in_any_layout(group, context, op, view):
    case = Case(op=op, rows=12)
    operands, extra = draw_own(case, group), {"total_rows": case.rows} if op == "all_gather_linear" else {}

    def results(viewed, call, **where):
        # A copy of an expanded tensor is contiguous, so the view is made behind the leaf.
        leaves = operands.copies().leaves
        given = {**leaves, "grad_y": operands.grad_y}
        given[viewed] = view(given[viewed])
        assert viewed == "bias" or not given[viewed].is_contiguous()
        grad_y = given.pop("grad_y")
        y = call(*given.values(), **where)
        y.backward(grad_y)
        return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

    for viewed in ("x", "weight", "bias", "grad_y"):
        found = results(viewed, getattr(ops, op), context=context, **extra)
        assert_equal(found, results(viewed, getattr(ops.reference, op), group=group, **extra))


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("group_size", [1, 2, 3])
@pytest.mark.parametrize("config", [linear_config(), linear_config("ring", 5), linear_config(path="sequential")])
@in_context("group_size", "config")
def test_sizes_of_zero_and_one(group, context, op):
    for sizes in ({"rows": 0}, {"rows": 3, "batch": 0}, {"rows": 3, "N": 0}, {"rows": 7, "K": 0}):
        check_linear(Case(op=op, **sizes), group, context)
    check_linear(Case(op=op, rows=3, batch=1, N=1, K=1), group, context)


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("shape", [(6,), (6, 2, 2)])
@on_ranks(2)
def test_any_number_of_middle_dimensions(group, device, op, shape):
    rows = shape[0] * (group.size() if op == "all_gather_linear" else 1)
    x = torch.randint(-2, 3, (*shape, 5), generator=torch.Generator().manual_seed(group.rank())).float()
    weight = torch.ones(4, 5)
    with OverlapContext(group) as context:
        found = getattr(ops, op)(x, weight, context=context)
    expected = getattr(ops.reference, op)(x, weight, group=group)
    assert found.shape == expected.shape
    assert found.size(0) == (rows // group.size() if op == "linear_reduce_scatter" else rows)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@on_ranks(3)
def test_two_operations_interleaved_and_two_contexts_at_once(group, device):
    with OverlapContext(group) as first, OverlapContext(group, linear_config("ring", 2)) as second:
        gather, scatter = Case(op=LINEARS[0], rows=8, seed=1), Case(op=LINEARS[1], rows=8, seed=2)
        a, b = (draw(case, group.rank(), group.size(), device) for case in (gather, scatter))
        for contexts in ((first, first), (first, second)):
            left, right = a.copies(), b.copies()
            y_left = ops.all_gather_linear(left.x, left.weight, left.bias, 8, context=contexts[0])
            y_right = ops.linear_reduce_scatter(right.x, right.weight, right.bias, context=contexts[1])
            y_left.backward(a.grad_y)
            y_right.backward(b.grad_y)
            for leaves, case, operands in ((left, gather, a), (right, scatter, b)):
                expected = reference(case, operands, group)
                assert torch.equal(leaves.x.grad, expected["x.grad"])
                assert torch.equal(leaves.weight.grad, expected["weight.grad"])


@pytest.mark.parametrize("op", LINEARS)
@in_context(3)
def test_a_hundred_runs_are_bit_identical(group, context, op):
    case = Case(op=op, rows=10, exact=False, dtype=torch.float32, N=33, K=17)
    operands = draw_own(case, group)
    first = overlapped(case, operands, context)
    for _ in range(99):
        assert_equal(overlapped(case, operands, context), first)


@pytest.mark.parametrize("op", LINEARS)
@on_ranks(2)
def test_weight_gradient_added_into_a_wider_tensor(group, device, op):
    case = Case(op=op, rows=8, dtype=torch.bfloat16)
    operands = draw(case, group.rank(), group.size(), device)
    main_grad = torch.full((case.N, case.K), 3.0)
    target = ops.WeightGradTarget(main_grad, lambda: None)
    with OverlapContext(group) as context:
        found = run_op(case, operands, getattr(ops, op), context=context, weight_grad=target)
    expected = reference(case, operands, group)
    assert found["weight.grad"] is None
    torch.testing.assert_close(main_grad, 3 + expected["weight.grad"].float(), atol=0, rtol=0)


@in_context(2)
def test_no_grad_forward_and_autocast(group, context):
    case = Case(op="all_gather_linear", rows=8)
    operands = draw_own(case, group)
    with torch.no_grad():
        y = ops.all_gather_linear(operands.x, operands.weight, context=context)
    assert not y.requires_grad
    leaves = operands.copies()
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.all_gather_linear(leaves.x, leaves.weight, context=context)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert leaves.weight.grad.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):  # as everywhere in autocast, float64 stays
        y = ops.all_gather_linear(operands.x.double(), operands.weight.double(), context=context)
    assert y.dtype is torch.float64


@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize("low", ["x", "nothing"])
@in_context(2)
def test_autocast_casts_the_bias_as_well(group, context, op, low):
    """Fails without the cast in the reference, whose result was as wide as its bias."""
    case = Case(op=op, rows=8)
    results = []
    for call, where in ((getattr(ops, op), {"context": context}), (getattr(ops.reference, op), {"group": group})):
        operands = draw_own(case, group)
        if low == "x":
            operands.x = operands.x.bfloat16()
        leaves = operands.copies()
        with torch.autocast("cpu", torch.bfloat16):
            y = call(leaves.x, leaves.weight, leaves.bias, **where)
            expected = torch.nn.functional.linear(leaves.x, leaves.weight, leaves.bias)
        assert y.dtype is expected.dtype is torch.bfloat16
        y.backward(operands.grad_y.to(y.dtype))
        results.append({"y": y.detach()} | {name: getattr(leaves, name).grad for name in ("x", "weight", "bias")})
    assert_equal(*results)
    assert results[0]["weight"].dtype is results[0]["bias"].dtype is torch.float32
