"""Plans of a context: the default, forced paths, trials and calibration over gloo with times that a test makes up."""

import dataclasses
import logging
import math

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import LinearConfig, PassConfig, PlanConfig, TransportConfig, WgradConfig
from commfuse_megatron.errors import ShapeError, TransportError
from commfuse_megatron.ops.trial import run_trial
from commfuse_megatron.plan.choose import choose_measured
from commfuse_megatron.plan.machine import Channel, GemmRate, HostTimes, MachineModel, Traits
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.runtime.calibrate import calibrate
from commfuse_megatron.runtime.stopwatch import Stopwatch
from commfuse_megatron.schedule import Algorithm
from tests.harness import run_threads
from tests.harness.linear_cases import OPS, Case, assert_equal, check_linear, draw, overlapped, reference
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

    def burst_us(self, call, calls, lead=None):
        call()
        prepared = call.args[0]
        return float(self.of_rank(prepared.context.group_rank, prepared.plan.name))


def records_of(group_size, case, body_config, monkeypatch, of_rank, model=None):
    """The report of every rank after one forward and backward pass, whose results are compared."""
    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(of_rank))

    def body(group, device):
        with OverlapContext(group, body_config) as context:
            plan_by_cost(context, model)
            operands = draw(case, group.rank(), group.size(), device)
            before = torch.get_rng_state()
            found = overlapped(case, operands, context)
            assert torch.equal(torch.get_rng_state(), before)
            assert_equal(found, reference(case, operands, group))
            return context.report()

    return run_threads(group_size, body)


def test_backward_passes_are_timed_as_the_engine_calls_them(monkeypatch):
    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(lambda rank, name: 1.0))

    def body(group, device):
        tasks = {}

        def rehearse(problem, context):
            return lambda prepared: tasks.setdefault(problem.pass_name, torch._C._current_graph_task_id())

        plan = PassPlan("sliced", "", Algorithm.DIRECT, 1, keep_gathered_input=False)
        with OverlapContext(group, config()) as context:
            for needs in ("", "input+weight"):
                problem = layer_problem("8b.qkv", 8, dtype="float32", needs=needs)
                assert run_trial(rehearse, context, problem, [plan]) == [1.0]
        return tasks

    for tasks in run_threads(2, body):
        assert tasks["fprop"] == -1  # no graph is being executed
        assert tasks["backward"] != -1


@pytest.mark.parametrize("op", OPS)
def test_on_the_cpu_the_default_is_sliced_and_says_so(op):
    def body(group, device):
        with OverlapContext(group, config()) as context:
            case = Case(op=op, rows=8)
            overlapped(case, draw(case, group.rank(), group.size(), device), context)
            return context.report()

    for records in run_threads(2, body):
        for record in records:
            assert (record.path, record.algorithm, record.chunks_per_shard) == ("sliced", "direct", 1)
            assert record.reason == "default on the CPU: correctness, not speed"
            assert record.predicted_us is record.measured_us is None


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("path", ["async", "bulk", "sequential", "sliced"])
@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("keeps", [False, True])
def test_forced_paths_equal_the_reference_with_all_gradients(op, path, group_size, keeps):
    def body(group, device):
        with OverlapContext(group, config(path, keeps=keeps)) as context:
            for rows in (6, 7, 1, 12):
                case = Case(op=op, rows=rows, seed=rows)
                operands = draw(case, group.rank(), group.size(), device)
                assert_equal(overlapped(case, operands, context), reference(case, operands, group))
                check_frozen(case, operands, context, group)
            return context.report()

    records = run_threads(group_size, body)[0]
    is_async = path == "async" and op == "all_gather_linear" and group_size > 1
    assert any(record.path == "async" for record in records) == is_async
    for record in records:
        expected = {"bulk": "sliced", "async": "sequential"}.get(path, path)
        if record.pass_name == "backward" and (path == "bulk" or (path == "async" and record.path == "async")):
            expected = path
        assert record.path == ("local" if group_size == 1 else expected)
        if group_size > 1 and record.path == path:
            assert record.reason == "forced by the configuration"
        elif group_size > 1:
            assert path in record.reason


