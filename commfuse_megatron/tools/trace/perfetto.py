"""Recordings as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

One process per rank (and run) with rows for compute, rows for transfers, by lane or stream and as many as run at once,
and a row of arrivals, to each of which an arrow leads from the transfer at its sender. Beware: viewers draw overlapping
events of one row wrongly, hence the extra rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from commfuse_megatron.runtime.meter import COMPUTE, TRANSFER, measure_overlap
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.trace.layout import Recording, find_arrivals, lanes_by_label

_FIRST_ROW = {COMPUTE: 0, TRANSFER: 100}
_ROW_NAME = {COMPUTE: "compute", TRANSFER: "transfers"}
_ARRIVALS_ROW = 200

# Arrows are drawn between slices: one ends within the receiver's, this fraction before its end.
_INSIDE = 1e-3


def chrome_trace(recording: Recording | Mapping[str, Recording]) -> dict[str, Any]:
    """The trace of `recording` (rank -> its intervals) as the JSON object of the Chrome trace format; or of several by
    name, such as "stock" and "plugin", below each other.

    Times start at zero with the earliest interval of any rank of a recording.
    """
    is_named = any(isinstance(key, str) for key in recording)
    runs = cast(Mapping[str, Recording], recording if is_named else {"": recording})
    events: list[dict[str, Any]] = []
    metered: dict[str, dict[str, float]] = {}
    for run_index, (run, ranks) in enumerate(runs.items()):
        first_process = run_index * (1 + max((max(r, default=0) for r in runs.values()), default=0))
        origin_us = min((i.start_us for intervals in ranks.values() for i in intervals), default=0.0)
        places: dict[int, tuple[int, int]] = {}
        for rank, intervals in sorted(ranks.items()):
            process, name = first_process + rank, f"{run}, rank {rank}" if run else f"rank {rank}"
            events.append(_metadata(process, 0, "process_name", name=name))
            events.append(_metadata(process, 0, "process_sort_index", sort_index=process))
            events.extend(_rows_of_rank(process, intervals, origin_us, places))
            overlap = measure_overlap(intervals)
            metered[name] = {times: getattr(overlap, times) for times in ("compute_us", "transfer_us", "exposed_us")}
        events.extend(_arrivals(ranks, first_process, origin_us, places, first_flow=len(events)))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metered}


def write_perfetto(path: str | Path, recording: Recording | Mapping[str, Recording]) -> Path:
    """Write `chrome_trace(recording)`, making the folder; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(recording)), encoding="utf-8")
    return path


def _rows_of_rank(
    process: int, intervals: Sequence[Interval], origin_us: float, places: dict[int, tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Rows with their slices; notes in `places` where each interval went (by its id)."""
    for track in (COMPUTE, TRANSFER):
        row = _FIRST_ROW[track]
        for label, lanes in lanes_by_label(i for i in intervals if i.track == track):
            name = _ROW_NAME[track] + (f", {label}" if label else "")
            for number, lane in enumerate(lanes, 1):
                yield _metadata(process, row, "thread_name", name=name if number == 1 else f"{name} {number}")
                yield _metadata(process, row, "thread_sort_index", sort_index=row)
                for interval in lane:
                    places[id(interval)] = process, row
                    args = {"op": interval.op, "call": interval.call, "step": interval.step}
                    yield {
                        "ph": "X",
                        "pid": process,
                        "tid": row,
                        "name": interval.name,
                        "cat": interval.track,
                        "ts": interval.start_us - origin_us,
                        "dur": interval.duration_us,
                        "args": args | ({"detail": interval.detail} if interval.detail else {}),
                    }
                row += 1


def _arrivals(
    recording: Recording, first_process: int, origin_us: float, places: dict[int, tuple[int, int]], first_flow: int
) -> Iterator[dict[str, Any]]:
    arrivals = find_arrivals(recording)
    for rank in sorted({arrival.to_rank for arrival in arrivals}):
        yield _metadata(first_process + rank, _ARRIVALS_ROW, "thread_name", name="arrivals")
        yield _metadata(first_process + rank, _ARRIVALS_ROW, "thread_sort_index", sort_index=_ARRIVALS_ROW)
    for flow, arrival in enumerate(arrivals, first_flow):
        received = arrival.received
        yield {
            "ph": "i",
            "s": "t",
            "pid": first_process + arrival.to_rank,
            "tid": _ARRIVALS_ROW,
            "name": f"from rank {arrival.from_rank}",
            "cat": "arrival",
            "ts": received.end_us - origin_us,
            "args": {"op": received.op, "call": received.call, "step": received.step},
        }
        if arrival.sent is None:
            continue
        just_inside_us = received.end_us - _INSIDE * received.duration_us
        ends = (("s", arrival.sent, arrival.sent.start_us), ("f", received, just_inside_us))
        for phase, interval, at_us in ends:
            process, row = places[id(interval)]
            event = {"ph": phase, "id": flow, "pid": process, "tid": row, "name": "message", "cat": "message"}
            yield {**event, "ts": at_us - origin_us, **({"bp": "e"} if phase == "f" else {})}


def _metadata(process: int, row: int, kind: str, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": kind, "args": args}
