"""Plans of attention in a context: trials over gloo with times that a test makes up, and buffers."""

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import AttentionConfig, PlanConfig
from commfuse_megatron.plan.candidates import buffer_needs
from tests.harness import run_threads
from tests.harness.contexts import in_context
from tests.threaded.test_planning import TRIAL, MadeUpTimes, plan_by_cost
from tests.threaded.test_query_split_attention import Case, assert_close, attention_config, draw, run

AUTO = AttentionConfig(path="auto")


def planned(monkeypatch, times, config=None, group_size=2, case=None):
    """The reports of all ranks after a forward and a backward pass, planned as on a GPU with these times."""
    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(lambda rank, name: times[rank][name]))
    case = case or Case(dtype=torch.float32)

    def body(group, device):
        with OverlapContext(group, config or OverlapConfig(attention=AUTO)) as context:
            plan_by_cost(context)
            operands, grad_y = draw(case, group.rank(), group.size())
            before = torch.get_rng_state()
            found = run(operands, grad_y, ops.query_split_attention, context=context)
            assert torch.equal(torch.get_rng_state(), before)
            expected = run(operands, grad_y, ops.reference.query_split_attention, group=group)
            assert_close(found, expected, 1e-4)
            records = context.report()
            assert all(sum(record.modes.values()) <= record.calls for record in records), "trials are no calls"
            return [record for record in records if record.op == "query_split_attention"]

    return run_threads(group_size, body)


WAYS = (
    "sequential",
    "row_parallel",
    *(f"query_split m={m}{backward}" for m in (1, 2, 4) for backward in ("", ", row_parallel backward")),
)


@pytest.mark.parametrize("best", WAYS)
def test_the_fastest_on_the_slowest_rank_is_taken_for_both(monkeypatch, best):
    names = WAYS
    times = [{name: 50.0 if name == best else 90.0 for name in names} for _ in range(2)]
    times[0].update({name: 10.0 for name in names if name != best})  # fast here, slow on the other rank
    # The linear that "row_parallel" is made of is planned and timed as well.
    for of_rank in times:
        of_rank.update({f"sliced m={m}": 1.0 for m in (1, 2, 4)}, async_=1.0, bulk=1.0)
    for records in planned(monkeypatch, times):
        forward, backward = records
        assert forward.path == best.partition(" ")[0]
        assert forward.reason.startswith(f"measured: {best} 0.050 ms")
        if best.endswith("row_parallel backward"):
            assert backward.path == "row_parallel"
            assert backward.reason == f"after {best.partition(',')[0]}"
        else:
            assert backward.path == forward.path
            assert backward.reason == "as the forward pass"
        assert (forward.measured_us, forward.calls, backward.calls) == (50.0, 1, 1)
        assert forward.attention == backward.attention == "math"


def test_as_many_tokens_in_longer_sequences_are_decided_anew(monkeypatch):
    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(lambda rank, name: 50.0))

    def body(group, device):
        with OverlapContext(group, OverlapConfig(attention=AUTO)) as context:
            plan_by_cost(context)
            for rows, batch in ((16, 2), (18, 2), (32, 1)):
                case = Case(rows=rows, batch=batch, dtype=torch.float32)
                operands, _ = draw(case, group.rank(), group.size())
                with torch.no_grad():
                    ops.query_split_attention(*operands.values(), context=context)
            return [record.reason for record in context.report() if record.op == "query_split_attention"]

    for first, near, longer in run_threads(2, body):
        assert first.startswith("measured: ")
        assert near.startswith("as for M=32, measured: ")
        assert longer.startswith("measured: ")


def test_where_nothing_may_be_measured_it_is_row_parallel(monkeypatch):
    config = OverlapConfig(attention=AUTO, plan=PlanConfig(measure="never"))
    for forward, _ in planned(monkeypatch, [{}, {}], config):
        assert (forward.path, forward.measured_us) == ("row_parallel", None)
        assert forward.reason == "default for attention where nothing is measured"


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("group_size", [2, 3])
@in_context("group_size", lambda m: attention_config(m=m))
def test_buffers_are_no_larger_than_the_plan_says(group, context):
    operands, grad_y = draw(Case(rows=13), group.rank(), group.size())
    run(operands, grad_y, ops.query_split_attention, context=context)
    (prepared, _) = context._prepared.values()
    needs = buffer_needs(prepared.problem, prepared.plan)
    held, promised = context.buffer_bytes, sum(-(-size // 256) * 256 for size in needs.values())
    assert 0 < held <= promised