def check_frozen(case, operands, context, group):
    for frozen in ("x", "weight"):
        found = []
        for call, where in (
            (getattr(ops, case.op), {"context": context}),
            (getattr(ops.reference, case.op), {"group": group}),
        ):
            leaves = operands.copies()
            getattr(leaves, frozen).requires_grad_(False)
            extra = {"total_rows": case.rows} if case.op == "all_gather_linear" else {}
            call(leaves.x, leaves.weight, leaves.bias, **extra, **where).backward(operands.grad_y)
            found.append({name: getattr(leaves, name).grad for name in ("x", "weight", "bias")})
        assert_equal(*found)


def test_ranks_that_measure_differently_choose_the_same_plan(monkeypatch):
    # Each rank alone would choose another plan; of the slowest ranks' times, bulk's and sliced m=2's are the shortest.
    times = [
        {"sequential": 10, "async": 90, "bulk": 40, "sliced m=1": 70, "sliced m=2": 55},
        {"sequential": 95, "async": 20, "bulk": 45, "sliced m=1": 30, "sliced m=2": 50},
    ]
    found = records_of(
        2, Case(op=OPS[0], rows=8), config(), monkeypatch, lambda rank, name: times[rank].get(name, 1000 + rank)
    )
    assert found[0] == found[1]
    forward, backward = found[0]
    assert (forward.path, forward.chunks_per_shard) == ("sliced", 2)
    assert forward.reason == "measured: sliced m=2 0.055 ms, sequential 0.095"
    assert (forward.measured_us, forward.calls) == (55, 1)
    assert forward.predicted_us >= 100
    assert backward.path == "bulk"
    assert backward.reason == "measured: bulk 0.045 ms, sliced m=2 0.055, async 0.090, sequential 0.095"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("winner", ["sequential", "async", "bulk", "sliced m=2", "sliced ring m=2"])
def test_whatever_wins_a_trial_gives_the_right_results(op, winner, monkeypatch):
    found = records_of(
        3,
        Case(op=op, rows=13),
        config(plan=PlanConfig(margin=10.0)),
        monkeypatch,
        lambda rank, name: 1 if name == winner else 2,
    )
    assert found[0] == found[1] == found[2]
    forward, backward = found[0]
    path = winner.split()[0]
    assert forward.path == (path if path in ("sequential", "sliced") else "sequential")
    assert backward.path == (path if (path, op) != ("async", "linear_reduce_scatter") else "sequential")
    assert all(record.reason.startswith("measured: ") for record in found[0])


def test_clear_predictions_and_measure_never_run_no_trial(monkeypatch):
    def refuse(rank, name):
        raise AssertionError("nothing was to be timed")

    case = Case(op=OPS[1], rows=64, N=64)
    # Collectives cost what transfers do, which the slices hide; with this margin the model is sure.
    exact = config(plan=PlanConfig(margin=0.0))
    rate = GemmRate(tflops=1e-3, memory_gb_s=1e3)
    free_host = dataclasses.replace(machine(link_gb_s=0.05), host=HostTimes(call_us=0.0), gemm=rate)
    for model, chosen in ((free_host, exact), (machine(), config(plan=PlanConfig(measure="never")))):
        for record in records_of(2, case, chosen, monkeypatch, refuse, model)[0]:
            assert record.reason.startswith("predicted: ")
            assert record.predicted_us is not None
            assert record.measured_us is None


def test_without_a_measurement_the_assumed_machine_decides():
    def body(group, device):
        with OverlapContext(group, config(plan=PlanConfig(measure="never"))) as context:
            context.planner.default_reason = None
            check_linear(Case(op=OPS[0], rows=8), group, context)
            assert not context.planner.machines
            return context.report()

    for record in run_threads(2, body)[1]:
        assert record.reason.startswith("predicted from assumed figures: sequential")


def test_different_problems_raise_before_anything_is_measured(monkeypatch):
    def of_rank(rank, name):
        raise AssertionError("nothing was to be timed")

    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(of_rank))

    def body(group, device):
        context = OverlapContext(group, config(transport=TransportConfig(timeout_s=5.0)))
        plan_by_cost(context)
        K = 4 + group.rank()
        with pytest.raises(ShapeError, match="do not agree"):
            ops.all_gather_linear(torch.zeros(4, 1, K), torch.zeros(4, K), context=context)
        assert not context.is_usable

    run_threads(2, body)


def run_out_of_memory():
    raise torch.OutOfMemoryError("no memory. More words.")


