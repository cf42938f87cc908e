"""Loss and gradient-norm curves of several runs in one picture, with their differences from the first as numbers.

    python examples/compare_curves.py stock=stock.jsonl plugin=plugin.jsonl --picture curves.png

The files are what `pretrain_gpt.py --loss-log` writes. With `--limit` it exits with 1 if a loss differs by more.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from commfuse_megatron.tools.common.output import results

QUANTITIES = {"lm loss": "loss", "grad-norm": "gradient norm"}


@dataclass(frozen=True)
class Curve:
    """One run: by quantity, step -> value."""

    name: str
    values: dict[str, dict[int, float]]


def main() -> int:
    """Print, draw. 0: done, and within the limit; 1: beyond it; 2: a file cannot be used, or nothing can be drawn."""
    parser, chosen = parse()
    try:
        curves = [read_curve(argument) for argument in chosen.runs]
        if len(curves) < 2:
            raise ValueError("name at least two runs")
        differences = {
            (curve.name, quantity): differences_of(curves[0], curve, quantity)
            for curve in curves[1:]
            for quantity in QUANTITIES
        }
        if chosen.picture is not None:
            draw(chosen.picture, curves)
    except (OSError, ValueError, ImportError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    table = Table(title=f"absolute differences from {curves[0].name}", title_justify="left")
    for column in ("run", "quantity", "steps", "largest", "mean"):
        table.add_column(column, justify="left" if column in ("run", "quantity") else "right")
    for (name, quantity), found in differences.items():
        mean = sum(found) / len(found)
        table.add_row(name, QUANTITIES[quantity], str(len(found)), f"{largest_of(found):.3g}", f"{mean:.3g}")
    results().print(table)
    if chosen.picture is not None:
        print(f"picture {chosen.picture}")
    largest = largest_of([d for (_, quantity), found in differences.items() if quantity == "lm loss" for d in found])
    if chosen.limit is not None and not largest <= chosen.limit:
        print(f"losses differ by {largest:.3g}, allowed {chosen.limit:g}")
        return 1
    return 0


def read_curve(argument: str) -> Curve:
    """The run that `NAME=FILE` or `FILE` names. Of a step that was run twice the later one counts.

    Raises ValueError for a file without losses.
    """
    name, _, file = argument.rpartition("=")
    values: dict[str, dict[int, float]] = {quantity: {} for quantity in QUANTITIES}
    for number, text in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            for quantity in QUANTITIES.keys() & line.keys():
                values[quantity][int(line["step"])] = float(line[quantity])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}, line {number}: not a line of a loss log: {text[:80]!r}") from error
    if not values["lm loss"]:
        raise ValueError(f"{file}: no losses")
    return Curve(name or Path(file).stem, values)


def differences_of(first: Curve, other: Curve, quantity: str) -> list[float]:
    """Absolute differences over common steps. Raises ValueError if there are none."""
    expected, found = first.values[quantity], other.values[quantity]
    steps = expected.keys() & found.keys()
    if not steps:
        raise ValueError(f"{first.name} and {other.name} have no step in common ({quantity})")
    return [abs(found[step] - expected[step]) for step in sorted(steps)]


def largest_of(differences: list[float]) -> float:
    """NaN if any is."""
    return max(differences, key=lambda difference: (math.isnan(difference), difference))


def draw(path: Path, curves: list[Curve]) -> None:
    """Both quantities over steps, one line per run; the first is drawn wide, so that equal curves stay visible.

    Raises ValueError without matplotlib.
    """
    from commfuse_megatron.tools.common.pictures import missing_matplotlib

    reason = missing_matplotlib()
    if reason is not None:
        raise ValueError(f"no picture: {reason}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (quantity, label) in zip(figure.subplots(1, len(QUANTITIES)), QUANTITIES.items(), strict=True):
        for number, curve in enumerate(curves):
            steps, values = zip(*sorted(curve.values[quantity].items()), strict=True)
            width, alpha = (4.0, 0.35) if number == 0 else (1.2, 1.0)
            axes.plot(steps, values, label=curve.name, linewidth=width, alpha=alpha)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, for its name, and what the command line chooses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", metavar="[NAME=]FILE", help="loss logs; the first is what others are held to")
    add("--picture", type=Path, metavar="FILE", help="draw the curves (needs matplotlib); folders are made")
    add("--limit", type=float, metavar="X", help="exit with 1 if losses differ by more than X")
    chosen = parser.parse_args()
    if chosen.limit is not None and not chosen.limit >= 0:
        parser.error(f"--limit must be at least 0, got {chosen.limit:g}")
    return parser, chosen


if __name__ == "__main__":
    sys.exit(main())
