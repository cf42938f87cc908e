"""The dry-run keeps the closed form where costs are equal, follows costs where they are not, and finds deadlocks."""

import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule import Activity, Algorithm, Costs, Interval, Simulation, Work, closed_form_us, simulate
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Copy, Gemm, Issue, Program, Wait, WeightGrad
from tests.harness.programs import KINDS, Case, cases, change

LINEARS = [(kind, algorithm) for kind in ("all_gather_linear", "linear_reduce_scatter") for algorithm in Algorithm]
SIZES = {"group_size": st.integers(1, 12), "m": st.integers(1, 4)}
TIMES_US = st.integers(0, 200).map(lambda tenths: tenths / 10)
TENSORS = Policy(has_windows=False)


def forward(kind: str, algorithm: Algorithm, group_size: int, m: int = 1, policy: Policy = TENSORS) -> list[Program]:
    return Case(kind, policy, Asked(), algorithm, group_size, m, rows=group_size * m).programs()


def costs(gemm_us: float, wire_us: float) -> Costs:
    """Of products and messages; all else is free."""
    return Costs(
        lambda rank, op, beside_us: (gemm_us, gemm_us) if isinstance(op, Gemm) else (0.0, 0.0),
        lambda sender, receiver, channel, rows: wire_us,
    )


def bound_us(group_size: int, m: int, gemm_us: float, wire_us: float) -> float:
    return closed_form_us(group_size * m * gemm_us, (group_size - 1) * m * wire_us, group_size, m)


def busy(simulation: Simulation, rank: int, activity: Activity) -> list[tuple[float, float]]:
    return [(i.start_us, i.end_us) for i in simulation.timelines[rank].intervals if i.activity is activity]


@pytest.mark.parametrize(("kind", "algorithm"), LINEARS)
@given(**SIZES, gemm_us=TIMES_US, wire_us=TIMES_US)
@settings(deadline=None, max_examples=30)
def test_equal_costs_give_the_closed_form(kind, algorithm, group_size, m, gemm_us, wire_us):
    simulation = simulate(forward(kind, algorithm, group_size, m), costs(gemm_us, wire_us))
    expected_us = bound_us(group_size, m, gemm_us, wire_us)
    # A GEMM that adds the running sum waits for it. With one chunk per shard the sum is added after it.
    if algorithm is Algorithm.RING and kind == "linear_reduce_scatter" and m > 1 and group_size > 1:
        compute_us, transfer_us = group_size * m * gemm_us, (group_size - 1) * m * wire_us
        expected_us = max(compute_us, transfer_us + 2 * gemm_us)
    assert simulation.total_us == pytest.approx(expected_us)
    assert simulation.compute_us == pytest.approx(group_size * m * gemm_us)
    if wire_us <= gemm_us:
        assert simulation.exposed_comm_us == pytest.approx(0, abs=1e-9)


@given(
    n=st.integers(2, 64),
    gemm_us=st.floats(0, 1e6, allow_subnormal=False),
    wire_us=st.floats(0, 1e6, allow_subnormal=False),
)
def test_bound_with_one_chunk_is_a_step_and_the_slower_of_two(n, gemm_us, wire_us):
    expected = gemm_us / n + (n - 1) * max(gemm_us / n, wire_us / (n - 1))
    assert closed_form_us(gemm_us, wire_us, n) == pytest.approx(expected)


def test_bound_in_numbers():
    assert closed_form_us(100, 75, 4) == 100  # all hidden: T_m = T_c (1 - 1/4)
    assert closed_form_us(100, 80, 4) == 105
    assert closed_form_us(100, 80, 4, 2) == 100
    assert closed_form_us(100, 400, 4, 2) == 412.5
    assert closed_form_us(100, 400, 1, 2) == 100
    for wrong in [(-1.0, 1.0, 2, 1), (1.0, -1.0, 2, 1), (1.0, 1.0, 0, 1), (1.0, 1.0, 2, 0)]:
        with pytest.raises(ScheduleError, match="no lower bound for"):
            closed_form_us(*wrong)