def test_a_rank_without_memory_for_a_trial_lets_the_model_decide(monkeypatch):
    def body(group, device):
        with OverlapContext(group, config()) as context:
            plan_by_cost(context)
            if group.rank() == 1:
                together = context.consensus.make_together
                context.consensus.make_together = lambda make, topic: together(run_out_of_memory, topic)
            check_linear(Case(op=OPS[0], rows=8), group, context)
            return context.report()

    found = run_threads(2, body)
    assert found[0] == found[1]
    for record in found[0]:
        assert record.reason.startswith("predicted: sequential")
        assert record.reason.endswith("not measured: group rank 1: no memory")


def try_three_ways(context, rehearse=lambda problem, context: lambda prepared: None, m=(1, 2, 4)):
    """What a trial of direct schedules with so many chunks finds; by default nothing is run."""
    problem = layer_problem("8b.qkv", 8, dtype="float32", needs="")
    plans = [PassPlan("sliced", "", Algorithm.DIRECT, each, keep_gathered_input=False) for each in m]
    return plans, run_trial(rehearse, context, problem, plans)


def out_of_memory_in(name, ranks):
    """Makes what runs plans, where the one of that name runs out of memory on those ranks."""

    def rehearse(problem, context):
        def run(prepared):
            if prepared.plan.name == name and context.group_rank in ranks:
                run_out_of_memory()

        return run

    return rehearse


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_way_that_runs_out_of_memory_is_left_out_or_named(monkeypatch, ranks):
    """It became the user's error; and of one rank alone, the others waited for what it had not sent."""
    times = {"sliced m=1": 100.0, "sliced m=2": 90.0}
    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(lambda rank, name: times.get(name, 1.0)))

    def body(group, device):
        context = OverlapContext(group, config())
        rehearse = out_of_memory_in("sliced m=4", ranks)
        if ranks == (1,):
            with pytest.raises(
                TransportError, match="sliced m=4 was tried, and ran out of memory on some ranks only: group rank 1"
            ):
                try_three_ways(context, rehearse)
            assert not context.is_usable
            return None
        plans, found = try_three_ways(context, rehearse)
        assert try_three_ways(context, rehearse, m=(4,))[1] == "every plan ran out of memory"
        context.close()
        return found, choose_measured(plans, found).reason

    results = run_threads(2, body)
    assert results[0] == results[1]
    if ranks == (0, 1):
        found, reason = results[0]
        assert found == [100.0, 90.0, math.inf]
        assert reason == "measured: sliced m=2 0.090 ms, sliced m=1 0.100, sliced m=4 out of memory"


def test_a_trial_is_neither_counted_nor_recorded_and_logged_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="commfuse_megatron")
    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(lambda rank, name: 1 + len(name)))

    def body(group, device):
        with OverlapContext(group, config("sliced", record=True, plan=PlanConfig(measure="always"))) as context:
            plan_by_cost(context)
            case = Case(op=OPS[0], rows=8)
            operands = draw(case, group.rank(), group.size(), device)
            for _ in range(2):
                overlapped(case, operands, context)
            calls = {interval.call for interval in context.recorder.intervals()}
            return context.report(), calls

    ((records, calls), _) = run_threads(2, body)
    assert [record.calls for record in records] == [2, 2]
    assert calls == {1, 2, 3, 4}
    lines = [entry.getMessage() for entry in caplog.records if "measured: " in entry.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith("all_gather_linear fprop S=8 ")


def test_lengths_that_change_always_are_not_timed_one_by_one(monkeypatch):
    timed = []

    def of_rank(rank, name):
        if rank == 0:
            timed.append(name)
        return 1 if name == "sliced m=2" else 2

    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(of_rank))
    rows_of_calls = [200, 204, 190, 180, 201, *range(300, 3000, 100), 4]

    def body(group, device):
        with OverlapContext(group, config(plan=PlanConfig(margin=10.0))) as context, torch.no_grad():
            plan_by_cost(context)
            for rows in rows_of_calls:
                operands = draw(Case(op=OPS[1], rows=rows, batch=1), group.rank(), group.size(), device)
                ops.linear_reduce_scatter(operands.x, operands.weight, context=context)
            return context.report()

    found = run_threads(2, body)
    assert found[0] == found[1]
    reasons = {record.M: record.reason for record in found[0]}
    assert reasons[200].startswith("measured: sliced m=2")
    assert reasons[204] == f"as for M=200, {reasons[200]}"
    assert reasons[190].startswith("as for M=200, ")
    assert reasons[180].startswith("as for M=200, ")
    assert reasons[201].startswith("measured: ")  # uneven rows are another matter
    trials = [reason for reason in reasons.values() if reason.startswith("measured: ")]
    assert len(trials) == 1 + 8  # of uneven and of even rows
    assert reasons[4].startswith("predicted: ")
    assert all(record.path == "sliced" for record in found[0][:5])


