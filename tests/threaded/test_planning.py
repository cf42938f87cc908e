"""Plans of a context: the default, forced paths, trials and calibration over gloo with times that a test makes up."""

import dataclasses
import logging
import math
import threading
import weakref
from collections import defaultdict

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import LinearConfig, PassConfig, PlanConfig, TransportConfig, WgradConfig
from commfuse_megatron.errors import ShapeError, TransportError
from commfuse_megatron.ops.trial import Scratch, run_trial
from commfuse_megatron.plan.choose import choose_measured
from commfuse_megatron.plan.machine import Channel, GemmRate, HostTimes, MachineModel, Traits
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.runtime.calibrate import calibrate
from commfuse_megatron.runtime.stopwatch import Stopwatch
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools.verify.calls import run_on
from tests.harness import on_ranks
from tests.harness.contexts import in_context
from tests.harness.linear_cases import (
    LINEARS,
    OPS,
    Case,
    assert_equal,
    check_linear,
    draw_own,
    drawn,
    overlapped,
    reference,
)
from tests.harness.problems import layer_problem

TRIAL = "commfuse_megatron.ops.trial.Stopwatch"


def config(path="auto", algorithm="auto", m=None, *, keeps=False, **others) -> OverlapConfig:
    chosen = PassConfig(path=path, algorithm=algorithm, chunks_per_shard=m)
    wgrad = WgradConfig(keep_gathered_input=keeps)
    return OverlapConfig(linear=LinearConfig(fprop=chosen, dgrad=chosen, wgrad=wgrad), **others)


def machine(link_gb_s=1.0, **traits) -> MachineModel:
    """Where nothing costs anything but bytes, and few of them much: every path is within any margin of the others."""
    channel = Channel(latency_us=0.0, bandwidth_gb_s=link_gb_s)
    return MachineModel(
        gemm=GemmRate(tflops=1e6, memory_gb_s=1e9, launch_us=0.0),
        link=channel,
        collective=channel,
        traits=Traits(transport="gloo", **traits),
        source="measured",
        host=HostTimes(
            call_us=100.0, gemm_us=0.0, transfer_us=0.0, collective_us=0.0, small_kernel_us=0.0, autograd_us=0.0
        ),
    )


def plan_by_cost(context: OverlapContext, model: MachineModel | None = None) -> OverlapContext:
    """Let `context` plan as it would on a GPU."""
    context.planner.default_reason = None
    context.planner.machines["float32"] = machine() if model is None else model
    return context


class MadeUpTimes:
    """A stopwatch that runs each call once and tells what the test says: `times[group rank](plan name)`."""

    def __init__(self, of_rank):
        self.of_rank = of_rank
        self.names = defaultdict(list)  # of what was timed, by rank

    def burst_us(self, call, calls, lead=None):
        call()
        rank, name = call.args[0].context.group_rank, call.args[0].plan.name
        self.names[rank].append(name)
        return float(self.of_rank(rank, name))


@pytest.fixture
def trial(monkeypatch) -> MadeUpTimes:
    """The stopwatch of all ranks; a test says what it tells."""
    stopwatch = MadeUpTimes(lambda rank, name: 1.0)
    monkeypatch.setattr(TRIAL, lambda device: stopwatch)
    return stopwatch


def refuse(rank, name):
    raise AssertionError("nothing was to be timed")


def records_of(case, group, context, model=None):
    """The report after one forward and backward pass, whose results are compared; equal on all ranks."""
    plan_by_cost(context, model)
    operands, expected = drawn(case, group)
    before = torch.get_rng_state()
    found = overlapped(case, operands, context)
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(found, expected)
    return agreed(context)


