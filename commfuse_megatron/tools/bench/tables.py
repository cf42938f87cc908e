"""Rows as tables. On the CPU only what was checked is shown: times there say nothing."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from rich.table import Table

from commfuse_megatron.tools.bench.rows import Problem, Row, by_problem, ratio
from commfuse_megatron.tools.bench.summary import METRICS, Summary
from commfuse_megatron.tools.common.cases import PAPER_MS, PLANNED, attention_bound_ms, attention_case
from commfuse_megatron.tools.common.output import make_table

_SPLITS = (1, 2, 4, 8)

#: Below a heading, of each thing: the attribute named, or what the function gives.
Columns = Mapping[str, str | Callable[[Any], object]]

_SIZES: Columns = {"case": "any.case", "pass": "any.pass_name", ">ranks": lambda p: _group(p.any), ">M": "any.M"}
_BOUNDS: Columns = {">compute": "any.compute_only_ms", ">comm": "any.comm_only_ms"}


def _table(title: str, things: Iterable[object], columns: Columns) -> Table:
    """A line for each thing."""
    cells = [attrgetter(cell) if isinstance(cell, str) else cell for cell in columns.values()]
    return make_table(title, columns, [[_text(cell(thing)) for cell in cells] for thing in things])


def rows_table(rows: Sequence[Row]) -> Table:
    """Every row with what follows from it."""
    columns: Columns = {
        "case": "case",
        "pass": "pass_name",
        "variant": lambda row: f"{row.variant} (emulated)" if row.emulated else row.variant,
        "path": _path,
        ">M": "M",
        ">ms": "median_ms",
        ">p95": "p95_ms",
        ">exposed ms": "exposed_ms",
        ">hidden": lambda row: _percent(row.overlap_efficiency),
        ">of ideal": lambda row: _percent(row.ideal_fraction),
        ">of bound": lambda row: _percent(row.schedule_fraction),
        ">tail ms": "tail_ms",
        ">split ms": "split_loss_ms",
        ">host us": lambda row: None if row.host_us is None else f"{row.host_us:.0f}",
    }
    first = rows[0]
    title = f"{first.device}, {_ranks(rows)}, link {first.link}, {first.dtype}"
    return _table(title, rows, columns)


def overview_table(rows: Sequence[Row]) -> Table:
    """One line per case and pass: what the user has, what the planned path takes, the best of everything else."""
    columns: Columns = {
        "case": lambda p: f"{p.any.case} (emulated {p.any.group_size})" if p.any.emulated else p.any.case,
        "pass": "any.pass_name",
        ">M": "any.M",
        **_BOUNDS,
        ">sequential": "any.sequential_ms",
        ">megatron": lambda p: p.ms("megatron"),
        ">planned": lambda p: p.ms(PLANNED),
        ">/ stock": lambda p: ratio(p.ms(PLANNED), p.stock_ms),
        ">of ideal": lambda p: p.planned and _percent(p.planned.ideal_fraction),
        "planned path": lambda p: p.planned and _path(p.planned),
        "fastest": lambda p: f"{p.fastest.variant} {p.fastest.median_ms:.3f}",
    }
    title = f"{rows[0].device}, {_ranks(rows)}, link {rows[0].link}: ms per call"
    return _table(title, by_problem(rows), columns)


def attention_table(rows: Sequence[Row]) -> Table:
    """One line per block and pass: the best of every path, in ms, with the share of the communication that it hides.

    bound: the lower one, of the forward schedule, simulated from this line's compute and comm, at the best number of
    splits.
    paper: what is published of it: no overlap / slicing / row-parallel / query-split, 4 ranks, ms.
    """
    paths = ("slicing", "row_parallel", "query_split", PLANNED)
    columns: Columns = {
        **_SIZES,
        **_BOUNDS,
        ">sequential": "any.sequential_ms",
        **{f">{path}": functools.partial(_best, path=path) for path in paths},
        ">bound": lambda p: _bound(p.any)[0],
        ">splits": lambda p: _bound(p.any)[1],
        ">paper": lambda p: " / ".join("-" if ms is None else f"{ms:.1f}" for ms in _of_paper(p.any)),
    }
    title = f"{rows[0].device}, link {rows[0].link}: attention with its projection, ms (share of communication hidden)"
    return _table(title, by_problem(rows), columns)


def ulysses_table(rows: Sequence[Row]) -> Table:
    """One line per block and pass, in ms: the best of every way; exposed: beyond compute, as a share of theirs."""

    def share(p: Problem) -> float | None:
        stock_ms = p.best_ms("transformer_engine") or p.best_ms("sequential")
        exposed_ms = [ms and ms - p.any.compute_only_ms for ms in (p.best_ms(PLANNED), stock_ms)]
        return ratio(*exposed_ms) if exposed_ms[1] is not None and exposed_ms[1] > 0 else None

    ways = ("sequential", "transformer_engine", "overlapped", "with_projections", PLANNED)
    columns: Columns = {
        **_SIZES,
        **_BOUNDS,
        **{f">{way}": functools.partial(Problem.best_ms, prefix=way) for way in ways},
        ">exposed / theirs": lambda p: _percent(share(p)),
        "planned path": lambda p: p.planned and _path(p.planned),
    }
    title = f"{rows[0].device}, link {rows[0].link}: attention over a split sequence between its linears, ms"
    return _table(title, by_problem(rows), columns)


def checked_table(rows: Sequence[Row]) -> Table:
    """What ran and was found right, without times."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        name = f"{row.variant} (emulated {row.group_size})" if row.emulated else row.variant
        groups.setdefault((name, row.pass_name), []).append(row)
    lines = []
    for key, members in groups.items():
        errors = [row.max_error for row in members if row.max_error is not None]
        paths = ", ".join(sorted({_path(row) for row in members}))
        lines.append((*key, paths, str(len(members)), f"{max(errors):.1e}" if errors else ""))
    title = f"{_ranks(rows)} on the CPU: checked, not timed ({rows[0].dtype})"
    return make_table(title, ("variant", "pass", "paths", ">cases", ">largest error"), lines)


