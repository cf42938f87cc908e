"""Measured attention blocks as a table, with what the paper publishes of its own beside them."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from commfuse_megatron.tools.bench.rows import Row
from commfuse_megatron.tools.common.attention_cases import PAPER_MS, attention_bound_ms, attention_case

_SPLITS = (1, 2, 4, 8)


def attention_table(rows: Sequence[Row]) -> Table:
    """One line per case and pass: the best of every way, in ms, with the share of the communication that it hides.

    bound: of the forward schedule, simulated from this line's compute and comm, at the best number of splits.
    paper: no overlap / slicing / row-parallel / query-split, 4 ranks, ms.
    """
    first = rows[0]
    title = f"{first.device}, link {first.link}: attention with its projection, ms (share of communication hidden)"
    table = Table(title=title, title_justify="left")
    for heading in ("case", "pass"):
        table.add_column(heading, no_wrap=True)
    ways = ("slicing", "row_parallel", "query_split", "planned")
    for heading in ("ranks", "M", "compute", "comm", "sequential", *ways, "bound", "splits", "paper"):
        table.add_column(heading, justify="right")
    problems: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        problems.setdefault(row.problem, []).append(row)
    for variants in problems.values():
        row = variants[0]
        bound_ms, splits = _bound(row)
        paper = PAPER_MS.get(row.case, ()) if row.pass_name == "fprop" else ()
        table.add_row(
            row.case,
            row.pass_name,
            f"{row.group_size} emulated" if row.emulated else str(row.group_size),
            str(row.M),
            f"{row.compute_only_ms:.3f}",
            f"{row.comm_only_ms:.3f}",
            f"{row.sequential_ms:.3f}",
            *(_best(variants, way) for way in ways),
            f"{bound_ms:.3f}" if row.pass_name == "fprop" else "",
            str(splits) if row.pass_name == "fprop" else "",
            " / ".join("-" if ms is None else f"{ms:.1f}" for ms in paper),
        )
    return table


def _bound(row: Row) -> tuple[float, int]:
    """(ms, splits per shard)."""
    case = attention_case(row.case, row.M * row.shrink, row.group_size, row.shrink)
    return min((attention_bound_ms(case, row.compute_only_ms, row.comm_only_ms, m), m) for m in _SPLITS)


def _best(variants: Iterable[Row], way: str) -> str:
    row = min((v for v in variants if v.variant.split()[0] == way), key=lambda v: v.median_ms, default=None)
    if row is None:
        return ""
    hidden = row.overlap_efficiency
    return f"{row.median_ms:.3f}" + ("" if hidden is None else f" ({100 * hidden:.1f} %)")