def agreed(context):
    """The report, which has to be the same on all ranks."""
    records = context.report()
    assert set(context.consensus.exchange(repr(records), topic="the report")) == {repr(records)}
    return records


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize(("needs", "is_backward"), [("", False), ("input+weight", True)])
@in_context(2, config())
def test_backward_passes_are_timed_as_the_engine_calls_them(group, context, needs, is_backward):
    tasks = []
    plan = PassPlan("sliced", "", Algorithm.DIRECT, 1, keep_gathered_input=False)
    problem = layer_problem("8b.qkv", 8, dtype="float32", needs=needs)
    rehearse = lambda problem, context: lambda prepared: tasks.append(torch._C._current_graph_task_id())  # noqa: E731
    assert run_trial(rehearse, context, problem, [plan]) == ([1.0], 0.0)
    assert (tasks[0] != -1) == is_backward  # else no graph is being executed


@pytest.mark.parametrize("op", OPS)
@in_context(2, config())
def test_on_the_cpu_the_default_is_sliced_and_says_so(group, context, op):
    case = Case(op=op, rows=8)
    overlapped(case, draw_own(case, group), context)
    for record in context.report():
        assert (record.path, record.algorithm, record.chunks_per_shard) == ("sliced", "direct", 1)
        assert record.reason == "default on the CPU: correctness, not speed"
        assert record.predicted_us is record.measured_us is None


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("path", ["async", "bulk", "sequential", "sliced"])
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("keeps", [False, True])
@in_context("group_size", lambda path, keeps: config(path, keeps=keeps))
def test_forced_paths_equal_the_reference_with_all_gradients(group, context, op, path, group_size):
    for rows in (6, 7, 1, 12):
        case = Case(op=op, rows=rows, seed=rows)
        operands, expected = drawn(case, group)
        assert_equal(overlapped(case, operands, context), expected)
        check_frozen(case, operands, context, group)
    records = context.report()
    is_async = path == "async" and op == "all_gather_linear" and group_size > 1
    assert any(record.path == "async" for record in records) == is_async
    for record in records:
        expected = {"bulk": "sliced", "async": "sequential"}.get(path, path)
        if record.pass_name == "backward" and (path == "bulk" or (path == "async" and record.path == "async")):
            expected = path
        assert record.path == ("local" if group_size == 1 else expected)
        if group_size > 1:
            assert record.reason == "forced by the configuration" if record.path == path else path in record.reason


def check_frozen(case, operands, context, group):
    for needs in (("weight", "bias"), ("x", "bias")):
        of_some = dataclasses.replace(case, needs=needs)
        assert_equal(overlapped(of_some, operands, context), reference(of_some, operands, group))


@in_context(2, config())
def test_ranks_that_measure_differently_choose_the_same_plan(group, context, trial):
    # Each rank alone would choose another plan; of the slowest ranks' times, bulk's and sliced m=2's are the shortest.
    times = [
        {"sequential": 10, "async": 90, "bulk": 40, "sliced m=1": 70, "sliced m=2": 55},
        {"sequential": 95, "async": 20, "bulk": 45, "sliced m=1": 30, "sliced m=2": 50},
    ]
    trial.of_rank = lambda rank, name: times[rank].get(name, 1000 + rank)
    forward, backward = records_of(Case(op=OPS[0], rows=8), group, context)
    assert (forward.path, forward.chunks_per_shard) == ("sliced", 2)
    assert forward.reason == "measured: sliced m=2 0.055 ms, sequential 0.095"
    assert (forward.measured_us, forward.calls) == (55, 1)
    assert forward.predicted_us >= 100
    assert backward.path == "bulk"
    assert backward.reason == "measured: bulk 0.045 ms, sliced m=2 0.055, async 0.090, sequential 0.095"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("winner", ["sequential", "async", "bulk", "sliced m=2", "sliced ring m=2"])
@in_context(3, config(plan=PlanConfig(margin=10.0)))
def test_whatever_wins_a_trial_gives_the_right_results(group, context, op, winner, trial):
    trial.of_rank = lambda rank, name: 1 if name == winner else 2
    forward, backward = records = records_of(Case(op=op, rows=13), group, context)
    path = winner.split()[0]
    assert forward.path == (path if path in ("sequential", "sliced") else "sequential")
    assert backward.path == (path if (path, op) != ("async", "linear_reduce_scatter") else "sequential")
    assert all(record.reason.startswith("measured: ") for record in records)


