"""How many of what arrives are taken at a time: each once, as costs want it."""

import dataclasses
import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.plan.cost_model import choose_details, predict_parts_us
from commfuse_megatron.plan.machine import Channel, Traits, assumed_machine
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.schedule import pieces
from commfuse_megatron.schedule.pieces import cut_into_halves, cut_into_pieces, doubling, soonest
from tests.harness.problems import layer_problem
from tests.harness.programs import sizes_of_pieces

MACHINE = assumed_machine(Traits(transport="copy_engine", replays=True), "bfloat16")


@given(st.integers(1, 64))
def test_halves_hold_each_once_and_end_in_one(count):
    found = cut_into_halves(count)
    assert [number for part in found for number in part] == list(range(count))
    assert len(found[-1]) == 1
    assert all(len(later) <= len(first) for first, later in itertools.pairwise(found))


@given(st.integers(2, 16), st.data())
def test_pieces_hold_each_owner_once_in_ranges(group_size, data):
    me, sizes = data.draw(st.integers(0, group_size - 1)), data.draw(sizes_of_pieces(group_size - 1))
    order = [(me - far) % group_size for far in range(1, group_size)]
    found = cut_into_pieces(order, sizes)
    assert sorted(owner for piece in found for owner in piece) == sorted(order)
    first = [min(order.index(owner) for owner in piece) for piece in found]
    assert first == sorted(first)
    assert len(found) <= len(sizes) + 1  # one more where owners are counted from the other end on


@pytest.mark.parametrize("sizes", [(1, 2), (1, 2, 5), (0, 3, 4), (-1, 8)])
def test_sizes_that_miss_an_owner_are_refused(sizes):
    with pytest.raises(ScheduleError, match="each of 7 once"):
        cut_into_pieces(range(7), sizes)


@given(st.integers(1, 12), st.floats(0.01, 100))
def test_sizes_follow_the_ratio_of_arrivals_to_work(count, arrival):
    found = soonest(count, arrival, lambda size: 0.001 + size)
    assert sum(found) == count
    if arrival >= 1.01:  # nothing is to be won by waiting for more
        assert found == (1,) * count
    if arrival * count <= 1:  # all are here when the own part is done
        assert found == (count,)


def test_doubling_sizes_and_the_example():
    assert [doubling(count) for count in (1, 2, 3, 4, 7, 15)] == [
        (1,), (1, 1), (1, 2), (1, 3), (1, 2, 4), (1, 2, 4, 8),
    ]  # fmt: skip
    assert doctest.testmod(pieces).attempted == 1
    assert doctest.testmod(pieces).failed == 0


@pytest.mark.parametrize("layer", ["70b.fc1", "70b.fc2", "70b.qkv"])
@pytest.mark.parametrize("bandwidth_gb_s", [100.0, 415.0, 3000.0])
def test_settled_sizes_are_no_worse_than_doubling_ones(layer, bandwidth_gb_s):
    machine = dataclasses.replace(MACHINE, link=Channel(latency_us=11.0, bandwidth_gb_s=bandwidth_gb_s))
    problem = layer_problem(layer, 8192, 8)
    found = choose_details(problem, PassPlan("grouped"), machine)
    assert sum(found.pieces) == 7
    assert f"pieces of {found.pieces[0]}" in found.details or found.pieces == (7,)
    us, doubling_us = (predict_parts_us(problem, each, machine)[0] for each in (found, PassPlan("grouped")))
    assert us <= doubling_us
    # H200's link, H200's GEMMs: groups of the last owners alone, fewer at first than doubling ones.
    assert us < 0.98 * doubling_us or (layer, bandwidth_gb_s) != ("70b.fc2", 415.0)
