"""Rows as a picture: per case, how far every variant is from the ideal. Needs matplotlib, which is an extra."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.rows import Row, has_word_prefix
from commfuse_megatron.tools.common.cases import HEADLINE_M, HEADLINE_MODELS, PLANNED
from commfuse_megatron.tools.common.pictures import drawn
from commfuse_megatron.tools.simulate.predict import Prediction

_COLORS = {
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
    problems: dict[tuple[object, ...], list[Row]] = {}
    for row in wanted:
        problems.setdefault(row.problem, []).append(row)
    if not problems:
        raise UnsupportedError("no rows to compare: times from a CPU are not drawn")
    passes = sorted({row.pass_name for row in wanted}, reverse=True)
    with drawn(path, len(passes), (12, 3.6 * len(passes))) as (figure, all_axes):
        for axes, pass_name in zip(all_axes, passes, strict=True):
            groups = [members for members in problems.values() if members[0].pass_name == pass_name]
            width = 0.8 / len(_COLORS)
            for offset, (prefix, color) in enumerate(_COLORS.items()):
                bars = [(at, found) for at, rows in enumerate(groups) if (found := _ratio(rows, prefix)) is not None]
                if bars:
                    label = f"best {prefix}" if prefix == "slicing" else prefix
                    places = [at + (offset + 0.5) * width - 0.4 for at, _ in bars]
                    axes.bar(places, [ratio for _, ratio in bars], width, color=color, label=label)
            axes.set_xticks(range(len(groups)), [_label(members[0]) for members in groups], fontsize=8)
            axes.set_ylim(bottom=0.8)
            _label_axes(axes, pass_name)
        all_axes[0].legend(ncols=len(_COLORS), fontsize=8, loc="upper left")
        first = wanted[0]
        figure.suptitle(f"{first.group_size} x {first.device}, link {first.link}: smaller is better", fontsize=10)
    return Path(path)


def draw_predictions(path: str | Path, predictions: Sequence[Sequence[Prediction]], device: str) -> Path:
    """Draw, a panel per group size, the fastest way's and the sequential program's time over the ideal into `path`.

    predictions: forward passes, per case the ways, the fastest first. device: whose GEMMs were measured. Raises
    UnsupportedError without matplotlib.
    """
    panels: dict[int, list[Prediction]] = {}
    for ways in predictions:
        panels.setdefault(ways[0].group_size, []).append(ways[0])
    widest = max(map(len, panels.values()))
    with drawn(path, len(panels), (max(8.0, 0.45 * widest), 3.2 * len(panels))) as (figure, all_axes):
        for axes, (group_size, best) in zip(all_axes, panels.items(), strict=True):
            ideals_ms = [max(way.compute_ms, way.comm_ms) for way in best]
            for offset, label, color, times_ms in (
                (0, "sequential", _COLORS["sequential"], [way.sequential_ms for way in best]),
                (1, "fastest way", _COLORS[PLANNED], [way.ms for way in best]),
            ):
                heights = [ms / ideal_ms for ms, ideal_ms in zip(times_ms, ideals_ms, strict=True)]
                axes.bar([at + 0.4 * offset - 0.2 for at in range(len(best))], heights, 0.4, color=color, label=label)
            labels = [f"{way.case}\nM {way.M}" for way in best]
            axes.set_xticks(range(len(best)), labels, fontsize=7, rotation=45, ha="right")
            _label_axes(axes, f"{group_size} ranks")
        all_axes[0].legend(fontsize=8)
        link = next(iter(panels.values()))[0].link
        figure.suptitle(f"forward, predicted and not measured: {device}, link {link}; smaller is better", fontsize=10)
    return Path(path)


def _label_axes(axes: Any, title: str) -> None:
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("time / max(compute, comm)")
    axes.set_title(title, loc="left", fontsize=10)


def _ratio(rows: Sequence[Row], prefix: str) -> float | None:
    times = [row.median_ms for row in rows if has_word_prefix(row.variant, prefix)]
    return min(times) / rows[0].ideal_ms if times else None


def _label(row: Row) -> str:
    emulated = f"\n{row.group_size} ranks emulated" if row.emulated else ""
    return f"{row.case}\nM {row.M}{emulated}"
