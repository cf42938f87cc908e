"""The dry-run keeps the closed form where costs are equal, follows costs where they are not, and finds deadlocks."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule import (
    Activity,
    Algorithm,
    Chunk,
    Collective,
    Interval,
    Receive,
    Schedule,
    Send,
    Simulation,
    schedule_bound_us,
    simulate,
)
from tests.harness.schedules import (
    build,
    change_step,
    change_transfer,
    drop,
    fewest_slots,
    schedules,
    transfer_at,
)

KINDS = [(c, a) for c in ("all_gather", "reduce_scatter") for a in ("ring", "direct")]
SIZES = {"group_size": st.integers(1, 16), "m": st.integers(1, 4)}
TIMES_US = st.integers(0, 200).map(lambda tenths: tenths / 10)


def run_equal(schedule: Schedule, gemm_us: float, wire_us: float, **options: bool) -> Simulation:
    return simulate(schedule, compute_us_per_chunk=gemm_us, transfer_us_per_chunk=wire_us, **options)


def bound_us(schedule: Schedule, gemm_us: float, wire_us: float) -> float:
    n, m = schedule.group_size, schedule.chunks_per_shard
    return schedule_bound_us(n * m * gemm_us, (n - 1) * m * wire_us, n, m)


def busy(simulation: Simulation, rank: int, activity: Activity) -> list[tuple[float, float]]:
    return [(i.start_us, i.end_us) for i in simulation.timelines[rank].intervals if i.activity is activity]


@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
@given(**SIZES, gemm_us=TIMES_US, wire_us=TIMES_US)
@settings(deadline=None, max_examples=50)
def test_equal_costs_give_the_closed_form(
    collective: str, algorithm: str, group_size: int, m: int, gemm_us: float, wire_us: float
) -> None:
    schedule = build(collective, algorithm, group_size, m)
    simulation = run_equal(schedule, gemm_us, wire_us)
    assert simulation.total_us == pytest.approx(bound_us(schedule, gemm_us, wire_us))
    if wire_us <= gemm_us:
        assert simulation.tail_us == 0
        assert simulation.exposed_comm_us == pytest.approx(0, abs=1e-9)


@given(
    n=st.integers(2, 64),
    gemm_us=st.floats(0, 1e6, allow_subnormal=False),
    wire_us=st.floats(0, 1e6, allow_subnormal=False),
)
def test_bound_with_one_chunk_is_a_first_step_and_the_slower_of_two(n: int, gemm_us: float, wire_us: float) -> None:
    expected = gemm_us / n + (n - 1) * max(gemm_us / n, wire_us / (n - 1))
    assert schedule_bound_us(gemm_us, wire_us, n) == pytest.approx(expected)


def test_bound_in_numbers() -> None:
    assert schedule_bound_us(100, 75, 4) == 100  # all hidden: T_m = T_c (1 - 1/4)
    assert schedule_bound_us(100, 80, 4) == 105
    assert schedule_bound_us(100, 80, 4, 2) == 100
    assert schedule_bound_us(100, 400, 4, 2) == 412.5
    assert schedule_bound_us(100, 400, 1, 2) == 100
    for wrong in [(-1.0, 1.0, 2, 1), (1.0, -1.0, 2, 1), (1.0, 1.0, 0, 1), (1.0, 1.0, 2, 0)]:
        with pytest.raises(ScheduleError, match="no bound for"):
            schedule_bound_us(*wrong)


@given(**SIZES, gemm_us=TIMES_US, wire_us=TIMES_US)
@settings(deadline=None, max_examples=50)
def test_ring_that_adds_in_the_epilogue_waits_for_its_addend(
    group_size: int, m: int, gemm_us: float, wire_us: float
) -> None:
    schedule = build("reduce_scatter", "ring", group_size, m)
    total_us = run_equal(schedule, gemm_us, wire_us, adds_in_epilogue=True).total_us
    compute_us, transfer_us = group_size * m * gemm_us, (group_size - 1) * m * wire_us
    if group_size == 1:
        expected_us = compute_us
    elif m == 1:
        expected_us = compute_us + transfer_us  # nothing is hidden
    else:
        expected_us = max(compute_us, transfer_us + 2 * gemm_us)
    assert total_us == pytest.approx(expected_us)


@given(schedule=schedules(max_group_size=8, max_chunks=3), gemm_us=TIMES_US, wire_us=TIMES_US)
@settings(deadline=None)
def test_reused_slots_may_delay_but_never_gain(schedule: Schedule, gemm_us: float, wire_us: float) -> None:
    total_us, least_us = run_equal(schedule, gemm_us, wire_us).total_us, bound_us(schedule, gemm_us, wire_us)
    assert total_us >= least_us - 1e-9
    # Receive slots are emptied in time even if they are as few as can be; send slots, as long as the GEMM is slower.
    if schedule.collective is Collective.ALL_GATHER or wire_us <= gemm_us or schedule.chunks_per_shard == 1:
        assert total_us == pytest.approx(least_us)


def test_two_send_slots_cost_time_when_the_wire_is_slower() -> None:
    schedule = build("reduce_scatter", "direct", 4, 4, num_send_slots=2)
    assert run_equal(schedule, 10, 13).total_us == pytest.approx(1.145 * bound_us(schedule, 10, 13), rel=1e-3)


@given(
    schedule=schedules(max_group_size=6, max_chunks=3),
    seed=st.integers(0, 1000),
    latency_us=st.integers(0, 9),
)
@settings(deadline=None)
def test_timelines_are_possible(schedule: Schedule, seed: int, latency_us: int) -> None:
    """With unequal costs: nothing overlaps on one stream or link, both ends agree, and waits fill the gaps."""

    def gemm_us(rank: int, chunk: Chunk) -> float:
        return float(hash((seed, rank, chunk.owner_rank, chunk.index)) % 17)

    def wire_us(from_rank: int, to_rank: int, chunk: Chunk) -> float:
        return float(hash((seed, from_rank, to_rank, chunk.owner_rank, chunk.index)) % 13)

    simulation = simulate(schedule, compute_us_per_chunk=gemm_us, transfer_us_per_chunk=wire_us, latency_us=latency_us)
    ends: dict[tuple[int, int, Chunk | None], set[tuple[float, float]]] = {}
    for rank, timeline in enumerate(simulation.timelines):
        program = schedule.programs[rank]
        for activity in (Activity.SEND, Activity.RECEIVE, Activity.COMPUTE):
            intervals = busy(simulation, rank, activity)
            assert all(before[1] <= after[0] for before, after in pairwise(intervals))
        stream = sorted(busy(simulation, rank, Activity.COMPUTE) + busy(simulation, rank, Activity.WAIT))
        assert [0.0, *(end for _, end in stream)] == [*(start for start, _ in stream), timeline.end_us]
        assert timeline.compute_us == sum(gemm_us(rank, step.compute.chunk) for step in program)
        assert timeline.end_us == timeline.compute_us + timeline.exposed_comm_us
        for i in timeline.intervals:
            if i.peer_rank is not None:
                pair = (rank, i.peer_rank) if i.activity is Activity.SEND else (i.peer_rank, rank)
                assert i.end_us - i.start_us == wire_us(*pair, i.chunk) + latency_us
                ends.setdefault((*pair, i.chunk), set()).add((i.start_us, i.end_us))
        computed = {i.step: (i.start_us, i.end_us) for i in timeline.intervals if i.activity is Activity.COMPUTE}
        received = {i.chunk: i.end_us for i in timeline.intervals if i.activity is Activity.RECEIVE}
        sent = {i.chunk: i.start_us for i in timeline.intervals if i.activity is Activity.SEND}
        for step in program:
            chunk = step.compute.chunk
            if schedule.collective is Collective.ALL_GATHER:
                assert computed[step.index][0] >= received.get(chunk, 0.0)
            elif chunk in sent:
                assert sent[chunk] >= max(computed[step.index][1], 0.0)
                if schedule.algorithm is Algorithm.RING:
                    assert sent[chunk] >= received.get(chunk, 0.0)
    assert all(len(pair) == 1 for pair in ends.values())
    assert simulation.total_us == max(t.end_us for t in simulation.timelines)


def test_a_small_timeline_in_full() -> None:
    """Two ranks, rank 1 twice as slow: rank 0's partial waits on the wire until rank 1 has issued its receive."""
    schedule = build("reduce_scatter", "direct", 2)
    simulation = simulate(
        schedule,
        compute_us_per_chunk=lambda rank, chunk: 10.0 * (1 + rank),
        transfer_us_per_chunk=lambda from_rank, to_rank, chunk: 3.0 + 4.0 * from_rank,
        latency_us=2.0,
    )
    assert simulation.timelines[0].intervals == (
        Interval(Activity.COMPUTE, 0, 0.0, 10.0, Chunk(1, 0)),
        Interval(Activity.COMPUTE, 1, 10.0, 20.0, Chunk(0, 0)),
        Interval(Activity.SEND, 1, 20.0, 25.0, Chunk(1, 0), 1),
        Interval(Activity.RECEIVE, 1, 20.0, 29.0, Chunk(0, 0), 1),
        Interval(Activity.WAIT, 1, 20.0, 29.0),
    )
    assert simulation.total_us == 40.0
    assert simulation.compute_us == 40.0
    assert simulation.exposed_comm_us == 0.0
    assert simulation.tail_us == 9.0
    assert simulation.timelines[0].tail_us == 9.0
    assert simulation.timelines[1].tail_us == 0.0
    names = [i.name for i in simulation.timelines[0].intervals]
    assert sorted(names) == ["compute 0.0", "compute 1.0", "receive 0.0 from 1", "send 1.0 to 1", "wait"]


