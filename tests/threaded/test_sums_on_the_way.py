"""Sums of a reduce-scatter made while the rest travels: the bits of one pass at the end, whoever is late."""

import dataclasses
import itertools
import time

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.plan.candidates import list_candidates
from commfuse_megatron.plan.cost_model import choose_details, predict_parts_us
from commfuse_megatron.plan.machine import Traits, assumed_machine
from commfuse_megatron.plan.passes import lower_pass, tape_policy
from commfuse_megatron.runtime.planning import Planner
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.program import Sum
from tests.harness import run_threads
from tests.harness.contexts import in_context
from tests.harness.emulated_gpu import tapes_of
from tests.harness.linear_cases import Case, check_linear, draw_own, linear_config
from tests.harness.problems import layer_problem

SCATTER = "linear_reduce_scatter"
COPIES = dataclasses.replace(linear_config(), transport=TransportConfig(backend="copy_engine"))


@pytest.fixture
def made(monkeypatch):
    """Sets when sums are made, for all plans from then on."""
    chosen, plan = [True], Planner.plan

    def planned(self, problem, try_out=None):
        found = plan(self, problem, try_out)
        return dataclasses.replace(found, sums_on_the_way=found.sums_on_the_way and chosen[0])

    monkeypatch.setattr(Planner, "plan", planned)
    return chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_bits_are_those_of_one_pass_at_the_end(dtype, m, has_bias, made):
    """Of sums that are rounded, in an order that shows: fp32 running sums rounded to bf16 on the way fail."""
    generator = torch.Generator().manual_seed(m)
    drawn_ones = [
        (torch.randn(14, 24, generator=generator).to(dtype), torch.randn(16, 24, generator=generator).to(dtype))
        for _ in range(6)
    ]
    bias = torch.randn(16, generator=generator).to(dtype) if has_bias else None

    def body(group, device):
        with OverlapContext(group, linear_config(m=m)) as context:
            out = ops.linear_reduce_scatter(*drawn_ones[group.rank()], bias, context=context)
            return out, context.report()[0].details

    found = []
    for chosen in (True, False, True):
        made[0] = chosen
        found.append(run_threads(6, body))
    for (first, said), (second, unsaid), (third, _) in zip(*found, strict=True):
        assert (said, unsaid) == ("sums on the way", "")
        assert torch.equal(first, second)
        assert torch.equal(first, third)


@pytest.mark.parametrize("group_size", [2, 3, 4, 5, 6, 7, 8])
@in_context("group_size", linear_config())
def test_integers_are_exact_in_groups_of_every_size(group, context, group_size):
    for op, rows in itertools.product((SCATTER, "all_gather_linear"), (2 * group_size, 2 * group_size + 1, 3)):
        check_linear(Case(op=op, rows=rows, N=16, K=8, has_bias=True, seed=rows), group, context)
    details = {record.details for record in context.report()}
    assert ("sums on the way" in details) == (group_size > 3)


@pytest.mark.parametrize("stepwise", [None, -1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group_size", [4, 7])
@in_context("group_size", COPIES, over_copies=True, stepwise="stepwise")
def test_tapes_and_graphs_sum_on_the_way(group, context, group_size, dtype):
    """Also the graph in every order that its dependencies allow, and with ranks that come late."""
    for seed, rows in itertools.product(range(6), (4 * group_size, 4 * group_size + 1)):
        check_linear(Case(op=SCATTER, rows=rows, N=16, K=8, dtype=dtype, seed=seed), group, context)
    assert None not in tapes_of(context)
    assert {record.details for record in context.report() if record.pass_name == "fprop"} == {"sums on the way"}


@in_context(5, linear_config())
def test_who_is_late_changes_no_bit(group, context):
    operands = draw_own(Case(op=SCATTER, rows=15, N=8, K=8), group)
    generator = torch.Generator().manual_seed(group.rank())
    x, weight = (torch.randn(each.shape, generator=generator).bfloat16() for each in (operands.x, operands.weight))
    found = []
    for late in range(6):
        if group.rank() == late:
            time.sleep(0.02)  # what arrives first and last differs, and nothing else
        found.append(ops.linear_reduce_scatter(x, weight, context=context))
    assert all(torch.equal(each, found[-1]) for each in found)


@pytest.mark.parametrize(("group_size", "sums"), [(2, [1]), (3, [2]), (4, [2, 1]), (8, [4, 2, 1]), (16, [8, 4, 2, 1])])
def test_each_pass_takes_half_of_what_is_left(group_size, sums):
    """So that one addend is left behind the last arrival; of two partials one pass moves no more."""
    problem = layer_problem("8b.proj", 32, group_size)
    (plan,) = list_candidates(problem, linear_config()).plans
    program = lower_pass(problem, plan, tape_policy(problem, plan), Asked(), group_rank=1)
    assert [len(op.adds) for op in program.ops if isinstance(op, Sum)] == sums


def test_the_last_pass_is_predicted_by_its_bytes():
    """Where transfers take longer than GEMMs, and not where the own GEMM is the last to end."""
    machine = assumed_machine(Traits(transport="copy_engine", replays=True), "bfloat16")
    for layer, on_the_way in (("70b.proj", True), ("70b.fc2", False)):
        problem = layer_problem(layer, 8192, 8)
        (plan,) = list_candidates(problem, linear_config()).plans
        found, at_end = choose_details(problem, plan, machine), dataclasses.replace(plan, sums_on_the_way=False)
        assert found.sums_on_the_way == on_the_way
        gained_us = predict_parts_us(problem, at_end, machine)[0] - predict_parts_us(problem, found, machine)[0]
        rows = (7 + 2) - (2 + 1 + 1) if on_the_way else 0
        assert gained_us == pytest.approx(machine.gemm.pass_us(rows * 1024 * 8192 * 2))