def draw_costs(seed: int) -> Costs:
    """Other ones for every op and link."""

    def work_us(rank: int, op: Work, beside_us: float) -> tuple[float, float]:
        us = float(hash((seed, rank, repr(op))) % 17)
        return us, us

    return Costs(work_us, lambda *message: float(hash((seed, *message)) % 13))


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_timelines_are_possible(kind, data, seed):
    """Nothing overlaps on a device or link, both ends agree, ops begin behind what they wait for."""
    case = data.draw(cases(kind, 6))
    programs, drawn = case.programs(), draw_costs(seed)
    simulation = simulate(programs, drawn)
    ends: dict[tuple[int, int, str, int], set[tuple[float, float]]] = {}
    for rank, timeline in enumerate(simulation.timelines):
        ops = programs[rank].ops
        for activity in (Activity.SEND, Activity.RECEIVE, Activity.COMPUTE):
            intervals = sorted(busy(simulation, rank, activity))
            assert all(before[1] <= after[0] for before, after in pairwise(intervals))
        computed = [i for i in timeline.intervals if i.activity in (Activity.COMPUTE, Activity.COPY)]
        others = {op for op in ops if not isinstance(op, Issue)}
        assert sum(i.end_us - i.start_us for i in computed) == sum(
            drawn.work_us(rank, ops[i.op], 0.0)[0] for i in computed
        )
        assert {ops[i.op] for i in computed} == {op for op in others if isinstance(op, Work)}
        assert all(i.end_us <= timeline.end_us for i in timeline.intervals)
        arrived = {i.op: i.end_us for i in timeline.intervals if i.activity is Activity.RECEIVE}
        for i in timeline.intervals:
            op = ops[i.op]
            if i.peer_rank is not None:
                assert isinstance(op, Issue)
                pair = (rank, i.peer_rank) if i.activity is Activity.SEND else (i.peer_rank, rank)
                ends.setdefault((*pair, op.channel, op.step), set()).add((i.start_us, i.end_us))
        assert len(arrived) == sum(isinstance(op, Issue) and op.receive is not None for op in ops)
        if case.policy.lanes == 0:
            issued = {(op.channel, op.step): number for number, op in enumerate(ops) if isinstance(op, Issue)}
            reached_us = 0.0
            starts = {i.op: i.start_us for i in computed if not is_beside(ops[i.op])}
            for number, op in enumerate(ops):
                if isinstance(op, Wait):
                    here = [arrived[issued[batch]] for batch in op.batches if batch in issued]
                    reached_us = max([reached_us, *here])
                assert starts.get(number, reached_us) >= reached_us
    assert all(len(pair) == 1 for pair in ends.values())


def is_beside(op) -> bool:
    return isinstance(op, Copy) and op.is_beside


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), TIMES_US, TIMES_US, st.booleans())
@settings(deadline=None, max_examples=25)
def test_of_equal_shards_one_rank_stands_for_all(kind, data, gemm_us, wire_us, is_beside):
    is_alike = lambda case: not (case.asked.is_bulk or case.policy.pieces) or case.group_size == 2  # noqa: E731
    case = data.draw(cases(kind, 6).filter(is_alike))
    if case.rows % (case.group_size * case.chunks_per_shard):
        return
    programs, equal = case.programs(), costs(gemm_us, wire_us)._replace(is_beside=is_beside)
    total_us = simulate(programs, equal).total_us
    for program in programs:
        assert simulate([program], equal).total_us == pytest.approx(total_us)


def test_a_small_timeline_in_full():
    """Two ranks, rank 1 twice as slow: rank 0's partial waits on the wire until rank 1 has issued its receive."""
    programs = forward("linear_reduce_scatter", Algorithm.DIRECT, 2)
    simulation = simulate(
        programs,
        Costs(
            lambda rank, op, beside_us: (10.0 * (1 + rank), 0.0) if isinstance(op, Gemm) else (1.0, 1.0),
            lambda sender, receiver, channel, rows: 5.0 + 4.0 * sender,
        ),
    )
    assert simulation.timelines[0].intervals == (
        Interval(Activity.COMPUTE, 0, 0.0, 10.0),
        Interval(Activity.COMPUTE, 2, 10.0, 20.0),
        Interval(Activity.SEND, 1, 20.0, 25.0, None, 1),
        Interval(Activity.RECEIVE, 1, 20.0, 29.0, None, 1),
        Interval(Activity.WAIT, 3, 20.0, 29.0),
        Interval(Activity.COMPUTE, 4, 29.0, 30.0),
    )
    first, second = simulation.timelines
    assert (first.end_us, first.compute_us) == (30.0, 21.0)
    assert (second.end_us, second.compute_us) == (41.0, 41.0)
    assert (simulation.total_us, simulation.compute_us, simulation.exposed_comm_us) == (41.0, 41.0, 0.0)


def test_lanes_share_a_device_that_one_op_does_not_fill():
    programs = forward("all_gather_linear", Algorithm.DIRECT, 4, policy=Policy(has_windows=True, lanes=2, is_tape=True))
    for device_us, expected_us in ((10.0, 40.0), (5.0, 25.0), (0.0, 20.0)):
        work = Costs(lambda rank, op, beside_us, us=device_us: (10.0, us), lambda *message: 0.0)
        assert simulate(programs, work).total_us == expected_us


