"""Chooses among candidates by what was predicted or measured of them, and says why.

Beware: the choice must be the same on every rank, so it may depend only on what all ranks share: the problem, the
configuration, and numbers that they have exchanged.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from commfuse_megatron.config import PlanConfig
from commfuse_megatron.plan.attention import predict_attention_us
from commfuse_megatron.plan.candidates import Candidates
from commfuse_megatron.plan.cost_model import choose_details
from commfuse_megatron.plan.machine import MachineModel
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.plan.ulysses import predict_ulysses_us
from commfuse_megatron.problem import AttentionProblem, GemmProblem, Problem, UlyssesProblem

# Of two that differ by less than this, the simpler one is taken: timings repeat no better.
_TIE = 0.01
# Of attention over a split sequence those of a trial may: how well its own rounds say, and this is the best that is
# believed. Not measured: that later calls repeat as well.
_LEAST_TIE = 0.002

# No prediction is better than this: host times of one program differ by as much between runs (4 x H200: sequential 0.22
# and 0.27 ms within one). Small problems are soon timed.
_UNSURE_US = 40.0

# More than this many are never timed, the ones predicted best first.
_MOST_TIMED = 10

_PREDICTIONS: dict[type, Callable[..., float]] = {
    AttentionProblem: predict_attention_us,
    UlyssesProblem: predict_ulysses_us,
}


class TrialTimes(NamedTuple):
    """Microseconds per call of every plan, equal on all ranks, infinite without memory; and the fraction by which those
    near the shortest may be wrong."""

    us: list[float]
    tie: float


def choose_only(candidates: Candidates) -> PassPlan:
    """The only candidate there is."""
    (plan,) = candidates.plans
    if candidates.note and plan.path == "sequential":
        return _because(plan, candidates.note)
    return _because(plan, "forced by the configuration", candidates.note)


def choose_by_default(candidates: Candidates, reason: str) -> PassPlan:
    """The candidate that exercises the most of this package, where speed does not count.

    Of attention, the row-parallel one: the smaller change, which nothing but a measurement argues against. Of a split
    sequence, the one with the most groups of heads; what the caller has for it argues likewise.
    """
    paths = ("sliced", "row_parallel")
    default = next((plan for plan in candidates.plans if plan.path in paths), candidates.plans[0])
    default = next((plan for plan in reversed(candidates.plans) if plan.path == "overlapped"), default)
    default = next((plan for plan in candidates.plans if plan.path == "stock"), default)
    return _because(default, reason, candidates.note)


def predict(problem: Problem, candidates: Candidates, machine: MachineModel) -> Candidates:
    """The same candidates, each with its predicted time, those of linears settled."""
    if isinstance(problem, GemmProblem):
        return replace(candidates, plans=tuple(choose_details(problem, plan, machine) for plan in candidates.plans))
    predict_plan_us = _PREDICTIONS[type(problem)]
    plans = (replace(plan, predicted_us=predict_plan_us(problem, plan, machine)) for plan in candidates.plans)
    return replace(candidates, plans=tuple(plans))


def choose_predicted(candidates: Candidates, machine: MachineModel, remark: str = "") -> PassPlan:
    """The candidate with the shortest predicted time."""
    times_us = [_predicted(plan) for plan in candidates.plans]
    best = candidates.plans[_fastest(times_us)]
    source = "predicted" if machine.source == "measured" else f"predicted from {machine.source} figures"
    reason = f"{source}: {_say_times(candidates.plans, times_us)}"
    return _because(best, f"{reason}; {remark}" if remark else reason, candidates.note)


def select_for_trial(candidates: Candidates, config: PlanConfig) -> tuple[PassPlan, ...]:
    """The candidates worth timing, the simplest first; none where the prediction is clear enough.

    Undecided means that another path comes within `config.margin` of the best, or within some microseconds. Then all
    that do are timed, and the best of every other path: a wrong prediction is found as well.
    """
    plans = candidates.plans
    best = plans[_fastest([_predicted(plan) for plan in plans])]
    limit_us = _predicted(best) * (1 + config.margin) + _UNSURE_US
    is_undecided = any(plan.path != best.path and _predicted(plan) <= limit_us for plan in plans)
    if len(plans) < 2 or config.measure == "never" or (config.measure == "auto" and not is_undecided):
        return ()
    if config.measure == "always":
        timed = list(plans)
    else:
        heads = _best_of_each_path(plans, [_predicted(plan) for plan in plans])
        timed = [plan for plan in plans if _predicted(plan) <= limit_us or plan in heads]
    kept = sorted(timed, key=_predicted)[:_MOST_TIMED]
    return tuple(plan for plan in timed if plan in kept)


def choose_measured(problem: Problem, plans: Sequence[PassPlan], measured: TrialTimes, note: str = "") -> PassPlan:
    """The plan with the shortest measured time."""
    tie = max(_LEAST_TIE, min(measured.tie, _TIE)) if isinstance(problem, UlyssesProblem) else _TIE
    best = _fastest(measured.us, tie)
    plan = replace(plans[best], measured_us=measured.us[best])
    return _because(plan, f"measured: {_say_times(plans, measured.us, tie)}", note)


def _fastest(times_us: Sequence[float], tie: float = _TIE) -> int:
    """The first, hence simplest, of those within a tie of the shortest."""
    limit_us = min(times_us) * (1 + tie)
    return next(index for index, time_us in enumerate(times_us) if time_us <= limit_us)


def _best_of_each_path(plans: Sequence[PassPlan], times_us: Sequence[float]) -> list[PassPlan]:
    best: dict[str, tuple[float, PassPlan]] = {}
    for plan, time_us in zip(plans, times_us, strict=True):
        if plan.path not in best or time_us < best[plan.path][0]:
            best[plan.path] = (time_us, plan)
    return [plan for _, plan in best.values()]


def _say_times(plans: Sequence[PassPlan], times_us: Sequence[float], tie: float = _TIE) -> str:
    """Such as "sliced m=2 0.812 ms, sequential 1.020": the chosen one, then the best of every path."""
    chosen = plans[_fastest(times_us, tie)]
    timed = [(us, plan) for us, plan in zip(times_us, plans, strict=True) if math.isfinite(us)]
    heads = _best_of_each_path(plans, times_us)
    others = [(us, plan) for us, plan in timed if plan in heads and plan is not chosen]
    if not others:  # variants of one path
        others = [(us, plan) for us, plan in timed if plan is not chosen]
    others.sort(key=lambda pair: pair[0])
    first = f"{chosen.name} {times_us[plans.index(chosen)] / 1e3:.3f} ms"
    too_large = [f"{plan.name} out of memory" for us, plan in zip(times_us, plans, strict=True) if math.isinf(us)]
    return ", ".join([first, *(f"{plan.name} {us / 1e3:.3f}" for us, plan in others), *too_large])


def _predicted(plan: PassPlan) -> float:
    assert plan.predicted_us is not None
    return plan.predicted_us


def _because(plan: PassPlan, reason: str, note: str = "") -> PassPlan:
    return replace(plan, reason=f"{reason} ({note})" if note else reason)
