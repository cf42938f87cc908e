"""Rows as tables. On the CPU only what was checked is shown: times there say nothing."""

from collections.abc import Sequence

from rich.table import Table

from commfuse_megatron.tools.bench.ours import PLANNED
from commfuse_megatron.tools.bench.rows import Row
from commfuse_megatron.tools.bench.summary import METRICS, Summary


def rows_table(rows: Sequence[Row]) -> Table:
    """Every row with what follows from it."""
    first = rows[0]
    table = Table(title=f"{first.device}, {_ranks(rows)}, link {first.link}, {first.dtype}", title_justify="left")
    for heading in ("case", "pass", "variant", "path"):
        table.add_column(heading, no_wrap=True)
    numbers = ("M", "ms", "p95", "exposed ms", "hidden", "of ideal", "of bound", "tail ms", "split ms", "host us")
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.case,
            row.pass_name,
            f"{row.variant} (emulated)" if row.emulated else row.variant,
            _path(row),
            str(row.M),
            f"{row.median_ms:.3f}",
            f"{row.p95_ms:.3f}",
            _number(row.exposed_ms),
            _percent(row.overlap_efficiency),
            _percent(row.ideal_fraction),
            _percent(row.schedule_fraction),
            _number(row.tail_ms),
            _number(row.split_loss_ms),
            "" if row.host_us is None else f"{row.host_us:.0f}",
        )
    return table


def overview_table(rows: Sequence[Row]) -> Table:
    """One line per case and pass: what the user has, what the planned path takes, the best of everything else."""
    first = rows[0]
    table = Table(title=f"{first.device}, {_ranks(rows)}, link {first.link}: ms per call", title_justify="left")
    for heading in ("case", "pass"):
        table.add_column(heading, no_wrap=True)
    for heading in ("M", "compute", "comm", "sequential", "megatron", "planned", "/ stock", "of ideal"):
        table.add_column(heading, justify="right")
    table.add_column("planned path", no_wrap=True)
    table.add_column("fastest", no_wrap=True)
    problems: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        problems.setdefault(row.problem, {})[row.variant] = row
    for variants in problems.values():
        any_row = next(iter(variants.values()))
        planned, megatron = variants.get(PLANNED), variants.get("megatron")
        stock_ms = min([any_row.sequential_ms] + ([megatron.median_ms] if megatron else []))
        whole = [row for row in variants.values() if row.path not in ("compute", "transfers", "slices")]
        fastest = min(whole, key=lambda row: row.median_ms)
        table.add_row(
            f"{any_row.case} (emulated {any_row.group_size})" if any_row.emulated else any_row.case,
            any_row.pass_name,
            str(any_row.M),
            f"{any_row.compute_only_ms:.3f}",
            f"{any_row.comm_only_ms:.3f}",
            f"{any_row.sequential_ms:.3f}",
            "" if megatron is None else f"{megatron.median_ms:.3f}",
            "" if planned is None else f"{planned.median_ms:.3f}",
            "" if planned is None else f"{planned.median_ms / stock_ms:.3f}",
            "" if planned is None else _percent(planned.ideal_fraction),
            "" if planned is None else _path(planned),
            f"{fastest.variant} {fastest.median_ms:.3f}",
        )
    return table


def checked_table(rows: Sequence[Row]) -> Table:
    """What ran and was found right, without times."""
    first = rows[0]
    table = Table(title=f"{_ranks(rows)} on the CPU: checked, not timed ({first.dtype})", title_justify="left")
    for heading in ("variant", "pass", "paths"):
        table.add_column(heading, no_wrap=True)
    for heading in ("cases", "largest error"):
        table.add_column(heading, justify="right")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        name = f"{row.variant} (emulated {row.group_size})" if row.emulated else row.variant
        groups.setdefault((name, row.pass_name), []).append(row)
    for (variant, pass_name), members in groups.items():
        errors = [row.max_error for row in members if row.max_error is not None]
        paths = ", ".join(sorted({_path(row) for row in members}))
        table.add_row(variant, pass_name, paths, str(len(members)), f"{max(errors):.1e}" if errors else "")
    return table


def summary_table(summary: Summary) -> Table:
    """The metrics: ratios of times, smaller is better."""
    table = Table(title="ratios of times: smaller is better", title_justify="left")
    for heading in ("figure", "value", "cases", "meaning"):
        table.add_column(heading)
    for name, metric in summary.metrics.items():
        table.add_row(name, f"{metric.value:.4f}", f"{metric.count} of {metric.wanted}", METRICS[name])
    return table


def _ranks(rows: Sequence[Row]) -> str:
    real = sorted({row.group_size for row in rows if not row.emulated})
    emulated = sorted({row.group_size for row in rows if row.emulated})
    texts = [f"{size} ranks" for size in real] + [f"{size} ranks emulated" for size in emulated]
    return ", ".join(texts)


def _path(row: Row) -> str:
    if row.path != "sliced":
        return row.path
    ring = " ring" if row.algorithm == "ring" else ""
    return f"sliced{ring} m={row.chunks_per_shard} {row.transport}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
