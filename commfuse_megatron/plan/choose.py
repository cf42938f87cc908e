"""Chooses the path for one problem from what all ranks share: the configuration and the problem's sizes.

The contract that bites: the choice must be the same on every rank, so it may depend on nothing else.
"""

from dataclasses import dataclass

from commfuse_megatron.config import OverlapConfig, PassConfig
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.schedule import Algorithm

__all__ = ["LinearPlan", "choose_linear_plan"]


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """What was chosen for one pass of one linear.

    path: "sliced", "bulk", "async" or "sequential" (see `PassConfig`), or "local" (a group of one rank: nothing to
    send). reason: one sentence, for the report. keep_gathered_input: see `WgradConfig`.
    """

    path: str
    reason: str
    algorithm: Algorithm
    chunks_per_shard: int
    keep_gathered_input: bool

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule is run (also the one without transfers)."""
        return self.path != "sequential"


def choose_linear_plan(problem: GemmProblem, config: OverlapConfig) -> LinearPlan:
    """The plan for `problem`; equal inputs give equal plans on every rank."""
    chosen = config.linear.fprop if problem.pass_name == "fprop" else config.linear.dgrad
    path, reason = _choose_path(problem, chosen)
    return LinearPlan(
        path=path,
        reason=reason,
        algorithm=Algorithm.RING if chosen.algorithm == "ring" else Algorithm.DIRECT,
        chunks_per_shard=(chosen.chunks_per_shard or 1) if path == "sliced" else 1,
        keep_gathered_input=config.linear.wgrad.keep_gathered_input,
    )


def _choose_path(problem: GemmProblem, chosen: PassConfig) -> tuple[str, str]:
    if problem.group_size == 1:
        return "local", "the group has one rank: nothing to send"
    if problem.rows == 0:
        return "sequential", "the sequence has no rows"
    if chosen.path == "auto":
        return "sliced", "default for groups of two and more ranks"
    return chosen.path, "forced by the configuration"