def test_causal_attention_suits_direct_to_owner() -> None:
    """Query slice j of a causal mask costs 2j + 1: the ring passes every delay on, direct only waits for its own."""

    def causal_us(rank: int, chunk: Chunk) -> float:
        return 2.0 * chunk.owner_rank + 1

    total_us = {
        algorithm: simulate(
            build("reduce_scatter", algorithm, 8), compute_us_per_chunk=causal_us, transfer_us_per_chunk=1.0
        ).total_us
        for algorithm in ("ring", "direct")
    }
    assert total_us["direct"] >= 64
    assert total_us["direct"] < total_us["ring"]


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_one_slow_link_slows_what_uses_it(algorithm: str) -> None:
    schedule = build("all_gather", algorithm, 4)
    simulation = simulate(
        schedule,
        compute_us_per_chunk=10.0,
        transfer_us_per_chunk=lambda from_rank, to_rank, chunk: 50.0 if (from_rank, to_rank) == (2, 3) else 1.0,
    )
    slow = [
        i for i in simulation.timelines[3].intervals if i.activity is Activity.RECEIVE and i.end_us - i.start_us > 1
    ]
    assert len(slow) == (3 if algorithm == "ring" else 1)
    assert simulation.total_us == (160 if algorithm == "ring" else 80)