# Collectives cost what transfers do, which the slices hide; without a margin the model is sure.
SURE = dataclasses.replace(
    machine(link_gb_s=0.05), host=HostTimes(call_us=0.0), gemm=GemmRate(tflops=1e-3, memory_gb_s=1e3)
)


@pytest.mark.parametrize(("model", "how"), [(SURE, {"margin": 0.0}), (machine(), {"measure": "never"})])
@in_context(2, lambda how: config(plan=PlanConfig(**how)))
def test_clear_predictions_and_measure_never_run_no_trial(group, context, model, trial):
    trial.of_rank = refuse
    for record in records_of(Case(op=OPS[1], rows=64, N=64), group, context, model):
        assert record.reason.startswith("predicted: ")
        assert record.predicted_us is not None
        assert record.measured_us is None


@in_context(2, config(plan=PlanConfig(measure="never")))
def test_without_a_measurement_the_assumed_machine_decides(group, context):
    context.planner.default_reason = None
    check_linear(Case(op=OPS[0], rows=8), group, context)
    assert not context.planner.machines
    for record in context.report():
        assert record.reason.startswith("predicted from assumed figures: sequential")


@on_ranks(2)
def test_different_problems_raise_before_anything_is_measured(group, device, trial):
    trial.of_rank = refuse
    context = plan_by_cost(OverlapContext(group, config(transport=TransportConfig(timeout_s=5.0))))
    K = 4 + group.rank()
    with pytest.raises(ShapeError, match="do not agree"):
        ops.all_gather_linear(torch.zeros(4, 1, K), torch.zeros(4, K), context=context)
    assert not context.is_usable


def run_out_of_memory():
    raise torch.OutOfMemoryError("no memory. More words.")


@in_context(2, config())
def test_a_rank_without_memory_for_a_trial_lets_the_model_decide(group, context):
    plan_by_cost(context)
    if group.rank() == 1:
        together = context.consensus.make_together
        context.consensus.make_together = lambda make, topic: together(run_out_of_memory, topic)
    check_linear(Case(op=OPS[0], rows=8), group, context)
    for record in agreed(context):
        assert record.reason.startswith("predicted: sequential")
        assert record.reason.endswith("not measured: group rank 1: no memory")


@pytest.fixture
def given_to_trials(monkeypatch):
    """By thread: where operands of trials lie."""
    found, draw = defaultdict(set), Scratch.draw

    def noted(scratch, *shape):
        operand = draw(scratch, *shape)
        found[threading.get_ident()].add(operand.data_ptr())
        return operand

    monkeypatch.setattr(Scratch, "draw", noted)
    return found


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("op", LINEARS)
@pytest.mark.parametrize(("rows", "N", "K"), [(8, 8, 6), (8, 8, 8), (4, 8, 8), (3, 8, 16)])
@in_context(2, config())
def test_trials_read_the_operands_of_their_call(group, context, op, rows, N, K, given_to_trials):
    """Operands of their own raised the peak of a step's memory. Where sizes are equal, one may stand for another."""
    plan_by_cost(context)
    case = Case(op=op, rows=rows, batch=2, N=N, K=K, has_bias=False)
    given, expected = drawn(case, group)
    leaves = given.copies()
    assert_equal(run_on(case, leaves, getattr(ops, op), context=context), expected)
    assert torch.equal(leaves.x, given.x)
    assert torch.equal(leaves.weight, given.weight)
    assert torch.equal(leaves.grad_y, given.copies().grad_y)
    assert {leaves.x.data_ptr(), leaves.weight.data_ptr()} <= set().union(*given_to_trials.values())
    timed = [record for record in agreed(context) if record.path != "local"]
    assert timed
    assert all(record.reason.startswith("measured") for record in timed)
    kept = weakref.ref(leaves.x)
    del leaves
    assert kept() is None


def try_three_ways(context, rehearse=lambda problem, context: lambda prepared: None, m=(1, 2, 4)):
    """What a trial of direct schedules with so many chunks finds; by default nothing is run."""
    problem = layer_problem("8b.qkv", 8, dtype="float32", needs="")
    plans = [PassPlan("sliced", "", Algorithm.DIRECT, each, keep_gathered_input=False) for each in m]
    return problem, plans, run_trial(rehearse, context, problem, plans)


