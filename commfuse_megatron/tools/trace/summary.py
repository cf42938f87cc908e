"""A rank's recording as the numbers of a table: times per call, what was hidden, what was left at the end."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commfuse_megatron.runtime.meter import COMPUTE, TRANSFER, measure_overlap, union_spans
from commfuse_megatron.runtime.recorder import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Means over calls, in microseconds.

    span_us: first start to last end. compute_us: something is computed; gemm_us: a GEMM is. exposed_us: something is
    transferred and nothing computed. tail_us: from the end of the last GEMM or attention to the end of the call.
    hidden_fraction: the share of the transfers' time beside which something was computed; 1 when nothing was sent.
    """

    calls: int
    span_us: float
    compute_us: float
    gemm_us: float
    transfer_us: float
    exposed_us: float
    tail_us: float
    hidden_fraction: float


def is_gemm(interval: Interval) -> bool:
    """Whether an interval is (part of) a matrix product, by the names that the runtime and the profiler give."""
    return interval.track == COMPUTE and (
        interval.name.startswith(("multiply", "wgrad", "dgrad")) or "GEMM" in interval.name
    )


def is_attention(interval: Interval) -> bool:
    """Whether an interval is (part of) attention without its projection, by the same names."""
    return interval.track == COMPUTE and interval.name.startswith(("attend", "attention"))


def summarize(intervals: Iterable[Interval], *, as_one_call: bool = False) -> Summary:
    """The summary of one rank's calls, each metered by itself; or of everything as one, e.g. of a training step."""
    by_call: dict[int, list[Interval]] = defaultdict(list)
    for interval in intervals:
        by_call[0 if as_one_call else interval.call].append(interval)
    measured: dict[str, list[float]] = defaultdict(list)
    for members in by_call.values():
        overlap, tail = measure_overlap(members), tail_us(members)
        for name in ("span_us", "compute_us", "transfer_us", "exposed_us"):
            measured[name].append(getattr(overlap, name))
        measured["gemm_us"].append(busy_us(filter(is_gemm, members)))
        measured["tail_us"].append(overlap.span_us if tail is None else tail)
    names = [field.name for field in dataclasses.fields(Summary) if field.name.endswith("_us")]
    means = {name: statistics.fmean(measured[name] or [0.0]) for name in names}
    exposed = means["exposed_us"] / means["transfer_us"] if means["transfer_us"] > 0 else 0.0
    return Summary(calls=len(by_call), hidden_fraction=1.0 - exposed, **means)


def busy_us(intervals: Iterable[Interval]) -> float:
    """How long some of these computations ran."""
    return sum(end_us - start_us for start_us, end_us in union_spans(intervals, COMPUTE))


def tail_us(call: Sequence[Interval]) -> float | None:
    """From the end of the last GEMM or attention to the end of everything, of one call; None without either."""
    work_ends_us = [i.end_us for i in call if is_gemm(i) or is_attention(i)]
    return max(i.end_us for i in call) - max(work_ends_us) if work_ends_us else None


def worst_of(summaries: Sequence[Summary]) -> Summary:
    """The largest of each number over ranks, and the least that one hides: a group is as slow as its slowest member."""
    names = [field.name for field in dataclasses.fields(Summary)]
    largest = {name: max(getattr(summary, name) for summary in summaries) for name in names}
    return Summary(**largest | {"hidden_fraction": min(summary.hidden_fraction for summary in summaries)})


def drop_nested(intervals: Sequence[Interval], outer: Sequence[Interval]) -> list[Interval]:
    """Without what lies inside one of `outer` of the same track: the same work, recorded a second time closer to it."""
    spans = {track: union_spans(outer, track) for track in (COMPUTE, TRANSFER)}
    return [i for i in intervals if not any(start <= i.start_us and i.end_us <= end for start, end in spans[i.track])]
