"""Predictions as a picture: per group size, how far the best way and the sequential program are from the ideal."""

from collections.abc import Sequence
from pathlib import Path

from commfuse_megatron.tools.bench.figure import COLORS, label_axes
from commfuse_megatron.tools.common.cases import PLANNED
from commfuse_megatron.tools.common.pictures import drawn
from commfuse_megatron.tools.simulate.predict import Prediction


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
                (0, "sequential", COLORS["sequential"], [way.sequential_ms for way in best]),
                (1, "fastest way", COLORS[PLANNED], [way.ms for way in best]),
            ):
                heights = [ms / ideal_ms for ms, ideal_ms in zip(times_ms, ideals_ms, strict=True)]
                axes.bar([at + 0.4 * offset - 0.2 for at in range(len(best))], heights, 0.4, color=color, label=label)
            labels = [f"{way.case}\nM {way.M}" for way in best]
            axes.set_xticks(range(len(best)), labels, fontsize=7, rotation=45, ha="right")
            label_axes(axes, f"{group_size} ranks")
        all_axes[0].legend(fontsize=8)
        link = next(iter(panels.values()))[0].link
        figure.suptitle(f"forward, predicted and not measured: {device}, link {link}; smaller is better", fontsize=10)
    return Path(path)
