"""Contexts with `plan.file`: later runs take the plans of the first, on all ranks, and time nothing."""

import dataclasses
import json
import threading

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import AttentionConfig, OverlapConfig, PlanConfig, TransportConfig
from commfuse_megatron.errors import ConfigError, ShapeError
from tests.harness import make_groups, on_ranks, run_threads
from tests.harness.linear_cases import OPS, Case, check_linear
from tests.harness.problems import layer_problem
from tests.threaded.test_attention_planning import planned
from tests.threaded.test_planning import TRIAL, MadeUpTimes, config, plan_by_cost


def run_job(group, device, job_config, rows_of_calls, *, by_cost):
    """Forward and backward passes of so many rows; every problem's plan."""
    with OverlapContext(group, job_config) as context:
        if by_cost:
            plan_by_cost(context)
        for rows in rows_of_calls:
            for op in OPS:
                check_linear(Case(op=op, rows=rows), group, context)
        assert (context.stored_plans.store is None) == (group.rank() > 0), "nodes share no disk"
        return {str(problem): prepared.plan for problem, prepared in context._prepared.items()}


def run_on_two(job_config, rows_of_calls=(8,), *, by_cost=False):
    first, second = run_threads(
        2, lambda group, device: run_job(group, device, job_config, rows_of_calls, by_cost=by_cost)
    )
    assert first == second
    return first


def stored_in(file, **others):
    return config(plan=PlanConfig(margin=10.0, file=str(file)), **others)


def without_reasons(plans):
    return {problem: dataclasses.replace(plan, reason="") for problem, plan in plans.items()}


def time_made_up(monkeypatch, winner):
    """Candidates take so long; what was timed, in the list."""
    timed = []

    def of_rank(rank, name):
        timed.append(name)
        return 1.0 if name == winner else 2.0 + rank

    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(of_rank))
    return timed


def test_a_job_that_starts_again_runs_the_same_plans(monkeypatch, tmp_path):
    job = stored_in(tmp_path / "plans.json")
    lengths = [40, 42, 100]
    assert time_made_up(monkeypatch, "sliced m=2") == []
    first = run_on_two(job, lengths, by_cost=True)
    assert sum(plan.reason.startswith("measured: ") for plan in first.values()) == 8
    assert sum(plan.reason.startswith("as for M=80, measured: ") for plan in first.values()) == 4
    timed = time_made_up(monkeypatch, "sequential")
    # In another order: what was decided "as for" another length stays what it was, too.
    again = run_on_two(job, lengths[::-1], by_cost=True)
    assert timed == []
    assert without_reasons(again) == without_reasons(first)
    for problem, plan in again.items():
        assert plan.reason.startswith("stored in plans.json 20")
        assert plan.reason.endswith(f" UTC: {first[problem].reason}")
    # A length near one of the file's takes its plan, as it would have in the first run.
    near = run_on_two(job, [100, 102], by_cost=True)
    assert timed == []
    assert sum(plan.reason.startswith("as for M=200, stored in ") for plan in near.values()) == 4


def test_the_defaults_of_the_cpu_are_stored_too(tmp_path):
    job = stored_in(tmp_path / "plans.json")
    first, again = run_on_two(job), run_on_two(job)
    assert {plan.reason for plan in first.values()} == {"default on the CPU: correctness, not speed"}
    assert without_reasons(again) == without_reasons(first)
    assert all(plan.reason.startswith("stored in plans.json ") for plan in again.values())


def test_attention_and_its_orders_come_back(monkeypatch, tmp_path):
    job = OverlapConfig(attention=AttentionConfig(path="auto"), plan=PlanConfig(file=str(tmp_path / "plans.json")))
    best = "query_split m=2, row_parallel backward"
    names = ["sequential", "row_parallel", *(f"query_split m={m}" for m in (1, 2, 4))]
    names += [f"{name}, row_parallel backward" for name in names[2:]]
    times = dict.fromkeys([*names, "bulk", *(f"sliced m={m}" for m in (1, 2, 4))], 9.0) | {best: 1.0}
    first = planned(monkeypatch, [times, times], job)
    again = planned(monkeypatch, [{}, {}], job)  # what is timed is a KeyError
    assert again[0] == again[1]
    for (forward, backward), (stored, after) in zip(first, again, strict=True):
        assert forward.reason.startswith(f"measured: {best}")
        assert stored.reason.endswith(forward.reason)
        assert dataclasses.replace(stored, reason="") == dataclasses.replace(forward, reason="")
        assert backward == after
    plans = json.loads((tmp_path / "plans.json").read_text())["sections"][0]["plans"]
    assert not [text for text in plans if "query_split_attention backward" in text], "they follow from the forward pass"


