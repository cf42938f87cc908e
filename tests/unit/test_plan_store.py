"""The file of plans: what fits, what is said of the rest, files that are none, and several writers at once."""

import dataclasses
import json
import subprocess
import threading

import pytest
from filelock import FileLock

from commfuse_megatron.plan import store as store_module
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.plan.store import PlanStore, plan_of, why_no_file
from commfuse_megatron.problem import AttentionProblem
from commfuse_megatron.schedule import Algorithm
from tests.harness.problems import layer_problem

PROBLEM = layer_problem("8b.qkv", 8192, needs="input+weight")
PLAN = PassPlan("sliced", "measured: so", Algorithm.RING, 2, True, predicted_us=0.1 + 0.2, measured_us=1e3 / 3)
HERE = {"device": "NVIDIA H200", "transport": "copy_engine", "torch": "2.11.0", "path": "auto", "measure": "auto"}
ATTENTION = AttentionProblem(
    pass_name="fprop", rows=64, batch=1, heads=4, kv_heads=4, head_dim=8, value_dim=8, N=16, dtype="bfloat16",
    group_size=3, right=0,
)  # fmt: skip
SPLIT = PassPlan("query_split", "why", Algorithm.DIRECT, 4, False, measured_us=7.0, backward_path="row_parallel")


def blank(plan):
    """As a list of candidates has it."""
    return dataclasses.replace(plan, reason="", predicted_us=None, measured_us=None)


POSSIBLE = [blank(PLAN), blank(SPLIT)]


def find(file, conditions=HERE, problem=PROBLEM, possible=POSSIBLE):
    return PlanStore(str(file)).find(conditions, problem, possible)


def add(file, conditions=HERE, problem=PROBLEM, plan=PLAN):
    return PlanStore(str(file)).add(conditions, problem, POSSIBLE, plan)


@pytest.mark.parametrize(("problem", "plan"), [(PROBLEM, PLAN), (ATTENTION, SPLIT)], ids=["linear", "attention"])
def test_a_plan_comes_back_bit_for_bit_and_says_where_from(problem, plan, tmp_path):
    file = tmp_path / "made" / "plans.json"
    assert add(file, problem=problem, plan=plan) == plan
    found = find(file, problem=problem)
    assert dataclasses.replace(found, reason=plan.reason) == plan
    assert type(found.algorithm) is Algorithm
    assert found.reason.startswith("stored in plans.json 20")
    assert found.reason.endswith(f" UTC: {plan.reason}")
    assert plan_of(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan


@pytest.mark.parametrize(("conditions", "problem", "reason"), [
    ({"device": "NVIDIA H100"}, PROBLEM, 'plans.json has it for device "NVIDIA H200" (here "NVIDIA H100")'),
    ({"torch": "2.12.0"}, PROBLEM, 'plans.json has it for torch "2.11.0" (here "2.12.0")'),
    ({"path": "sequential"}, PROBLEM, 'plans.json has it for path "auto" (here "sequential")'),
    ({"new": True}, PROBLEM, "plans.json has it for new null (here true)"),
    ({}, dataclasses.replace(PROBLEM, rows=4096), f"plans.json does not have it, but {PROBLEM}"),
    ({}, dataclasses.replace(PROBLEM, dtype="float16"), f"plans.json does not have it, but {PROBLEM}"),
    ({}, dataclasses.replace(PROBLEM, group_size=4), f"plans.json does not have it, but {PROBLEM}"),
])  # fmt: skip
def test_what_does_not_fit_is_ignored_with_the_difference(conditions, problem, reason, tmp_path):
    file = tmp_path / "plans.json"
    add(file)
    assert find(file, HERE | conditions, problem) == reason
    other = dataclasses.replace(PLAN, chunks_per_shard=2, measured_us=1.0)
    assert add(file, HERE | conditions, problem, other) == other
    assert find(file, HERE | conditions, problem).measured_us == 1.0
    assert find(file).measured_us == PLAN.measured_us


def test_a_new_file_has_nothing_to_say(tmp_path):
    store = PlanStore(str(tmp_path / "plans.json"))
    assert store.find(HERE, PROBLEM, POSSIBLE) == ""
    store.add(HERE, PROBLEM, POSSIBLE, PLAN)
    assert store.find(HERE, ATTENTION, POSSIBLE) == "", "this run's own plans are no reason for anything"


def test_what_was_measured_holds_where_nothing_may_be(tmp_path):
    add(tmp_path / "plans.json")
    assert find(tmp_path / "plans.json", HERE | {"measure": "never"}).measured_us == PLAN.measured_us
    add(tmp_path / "other.json", HERE | {"measure": "never"})
    assert find(tmp_path / "other.json") == 'other.json has it for measure "never" (here "auto")'


def test_what_is_no_candidate_or_was_edited_is_replaced(tmp_path):
    file = tmp_path / "plans.json"
    add(file)
    assert find(file, possible=[]) == "what plans.json has cannot be run here"
    entry = {str(PROBLEM): {"path": "sliced", "chunks_per_shard": "two"}}
    file.write_text(json.dumps({"format": 1, "sections": [{"conditions": HERE, "plans": entry}]}))
    assert find(file) == "what plans.json has cannot be run here"
    add(file)
    assert find(file).measured_us == PLAN.measured_us


@pytest.mark.parametrize(("pieces", "is_taken"), [((3, 4), True), ((), True), ((3, 3), False), ((8, -1), False)])
def test_what_was_settled_is_stored_where_it_is_whole(pieces, is_taken, tmp_path):
    """Of pieces that somebody has edited, an owner's rows would be missed."""
    problem = layer_problem("70b.fc2", 8192, 8)
    plan = PassPlan("grouped", "measured: so", measured_us=1.0, sums_on_the_way=True, pieces=pieces)
    candidates = [PassPlan("grouped", sums_on_the_way=True)]
    PlanStore(str(tmp_path / "plans.json")).add(HERE, problem, candidates, plan)
    found = find(tmp_path / "plans.json", HERE, problem, candidates)
    assert (found == "what plans.json has cannot be run here") == (not is_taken)
    assert not is_taken or (found.pieces, found.sums_on_the_way) == (pieces, True)


@pytest.mark.parametrize(
    "text", ["{", "[]", "\xff", "{}", '{"format": 2, "sections": []}', '{"format": 1, "sections": [3]}']
)
def test_a_broken_file_is_named_once_and_left_alone(text, tmp_path, caplog):
    file = tmp_path / "plans.json"
    file.write_text(text, encoding="latin-1")
    store = PlanStore(str(file))
    for problem in (PROBLEM, ATTENTION):
        assert store.find(HERE, problem, POSSIBLE) == "plans.json was not read"
        assert store.add(HERE, problem, POSSIBLE, PLAN) == PLAN
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"no plans are read: {file} is no file of plans: ")
    assert line.endswith("delete it, or name another")
    assert file.read_text(encoding="latin-1") == text