def out_of_memory_in(name, ranks):
    """Makes what runs plans, where the one of that name runs out of memory on those ranks."""

    def rehearse(problem, context):
        def run(prepared):
            if prepared.plan.name == name and context.group_rank in ranks:
                run_out_of_memory()

        return run

    return rehearse


OUT_OF_MEMORY = {"sliced m=1": 100.0, "sliced m=2": 90.0}


@in_context(2, config())
def test_a_way_that_runs_out_of_memory_everywhere_is_left_out(group, context, trial):
    """It became the user's error."""
    trial.of_rank = lambda rank, name: OUT_OF_MEMORY.get(name, 1.0)
    rehearse = out_of_memory_in("sliced m=4", (0, 1))
    problem, plans, found = try_three_ways(context, rehearse)
    assert try_three_ways(context, rehearse, m=(4,))[2] == "every plan ran out of memory"
    assert found.us == [100.0, 90.0, math.inf]
    reason = choose_measured(problem, plans, found).reason
    assert reason == "measured: sliced m=2 0.090 ms, sliced m=1 0.100, sliced m=4 out of memory"


@on_ranks(2)
def test_a_way_that_runs_out_of_memory_on_one_rank_is_named(group, device, trial):
    """The others waited for what it had not sent."""
    context = OverlapContext(group, config())
    words = "sliced m=4 was tried, and ran out of memory on some ranks only: group rank 1"
    with pytest.raises(TransportError, match=words):
        try_three_ways(context, out_of_memory_in("sliced m=4", (1,)))
    assert not context.is_usable


@in_context(2, config("sliced", record=True, plan=PlanConfig(measure="always")))
def test_a_trial_is_neither_counted_nor_recorded_and_logged_once(group, context, trial, logged):
    trial.of_rank = lambda rank, name: 1 + len(name)
    plan_by_cost(context)
    case = Case(op=OPS[0], rows=8)
    operands = draw_own(case, group)
    for _ in range(2):
        overlapped(case, operands, context)
    assert [record.calls for record in context.report()] == [2, 2]
    assert {interval.call for interval in context.recorder.intervals()} == {1, 2, 3, 4}


