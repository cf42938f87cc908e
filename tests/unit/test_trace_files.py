"""What is written, drawn and measured of hand-made recordings: every interval once, arrows in pairs, labels whole."""

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.trace import figure
from commfuse_megatron.tools.trace.figure import densest_calls, draw_runs, draw_timeline
from commfuse_megatron.tools.trace.layout import assign_lanes, find_arrivals, lanes_by_label
from commfuse_megatron.tools.trace.perfetto import chrome_trace, write_perfetto
from commfuse_megatron.tools.trace.session import export

OP = "linear_reduce_scatter.fprop"


def transfer(start_us: float, end_us: float, step: int = 0) -> Interval:
    return Interval(f"batch {step}", "transfer", start_us, end_us, step, "all_gather_linear", 0)


def batch(to_rank: int, from_rank: int, start_us: float, end_us: float, *, call: int = 1, step: int = 1) -> Interval:
    return Interval(f"to rank {to_rank} from rank {from_rank}", "transfer", start_us, end_us, step, OP, call, "lane 0")


def multiply(start_us: float, end_us: float, call: int = 1) -> Interval:
    return Interval("multiply 0", "compute", start_us, end_us, 0, OP, call)


def a_ring(ranks: int) -> dict[int, list[Interval]]:
    """Every rank sends to the next one, twice per call, in two calls."""
    return {
        rank: [
            item
            for call, step in itertools.product((1, 2), (0, 1))
            for item in (
                multiply(100 * call + 10 * step, 100 * call + 10 * step + 8, call),
                batch(
                    (rank + 1) % ranks, (rank - 1) % ranks, 100 * call + step, 130 * call + step, call=call, step=step
                ),
            )
        ]
        for rank in range(ranks)
    }


def check(trace: dict[str, Any], recordings: list[dict[int, list[Interval]]]) -> None:
    """The trace holds every interval once, rows are free of overlaps, and arrows lead from slice to slice."""
    json.dumps(trace, allow_nan=False)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    written = Counter((event["name"], event["cat"], event["dur"], event["args"]["call"]) for event in slices)
    recorded = [i for recording in recordings for intervals in recording.values() for i in intervals]
    assert written == Counter((i.name, i.track, i.end_us - i.start_us, i.call) for i in recorded)
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices:
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(sorted(spans)))
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(rows) <= named
    starts, ends = ({e["id"]: e for e in trace["traceEvents"] if e["ph"] == phase} for phase in "sf")
    assert set(starts) == set(ends)
    for arrow in (*starts.values(), *ends.values()):
        assert any(start <= arrow["ts"] <= end for start, end in rows[arrow["pid"], arrow["tid"]]), "outside any slice"
    assert all(starts[number]["pid"] != ends[number]["pid"] for number in starts)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_trace_is_complete_and_arrows_pair(ranks: int) -> None:
    recording = a_ring(ranks)
    trace = chrome_trace(recording)
    check(trace, [recording])
    arrows = sum(event["ph"] == "s" for event in trace["traceEvents"])
    arrivals = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert arrows == len(arrivals) == 4 * ranks
    for arrival in find_arrivals(recording):
        assert arrival.sent is not None
        assert (arrival.sent.call, arrival.sent.step) == (arrival.received.call, arrival.received.step)
        assert arrival.sent in recording[arrival.from_rank]
        assert arrival.received in recording[arrival.to_rank]


def test_batches_of_one_step_pair_in_the_order_of_their_issue() -> None:
    """The re-gather of a backward pass and its reduce-scatter meet in one call and step."""
    recording = {rank: [batch(1 - rank, 1 - rank, 0, 5), batch(1 - rank, 1 - rank, 2, 9)] for rank in (0, 1)}
    pairs = [(a.to_rank, a.sent.end_us, a.received.end_us) for a in find_arrivals(recording) if a.sent]
    assert pairs == [(0, 5, 5), (0, 9, 9), (1, 5, 5), (1, 9, 9)]


