"""Rows as a picture: per case, how far every variant is from the ideal. Needs matplotlib, which is an extra."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.rows import Row, by_problem
from commfuse_megatron.tools.common.cases import HEADLINE_M, HEADLINE_MODELS, PLANNED
from commfuse_megatron.tools.common.pictures import drawn

COLORS = {
    "sequential": "#8d99ae",
    "megatron": "#5c677d",
    "slicing": "#c9ada7",
    "async_tp": "#f0a63a",
    "userbuffers": "#2f9e8f",
    PLANNED: "#2b6cb0",
}


def draw_rows(path: str | Path, rows: Sequence[Row]) -> Path:
    """Draw time / max(compute_only, comm_only) of the headline cases (or, without any, of all) into `path`.

    Raises UnsupportedError without matplotlib, or when there is nothing to compare.
    """
    comparable = [row for row in rows if row.is_comparable]
    wanted = [r for r in comparable if r.case.split(".")[0] in HEADLINE_MODELS and r.M == HEADLINE_M and not r.emulated]
    wanted = wanted or comparable
    problems = by_problem(wanted)
    if not problems:
        raise UnsupportedError("no rows to compare: times from a CPU are not drawn")
    passes = sorted({row.pass_name for row in wanted}, reverse=True)
    with drawn(path, len(passes), (12, 3.6 * len(passes))) as (figure, all_axes):
        for axes, pass_name in zip(all_axes, passes, strict=True):
            groups = [problem for problem in problems if problem.any.pass_name == pass_name]
            width = 0.8 / len(COLORS)
            for offset, (prefix, color) in enumerate(COLORS.items()):
                found = [(at, problem.best(prefix), problem.any.ideal_ms) for at, problem in enumerate(groups)]
                bars = [(at, row.median_ms / ideal_ms) for at, row, ideal_ms in found if row is not None]
                if bars:
                    label = f"best {prefix}" if prefix == "slicing" else prefix
                    places = [at + (offset + 0.5) * width - 0.4 for at, _ in bars]
                    axes.bar(places, [height for _, height in bars], width, color=color, label=label)
            axes.set_xticks(range(len(groups)), [_label(problem.any) for problem in groups], fontsize=8)
            axes.set_ylim(bottom=0.8)
            label_axes(axes, pass_name)
        all_axes[0].legend(ncols=len(COLORS), fontsize=8, loc="upper left")
        first = wanted[0]
        figure.suptitle(f"{first.group_size} x {first.device}, link {first.link}: smaller is better", fontsize=10)
    return Path(path)


def label_axes(axes: Any, title: str) -> None:
    """Say what the heights of bars are: 1 is the ideal."""
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("time / max(compute, comm), ratio")
    axes.set_title(title, loc="left", fontsize=10)


def _label(row: Row) -> str:
    emulated = f"\n{row.group_size} ranks emulated" if row.emulated else ""
    return f"{row.case}\nM {row.M}{emulated}"
