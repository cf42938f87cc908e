"""Plans the cases of the benchmark, so that a job which has the same configuration finds its plans in the file."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import Problem
from commfuse_megatron.tools.bench.operands import Pool, draw, our_result
from commfuse_megatron.tools.bench.run import Piece, Settings, dtype_of, grid, make_case
from commfuse_megatron.tools.common.cases import LinearCase


@dataclass(slots=True)
class Planned:
    """What came of it. missing: cases that cannot run. complaints: why the file was not written, on the first rank."""

    plans: dict[Problem, PassPlan] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def cases_to_plan(settings: Settings, group_size: int) -> list[Piece]:
    """Every case once: both passes are planned together."""
    return grid(replace(settings, passes=("fprop",)), group_size)


def plan_cases(
    settings: Settings,
    group: dist.ProcessGroup,
    device: torch.device,
    config: OverlapConfig,
    on_case: Callable[[Piece], None],
) -> Planned:
    """Run every case once, forward and backward, in contexts that keep their plans in `config.plan.file`."""
    outcome = Planned()
    pool = Pool(device, dtype_of(device), seed=group.rank())
    for model in settings.models:  # each as in a job of its own: buffers of one count in what the next may take
        with OverlapContext(group, config) as context:
            for piece in cases_to_plan(replace(settings, models=(model,)), group.size()):
                try:
                    _run_once(make_case(settings, piece), pool, context)
                except ConfigError as error:
                    outcome.missing.append(f"{piece.name} M={piece.M}: {error}")
                on_case(piece)
            stored = context.stored_plans
            assert stored is not None
            outcome.plans |= stored.plans
            outcome.complaints += [] if stored.store is None else stored.store.complaints
    return outcome


def _run_once(case: LinearCase, pool: Pool, context: OverlapContext) -> None:
    operands = draw(case, pool)
    y = our_result(case, operands, context)
    torch.autograd.grad(y, list(operands.leaves.values()), operands.grad_y)