def test_an_arrival_without_its_sender_has_no_arrow() -> None:
    recording = {0: [batch(1, 1, 0, 5)]}
    trace = chrome_trace(recording)
    check(trace, [recording])
    assert Counter(event["ph"] for event in trace["traceEvents"])["i"] == 1
    assert not [event for event in trace["traceEvents"] if event["ph"] in "sf"]


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 50), st.integers(0, 20), st.booleans()), max_size=12))
def test_any_recording_is_written_completely(drawn: list[tuple[int, int, int, bool]]) -> None:
    recording: dict[int, list[Interval]] = {0: [], 1: []}
    for rank, start, length, computes in drawn:
        end = float(start + length)
        recording[rank].append(multiply(start, end) if computes else batch(1 - rank, 1 - rank, start, end))
    check(chrome_trace(recording), [recording])


def test_runs_lie_below_each_other_and_all_start_at_zero(tmp_path: Path) -> None:
    stock = {0: [multiply(500, 510)], 1: [multiply(505, 520)]}
    plugin = a_ring(2)
    runs = {"stock": stock, "plugin": plugin}
    trace = chrome_trace(runs)
    check(trace, [stock, plugin])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert list(names.values()) == ["stock, rank 0", "stock, rank 1", "plugin, rank 0", "plugin, rank 1"]
    for processes in ((0, 1), (2, 3)):
        assert min(e["ts"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] in processes) == 0
    assert json.loads(write_perfetto(tmp_path / "trace.json", runs).read_text("utf-8")) == json.loads(json.dumps(trace))


def rows_of(trace: dict[str, Any]) -> set[str]:
    return {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}


def test_lanes_and_streams_name_the_rows() -> None:
    kernel = Interval("GEMM", "compute", 0, 9, None, "GEMM kernels", 1, "stream 7", "nvjet_tst_128x256")
    trace = chrome_trace({0: [kernel, batch(1, 1, 0, 5)]})
    assert rows_of(trace) == {"compute, stream 7", "transfers, lane 0", "arrivals"}
    assert trace["otherData"]["rank 0"] == {"compute_us": 9, "transfer_us": 5, "exposed_us": 0}
    assert [e["args"]["detail"] for e in trace["traceEvents"] if "detail" in e.get("args", {})] == ["nvjet_tst_128x256"]


def test_intervals_that_overlap_have_rows_of_their_own() -> None:
    intervals = [transfer(0, 10), transfer(5, 15), transfer(10, 12), transfer(11, 20)]
    lanes = [[(i.start_us, i.end_us) for i in lane] for lane in assign_lanes(intervals)]
    assert lanes == [[(0, 10), (10, 12)], [(5, 15)], [(11, 20)]]
    assert rows_of(chrome_trace({0: [multiply(0, 9), *intervals]})) >= {"compute", "transfers", "transfers 2"}


def test_rows_of_streams_come_in_the_order_of_their_numbers() -> None:
    kernels = [
        Interval("GEMM", "compute", start, start + 9, None, "GEMM kernels", 1, f"stream {stream}")
        for stream, start in ((20, 0), (7, 0), (7, 5), (9, 30))
    ]
    found = [(label, [[i.start_us for i in row] for row in rows]) for label, rows in lanes_by_label(kernels)]
    assert found == [("stream 7", [[0], [5]]), ("stream 9", [[30]]), ("stream 20", [[0]])]


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cut_labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled, whenever a picture is saved, with texts that do not lie inside it, and axes without a unit."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    found: list[str] = []
    save = Figure.savefig

    def save_and_look(figure: Figure, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)
        found.extend(f"no unit: {axes.get_title('left')}" for axes in figure.axes if axes.get_xlabel()[:2] != "ms")
        width, height = figure.bbox.width, figure.bbox.height
        axis_ticks = [(tick, a.xaxis.get_view_interval()) for a in figure.axes for tick in a.xaxis.get_major_ticks()]
        not_drawn = {tick.label1 for tick, (low, high) in axis_ticks if not low <= tick.get_loc() <= high}
        for text in figure.findobj(Text):
            is_clipped = text.get_clip_on() and text.get_clip_path() is not None  # within its bar
            if not text.get_text() or not text.get_visible() or is_clipped or text in not_drawn:
                continue
            box = text.get_window_extent()
            if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1:
                found.append(text.get_text())

    monkeypatch.setattr(Figure, "savefig", save_and_look)
    return found


