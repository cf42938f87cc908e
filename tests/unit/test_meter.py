"""The meter against counting microseconds one by one, on any intervals: nested, touching, equal, empty, none."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_megatron.runtime.meter import exposed_spans, exposed_us, measure_calls, measure_overlap, union_spans
from commfuse_megatron.runtime.recorder import Interval

TRACKS = ("compute", "transfer")


@st.composite
def intervals(draw: st.DrawFn) -> list[Interval]:
    """Whole microseconds, so that spans can be counted; an interval of length 0 is a legal one."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        start, length = draw(st.integers(0, 30)), draw(st.integers(0, 12))
        track, call = draw(st.sampled_from(TRACKS)), draw(st.integers(1, 3))
        found.append(Interval("x", track, float(start), float(start + length), None, "op", call))
    return found


def counted(members: list[Interval], track: str) -> set[int]:
    """The microseconds in which `track` runs."""
    return {us for i in members if i.track == track for us in range(int(i.start_us), int(i.end_us))}


@given(intervals())
def test_a_whole_recording_is_metered_as_counted(members: list[Interval]) -> None:
    computing, transferring = (counted(members, track) for track in TRACKS)
    overlap = measure_overlap(members)
    assert overlap.compute_us == len(computing)
    assert overlap.transfer_us == len(transferring)
    assert overlap.exposed_us == exposed_us(members) == len(transferring - computing)
    assert overlap.exposed_us <= overlap.transfer_us <= overlap.span_us
    assert 0 <= overlap.hidden_fraction <= 1
    hidden = overlap.transfer_us - overlap.exposed_us
    assert overlap.hidden_fraction == pytest.approx(hidden / overlap.transfer_us if transferring else 1.0)
    ends = [us for i in members for us in (i.start_us, i.end_us)]
    assert overlap.span_us == (max(ends) - min(ends) if ends else 0)


@given(intervals(), st.randoms(use_true_random=False))
def test_the_order_of_intervals_does_not_matter(members: list[Interval], shuffle: random.Random) -> None:
    shuffled = members.copy()
    shuffle.shuffle(shuffled)
    assert exposed_spans(shuffled) == exposed_spans(members)
    assert measure_overlap(shuffled) == measure_overlap(members)


@given(intervals())
def test_spans_are_what_is_counted_in_order_and_never_empty(members: list[Interval]) -> None:
    computing, transferring = (counted(members, track) for track in TRACKS)
    of_tracks = [union_spans(members, track) for track in TRACKS]
    counts = (transferring - computing, computing, transferring)
    for spans, expected in zip((exposed_spans(members), *of_tracks), counts, strict=True):
        assert {us for start, end in spans for us in range(int(start), int(end))} == expected
        assert all(start < end for start, end in spans)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@given(intervals())
def test_calls_are_metered_by_themselves(members: list[Interval]) -> None:
    by_call = measure_calls(members)
    assert list(by_call) == sorted({i.call for i in members})
    for call, overlap in by_call.items():
        assert overlap == measure_overlap(i for i in members if i.call == call)
    # A call's transfer that only another call's computation covers is hidden in the whole, exposed in the call.
    assert measure_overlap(members).exposed_us <= sum(overlap.exposed_us for overlap in by_call.values())
