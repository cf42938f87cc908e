"""The trace, the picture and the meter, on recordings written by hand."""

import builtins
import json
from pathlib import Path

import pytest

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.runtime.meter import exposed_spans, exposed_us, measure_overlap
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.trace import figure
from commfuse_megatron.tools.trace.figure import densest_calls, draw_timeline
from commfuse_megatron.tools.trace.layout import assign_lanes
from commfuse_megatron.tools.trace.perfetto import chrome_trace, write_perfetto


def compute(start_us: float, end_us: float, step: int = 0) -> Interval:
    return Interval(f"chunk {step}", "compute", start_us, end_us, step, "all_gather_linear", 0)


def transfer(start_us: float, end_us: float, step: int = 0) -> Interval:
    return Interval(f"batch {step}", "transfer", start_us, end_us, step, "all_gather_linear", 0)


@pytest.mark.parametrize(("intervals", "exposed"), [
    ([], 0.0), ([compute(0, 10)], 0.0), ([transfer(0, 10)], 10.0), ([compute(0, 10), transfer(2, 8)], 0.0),
    ([compute(0, 10), transfer(5, 15)], 5.0), ([compute(5, 10), transfer(0, 20)], 15.0),
    ([compute(0, 4), compute(6, 9), transfer(2, 12)], 5.0), ([compute(0, 4), compute(3, 9), transfer(2, 8)], 0.0),
    # Two transfers at once count once.
    ([transfer(0, 10), transfer(5, 12), compute(0, 6)], 6.0),
    ([compute(100, 200), transfer(0, 10), transfer(300, 305)], 15.0),
])  # fmt: skip
def test_exposed_time_is_transfers_without_computation(intervals: list[Interval], exposed: float) -> None:
    assert exposed_us(intervals) == pytest.approx(exposed, abs=1e-12)
    assert exposed_us(reversed(intervals)) == pytest.approx(exposed, abs=1e-12)


def test_exposed_spans_are_where_the_gaps_are() -> None:
    assert exposed_spans([compute(2, 4), compute(6, 8), transfer(0, 10)]) == [(0, 2), (4, 6), (8, 10)]


def test_overlap_counts_no_time_twice() -> None:
    overlap = measure_overlap([compute(0, 10), compute(5, 20), transfer(15, 25), transfer(20, 30)])
    assert (overlap.compute_us, overlap.transfer_us, overlap.exposed_us) == (20, 15, 10)
    assert overlap.hidden_fraction == pytest.approx(1 / 3)
    assert measure_overlap([compute(0, 1)]).hidden_fraction == 1.0


def test_lanes_never_hold_overlapping_intervals() -> None:
    lanes = assign_lanes([transfer(0, 10), transfer(5, 15), transfer(10, 12), transfer(11, 20)])
    assert [[(i.start_us, i.end_us) for i in lane] for lane in lanes] == [[(0, 10), (10, 12)], [(5, 15)], [(11, 20)]]


def test_the_trace_has_one_process_per_rank_and_starts_at_zero(tmp_path: Path) -> None:
    recording = {0: [compute(100, 200), transfer(110, 150, 1), transfer(120, 160, 1)], 1: [compute(90, 95)]}
    path = write_perfetto(tmp_path / "new" / "trace.json", recording)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace == json.loads(json.dumps(chrome_trace(recording)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 4
    assert min(event["ts"] for event in slices) == 0
    assert {event["pid"] for event in slices} == {0, 1}
    rows = [event["tid"] for event in slices if event["cat"] == "transfer"]
    assert len(set(rows)) == 2, "overlapping transfers share a row"
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names[0, 0] == "compute"
    assert {names[0, row] for row in rows} == {"transfers", "transfers 2"}
    assert trace["otherData"]["rank 0"] == {"compute_us": 100, "transfer_us": 50, "exposed_us": 0}


def test_the_picture_is_written(tmp_path: Path) -> None:
    recording = {rank: [compute(0, 100), transfer(50, 150)] for rank in range(3)}
    for name in ("timeline.png", "timeline.svg"):
        path = draw_timeline(
            tmp_path / "deep" / name, recording, title="three ranks", zooms={"end": (60, 160)}, caption="x"
        )
        assert path.stat().st_size > 1000


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_the_measured_overlap_fits_the_picture(num_ranks: int) -> None:
    """Fails with the ranks in one line: matplotlib does not wrap titles, and cuts them off at the edge."""
    text = figure._overlap_line({rank: [compute(0, 1)] for rank in range(num_ranks)})
    assert max(map(len, text.splitlines())) < 100
    assert [f"rank {rank}" in text for rank in range(num_ranks)] == [rank < 4 for rank in range(num_ranks)]
    assert ("..." in text) == (num_ranks > 4)


def test_the_picture_needs_intervals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no interval to draw between 5 and 6 us"):
        draw_timeline(tmp_path / "timeline.png", {0: [compute(0, 1)]}, zooms={"nothing there": (5, 6)})
    with pytest.raises(ValueError, match="no interval to draw in the recording of 2 ranks"):
        draw_timeline(tmp_path / "timeline.png", {0: [], 1: []})


def test_the_zoom_is_where_most_is_computed() -> None:
    def call(number: int, start_us: float, end_us: float) -> Interval:
        return Interval("chunk", "compute", start_us, end_us, 0, "all_gather_linear", number)

    first = [call(1, 0, 1), call(2, 100, 101), call(3, 200, 250), call(4, 251, 300), call(5, 900, 901)]
    recording = {0: first, 1: [call(3, 195, 240), call(4, 241, 310)]}
    window = densest_calls(recording)
    assert window == pytest.approx((195 - 1.15, 310 + 1.15))
    assert densest_calls({0: first[:1]}) is None
    assert densest_calls({}) is None


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedError, match=r"commfuse-megatron\[plot\]"):
        draw_timeline(tmp_path / "timeline.png", {0: [compute(0, 1)]})
