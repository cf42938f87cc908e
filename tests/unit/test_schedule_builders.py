"""All-gather and reduce-scatter schedules are what they should be, for any size, and give right results."""

import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule import (
    Algorithm,
    Chunk,
    Collective,
    Receive,
    Schedule,
    Send,
    build_all_gather,
    build_reduce_scatter,
    validate,
)
from tests.harness.schedules import Interpreter, build, fewest_slots, is_right, schedules

KINDS = [(c, a) for c in ("all_gather", "reduce_scatter") for a in ("ring", "direct")]


@given(schedules())
@settings(deadline=None)
def test_whatever_is_built_is_valid(schedule: Schedule) -> None:
    validate(schedule)


@given(schedules(max_group_size=5), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_results_are_right_whatever_comes_first(schedule: Schedule, rng: random.Random) -> None:
    results = Interpreter(schedule, rng).run()
    assert results is not None
    assert is_right(schedule, results)


@given(schedules(min_group_size=2))
@settings(deadline=None)
def test_transfers_run_beside_all_computations_but_one_chunk(schedule: Schedule) -> None:
    group_size, m = schedule.group_size, schedule.chunks_per_shard
    num_transfers = (group_size - 1) * m
    is_gather = schedule.collective is Collective.ALL_GATHER
    first = 0 if is_gather else 1
    for rank, program in enumerate(schedule.programs):
        assert len(program) == group_size * m
        assert [s.index for s in program if s.transfers] == list(range(first, first + num_transfers))
        own = [s.index for s in program if s.compute.chunk.owner_rank == rank]
        assert own == (list(range(m)) if is_gather else list(range(num_transfers, num_transfers + m)))
        for step in program:
            assert [type(t) for t in step.transfers] in ([], [Send, Receive])
            for transfer in step.transfers:
                if schedule.algorithm is Algorithm.RING:
                    peer = transfer.to_rank if isinstance(transfer, Send) else transfer.from_rank
                    assert peer == (rank + (1 if isinstance(transfer, Send) else -1)) % group_size


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("group_size", [1, 2, 5])
def test_order_of_computations(group_size: int, m: int) -> None:
    for rank in range(group_size):
        expected = {
            ("all_gather", "ring"): [(rank - i) % group_size for i in range(group_size)],
            ("all_gather", "direct"): [(rank - i) % group_size for i in range(group_size)],
            ("reduce_scatter", "ring"): [(rank - 1 - i) % group_size for i in range(group_size)],
            ("reduce_scatter", "direct"): [(rank + 1 + i) % group_size for i in range(group_size)],
        }
        for (collective, algorithm), owners in expected.items():
            program = build(collective, algorithm, group_size, m).programs[rank]
            assert [s.compute.chunk for s in program] == [Chunk(o, c) for o in owners for c in range(m)]


@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
@pytest.mark.parametrize("m", [1, 3])
def test_one_rank_only_computes(collective: str, algorithm: str, m: int) -> None:
    schedule = build(collective, algorithm, 1, m)
    (program,) = schedule.programs
    assert [s.compute.chunk for s in program] == [Chunk(0, c) for c in range(m)]
    assert not any(s.transfers or s.compute.receive_slot is not None for s in program)
    assert all(s.compute.send_slot is None for s in program)
    assert (schedule.num_receive_slots, schedule.num_send_slots) == (0, 0)
    validate(schedule)


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("group_size", [2, 3, 4, 8])
@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
def test_fewest_slots_are_accepted_and_one_less_is_not(
    collective: str, algorithm: str, group_size: int, m: int
) -> None:
    fewest = fewest_slots(collective, algorithm, group_size, m)
    schedule = build(collective, algorithm, group_size, m, **fewest)
    assert schedule.num_receive_slots == fewest["num_receive_slots"]
    assert schedule.num_send_slots == fewest.get("num_send_slots", 0)
    validate(schedule)
    for name, number in fewest.items():
        with pytest.raises(ScheduleError, match=rf"{name}={number - 1} was asked for.*need {number} or more"):
            build(collective, algorithm, group_size, m, **{**fewest, name: number - 1})


def test_more_slots_than_transfers_are_not_used() -> None:
    assert build_all_gather(3, Algorithm.RING, 2, num_receive_slots=99) == build_all_gather(3, Algorithm.RING, 2)
    many = build_reduce_scatter(3, Algorithm.RING, 2, num_receive_slots=99, num_send_slots=99)
    assert (many.num_receive_slots, many.num_send_slots) == (4, 4)
    assert build_all_gather(1, Algorithm.RING, num_receive_slots=0).num_receive_slots == 0


@pytest.mark.parametrize("builder", [build_all_gather, build_reduce_scatter])
def test_impossible_arguments(builder) -> None:
    with pytest.raises(ScheduleError, match="group_size=0"):
        builder(0, Algorithm.RING)
    with pytest.raises(ScheduleError, match="chunks_per_shard=0"):
        builder(2, Algorithm.RING, 0)
    with pytest.raises(ScheduleError, match=r'unknown algorithm "tree".*"ring", "direct"'):
        builder(2, "tree")


def test_schedules_are_plain_values() -> None:
    one, two = (build_reduce_scatter(4, Algorithm.RING, 2) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != build_reduce_scatter(4, Algorithm.DIRECT, 2)
    receives = [t for s in one.programs[0] for t in s.transfers if isinstance(t, Receive)]
    assert [t.slot for t in receives] == list(range(6))


@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
def test_large_groups_are_built_and_validated_quickly(collective: str, algorithm: str) -> None:
    start = time.process_time()
    validate(build(collective, algorithm, 64, 4))
    assert time.process_time() - start < 5  # 0.4 s alone on one core; quadratic work would take minutes


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, commfuse_megatron.schedule; print([m for m in ('torch', 'numpy', 'megatron') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=50)
    assert found.stdout.strip() == "[]"
