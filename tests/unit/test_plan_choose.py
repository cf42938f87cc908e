"""Choosing by predicted and by measured times: ties, margins, what is timed, and the sentences of the report."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_megatron.config import OverlapConfig, PlanConfig
from commfuse_megatron.plan.candidates import Candidates, list_candidates
from commfuse_megatron.plan.choose import (
    TrialTimes,
    choose_by_default,
    choose_measured,
    choose_only,
    choose_predicted,
    select_for_trial,
)
from commfuse_megatron.plan.machine import Traits, assumed_machine
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import UlyssesProblem
from tests.harness.problems import layer_problem

MACHINE = dataclasses.replace(assumed_machine(Traits(transport="copy_engine"), "bfloat16"), source="measured")
PROBLEM = layer_problem("70b.qkv", 8192, needs="input+weight")
PLANS = list_candidates(PROBLEM, OverlapConfig()).plans
NAMES = ["sequential", "bulk", "sliced m=1", "sliced m=2", "sliced m=4", "async"]


def predicted(*times_us: float, note: str = "") -> Candidates:
    assert [plan.name for plan in PLANS] == NAMES
    plans = tuple(dataclasses.replace(plan, predicted_us=t) for plan, t in zip(PLANS, times_us, strict=True))
    return Candidates(plans, note)


def measured(times_us: list[float], note: str = "", problem=PROBLEM, tie: float = 0.0) -> PassPlan:
    return choose_measured(problem, PLANS, TrialTimes(times_us, tie), note)


def timed(candidates: Candidates, **config) -> list[str]:
    return [plan.name for plan in select_for_trial(candidates, PlanConfig(**config))]


def test_a_clear_prediction_is_taken_and_said():
    candidates = predicted(1950, 1400, 1200, 1100, 1150, 1800)
    assert timed(candidates) == []
    plan = choose_predicted(candidates, MACHINE)
    assert plan.name == "sliced m=2"
    assert plan.reason == "predicted: sliced m=2 1.100 ms, bulk 1.400, async 1.800, sequential 1.950"
    assert plan.predicted_us == 1100
    assert plan.measured_us is None
    assumed = choose_predicted(candidates, dataclasses.replace(MACHINE, source="assumed"), "not measured: no memory")
    assert assumed.reason.startswith("predicted from assumed figures: sliced m=2 1.100 ms")
    assert assumed.reason.endswith("; not measured: no memory")


def test_close_predictions_are_timed_with_the_best_of_every_path():
    candidates = predicted(2000, 1200, 1160, 1100, 1320, 1900)
    assert timed(candidates) == ["sequential", "bulk", "sliced m=1", "sliced m=2", "async"]
    assert timed(candidates, margin=0.05) == []
    assert timed(candidates, margin=1.0) == NAMES
    assert timed(candidates, measure="never", margin=1.0) == []
    assert timed(predicted(2000, 1800, 500, 400, 410, 1900), measure="always") == NAMES


def test_a_few_microseconds_are_never_clear():
    assert timed(predicted(105, 105, 90, 100, 300, 105)) == ["sequential", "bulk", "sliced m=1", "sliced m=2", "async"]
    assert timed(predicted(150, 150, 90, 100, 300, 150)) == []


def test_variants_of_one_path_are_not_worth_a_trial():
    assert timed(predicted(2000, 2000, 1000, 1000, 1000, 2000)) == []


def test_the_simplest_of_a_tie_wins():
    assert choose_predicted(predicted(1005, 1003, 1002, 1001, 1000, 1004), MACHINE).name == "sequential"
    assert measured([1020, 1009, 1000, 1000, 1000, 1000]).name == "bulk"
    assert measured([1020, 1011, 1009, 1005, 1005, 1000]).name == "sliced m=1", "async is last"


def test_a_tie_is_what_a_trial_of_a_split_sequence_repeats_to():
    """Fails without the fix: of attention over a split sequence what was faster by 0.9 % lost in steady rounds, too."""
    sizes = {"rows": 8192, "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128}
    split = UlyssesProblem(pass_name="fprop", dtype="bfloat16", group_size=2, right=0, **sizes)
    times = [1020.0, 1009.0, 1004.0, 1003.0, 1000.0, 1100.0]
    assert measured(times, tie=0.003).name == "bulk", "of a linear a percent is a tie as ever"
    assert [measured(times, problem=split, tie=tie).name for tie in (0.0, 0.0035, 0.005, 0.5)] == [
        "sliced m=4", "sliced m=2", "sliced m=1", "bulk",
    ]  # fmt: skip
    reason = measured(times, problem=split, tie=0.005).reason
    assert reason.startswith("measured: sliced m=1 1.004 ms, sliced m=4 1.000, bulk 1.009"), "and who lost by a tie"


def test_a_measured_choice_says_all_paths():
    plan = measured([1950, 1702, 1900, 1800, 2500, 1781], "a note")
    assert plan.name == "bulk"
    assert plan.reason == "measured: bulk 1.702 ms, async 1.781, sliced m=2 1.800, sequential 1.950 (a note)"
    assert plan.measured_us == 1702


@given(st.lists(st.floats(1, 1e6), min_size=6, max_size=6))
def test_whatever_is_chosen_is_within_a_tie_of_the_shortest(times_us):
    assert measured(times_us).measured_us <= min(times_us) * 1.01
    candidates = predicted(*times_us)
    chosen = choose_predicted(candidates, MACHINE)
    assert chosen.predicted_us <= min(times_us) * 1.01
    names = timed(candidates)
    assert not names or "sequential" in names


def test_where_speed_does_not_count_the_plainest_plan_is_taken():
    plan = choose_by_default(predicted(*range(1, 7)), "default on the CPU")
    assert (plan.name, plan.reason) == ("sliced m=1", "default on the CPU")
    alone = Candidates(PLANS[:1], "sliced would take too much")
    assert choose_by_default(alone, "default").reason == "default (sliced would take too much)"


@pytest.mark.parametrize(("plan", "note", "reason"), [
    (PLANS[2], "", "forced by the configuration"),
    (PLANS[2], "bulk is for backward", "forced by the configuration (bulk is for backward)"),
    (PLANS[0], "too large", "too large"),
    (dataclasses.replace(PLANS[0], path="row_parallel"), "", "forced by the configuration"),
    (dataclasses.replace(PLANS[3], path="query_split"), "", "forced by the configuration"),
])  # fmt: skip
def test_an_only_candidate_says_why(plan, note, reason):
    assert choose_only(Candidates((plan,), note)).reason == reason
