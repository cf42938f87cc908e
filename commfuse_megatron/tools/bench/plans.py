"""`commfuse bench --write-plans`: fills the file of plans that jobs with `plan.file` take theirs from."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from commfuse_megatron.config import OverlapConfig, config_file_from_environment
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.store import STORED, read_sections
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import for_ranks, refuse_given
from commfuse_megatron.tools.common.output import make_progress, results, say_count, write_json
from commfuse_megatron.tools.common.ranks import Rank, UsageError

if TYPE_CHECKING:
    from commfuse_megatron.plan.pass_plan import PassPlan
    from commfuse_megatron.problem import Problem
    from commfuse_megatron.tools.bench.run import Settings


_OF_ROWS = (
    "variants", "passes", "chunks", "virtual_ranks", "rounds", "case_s", "budget_s", "figure", "resume", "check",
)  # fmt: skip


def require_plans_alone(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options that would do nothing, and for a file of something else."""
    refuse_given(arguments, _OF_ROWS, "{}: of rows, which --write-plans does not make")
    if arguments.all_reduce:
        raise UsageError("--all-reduce: --write-plans plans linears of sequence parallelism; leave one of them out")
    if len(arguments.config) > 1:
        raise UsageError(f"--config: plans are of one configuration, not of {len(arguments.config)}")
    try:
        read_sections(Path(arguments.write_plans))
    except (OSError, ValueError) as error:
        raise UsageError(f"--write-plans: {error}") from None


def run_write_plans(arguments: argparse.Namespace, settings: Settings, num_ranks: int) -> int:
    """Plan all cases of `settings` as a job with the same configuration would. 1: the file was not written."""
    file = arguments.config[0] if arguments.config else config_file_from_environment()
    config = OverlapConfig.from_file(file) if file else OverlapConfig()
    config = replace(config, plan=replace(config.plan, file=arguments.write_plans))
    options = for_ranks(arguments, settings=settings, config=config)
    return launch(_write_plans_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _write_plans_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    import torch

    from commfuse_megatron import OverlapContext
    from commfuse_megatron.tools.bench.operands import Pool, draw, our_result
    from commfuse_megatron.tools.bench.run import dtype_of, grid, make_case

    settings = replace(options.settings, passes=("fprop",))  # every case once: both passes are planned together
    plans: dict[Problem, PassPlan] = {}
    missing: list[str] = []
    complaints: list[str] = []  # why the file was not written, on the first rank
    pool = Pool(rank.device, dtype_of(rank.device), seed=rank.global_rank)
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("planning", total=len(grid(settings, rank.world_size)))
        for model in settings.models:  # each as in a job of its own: buffers of one count in what the next may take
            with OverlapContext(rank.group, options.config) as context:
                for piece in grid(replace(settings, models=(model,)), rank.world_size):
                    what = f"{piece.name} M={piece.M}"
                    try:
                        case = make_case(settings, piece)
                        operands = draw(case, pool)
                        y = our_result(case, operands, context)
                        torch.autograd.grad(y, list(operands.leaves.values()), operands.grad_y)
                    except ConfigError as error:
                        missing.append(f"{what}: {error}")
                    progress.update(task, advance=1, description=what)
                stored = context.stored_plans
                assert stored is not None
                plans |= stored.plans
                complaints += [] if stored.store is None else stored.store.complaints
    if not rank.is_first:
        return 0
    kinds = [_kind_of(plan) for plan in plans.values()]
    counts = {
        kind: kinds.count(kind) for kind in ("measured", "chosen by the model", "forced or a default", "already there")
    }
    if options.json:
        listed = [{"problem": str(problem), **asdict(plan)} for problem, plan in plans.items()]
        write_json(options.json, counts | {"missing": missing, "failures": complaints, "plans": listed})
    for word, texts in (("[yellow]missing[/]", missing), ("[red]failed[/]", complaints)):
        for text in texts:
            results().print(f"{word} {escape(text)}", soft_wrap=True)
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    results().print(f"{escape(str(options.config.plan.file))}: {say_count(len(kinds), 'plan')}, {said}", soft_wrap=True)
    return 1 if complaints else 0


def _kind_of(plan: PassPlan) -> str:
    """How it was come by. What is as for another length counts as a default."""
    if plan.reason.startswith(STORED):
        return "already there"
    if plan.measured_us is not None:
        return "measured"
    return "forced or a default" if plan.predicted_us is None else "chosen by the model"