def summary_table(summary: Summary) -> Table:
    """The metrics: ratios of times, smaller is better."""
    lines = [
        (name, f"{metric.value:.4f}", f"{metric.count} of {metric.wanted}", METRICS[name])
        for name, metric in summary.metrics.items()
    ]
    return make_table("ratios of times: smaller is better", ("figure", "value", "cases", "meaning"), lines)


@functools.lru_cache(maxsize=256)
def _bound(row: Row) -> tuple[float | None, int | None]:
    """(ms, splits per shard) of a forward pass."""
    if row.pass_name != "fprop":
        return None, None
    case = attention_case(row.case, row.M * row.shrink, row.group_size, row.shrink)
    return min((attention_bound_ms(case, row.compute_only_ms, row.comm_only_ms, m), m) for m in _SPLITS)


def _of_paper(row: Row) -> tuple[float | None, ...]:
    return PAPER_MS.get(row.case, ()) if row.pass_name == "fprop" else ()


def _best(problem: Problem, path: str) -> str | None:
    row = problem.best(path)
    if row is None:
        return None
    hidden = row.overlap_efficiency
    return f"{row.median_ms:.3f}" + ("" if hidden is None else f" ({100 * hidden:.1f} %)")


def _group(row: Row) -> str:
    return f"{row.group_size} emulated" if row.emulated else str(row.group_size)


def _ranks(rows: Sequence[Row]) -> str:
    sizes = sorted({(row.emulated, row.group_size) for row in rows})
    return ", ".join(f"{size} ranks emulated" if emulated else f"{size} ranks" for emulated, size in sizes)


def _path(row: Row) -> str:
    if row.path not in ("sliced", "overlapped"):
        return row.path
    return f"{row.schedule} {row.transport}"


def _text(value: object) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"
