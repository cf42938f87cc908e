"""All-gather and reduce-scatter schedules are what they should be, for any size.

That what runs by them is right on all ranks, `test_programs` proves of the programs that they become.
"""

import pytest
from hypothesis import given, settings

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule import Algorithm, Chunk, Collective, Schedule, build_all_gather, build_reduce_scatter
from tests.harness.schedules import build, schedules


@given(schedules())
@settings(deadline=None)
def test_both_ends_of_a_transfer_stand_in_the_same_step(schedule: Schedule) -> None:
    for row in zip(*schedule.steps, strict=True):
        sent = {(rank, step.send.to_rank, step.send.chunk) for rank, step in enumerate(row) if step.send}
        received = {(step.receive.from_rank, rank, step.receive.chunk) for rank, step in enumerate(row) if step.receive}
        assert sent == received


@given(schedules())
@settings(deadline=None)
def test_transfers_run_beside_all_computations_but_one_chunk(schedule: Schedule) -> None:
    group_size, m = schedule.group_size, schedule.chunks_per_shard
    num_transfers = (group_size - 1) * m
    is_gather = schedule.collective is Collective.ALL_GATHER
    first = 0 if is_gather else 1
    for rank, steps in enumerate(schedule.steps):
        assert len(steps) == group_size * m
        assert [s.index for s in steps if s.send] == list(range(first, first + num_transfers))
        assert [s.index for s in steps if s.receive] == list(range(first, first + num_transfers))
        own = [s.index for s in steps if s.chunk.owner_rank == rank]
        assert own == (list(range(m)) if is_gather else list(range(num_transfers, num_transfers + m)))
        if schedule.algorithm is Algorithm.RING and group_size > 1:
            assert {s.send.to_rank for s in steps if s.send} == {(rank + 1) % group_size}
            assert {s.receive.from_rank for s in steps if s.receive} == {(rank - 1) % group_size}


@given(schedules())
@settings(deadline=None)
def test_what_a_step_needs_is_what_it_multiplies_or_adds(schedule: Schedule) -> None:
    is_gather = schedule.collective is Collective.ALL_GATHER
    for rank, steps in enumerate(schedule.steps):
        for step in steps:
            adds = schedule.algorithm is Algorithm.RING and step.index >= schedule.chunks_per_shard
            assert (step.needs is not None) == (step.chunk.owner_rank != rank if is_gather else adds)
            if step.needs is not None:
                assert step.needs <= step.index
                assert steps[step.needs].receive.chunk == step.chunk


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
            steps = build(collective, algorithm, group_size, m).steps[rank]
            assert [s.chunk for s in steps] == [Chunk(o, c) for o in owners for c in range(m)]


@pytest.mark.parametrize("builder", [build_all_gather, build_reduce_scatter])
def test_impossible_arguments(builder) -> None:
    with pytest.raises(ScheduleError, match="group_size=0"):
        builder(0, Algorithm.RING)
    with pytest.raises(ScheduleError, match="chunks_per_shard=0"):
        builder(2, Algorithm.RING, 0)
    with pytest.raises(ValueError, match="'tree' is not a valid Algorithm"):
        builder(2, "tree")
