"""Calls of query-split attention that look like earlier ones but are not: bad dropout, autocast, recompute, reports."""

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import AttentionConfig
from commfuse_megatron.errors import ConfigError, ShapeError
from tests.harness import on_ranks
from tests.harness.contexts import in_context
from tests.threaded.test_planning import TRIAL, MadeUpTimes, plan_by_cost
from tests.threaded.test_query_split_attention import Case, attention_config, check, draw, run


@pytest.mark.parametrize(("good", "bad"), [(0.4, 1.4), (0.0, -0.4), (0.4, float("nan"))])
@in_context(2, attention_config())
def test_a_bad_dropout_after_a_good_one_is_refused(group, context, good, bad):
    """Fails with only `dropout > 0` in the key of known calls: what the first call passed, the second would not do."""
    operands, _ = draw(Case(), group.rank(), group.size())
    ops.query_split_attention(*operands.values(), context=context, dropout=good)
    with pytest.raises(ShapeError, match="dropout must be"):
        ops.query_split_attention(*operands.values(), context=context, dropout=bad)
    check(Case(), group, context)


@in_context(2, attention_config())
def test_windows_that_are_no_integers_are_refused(group, context):
    operands, _ = draw(Case(), group.rank(), group.size())
    for window in ((2.5, 0), (1, 2, 3), (-2, 0)):
        with pytest.raises(ShapeError, match="window must be"):
            ops.query_split_attention(*operands.values(), window=window, context=context)
    check(Case(keywords={"window": [3, 0]}), group, context)


@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
@on_ranks(2)
def test_autocast_rounds_operands_and_nothing_else(group, device, path):
    """Fails with the operation left inside autocast: its scores are then rounded to bfloat16 too, only forward."""
    operands, grad_y = draw(Case(rows=9, kv_heads=2, dtype=torch.float32), group.rank(), group.size())
    rounded = {name: t.bfloat16() for name, t in operands.items()}

    def attend(*given, **where):
        with torch.autocast("cpu", torch.bfloat16):
            return ops.query_split_attention(*given, **where)

    with OverlapContext(group, attention_config(path)) as context:
        expected = run(rounded, grad_y.bfloat16(), ops.query_split_attention, context=context, scale=2.0)
        found = run(operands, grad_y.bfloat16(), attend, context=context, scale=2.0)
    for name, value in expected.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name


@pytest.mark.parametrize("path", ["query_split", "row_parallel", "sequential"])
@in_context(2, lambda path: attention_config(path))
def test_a_backward_pass_inside_autocast_is_that_outside(group, context):
    """Fails with backward left inside autocast: its products are then rounded to bfloat16."""
    operands, grad_y = draw(Case(rows=9, kv_heads=2, dtype=torch.float32), group.rank(), group.size())

    def gradients(*, is_inside):
        leaves = [t.detach().clone().requires_grad_() for t in operands.values()]
        with torch.autocast("cpu", torch.bfloat16):
            y = ops.query_split_attention(*leaves, scale=2.0, context=context)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            y.backward(grad_y.bfloat16())
        return [leaf.grad for leaf in leaves]

    for name, found, expected in zip(operands, gradients(is_inside=True), gradients(is_inside=False), strict=True):
        assert torch.equal(found, expected), name


BESTS = {"": "query_split m=1", "input+weight": "query_split m=2"}


@pytest.fixture
def best_by_gradients(monkeypatch):
    def time(self, call, *_):
        call()
        plan, needs = call.args[0].plan, call.args[0].problem.needs
        return 50.0 if plan.name == BESTS[needs] else 90.0

    monkeypatch.setattr(MadeUpTimes, "burst_us", time)
    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(None))


@pytest.mark.usefixtures("best_by_gradients")
@in_context(2, attention_config("auto", None))
def test_with_dropout_a_call_is_split_alike_without_gradients(group, context):
    """As a recomputed layer is called: splits draw masks of their own, so gradients would be those of other masks.

    Fails with a plan of its own for every set of gradients.
    """
    operands, grad_y = draw(Case(rows=16, batch=1, dtype=torch.float32), group.rank(), group.size())
    plan_by_cost(context)
    for dropout in (0.0, 0.5):
        with torch.no_grad():
            ops.query_split_attention(*operands.values(), context=context, dropout=dropout)
        run(operands, grad_y, ops.query_split_attention, context=context, dropout=dropout)
    called = [p for p in context._prepared.values() if p.calls and p.problem.pass_name == "fprop"]
    plans = {(p.problem.has_dropout, p.problem.needs): p.plan.name for p in called}
    assert plans[False, ""] == BESTS[""]
    assert plans[False, "input+weight"] == plans[True, ""] == plans[True, "input+weight"] == BESTS["input+weight"]


def test_splits_that_nothing_would_be_split_into_are_an_error():
    for path in ("row_parallel", "sequential"):
        with pytest.raises(ConfigError, match=r"^splits_per_shard = 2"):
            AttentionConfig(path=path, splits_per_shard=2)
        with pytest.raises(ConfigError, match=r"^backward = row_parallel"):
            AttentionConfig(path=path, backward="row_parallel")


@in_context(2, attention_config())
def test_the_report_says_why_faster_kernels_were_passed_over(group, context):
    check(Case(), group, context)
    records = context.report()
    for record in records:
        assert record.attention == "math"
        assert all(f"{name} attention runs on CUDA" in record.attention_reason for name in ("cudnn", "flash"))