def test_of_two_plans_the_first_one_written_stays_for_both(tmp_path):
    stores = [PlanStore(str(tmp_path / "plans.json")) for _ in range(2)]
    assert [store.find(HERE, PROBLEM, POSSIBLE) for store in stores] == ["", ""]
    other = dataclasses.replace(PLAN, measured_us=5.0)
    assert [store.add(HERE, PROBLEM, POSSIBLE, plan) for store, plan in zip(stores, (PLAN, other), strict=True)] == [
        PLAN,
        PLAN,
    ]


def test_writers_at_once_lose_nothing(tmp_path):
    file = tmp_path / "plans.json"
    start = threading.Barrier(4)

    def write(number):
        store = PlanStore(str(file))
        start.wait(10)
        for rows in range(10):
            store.add(HERE, dataclasses.replace(PROBLEM, rows=100 * number + rows), POSSIBLE, PLAN)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (section,) = store_module.read_sections(file)
    assert len(section["plans"]) == 40


def test_a_lock_that_does_not_come_is_waited_for_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store_module, "_LOCK_S", 0.1)
    file = tmp_path / "plans.json"
    store = PlanStore(str(file))
    (tmp_path / ".commfuse").mkdir()
    with FileLock(tmp_path / ".commfuse" / "plans.json.lock"):
        assert store.add(HERE, PROBLEM, POSSIBLE, PLAN) == PLAN
    monkeypatch.setattr("filelock.FileLock", None)  # not asked for again
    assert store.add(HERE, ATTENTION, POSSIBLE, SPLIT) == SPLIT
    assert not file.exists()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("plans are not stored: ")


def test_git_and_ls_show_the_plans_alone(tmp_path):
    """Fails with the lock beside them: it stayed, and no `.gitignore` knew it."""
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True, timeout=30)
    add(tmp_path / "plans.json")
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    shown = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=30).stdout
    assert shown == "?? plans.json\n"
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["plans.json"]


def test_a_file_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_MOST_PLANS", 2)
    store = PlanStore(str(tmp_path / "plans.json"))
    for rows in range(3):
        store.add(HERE, dataclasses.replace(PROBLEM, rows=rows), POSSIBLE, PLAN)
    assert store.complaints == [f"plans are not stored: {tmp_path / 'plans.json'} holds 2 plans, and takes no more"]


@pytest.mark.parametrize("problem", [PROBLEM, ATTENTION], ids=["linear", "attention"])
def test_problems_that_differ_are_written_differently(problem):
    """Fails with a field left out of `str(problem)`, by which plans are found."""
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        other = not value if isinstance(value, bool) else f"{value}x" if isinstance(value, str) else (value or 0) + 1
        assert str(dataclasses.replace(problem, **{field.name: other})) != str(problem), field.name


def test_a_file_that_cannot_be_read_is_known_before(tmp_path):
    assert why_no_file(str(tmp_path)) == "is no regular file"
    assert why_no_file(str(tmp_path / "none.json")) == ""
    (tmp_path / "file").touch()
    assert why_no_file(str(tmp_path / "file" / "plans.json")) == "cannot be read: Not a directory"
    assert why_no_file(str(tmp_path / "file")) == ""