@pytest.fixture
def logged(caplog):
    """Afterwards: each of two trials once, by one rank."""
    caplog.set_level(logging.INFO, logger="commfuse_megatron")
    yield
    lines = [entry.getMessage() for entry in caplog.get_records("call") if "measured: " in entry.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith("all_gather_linear fprop S=8 ")


@in_context(2, config(plan=PlanConfig(margin=10.0)))
def test_lengths_that_change_always_are_not_timed_one_by_one(group, context, trial):
    trial.of_rank = lambda rank, name: 1 if name == "sliced m=2" else 2
    plan_by_cost(context)
    for rows in (200, 204, 190, 180, 201, *range(300, 3000, 100), 4):
        operands = draw_own(Case(op=OPS[1], rows=rows, batch=1), group)
        with torch.no_grad():
            ops.linear_reduce_scatter(operands.x, operands.weight, context=context)
    records = agreed(context)
    reasons = {record.M: record.reason for record in records}
    assert reasons[200].startswith("measured: sliced m=2")
    assert reasons[204] == f"as for M=200, {reasons[200]}"
    assert reasons[190].startswith("as for M=200, ")
    assert reasons[180].startswith("as for M=200, ")
    assert reasons[201].startswith("measured: ")  # uneven rows are another matter
    trials = [reason for reason in reasons.values() if reason.startswith("measured: ")]
    assert len(trials) == 1 + 8  # of uneven and of even rows
    assert reasons[4].startswith("predicted: ")
    assert all(record.path == "sliced" for record in records[:5])


@in_context(2, config("sliced", "direct", 1, transport=TransportConfig(max_buffer_mib=1)))
def test_buffers_of_earlier_problems_count(group, context):
    # 16 KiB, 256 KiB and 1 MiB gathered, then another operation's.
    sizes = [{"op": OPS[0], "K": K} for K in (64, 1024, 4096)]
    for size in (*sizes, {"op": OPS[1], "N": 256}):
        operands = draw_own(Case(rows=64, batch=1, **size), group)
        with torch.no_grad():
            getattr(ops, size["op"])(operands.x, operands.weight, context=context)
    assert context.buffer_bytes <= 1 << 20
    records = context.report()
    assert [record.path for record in records] == ["sliced", "sliced", "sliced", "sequential"]
    assert "more than transport.max_buffer_mib = 1" in records[-1].reason


@in_context(3, config())
def test_calibration_gives_all_ranks_the_same_machine(group, context):
    timings = calibrate(context, torch.float32, Stopwatch(context.device))
    assert not context.report()
    assert set(context.consensus.exchange(repr(timings), topic="the machine")) == {repr(timings)}
    model = timings.machine(Traits(transport="gloo"), 4)
    assert 0 < model.gemm.tflops < 1e3
    assert model.link.bandwidth_gb_s > 0
    assert model.collective.bandwidth_gb_s > 0


@in_context(2, config())
def test_a_context_that_plans_by_cost_calibrates_once(group, context):
    context.planner.default_reason = None
    for seed, op in enumerate(OPS):
        check_linear(Case(op=op, rows=8, seed=seed), group, context)
    assert list(context.planner.machines) == ["float32"]
    assert all(record.reason.split(":")[0] in ("predicted", "measured") for record in agreed(context))


@in_context(2, config())
def test_who_may_still_win_is_timed_more_often(group, context, trial):
    """On every rank the same, though each finds other times."""
    times = [{"sliced m=1": 100.0, "sliced m=2": 103.0, "sliced m=4": 120.0}, {"sliced m=1": 99.0, "sliced m=2": 80.0}]
    trial.of_rank = lambda rank, name: times[rank].get(name, 1.0)
    assert try_three_ways(context)[2].us == [100.0, 103.0, 120.0]
    bursts = trial.names[group.rank()]
    assert [bursts.count(f"sliced m={m}") for m in (1, 2, 4)] == [13, 13, 5]
    assert bursts[:6] == [f"sliced m={m}" for m in (1, 2, 4, 2, 4, 1)]


@in_context(2, config())
def test_who_is_out_does_not_win_on_a_device_grown_slower(group, context, trial):
    times = {
        "sliced m=1": [100.0] * 5 + [150.0] * 8, "sliced m=2": [101.0] * 5 + [160.0] * 8, "sliced m=4": [120.0] * 5,
    }  # fmt: skip
    trial.of_rank = lambda rank, name: times[name][trial.names[rank].count(name) - 1]
    assert try_three_ways(context)[2].us == [150.0, 160.0, 180.0]


@in_context(2, config())
def test_a_trial_says_how_well_its_rounds_repeat(group, context, trial):
    """Clocks that drift slow all candidates of a round, and say nothing of which is faster."""
    drift = [1 + 0.05 * (number % 4) for number in range(13)]

    def found(noise):
        trial.names.clear()
        noises = {"sliced m=1": [0.0] * 13, "sliced m=2": noise, "sliced m=4": [0.0] * 13}
        trial.of_rank = lambda rank, name: 100.0 * (drift[at := trial.names[rank].count(name) - 1] + noises[name][at])
        return try_three_ways(context)[2].tie

    assert found([0.0] * 13) == 0.0
    assert 0.02 < found([0.05, -0.05, 0.0] * 4 + [0.0]) < 0.06
    assert found([0.5] + [0.0] * 12) == 0.0, "one round that was disturbed"


@in_context(3, config())
def test_a_reason_of_one_rank_is_one_of_all(group, context):
    is_odd = group.rank() == 1
    reasons = [
        context.consensus.first_reason("a", "it is not installed" if is_odd else None),
        context.consensus.first_reason("a", None), context.consensus.first_reason("b", None),
    ]  # fmt: skip
    said = "it is not installed" if is_odd else "group rank 1: it is not installed"
    assert reasons == [said, said, None]
