"""Faults that users of such systems have reported, as tests: docs/field_bugs.md says which is tested where."""

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from tests.harness import on_ranks, run_threads
from tests.harness.contexts import in_context
from tests.harness.linear_cases import OPS, Case, assert_equal, check_linear, draw, linear_config, overlapped, reference
from tests.harness.threads import make_groups


@pytest.mark.parametrize("op", OPS)
@in_context(3, linear_config())
def test_01_sequence_lengths_change_and_are_not_divisible(group, context, op):
    for seed, rows in enumerate((512, 384, 500, 7, 512)):
        for batch in (1, 2):  # 1: packed tokens [t, 1, h]
            check_linear(Case(op=op, rows=rows, batch=batch, seed=seed), group, context)


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("m", [2, 4])
@in_context(2, lambda algorithm, m: linear_config(algorithm, m))
def test_02_two_ranks_do_not_cross_slices_of_equal_size(group, context, m):
    # Every row holds its own number, so that a slice in another's place is seen in every row of it.
    rows = 8 * m
    numbers = torch.arange(2 * rows, dtype=torch.float64).view(-1, 1, 1)
    own = slice(group.rank() * rows, (group.rank() + 1) * rows)
    weight = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(3):
        assert torch.equal(ops.all_gather_linear(numbers[own], weight, context=context), numbers)
        summed = ops.linear_reduce_scatter(numbers * (1 + group.rank()), weight, context=context)
        assert torch.equal(summed, 3 * numbers[own])


@pytest.mark.parametrize("op", OPS)
def test_03_large_payloads_pass_beside_another_groups_collective(op):
    # 4 MiB a message: far above what a socket or a transport buffers, so an order in which both sides send first hangs.
    of_rank = make_groups([[0, 1, 2], [0, 1, 2]])

    def body(group, device):
        first, second = of_rank(group.rank())
        sizes = {"N": 8, "K": 512} if op == "all_gather_linear" else {"N": 512, "K": 8}
        case = Case(op=op, rows=3 * 2048, batch=1, **sizes)
        with OverlapContext(first, linear_config(m=2)) as context:
            operands = draw(case, group.rank(), 3, device)
            expected = reference(case, operands, first)
            for is_before in (True, False):
                summed = torch.ones(1 << 20)
                if is_before:
                    work = second.allreduce([summed])
                found = overlapped(case, operands, context)
                if not is_before:
                    work = second.allreduce([summed])
                work.wait()
                assert torch.equal(summed, torch.full_like(summed, 3))
                assert_equal(found, expected)

    run_threads(3, body, timeout_s=50)


@pytest.mark.parametrize("op", OPS)
@on_ranks(3)
def test_10_inputs_overwritten_after_the_call_reach_nobody(group, device, op):
    # A send that still reads its source after the call has returned would carry the NaNs.
    case = Case(op=op, rows=64 * group.size(), batch=2, N=32, K=32)
    with OverlapContext(group, linear_config(m=2)) as context, torch.no_grad():
        for seed in range(20):
            operands = draw(Case(**{**vars(case), "seed": seed}), group.rank(), group.size(), device)
            expected = getattr(ops.reference, op)(operands.x, operands.weight, operands.bias, group=group)
            x = operands.x.detach().clone()
            y = getattr(ops, op)(x, operands.weight, operands.bias, context=context)
            x.fill_(float("nan"))
            assert torch.equal(y, expected)


@pytest.mark.parametrize("op", OPS)
@on_ranks(4)
def test_15_every_rank_gets_the_whole_input_gradient(group, device, op):
    # Reported: 1/R of it was right. Here each element of every rank's gradient is known beforehand.
    R, r = group.size(), group.rank()
    rows = 2 * R if op == "linear_reduce_scatter" else 2
    x = torch.ones(rows, 1, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.full((5, 3), 1.0 + r, dtype=torch.float64, requires_grad=True)
    with OverlapContext(group, linear_config()) as context:
        getattr(ops, op)(x, weight, context=context).sum().backward()
    per_rank = [5.0 * (1 + rank) for rank in range(R)]
    expected = sum(per_rank) if op == "all_gather_linear" else per_rank[r]
    assert torch.equal(x.grad, torch.full_like(x, expected))
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0 * R))
