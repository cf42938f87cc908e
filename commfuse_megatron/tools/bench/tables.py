"""Rows as tables. On the CPU only what was checked is shown: times there say nothing."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from commfuse_megatron.tools.bench.rows import Row, by_problem
from commfuse_megatron.tools.bench.summary import METRICS, Summary
from commfuse_megatron.tools.common.cases import PAPER_MS, PLANNED, attention_bound_ms, attention_case
from commfuse_megatron.tools.common.output import make_table

_SPLITS = (1, 2, 4, 8)


def rows_table(rows: Sequence[Row]) -> Table:
    """Every row with what follows from it."""
    numbers = ("M", "ms", "p95", "exposed ms", "hidden", "of ideal", "of bound", "tail ms", "split ms", "host us")
    lines = [
        (
            row.case,
            row.pass_name,
            f"{row.variant} (emulated)" if row.emulated else row.variant,
            _path(row),
            str(row.M),
            *map(_number, (row.median_ms, row.p95_ms, row.exposed_ms)),
            *map(_percent, (row.overlap_efficiency, row.ideal_fraction, row.schedule_fraction)),
            *map(_number, (row.tail_ms, row.split_loss_ms)),
            "" if row.host_us is None else f"{row.host_us:.0f}",
        )
        for row in rows
    ]
    first = rows[0]
    title = f"{first.device}, {_ranks(rows)}, link {first.link}, {first.dtype}"
    return make_table(title, ("case", "pass", "variant", "path", *(f">{name}" for name in numbers)), lines)


def overview_table(rows: Sequence[Row]) -> Table:
    """One line per case and pass: what the user has, what the planned path takes, the best of everything else."""
    lines = []
    for variants in by_problem(rows):
        any_row = next(iter(variants.values()))
        planned, megatron = variants.get(PLANNED), variants.get("megatron")
        stock_ms = min([any_row.sequential_ms] + ([megatron.median_ms] if megatron else []))
        whole = [row for row in variants.values() if row.path not in ("compute", "transfers", "slices")]
        fastest = min(whole, key=lambda row: row.median_ms)
        of_planned = ["", "", "", ""]
        if planned is not None:
            share = f"{planned.median_ms / stock_ms:.3f}"
            of_planned = [_number(planned.median_ms), share, _percent(planned.ideal_fraction), _path(planned)]
        lines.append(
            (
                f"{any_row.case} (emulated {any_row.group_size})" if any_row.emulated else any_row.case,
                any_row.pass_name,
                str(any_row.M),
                *map(_number, (any_row.compute_only_ms, any_row.comm_only_ms, any_row.sequential_ms)),
                "" if megatron is None else _number(megatron.median_ms),
                *of_planned,
                f"{fastest.variant} {fastest.median_ms:.3f}",
            )
        )
    first = rows[0]
    numbers = ("M", "compute", "comm", "sequential", "megatron", "planned", "/ stock", "of ideal")
    columns = ("case", "pass", *(f">{name}" for name in numbers), "planned path", "fastest")
    return make_table(f"{first.device}, {_ranks(rows)}, link {first.link}: ms per call", columns, lines)


def attention_table(rows: Sequence[Row]) -> Table:
    """One line per block and pass: the best of every path, in ms, with the share of the communication that it hides.

    bound: the lower one, of the forward schedule, simulated from this line's compute and comm, at the best number of
    splits.
    paper: what is published of it: no overlap / slicing / row-parallel / query-split, 4 ranks, ms.
    """
    paths = ("slicing", "row_parallel", "query_split", PLANNED)
    lines = []
    for variants in by_problem(rows):
        row = next(iter(variants.values()))
        paper: Iterable[float | None] = ()
        bound = ("", "")
        if row.pass_name == "fprop":
            paper = PAPER_MS.get(row.case, ())
            bound_ms, splits = _bound(row)
            bound = (_number(bound_ms), str(splits))
        lines.append(
            (
                row.case,
                row.pass_name,
                f"{row.group_size} emulated" if row.emulated else str(row.group_size),
                str(row.M),
                *map(_number, (row.compute_only_ms, row.comm_only_ms, row.sequential_ms)),
                *(_best(variants.values(), path) for path in paths),
                *bound,
                " / ".join("-" if ms is None else f"{ms:.1f}" for ms in paper),
            )
        )
    first = rows[0]
    title = f"{first.device}, link {first.link}: attention with its projection, ms (share of communication hidden)"
    numbers = ("ranks", "M", "compute", "comm", "sequential", *paths, "bound", "splits", "paper")
    return make_table(title, ("case", "pass", *(f">{name}" for name in numbers)), lines)


def _bound(row: Row) -> tuple[float, int]:
    """(ms, splits per shard)."""
    case = attention_case(row.case, row.M * row.shrink, row.group_size, row.shrink)
    return min((attention_bound_ms(case, row.compute_only_ms, row.comm_only_ms, m), m) for m in _SPLITS)


def _best(variants: Iterable[Row], path: str) -> str:
    row = min((v for v in variants if v.variant.split()[0] == path), key=lambda v: v.median_ms, default=None)
    if row is None:
        return ""
    hidden = row.overlap_efficiency
    return f"{row.median_ms:.3f}" + ("" if hidden is None else f" ({100 * hidden:.1f} %)")


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


def _ranks(rows: Sequence[Row]) -> str:
    real = sorted({row.group_size for row in rows if not row.emulated})
    emulated = sorted({row.group_size for row in rows if row.emulated})
    return ", ".join([f"{size} ranks" for size in real] + [f"{size} ranks emulated" for size in emulated])


def _path(row: Row) -> str:
    if row.path != "sliced":
        return row.path
    ring = " ring" if row.algorithm == "ring" else ""
    return f"sliced{ring} m={row.chunks_per_shard} {row.transport}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