def test_a_way_that_is_forced_wins_and_says_so(tmp_path):
    file = tmp_path / "plans.json"
    run_on_two(stored_in(file))
    forced = config("sequential", plan=PlanConfig(margin=10.0, file=str(file)))
    for plan in run_on_two(forced).values():
        assert plan.path == "sequential"
        assert plan.reason == 'forced by the configuration (plans.json has it for path "auto" (here "sequential"))'
    assert {plan.path for plan in run_on_two(stored_in(file)).values()} == {"sliced"}


@pytest.mark.parametrize("name", ["device", "torch", "commfuse_megatron", "transport", "hosts", "num_sms", "default"])
def test_plans_of_another_machine_are_not_taken(name, tmp_path):
    file = tmp_path / "plans.json"
    run_on_two(stored_in(file))
    data = json.loads(file.read_text())
    for section in data["sections"]:
        assert name in section["conditions"]
        section["conditions"][name] = "another"
    file.write_text(json.dumps(data))
    for plan in run_on_two(stored_in(file)).values():
        assert plan.reason.startswith(f'default on the CPU: correctness, not speed (plans.json has it for {name} "an')


def test_another_size_is_planned_with_a_reason(tmp_path):
    file = tmp_path / "plans.json"
    run_on_two(stored_in(file))
    for problem, plan in run_on_two(stored_in(file), [16]).items():
        assert plan.reason.startswith("default on the CPU: correctness, not speed (plans.json does not have it, but ")
        assert f"{problem.replace('S=16', 'S=8')})" in plan.reason


def test_a_broken_file_is_a_warning_on_one_rank(tmp_path, caplog):
    file = tmp_path / "plans.json"
    file.write_text("{")
    reasons = {plan.reason for plan in run_on_two(stored_in(file)).values()}
    assert reasons == {"default on the CPU: correctness, not speed (plans.json was not read)"}
    assert len([record for record in caplog.records if "is no file of plans" in record.getMessage()]) == 1
    assert file.read_text() == "{"


@on_ranks(2)
def test_a_folder_is_refused_on_all_ranks_before_they_send(group, device, tmp_path):
    said = rf"^plan\.file: {tmp_path} is no regular file; name a file"
    with pytest.raises(ConfigError, match=said):
        OverlapContext(group, stored_in(tmp_path))


@on_ranks(2)
def test_ranks_with_different_problems_find_out_before_reading(group, device, tmp_path):
    context = OverlapContext(group, stored_in(tmp_path / "plans.json", transport=TransportConfig(timeout_s=5.0)))
    K = 4 + group.rank()
    with pytest.raises(ShapeError, match="do not agree"):
        ops.all_gather_linear(torch.zeros(4, 1, K), torch.zeros(4, K), context=context)
    assert not (tmp_path / "plans.json").exists()


def test_what_is_planned_in_a_capture_leaves_the_file_alone(monkeypatch, tmp_path):
    captured = [True]
    monkeypatch.setattr("commfuse_megatron.runtime.context._is_capturing", lambda device: bool(captured))
    file, problem = tmp_path / "plans.json", layer_problem("8b.qkv", 64, dtype="float32")

    def body(group, device):
        with OverlapContext(group, stored_in(file)) as context:
            context.planner.plan(problem)
            assert not context.stored_plans.plans

    run_threads(2, body)
    assert not file.exists()
    captured.clear()

    def later(group, device):
        with OverlapContext(group, stored_in(file)) as context:
            return context.stored_plans.plans if context.planner.plan(problem) else None

    assert [list(plans) for plans in run_threads(2, later)] == [[problem]] * 2
    assert str(problem) in file.read_text()


def test_groups_that_share_a_file_run_the_same_plans(monkeypatch, tmp_path):
    """Each finds another way faster, at the same time; the first plan written is everybody's, later too."""
    job = stored_in(tmp_path / "plans.json")
    ways = ("sliced m=2", "sequential")
    place = threading.local()
    monkeypatch.setattr(
        TRIAL, lambda device: MadeUpTimes(lambda rank, name: 1.0 if name == ways[place.number] else 2.0)
    )

    def run_on_two_groups():
        groups_of = make_groups([[0, 1], [2, 3]])

        def body(everyone, device):
            place.number = everyone.rank() // 2
            (group,) = groups_of(everyone.rank())
            return run_job(group, device, job, [8, 20, 60], by_cost=True)

        return run_threads(4, body)

    first, again = run_on_two_groups(), run_on_two_groups()
    assert len({json.dumps(without_reasons(plans), default=dataclasses.asdict) for plans in [*first, *again]}) == 1
    sections = json.loads((tmp_path / "plans.json").read_text())["sections"]
    assert {text for section in sections for text in section["plans"]} == set(first[0])