def test_buffers_of_earlier_problems_count(monkeypatch):
    limit = config("sliced", "direct", 1, transport=TransportConfig(max_buffer_mib=1))

    def body(group, device):
        with OverlapContext(group, limit) as context:
            for K in (64, 1024, 4096):  # 16 KiB, 256 KiB and 1 MiB gathered
                case = Case(op=OPS[0], rows=64, batch=1, K=K)
                operands = draw(case, group.rank(), group.size(), device)
                with torch.no_grad():
                    ops.all_gather_linear(operands.x, operands.weight, context=context)
            case = Case(op=OPS[1], rows=64, batch=1, N=256)
            operands = draw(case, group.rank(), group.size(), device)
            with torch.no_grad():
                ops.linear_reduce_scatter(operands.x, operands.weight, context=context)
            assert context.buffer_bytes <= 1 << 20
            return context.report()

    records = run_threads(2, body)[0]
    assert [record.path for record in records] == ["sliced", "sliced", "sliced", "sequential"]
    assert "more than transport.max_buffer_mib = 1" in records[-1].reason


def test_calibration_gives_all_ranks_the_same_machine():
    def body(group, device):
        with OverlapContext(group, config()) as context:
            timings = calibrate(context, torch.float32, Stopwatch(device))
            assert not context.report()
            return timings

    found = run_threads(3, body)
    assert found[0] == found[1] == found[2]
    model = found[0].machine(Traits(transport="gloo"), 4)
    assert 0 < model.gemm.tflops < 1e3
    assert model.link.bandwidth_gb_s > 0
    assert model.collective.bandwidth_gb_s > 0


def test_a_context_that_plans_by_cost_calibrates_once():
    def body(group, device):
        with OverlapContext(group, config()) as context:
            context.planner.default_reason = None
            for seed, op in enumerate(OPS):
                check_linear(Case(op=op, rows=8, seed=seed), group, context)
            assert list(context.planner.machines) == ["float32"]
            return context.report()

    found = run_threads(2, body)
    assert found[0] == found[1]
    assert all(record.reason.split(":")[0] in ("predicted", "measured") for record in found[0])


def test_who_may_still_win_is_timed_more_often(monkeypatch):
    """On every rank the same, though each finds other times."""
    times = [{"sliced m=1": 100.0, "sliced m=2": 103.0, "sliced m=4": 120.0}, {"sliced m=1": 99.0, "sliced m=2": 80.0}]
    bursts = [[], []]

    def of_rank(rank, name):
        bursts[rank].append(name)
        return times[rank].get(name, 1.0)

    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(of_rank))

    def body(group, device):
        with OverlapContext(group, config()) as context:
            return try_three_ways(context)[1]

    assert run_threads(2, body) == [[100.0, 103.0, 120.0]] * 2
    for of_one_rank in bursts:
        assert [of_one_rank.count(f"sliced m={m}") for m in (1, 2, 4)] == [13, 13, 5]
        assert of_one_rank[:6] == [f"sliced m={m}" for m in (1, 2, 4, 2, 4, 1)]


def test_who_is_out_does_not_win_on_a_device_grown_slower(monkeypatch):
    times = {
        "sliced m=1": [100.0] * 5 + [150.0] * 8,
        "sliced m=2": [101.0] * 5 + [160.0] * 8,
        "sliced m=4": [120.0] * 5,
    }
    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(lambda rank, name: times[name, rank].pop(0)))
    times = {(name, rank): list(each) for name, each in times.items() for rank in range(2)}

    def body(group, device):
        with OverlapContext(group, config()) as context:
            return try_three_ways(context)[1]

    assert run_threads(2, body) == [[150.0, 160.0, 180.0]] * 2


def test_a_reason_of_one_rank_is_one_of_all():
    def body(group, device):
        with OverlapContext(group, config()) as context:
            here = "it is not installed" if group.rank() == 1 else None
            return [
                context.consensus.first_reason("a", here),
                context.consensus.first_reason("a", None),
                context.consensus.first_reason("b", None),
            ]

    first, second, third = run_threads(3, body)
    assert first == third == ["group rank 1: it is not installed"] * 2 + [None]
    assert second == ["it is not installed"] * 2 + [None]