@pytest.mark.parametrize(("ranks", "file"), [(1, "a.png"), (2, "deep/a.svg"), (4, "a.png")])
def test_labels_of_a_timeline_are_whole(ranks: int, file: str, tmp_path: Path, cut_labels: list[str]) -> None:
    caption = "8 x NVIDIA H100 80GB HBM3, copy_engine, bfloat16, November 2026"
    title = "llama-70b.fc2 backward, M 8192, N 8192, K 14336: sliced, direct, 2 per shard"
    recording = a_ring(max(2, ranks))
    shown = {rank: recording[rank] for rank in range(ranks)}
    path = draw_timeline(tmp_path / file, shown, title=title, caption=caption, zooms={"two calls": (100, 250)})
    assert path.stat().st_size > 5000
    assert cut_labels == []


def test_labels_of_runs_are_whole_however_long(tmp_path: Path, cut_labels: list[str]) -> None:
    runs = {"stock": a_ring(4), "plugin": a_ring(4)}
    path = draw_runs(tmp_path / "b.png", runs, title="a long title " * 20, caption="a long caption " * 15)
    assert path.stat().st_size > 5000
    assert cut_labels == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_the_measured_overlap_fits_the_picture(num_ranks: int) -> None:
    """Fails with the ranks in one line: matplotlib does not wrap titles, and cuts them off at the edge."""
    text = figure._overlap_line({rank: [multiply(0, 1)] for rank in range(num_ranks)})
    assert max(map(len, text.splitlines())) < 100
    assert [f"rank {rank}" in text for rank in range(num_ranks)] == [rank < 4 for rank in range(num_ranks)]
    assert ("..." in text) == (num_ranks > 4)


def test_pictures_need_intervals_and_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, one = tmp_path / "c.png", {0: [multiply(0, 1)]}
    with pytest.raises(ValueError, match="no interval to draw between 5 and 6 us"):
        draw_timeline(file, one, zooms={"nothing there": (5, 6)})
    with pytest.raises(ValueError, match="no interval to draw in the recording of 2 ranks"):
        draw_timeline(file, {0: [], 1: []})
    with pytest.raises(ValueError, match="no interval to draw in the recording of 1 ranks of plugin"):
        draw_runs(file, {"stock": a_ring(2), "plugin": {0: []}})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"commfuse-megatron\[plot\]"):
        draw_timeline(file, one)


def test_the_zoom_is_where_most_is_computed() -> None:
    spans = ((0, 1), (100, 101), (200, 250), (251, 300), (900, 901))
    first = [multiply(*span, call) for call, span in enumerate(spans, 1)]
    recording = {0: first, 1: [multiply(195, 240, 3), multiply(241, 310, 4)]}
    assert densest_calls(recording) == pytest.approx((195 - 1.15, 310 + 1.15))
    assert densest_calls({0: first[:1]}) is None
    assert densest_calls({}) is None


def bars(axes: Any) -> set[tuple[float, float]]:
    """(bottom, height) of everything drawn as a bar above a rank's line of exposed time."""
    boxes = [p.get_extents() for collection in axes.collections for p in collection.get_paths()]
    return {(round(box.y0, 3), round(box.height, 3)) for box in boxes if box.height > 0.2}


@pytest.mark.parametrize(("num_streams", "rows"), [(1, 1), (2, 2), (3, 3), (5, 1)])
def test_every_stream_has_a_row_where_there_is_room(num_streams, rows, tmp_path, monkeypatch):
    """Fails where rows go by overlap alone: kernels that alternate between two streams would look like one."""
    from matplotlib.figure import Figure

    drawn: list[set[tuple[float, float]]] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(bars(figure.axes[0])))
    kernels = [
        Interval("GEMM", "compute", 10 * n, 10 * n + 9, None, "GEMMs", 1, f"stream {n % num_streams}")
        for n in range(10)
    ]
    draw_timeline(tmp_path / "a.png", {0: kernels})
    height = 0.8 / rows
    assert drawn == [{(round(0.4 - (n + 1) * height, 3), round(height, 3)) for n in range(rows)}]


def test_export_writes_trace_and_picture(tmp_path: Path) -> None:
    files = export(a_ring(2), tmp_path / "new", name="step", title="a step")
    assert [file.name for file in files] == ["step_trace.json", "step_timeline.png"]
    check(json.loads(files[0].read_text("utf-8")), [a_ring(2)])
    assert files[1].stat().st_size > 5000
