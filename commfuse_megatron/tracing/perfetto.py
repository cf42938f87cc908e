"""A recording as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

One process per rank with a row for compute and as many rows for transfers as run at once. The contract that bites:
viewers draw overlapping events of one row wrongly, hence the extra rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commfuse_megatron.runtime.meter import COMPUTE, TRANSFER, measure_overlap
from commfuse_megatron.tracing.lanes import assign_lanes

if TYPE_CHECKING:
    from commfuse_megatron.runtime.recorder import Interval

__all__ = ["chrome_trace", "write_perfetto"]

_FIRST_ROW = {COMPUTE: 0, TRANSFER: 100}
_ROW_NAME = {COMPUTE: "compute", TRANSFER: "transfers"}


def chrome_trace(recording: Mapping[int, Sequence[Interval]]) -> dict[str, Any]:
    """The trace of `recording` (rank -> its intervals) as the JSON object of the Chrome trace format.

    Times start at zero with the earliest interval of any rank.
    """
    origin_us = min((i.start_us for intervals in recording.values() for i in intervals), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, intervals in sorted(recording.items()):
        events.append(_metadata(rank, 0, "process_name", name=f"rank {rank}"))
        events.append(_metadata(rank, 0, "process_sort_index", sort_index=rank))
        for track in (COMPUTE, TRANSFER):
            lanes = assign_lanes(i for i in intervals if i.track == track)
            for row, lane in enumerate(lanes, start=_FIRST_ROW[track]):
                name = _ROW_NAME[track] + ("" if row == _FIRST_ROW[track] else f" {row - _FIRST_ROW[track] + 1}")
                events.append(_metadata(rank, row, "thread_name", name=name))
                events.append(_metadata(rank, row, "thread_sort_index", sort_index=row))
                events.extend(_slice(rank, row, interval, origin_us) for interval in lane)
    overlap = {f"rank {rank}": measure_overlap(intervals) for rank, intervals in sorted(recording.items())}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            rank: {"compute_us": o.compute_us, "transfer_us": o.transfer_us, "exposed_us": o.exposed_us}
            for rank, o in overlap.items()
        },
    }


def write_perfetto(path: str | Path, recording: Mapping[int, Sequence[Interval]]) -> Path:
    """Write `chrome_trace(recording)` to `path`, making its folder; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(recording)), encoding="utf-8")
    return path


def _metadata(rank: int, row: int, kind: str, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": kind, "args": args}


def _slice(rank: int, row: int, interval: Interval, origin_us: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": row,
        "name": interval.name,
        "cat": interval.track,
        "ts": interval.start_us - origin_us,
        "dur": interval.end_us - interval.start_us,
        "args": {"op": interval.op, "call": interval.call, "step": interval.step},
    }