def test_what_is_issued_before_an_op_runs_beside_it():
    """Its own batches' time is what a GEMM that gives SMs to transfers is modelled with."""
    seen = []

    def work_us(rank: int, op: Work, beside_us: float) -> tuple[float, float]:
        if isinstance(op, Gemm | WeightGrad):
            seen.append((rank, beside_us))
        return 1.0, 1.0

    simulate(forward("all_gather_linear", Algorithm.DIRECT, 3), Costs(work_us, lambda *message: 7.0))
    assert [beside_us for rank, beside_us in seen if rank == 1] == [7.0, 7.0, 0.0]
    seen.clear()
    alone = Asked(is_backward=True, has_product=False, weight_grad="now")  # behind all that was gathered
    simulate(Case("linear_reduce_scatter backward", TENSORS, alone).programs(), Costs(work_us, lambda *message: 7.0))
    assert sorted(seen) == [(rank, 0.0) for rank in range(4)]


@pytest.mark.parametrize(("kind", "algorithm"), LINEARS)
def test_where_nothing_moves_beside_gemms_all_adds_up(kind, algorithm):
    programs = forward(kind, algorithm, 4, 2)
    assert simulate(programs, costs(10.0, 3.0)._replace(is_beside=False)).total_us == 8 * 10 + 6 * 3


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_one_slow_link_slows_what_uses_it(algorithm):
    def wire_us(sender: int, receiver: int, channel: str, rows: int) -> float:
        return 50.0 if (sender, receiver) == (2, 3) else 1.0

    simulation = simulate(forward("all_gather_linear", algorithm, 4), costs(10.0, 1.0)._replace(transfer_us=wire_us))
    slow = [end - start for start, end in busy(simulation, 3, Activity.RECEIVE) if end - start > 1]
    assert len(slow) == (3 if algorithm is Algorithm.RING else 1)
    assert simulation.total_us == (160 if algorithm is Algorithm.RING else 80)


def test_large_groups_are_fast_to_simulate():
    program = forward("linear_reduce_scatter", Algorithm.RING, 64, 4)[0]
    start = time.process_time()
    assert simulate([program], costs(1.0, 1.0)).total_us == 256
    assert time.process_time() - start < 0.2  # some 3 ms


@pytest.mark.parametrize("wrong_us", [-1.0, math.nan, math.inf])
def test_costs_must_be_times(wrong_us):
    programs = forward("all_gather_linear", Algorithm.RING, 2)
    for wrong in (costs(wrong_us, 1.0), costs(1.0, wrong_us)):
        with pytest.raises(ScheduleError, match=r"rank \d, op \d: a cost of .*: it must be a time"):
            simulate(programs, wrong)


def test_a_send_that_nobody_receives_is_a_deadlock():
    programs = forward("linear_reduce_scatter", Algorithm.DIRECT, 4)
    ops = [op for op in programs[2].ops if not (isinstance(op, Issue) and op.step == 3)]
    ops = [Wait(op.batches[:2]) if isinstance(op, Wait) else op for op in ops]
    with pytest.raises(ScheduleError, match=r"rank 1, op \d+: deadlock: this batch waits for rank 2, which does not"):
        simulate(change(programs, 2, ops), costs(1.0, 1.0))


def test_ranks_that_wait_in_a_circle_are_a_deadlock():
    """Every rank sends in one batch and receives in the next: without buffers on the way, nobody gets to receive."""
    programs = forward("all_gather_linear", Algorithm.DIRECT, 3)
    for rank, program in enumerate(programs):
        ops = []
        for op in program.ops:
            if isinstance(op, Issue) and op.step == 0:
                ops += [Issue(op.channel, 0, op.send, None), Issue(op.channel, 7, None, op.receive)]
            else:
                ops.append(op)
        programs = change(programs, rank, ops)
    with pytest.raises(ScheduleError, match="rank 0, op 0: deadlock: this batch waits for rank 1, which does"):
        simulate(programs, costs(1.0, 1.0))


def test_messages_that_cross_are_found():
    programs = forward("all_gather_linear", Algorithm.DIRECT, 2, 2)
    (first,) = [op for op in programs[0].ops if isinstance(op, Issue) and op.step == 0]
    other = replace(first, send=first.send._replace(chunk=1))
    crossed = change(programs, 0, [other if op is first else op for op in programs[0].ops])
    with pytest.raises(ScheduleError, match=r"chunk 0 in gather 0 is chunk 1 for rank 0: messages cross"):
        simulate(crossed, costs(1.0, 1.0))
