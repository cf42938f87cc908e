"""What a whole run comes to: geometric means over the headline cases, and whether the planned path is ever slower."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.bench.rows import Problem, Row, ratio
from commfuse_megatron.tools.common.cases import HEADLINE_M, HEADLINE_MODELS, LINEARS

#: Name -> what it says; all are ratios of times, smaller is better.
METRICS = {
    "ideal": "geometric mean of planned / max(compute_only, comm_only), headline cases",
    "vs_sequential": "geometric mean of planned / sequential, headline cases",
    "vs_megatron": "geometric mean of planned / megatron, headline cases",
    "vs_async_tp": "geometric mean of planned / async_tp, headline cases",
    "vs_userbuffers": "geometric mean of planned / userbuffers, headline cases",
    "vs_slicing": "geometric mean of planned / the best data slicing, headline cases",
    "never_slower": "largest planned / min(sequential, megatron), all cases and passes",
}

NUM_HEADLINES = len(HEADLINE_MODELS) * len(LINEARS)


@dataclass(frozen=True, slots=True)
class Metric:
    """A ratio over `count` cases; of the headline cases `wanted`."""

    name: str
    value: float
    count: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Summary:
    """metrics: those that the rows allow. offenders: (ratio, row of the planned path), the slowest first."""

    metrics: dict[str, Metric]
    offenders: list[tuple[float, Row]]


def summarize(rows: Sequence[Row]) -> Summary:
    """The metrics of measured rows; emulated rows and rows from a CPU do not count.

    A file may hold several runs: the headline is that of the machine and link of its last row, and what was measured
    again, by another commit, counts as it was last.
    """
    problems: dict[tuple[object, ...], Problem] = {}
    for row in rows:
        if row.is_comparable and not row.emulated:
            problem = problems.pop(row.problem, Problem())
            problem[row.variant] = row
            problems[row.problem] = problem  # behind what was measured before
    latest: dict[tuple[object, ...], tuple[Row, Problem]] = {}
    for problem in problems.values():
        if problem.planned is not None:
            latest.pop(problem.planned.task, None)
            latest[problem.planned.task] = problem.planned, problem
    planned = list(latest.values())
    headline = [(row, problem) for row, problem in planned if _is_headline(row, planned[-1][0])]
    ratios: dict[str, list[float]] = {"ideal": [row.median_ms / row.ideal_ms for row, _ in headline]}
    for name in ("sequential", "megatron", "async_tp", "userbuffers", "slicing"):
        others = [(row, problem.best_ms(name)) for row, problem in headline]
        ratios[f"vs_{name}"] = [row.median_ms / other for row, other in others if other is not None]
    metrics = {
        name: Metric(name, statistics.geometric_mean(values), len(values), NUM_HEADLINES)
        for name, values in ratios.items()
        if values
    }
    stock = [(ratio(row.median_ms, problem.stock_ms), row) for row, problem in planned]
    offenders = [(share, row) for share, row in stock if share is not None]
    offenders.sort(key=lambda pair: pair[0], reverse=True)
    if offenders:
        metrics["never_slower"] = Metric("never_slower", offenders[0][0], len(offenders), len(offenders))
    return Summary(metrics, offenders)


def _is_headline(row: Row, last: Row) -> bool:
    is_here = (row.device, row.link, row.group_size) == (last.device, last.link, last.group_size)
    is_one = row.is_linear and row.case.split(".")[0] in HEADLINE_MODELS
    return is_here and is_one and (row.M, row.pass_name, row.shrink, row.recipe) == (HEADLINE_M, "fprop", 1, None)


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """ "ideal=1.1" ... -> limits by metric. Raises ConfigError for what is neither."""
    limits = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in METRICS:
            raise ConfigError(f'--check {text}: unknown figure "{name}"; known are {", ".join(METRICS)}')
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if not math.isfinite(limits[name]):
            raise ConfigError(f"--check {text}: write NAME=LARGEST, such as ideal=1.10")
    return limits


def check_limits(summary: Summary, limits: dict[str, float]) -> list[str]:
    """What is missed, one sentence each; a figure that was not measured in full is missed too."""
    complaints = []
    for name, largest in limits.items():
        metric = summary.metrics.get(name)
        if metric is None:
            complaints.append(f"{name}: not measured")
        elif metric.count < metric.wanted:
            complaints.append(f"{name}: measured in {metric.count} of {metric.wanted} cases only")
        elif metric.value > largest:
            complaints.append(f"{name}: {metric.value:.4f} is more than {largest:g}")
    return complaints