def test_one_rank_takes_its_own_time() -> None:
    simulation = run_equal(build("all_gather", "ring", 1, 3), 7, 100)
    assert simulation.total_us == 21
    assert {i.activity for i in simulation.timelines[0].intervals} == {Activity.COMPUTE}


def test_large_groups_are_fast_to_simulate() -> None:
    assert run_equal(build("reduce_scatter", "ring", 64, 4), 1, 1).total_us == 256


@pytest.mark.parametrize("wrong_us", [-1.0, math.nan, math.inf])
def test_costs_must_be_times(wrong_us: float) -> None:
    schedule = build("all_gather", "ring", 2)
    with pytest.raises(ScheduleError, match=r"compute_us_per_chunk of rank \d .* must be a time"):
        run_equal(schedule, wrong_us, 1)
    with pytest.raises(ScheduleError, match=r"transfer_us_per_chunk from \d to \d .* must be a time"):
        run_equal(schedule, 1, wrong_us)
    with pytest.raises(ScheduleError, match=r"latency_us .* must be a time"):
        simulate(schedule, compute_us_per_chunk=1, transfer_us_per_chunk=1, latency_us=wrong_us)


def test_a_send_that_nobody_receives_is_a_deadlock() -> None:
    broken = drop(build("reduce_scatter", "direct", 4), 2, 3, Receive)
    with pytest.raises(ScheduleError) as caught:
        run_equal(broken, 1, 1)
    head, _, grid = str(caught.value).partition("\n\n")
    assert "rank 3, step 3: deadlock, rank 2 has finished its program:" in head
    assert head.splitlines()[1:] == ["  rank 3, step 3: waits for rank 2 to receive chunk 2"]
    assert "|>" in grid


def test_ranks_that_wait_in_a_circle_are_a_deadlock() -> None:
    """Every rank sends in one step and receives in the next: without buffers on the way, nobody gets to receive."""
    schedule = build("all_gather", "direct", 3)
    for rank in range(3):
        sends = [(transfer_at(schedule, rank, 0, Send),), (transfer_at(schedule, rank, 0, Receive),), ()]
        for step, transfers in enumerate(sends):
            schedule = change_step(schedule, rank, step, transfers=transfers)
    with pytest.raises(ScheduleError) as caught:
        run_equal(schedule, 1, 1)
    head = str(caught.value).partition("\n\n")[0]
    assert "deadlock, they wait in a circle, rank 0 -> 1 -> 2 -> 0:" in head
    assert head.splitlines()[1:] == [
        "  rank 0, step 0: waits for rank 1 to receive chunk 0",
        "  rank 1, step 0: waits for rank 2 to receive chunk 1",
        "  rank 2, step 0: waits for rank 0 to receive chunk 2",
    ]


def test_a_deadlock_of_many_names_a_few() -> None:
    broken = drop(build("all_gather", "direct", 32), 5, 0, Receive)
    with pytest.raises(ScheduleError, match=r"and \d+ more ranks"):
        run_equal(broken, 1, 1)


def test_crossed_values_are_found_without_validate() -> None:
    broken = change_transfer(build("all_gather", "direct", 2, 2), 0, 0, Send, chunk=Chunk(0, 1))
    with pytest.raises(ScheduleError, match=r"sends chunk 0\.1 to rank 1, which takes it for chunk 0\.0: values cross"):
        run_equal(broken, 1, 1)


@given(schedules(min_group_size=2, max_group_size=6, max_chunks=2), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_dropped_transfer_never_goes_unnoticed(schedule: Schedule, rng) -> None:
    rank = rng.randrange(schedule.group_size)
    step = rng.choice([s.index for s in schedule.programs[rank] if s.transfers])
    with pytest.raises(ScheduleError, match=r"deadlock|values cross"):
        run_equal(drop(schedule, rank, step, rng.choice([Send, Receive])), 1, 1)


@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
def test_fewest_slots_do_not_deadlock(collective: str, algorithm: str) -> None:
    for n, m in [(2, 1), (2, 4), (5, 1), (5, 3)]:
        run_equal(build(collective, algorithm, n, m, **fewest_slots(collective, algorithm, n, m)), 1, 5)
