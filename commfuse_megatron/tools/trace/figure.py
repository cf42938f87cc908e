"""Recordings as a picture: per rank a lane of computations and a lane of transfers, exposed time in red.

How pictures are made at all is in `tools/common/pictures.py`.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commfuse_megatron.runtime.meter import COMPUTE, TRANSFER, Span, exposed_spans, measure_overlap
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.common.pictures import drawn
from commfuse_megatron.tools.trace.layout import Recording, assign_lanes, lanes_by_label, sender_of

COMPUTE_COLORS = ("#2b6cb0", "#2f9e8f", "#6b5bb5", "#5a7a2c", "#8a8f98", "#8c5a3c")
TRANSFER_COLOR = "#f0a63a"
EXPOSED_COLOR = "#d62839"
ARRIVAL_COLOR = "#333333"
LANE_HEIGHT = 0.8
WIDTH_IN = 12.0
CHARS_PER_WIDTH = 190  # of 7-point text across the axes; estimated, used only to leave out labels that do not fit
LEAST_WITH_EDGE = 0.003  # of the width; the white edges of narrower ones would hide them
LEAST_HEIGHT_WITH_EDGE = 0.05  # so would those of lower ones
TITLE_CHARS = 130  # of 10-point text across the axes; estimated, used only to break lines
MOST_LABELLED_ROWS = 3  # of one rank's track; more would be too thin to look at
MOST_ARRIVALS = 60  # marks of one rank in one panel; more would be a smear


def draw_timeline(
    path: str | Path,
    recording: Recording,
    *,
    title: str = "",
    caption: str = "",
    zooms: Mapping[str, Span] | None = None,
) -> Path:
    """Draw `recording` (rank -> its intervals) into the picture `path` (.png or .svg); returns the path.

    Args:
        title: what was recorded; the measured overlap of each rank is added below it.
        caption: one line at the bottom, e.g. hardware and date.
        zooms: title -> window of the recorders' clock, in microseconds; each is drawn again, larger, below.

    Raises:
        UnsupportedError: matplotlib is not installed; names the extra to install.
        ValueError: no interval lies in the recording, or in a window.
    """
    whole = _span_of(recording)
    heading = "\n".join(line for line in (title, _overlap_line(recording)) if line)
    panels = [(heading, recording, whole), *((name, recording, window) for name, window in (zooms or {}).items())]
    return _draw(path, panels, caption)


def draw_runs(path: str | Path, runs: Mapping[str, Recording], *, title: str = "", caption: str = "") -> Path:
    """Draw recordings of the same work below each other, e.g. "stock" and "plugin", on one scale; returns the path.

    Every run starts at zero. Raises as `draw_timeline` does.
    """
    spans = {name: _span_of(recording, f" of {name}") for name, recording in runs.items()}
    length_us = max(end_us - start_us for start_us, end_us in spans.values())
    panels = [
        (f"{name}; {_overlap_line(recording)}", recording, (spans[name][0], spans[name][0] + length_us))
        for name, recording in runs.items()
    ]
    return _draw(path, panels, caption, title)


def _span_of(recording: Recording, of_what: str = "") -> Span:
    everything = [i for intervals in recording.values() for i in intervals]
    if not everything:
        raise ValueError(f"no interval to draw in the recording of {len(recording)} ranks{of_what}")
    return _ends_of(everything)


def _ends_of(intervals: Sequence[Interval]) -> Span:
    return min(i.start_us for i in intervals), max(i.end_us for i in intervals)


def _draw(path: str | Path, panels: list[tuple[str, Recording, Span]], caption: str, title: str = "") -> Path:
    """Draw panels (heading, what, window) below each other."""
    everything = [i for _, recording, _ in panels for intervals in recording.values() for i in intervals]
    ops = sorted({i.op for i in everything if i.track == COMPUTE})
    colors = {op: COMPUTE_COLORS[index % len(COMPUTE_COLORS)] for index, op in enumerate(ops)}
    height_in = 0.8 + sum(1.1 + 0.95 * len(recording) for _, recording, _ in panels)
    with drawn(path, len(panels), (WIDTH_IN, height_in)) as (figure, all_axes):
        if title:
            figure.suptitle(_broken(title), x=0.01, ha="left", fontsize=10)
        for axes, (heading, recording, window_us) in zip(all_axes, panels, strict=True):
            _draw_panel(axes, recording, window_us, colors)
            axes.set_title(_broken(heading), loc="left", fontsize=10)
            axes.set_xlabel("ms")
        all_axes[-1].set_xlabel(_broken("ms" + (f"      {caption}" if caption else "")))
        _add_legend(figure, colors, has_arrivals=any(sender_of(i) is not None for i in everything))
    return Path(path)


def _broken(text: str) -> str:
    """`text` in lines that fit into the picture."""
    lines = (textwrap.wrap(line, TITLE_CHARS, drop_whitespace=False) for line in text.splitlines())
    return "\n".join(line for wrapped in lines for line in wrapped)


def densest_calls(recording: Recording, num_calls: int = 2) -> Span | None:
    """The window of `num_calls` calls in a row that compute for the largest share of it, for a zoom.

    None if no rank has so many. Calls are compared on the first rank; the window spans them on all ranks.
    """
    first = recording[min(recording)] if recording else ()
    calls = sorted({i.call for i in first})
    best, most = None, -1.0
    for index in range(len(calls) - num_calls + 1):
        chosen = set(calls[index : index + num_calls])
        own = [i for i in first if i.call in chosen]
        start_us, end_us = _ends_of(own)
        density = measure_overlap(own).compute_us / (end_us - start_us) if end_us > start_us else 0.0
        if density > most:
            best, most = chosen, density
    if best is None:
        return None
    start_us, end_us = _ends_of([i for intervals in recording.values() for i in intervals if i.call in best])
    margin_us = 0.01 * (end_us - start_us)
    return start_us - margin_us, end_us + margin_us


def _draw_panel(axes: Any, recording: Recording, window_us: Span, colors: dict[str, str]) -> None:
    """Draw what lies in a window: two lanes per rank, the exposed time below them."""
    start_us, end_us = window_us
    shown = {
        rank: [i for i in intervals if i.end_us > start_us and i.start_us < end_us]
        for rank, intervals in sorted(recording.items())
    }
    if not any(shown.values()):
        raise ValueError(f"no interval to draw between {start_us} and {end_us} us")
    ticks: list[tuple[float, str]] = []
    for index, (rank, intervals) in enumerate(shown.items()):
        top = -2.5 * index
        for track, y in ((COMPUTE, top), (TRANSFER, top - 1)):
            _draw_lane(axes, [i for i in intervals if i.track == track], y, window_us, colors)
            ticks.append((y, f"rank {rank} {'compute' if track == COMPUTE else 'transfers'}"))
        arrivals = [(i.end_us - start_us) / 1e3 for i in intervals if sender_of(i) is not None and i.end_us <= end_us]
        if len(arrivals) <= MOST_ARRIVALS:
            axes.plot(arrivals, [top - 0.5] * len(arrivals), "^", color=ARRIVAL_COLOR, markersize=4, linewidth=0)
        spans = [((a - start_us) / 1e3, (b - a) / 1e3) for a, b in exposed_spans(intervals)]
        axes.broken_barh(spans, (top - 1 - 0.62, 0.14), color=EXPOSED_COLOR, linewidth=0)
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(-2.5 * len(shown) + 0.7, 0.6)
    axes.set_xlim(0, (end_us - start_us) / 1e3)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_lane(axes: Any, intervals: list[Interval], y: float, window_us: Span, colors: dict[str, str]) -> None:
    """Draw one rank's intervals of one track around height `y`: a sub-row per stream, else where they overlap."""
    lanes = [lane for _, rows in lanes_by_label(intervals) for lane in rows]
    if len(lanes) > MOST_LABELLED_ROWS:
        lanes = assign_lanes(intervals)
    height = LANE_HEIGHT / max(1, len(lanes))
    for row, lane in enumerate(lanes):
        top = y + LANE_HEIGHT / 2 - row * height
        alike: dict[tuple[str, float], list[Span]] = {}  # one artist each: one per interval takes minutes to draw
        for interval in lane:
            left_ms = (interval.start_us - window_us[0]) / 1e3
            width_ms = (interval.end_us - interval.start_us) / 1e3
            color = colors[interval.op] if interval.track == COMPUTE else TRANSFER_COLOR
            share = (interval.end_us - interval.start_us) / (window_us[1] - window_us[0])
            edge = 0.4 if share > LEAST_WITH_EDGE and height > LEAST_HEIGHT_WITH_EDGE else 0.0
            alike.setdefault((color, edge), []).append((left_ms, width_ms))
            if len(interval.name) + 1 <= CHARS_PER_WIDTH * share and height > 0.2:
                place = {"ha": "center", "va": "center", "clip_on": True}
                ink = "white" if interval.track == COMPUTE else "black"
                axes.text(left_ms + width_ms / 2, top - height / 2, interval.name, fontsize=7, color=ink, **place)
        for (color, edge), spans in alike.items():
            axes.broken_barh(spans, (top - height, height), facecolor=color, edgecolor="white", linewidth=edge)


def _overlap_line(shown: Recording) -> str:
    overlaps = {rank: measure_overlap(intervals) for rank, intervals in shown.items()}
    parts = [f"rank {r} {o.exposed_us / 1e3:.2f} of {o.transfer_us / 1e3:.2f} ms" for r, o in overlaps.items()]
    # Two ranks fill a line of the picture; a third would be cut off at its edge.
    lines = ["; ".join(parts[start : start + 2]) for start in range(0, min(4, len(parts)), 2)]
    return "transfers exposed: " + ";\n".join(lines) + ("; ..." if len(parts) > 4 else "")


def _add_legend(figure: Any, colors: dict[str, str], *, has_arrivals: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=color, label=f"computation of {op}" if op else "computation") for op, color in colors.items()
    ]
    handles.append(Patch(color=TRANSFER_COLOR, label="transfer"))
    handles.append(Patch(color=EXPOSED_COLOR, label="exposed: transfer without computation"))
    if has_arrivals:
        handles.append(Line2D([], [], marker="^", color=ARRIVAL_COLOR, markersize=4, linewidth=0, label="arrival"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
