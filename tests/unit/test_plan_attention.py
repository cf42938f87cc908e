"""Plans for attention with its projection: which are offered, what they need, what is predicted of them."""

import dataclasses

import pytest

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import AttentionConfig, TransportConfig
from commfuse_megatron.plan.attention import predict_attention_us
from commfuse_megatron.plan.candidates import buffer_needs, list_candidates
from commfuse_megatron.plan.choose import choose_by_default, predict
from commfuse_megatron.plan.machine import Traits, assumed_machine
from commfuse_megatron.problem import AttentionProblem


def problem(tp: int = 8, rows: int = 8192, needs: str = "input+weight", **others) -> AttentionProblem:
    """Llama-70B's attention: 64 heads of 128, 8 groups, N 8192."""
    sizes = {"batch": 1, "heads": 64 // tp, "kv_heads": max(1, 8 // tp), "head_dim": 128, "value_dim": 128, "N": 8192}
    return AttentionProblem(
        pass_name="fprop", rows=rows, dtype="bfloat16", group_size=tp, right=0, needs=needs, **{**sizes, **others}
    )


def config(path="auto", m=None, backward="auto", **transport) -> OverlapConfig:
    return OverlapConfig(
        attention=AttentionConfig(path=path, splits_per_shard=m, backward=backward),
        transport=TransportConfig(**transport),
    )


def names(the_problem, configuration=None) -> list[str]:
    return [plan.name for plan in list_candidates(the_problem, configuration or config()).plans]


def test_candidates():
    forward = problem(needs="")
    assert names(forward) == ["sequential", "row_parallel", "query_split m=1", "query_split m=2", "query_split m=4"]
    assert names(problem(needs="weight")) == names(forward)
    assert names(problem(rows=9, needs="")) == ["sequential", "row_parallel", "query_split m=1"]
    assert names(forward, config("query_split")) == ["query_split m=1", "query_split m=2", "query_split m=4"]
    assert names(forward, config("query_split", 5)) == ["query_split m=5"]
    assert names(forward, config("query_split", 4097)) == ["sequential"]  # more chunks than there are flags
    for path in ("row_parallel", "sequential"):
        assert names(problem(), config(path)) == [path]


def test_a_split_forward_pass_may_have_an_unsplit_backward_pass():
    both = ["query_split m=5", "query_split m=5, row_parallel backward"]
    assert names(problem(), config("query_split", 5)) == both
    assert names(problem(needs="input"), config("query_split", 5)) == both
    assert names(problem(), config("query_split", 5, "query_split")) == both[:1]
    assert names(problem(), config("query_split", 5, "row_parallel")) == both[1:]
    assert names(problem(), config("auto", 5)) == ["sequential", "row_parallel", *both]
    # Every split draws a mask of its own.
    assert names(problem(has_dropout=True), config("query_split", 5, "row_parallel")) == both[:1]
    plan = list_candidates(problem(), config("query_split", 5, "row_parallel")).plans[0]
    assert (plan.for_backward.path, plan.for_backward.name) == ("row_parallel", "row_parallel")


def test_by_default_the_planner_chooses_or_it_is_row_parallel():
    assert names(problem(), OverlapConfig()) == names(problem(), config("auto"))
    assert choose_by_default(list_candidates(problem(), config()), "because").path == "row_parallel"


def test_what_does_not_fit_is_left_out_with_its_size():
    candidates = list_candidates(problem(), config(max_buffer_mib=64))
    assert [plan.path for plan in candidates.plans] == ["sequential", "row_parallel"]
    assert "query_split would take" in candidates.note
    assert "max_buffer_mib = 64" in candidates.note


def test_only_query_split_plans_need_buffers():
    for plan in list_candidates(problem(), config()).plans:
        needs = buffer_needs(problem(), plan)
        assert bool(needs) == (plan.path == "query_split")
        assert ("gather" in needs) == (plan.path == "query_split" and plan.backward_path is None)
        assert "gather" not in buffer_needs(problem(needs=""), plan)


@pytest.mark.parametrize("needs", ["", "input", "weight", "input+weight"])
@pytest.mark.parametrize("is_link_slow", [False, True])
def test_predictions_are_positive_and_query_split_hides_most(needs, is_link_slow):
    machine = assumed_machine(Traits(transport="copy_engine", replays=True), "bfloat16", is_link_slow=is_link_slow)
    predicted = predict(problem(needs=needs), list_candidates(problem(), config()), machine)
    times = {plan.name: plan.predicted_us for plan in predicted.plans}
    assert all(time > 0 for time in times.values())
    if needs == "" and not is_link_slow:  # K per rank is 1024: the projection is shorter than its transfer
        assert times["query_split m=1"] < times["row_parallel"] < times["sequential"]


def test_attention_costs_what_is_seen_of_the_keys():
    machine = assumed_machine(Traits(transport="copy_engine"), "bfloat16")
    plan = list_candidates(problem(), config("row_parallel")).plans[0]
    causal, full, window = (
        predict_attention_us(dataclasses.replace(problem(needs="", rows=32768), left=left, right=right), plan, machine)
        for left, right in ((None, 0), (None, None), (512, 0))
    )
    assert window < causal < full


def test_no_sum_ends_a_forward_pass_that_is_replayed():
    (plan,) = list_candidates(problem(2), config("query_split", 2, "query_split")).plans
    step_by_step, replayed = (
        predict_attention_us(
            problem(2, needs=""), plan, assumed_machine(Traits(transport="copy_engine", replays=replays), "bfloat16")
        )
        for replays in (False, True)
    )
    gemm = assumed_machine(Traits(transport="copy_engine"), "bfloat16").gemm
    sums_us = 2 * gemm.launch_us + gemm.pass_us(3 * problem(2).shard_bytes)  # two partials and the result
    assert step_by_step - replayed == pytest.approx(sums_us)


def test_the_projection_is_the_linear_alone():
    backward = dataclasses.replace(problem(), pass_name="backward")
    assert backward.projection.needs == "input+weight"
    assert problem().projection.needs == ""
    assert (backward.projection.N, backward.projection.K, backward.projection.M) == (8192, 1024, 8192)
    assert "S=8192" in str(problem())
    assert "heads=8/1" in str(problem())
