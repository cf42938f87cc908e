"""Predicted times: what must hold of any machine, and the clear cases on known ones."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import PlanConfig
from commfuse_megatron.plan.candidates import list_candidates
from commfuse_megatron.plan.choose import choose_predicted, predict, select_for_trial
from commfuse_megatron.plan.cost_model import is_link_slow, predict_us
from commfuse_megatron.plan.machine import (
    Channel,
    GemmRate,
    HostTimes,
    MachineModel,
    Timings,
    Traits,
    assumed_machine,
    fit_channel,
)
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.schedule import Algorithm, closed_form_us
from tests.harness.problems import LAYERS, layer_problem

BOTH = "input+weight"
COPY_ENGINE = assumed_machine(Traits(transport="copy_engine", adds_in_epilogue=True, replays=True), "bfloat16")
NVLINK_NCCL = assumed_machine(
    Traits(transport="nccl", transfer_sms=20, regains_sms=True), "bfloat16", is_link_slow=False
)
SLOW_LINK = assumed_machine(Traits(transport="nccl", transfer_sms=4), "bfloat16")
MACHINES = {"copy engine": COPY_ENGINE, "nccl": NVLINK_NCCL, "slow": SLOW_LINK}
FREE_HOST = HostTimes(call_us=0, gemm_us=0, transfer_us=0, collective_us=0, small_kernel_us=0, autograd_us=0)


def plan(path, m=1, algorithm=Algorithm.DIRECT, *, keeps=False) -> PassPlan:
    return PassPlan(path, "", algorithm, m, keep_gathered_input=keeps)


def choice(problem, machine) -> PassPlan:
    candidates = list_candidates(problem, OverlapConfig(), is_link_slow=is_link_slow(problem, machine))
    return choose_predicted(predict(problem, candidates, machine), machine)


@pytest.mark.parametrize("machine", MACHINES)
@given(
    st.sampled_from(sorted(LAYERS)),
    st.sampled_from([2, 3, 4]),
    st.integers(0, 600),
    st.sampled_from(["", "input", "weight", BOTH]),
)
@settings(max_examples=50, deadline=None)
def test_larger_problems_take_longer(machine, layer, group_size, rows, needs):
    smaller, larger = (layer_problem(layer, 8 * n * group_size, group_size, needs) for n in (rows, rows + 40))
    machine = dataclasses.replace(MACHINES[machine], host=FREE_HOST, replay=FREE_HOST)
    for candidate in list_candidates(larger, OverlapConfig()).plans:
        few, many = (predict_us(problem, candidate, machine) for problem in (smaller, larger))
        assert 0 <= few <= many * (1 + 1e-9), candidate.name


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([0, 4, 20, 131]))
def test_gemms_take_longer_when_larger_or_on_fewer_sms(M, N, K, idle_sms):
    rate = COPY_ENGINE.gemm
    alone = rate.time_us(M, N, K, 2)
    assert alone <= rate.time_us(M + 100, N, K, 2)
    assert alone <= rate.time_us(M, N + 100, K, 2)
    assert alone <= rate.time_us(M, N, K + 100, 2)
    assert alone <= rate.time_us(M, N, K, 2, idle_sms=idle_sms) + 1e-9
    assert rate.time_us(M, 0, K, 2) == 0


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("bandwidth_gb_s", [2.0, 20.0, 400.0])
def test_a_sliced_gather_takes_its_schedule_bound(group_size, m, algorithm, bandwidth_gb_s):
    problem = layer_problem("70b.qkv", 8192, group_size)
    machine = MachineModel(
        gemm=COPY_ENGINE.gemm, link=Channel(latency_us=0.0, bandwidth_gb_s=bandwidth_gb_s),
        collective=COPY_ENGINE.collective, traits=COPY_ENGINE.traits, source="test", host=FREE_HOST, replay=FREE_HOST,
    )  # fmt: skip
    slices = group_size * m
    compute_us = slices * machine.gemm.time_us(8192 // slices, problem.N, problem.K, 2)
    transfer_us = (group_size - 1) * machine.link.time_us(problem.shard_bytes)
    expected = closed_form_us(compute_us, transfer_us, group_size, m)
    assert predict_us(problem, plan("sliced", m, algorithm), machine) == pytest.approx(expected)


def test_with_a_free_link_overlap_costs_no_more_than_the_gemms():
    free = Channel(latency_us=0.0, bandwidth_gb_s=1e9)
    machine = dataclasses.replace(COPY_ENGINE, link=free, collective=free, host=FREE_HOST, replay=FREE_HOST)
    forward, backward = layer_problem("70b.qkv", 8192), layer_problem("70b.qkv", 8192, needs=BOTH)
    gemm_us = machine.gemm.time_us(8192, forward.N, forward.K, 2)
    assert predict_us(forward, plan("sequential"), machine) == pytest.approx(gemm_us, rel=1e-3)
    for path in ("sequential", "async", "bulk", "sliced"):
        assert predict_us(backward, plan(path), machine) == pytest.approx(2 * gemm_us, rel=0.1)


@pytest.mark.parametrize(("machine", "tokens"), [("nccl", 64), ("slow", 8)])
@pytest.mark.parametrize("layer", LAYERS)
def test_decode_stays_sequential(machine, layer, tokens):
    assert choice(layer_problem(layer, tokens), MACHINES[machine]).path == "sequential"


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("layer", ["8b.qkv", "8b.proj", "70b.proj"])
def test_decode_is_timed_where_both_ways_take_little_host_time(layer, group_size):
    problem = layer_problem(layer, 8 * group_size, group_size)
    candidates = predict(problem, list_candidates(problem, OverlapConfig(), with_rings=False), COPY_ENGINE)
    assert {"sequential", "sliced"} <= {plan.path for plan in select_for_trial(candidates, PlanConfig())}


@pytest.mark.parametrize("layer", ["70b.qkv", "70b.proj", "70b.fc2", "70b.fc1"])
@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_large_layers_overlap_over_nvlink(layer, group_size):
    for needs, paths in (("", {"sliced"}), (BOTH, {"sliced", "bulk"})):
        found = choice(layer_problem(layer, 8192, group_size, needs), COPY_ENGINE)
        assert found.path in paths, found.reason


@pytest.mark.parametrize("layer", ["8b.proj", "70b.proj"])
def test_a_ring_issued_step_by_step_is_not_thought_fast(layer):
    """Of four ranks a ring with two chunks takes 0.8 ms of host time, and a replayed direct schedule 0.25."""
    assert choice(layer_problem(layer, 8192, 4), COPY_ENGINE).algorithm is Algorithm.DIRECT


def test_a_slow_link_wants_fine_chunks():
    problem = layer_problem("70b.fc2", 8192)
    assert is_link_slow(problem, SLOW_LINK)
    assert not is_link_slow(problem, COPY_ENGINE)
    found = choice(problem, SLOW_LINK)
    assert found.path == "sliced"
    assert found.chunks_per_shard >= 4
    # 2 x H200 through host memory, one lane, m=8: 3.538 ms, sequential 5.175.
    assert found.predicted_us == pytest.approx(3538, rel=0.15)
    assert predict_us(problem, plan("sequential"), SLOW_LINK) == pytest.approx(5175, rel=0.15)


@pytest.mark.parametrize(("layer", "path", "measured_us"), [
    ("70b.qkv", "sliced", 895), ("70b.qkv", "sequential", 1167), ("70b.proj", "sliced", 764),
    ("70b.proj", "sequential", 1027), ("70b.fc2", "sliced", 2670), ("70b.fc2", "sequential", 2910),
])  # fmt: skip
def test_assumed_figures_come_near_what_was_measured(layer, path, measured_us):
    # 2 x H200, copy engine, November 2026; the assumed rate lies between that of H100 and H200.
    assert predict_us(layer_problem(layer, 8192), plan(path), COPY_ENGINE) == pytest.approx(measured_us, rel=0.2)


def test_without_a_gemm_that_leaves_room_nothing_is_won():
    traits = Traits(transport="nccl", transfer_sms=20, overlaps=False)
    machine = assumed_machine(traits, "float32", is_link_slow=False)
    problem = layer_problem("70b.qkv", 8192, dtype="float32")
    transfer_us = machine.link.time_us(problem.shard_bytes)
    gemm_us = machine.gemm.time_us(8192, problem.N, problem.K, 4)
    assert predict_us(problem, plan("sliced"), machine) >= gemm_us + transfer_us
    for path in ("sliced", "bulk"):
        backward = dataclasses.replace(problem, pass_name="backward", needs=BOTH)
        assert predict_us(backward, plan(path), machine) >= 2 * gemm_us + 2 * transfer_us


def test_a_kept_input_is_not_gathered_again():
    problem = layer_problem("70b.qkv", 8192, needs=BOTH)
    for path in ("sequential", "async", "bulk", "sliced"):
        kept = predict_us(problem, plan(path, keeps=True), SLOW_LINK)
        assert kept < predict_us(problem, plan(path), SLOW_LINK)
    weight_alone = dataclasses.replace(problem, needs="weight")
    without_transfers = dataclasses.replace(SLOW_LINK, link=Channel(latency_us=0.0, bandwidth_gb_s=1e9))
    copy_us = SLOW_LINK.gemm.launch_us + SLOW_LINK.gemm.pass_us(2 * problem.shard_bytes)  # of the own rows
    assert predict_us(weight_alone, plan("sliced", keeps=True), SLOW_LINK) + copy_us == pytest.approx(
        predict_us(weight_alone, plan("sliced"), without_transfers), rel=1e-3
    )


@given(st.floats(0, 200), st.floats(0.5, 1000), st.integers(1, 1 << 16), st.integers(1 << 17, 1 << 27))
def test_a_channel_is_found_again(latency_us, bandwidth_gb_s, small, large):
    channel = Channel(latency_us=latency_us, bandwidth_gb_s=bandwidth_gb_s)
    times = channel.time_us(small), channel.time_us(large)
    found = fit_channel((small, large), times)
    assert found.time_us(large) == pytest.approx(times[1], rel=1e-6, abs=1e-6)
    if times[1] > times[0] * 1.001:
        assert found.latency_us == pytest.approx(latency_us, rel=0.05, abs=1e-3 * times[1])


def test_noise_gives_no_negative_latency():
    for times in ((10.0, 5.0), (1.0, 100.0), (0.0, 0.0)):
        found = fit_channel((1000, 2000), times)
        assert found.latency_us >= 0
        assert found.bandwidth_gb_s > 0


def test_a_calibrated_machine_predicts_its_calibration():
    timings = Timings(
        gemm_size=4096, gemm_us=200.0, copy_bytes=64 << 20, copy_us=50.0, message_bytes=(1 << 18, 1 << 24),
        link_us=(10.0, 60.0), collective_bytes=(1 << 18, 1 << 24), collective_us=(30.0, 100.0),
    )  # fmt: skip
    machine = timings.machine(COPY_ENGINE.traits, 2)
    assert machine.source == "measured"
    assert machine.gemm.time_us(4096, 4096, 4096, 2) == pytest.approx(200.0)
    assert machine.gemm.pass_us(2 * (64 << 20)) == pytest.approx(50.0)
    assert machine.link.time_us(1 << 24) == pytest.approx(60.0)
    assert machine.collective.time_us(1 << 18) == pytest.approx(30.0)
    assert isinstance(machine.gemm, GemmRate)


@pytest.mark.parametrize("path", ["bulk", "sliced"])
def test_own_gemms_add_what_arrived_only_where_it_is_covered(path):
    """Without a weight gradient nothing is computed between: bulk was predicted as if the last GEMM added it still."""
    stepped = dataclasses.replace(
        COPY_ENGINE, host=FREE_HOST, traits=Traits(transport="copy_engine", adds_in_epilogue=True)
    )
    apart = dataclasses.replace(stepped, traits=Traits(transport="copy_engine"))
    for needs, adds in (("input", False), (BOTH, path == "bulk")):
        problem = layer_problem("70b.qkv", 8192, needs=needs)
        times = [predict_us(problem, plan(path, 1), machine) for machine in (stepped, apart)]
        assert (times[0] != times[1]) == adds
