"""`commfuse bench --write-plans`: fills the file of plans that jobs with `plan.file` take theirs from."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from commfuse_megatron.cli.launch import launch
from commfuse_megatron.cli.output import make_progress, results, say_count, write_json
from commfuse_megatron.cli.ranks import Rank, UsageError
from commfuse_megatron.config import OverlapConfig, config_file_from_environment
from commfuse_megatron.plan.store import STORED, read_sections

if TYPE_CHECKING:
    from commfuse_megatron.benchmark.run import Piece, Settings
    from commfuse_megatron.plan.linear_plan import LinearPlan

__all__ = ["require_plans_alone", "run_write_plans"]

_OF_ROWS = (
    "variants",
    "passes",
    "chunks",
    "virtual_ranks",
    "rounds",
    "case_s",
    "budget_s",
    "figure",
    "resume",
    "check",
)


@dataclass(frozen=True, slots=True)
class _Options:
    settings: Settings
    config: OverlapConfig
    json: str | None


def require_plans_alone(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options that would do nothing, and for a file of something else."""
    default = arguments.parser.get_default
    given = [f"--{name.replace('_', '-')}" for name in _OF_ROWS if getattr(arguments, name) != default(name)]
    if given:
        raise UsageError(f"{', '.join(given)}: of rows, which --write-plans does not make")
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
    options = _Options(settings, config, arguments.json)
    return launch(_write_plans_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _write_plans_on_rank(rank: Rank, options: _Options) -> int:
    import torch
    from torch import distributed as dist

    from commfuse_megatron.benchmark.plans import cases_to_plan, plan_cases

    device = torch.device("cuda", torch.cuda.current_device()) if rank.device_type == "cuda" else torch.device("cpu")
    assert dist.group.WORLD is not None
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("planning", total=len(cases_to_plan(options.settings, rank.world_size)))

        def step(piece: Piece) -> None:
            progress.update(task, advance=1, description=f"{piece.name} M={piece.M}")

        found = plan_cases(options.settings, dist.group.WORLD, device, options.config, step)
    if not rank.is_first:
        return 0
    kinds = [_kind_of(plan) for plan in found.plans.values()]
    counts = {kind: kinds.count(kind) for kind in ("measured", "chosen by the model", "neither", "already there")}
    if options.json:
        plans = [{"problem": str(problem), **asdict(plan)} for problem, plan in found.plans.items()]
        write_json(options.json, counts | {"missing": found.missing, "failures": found.complaints, "plans": plans})
    for word, texts in (("[yellow]missing[/]", found.missing), ("[red]failed[/]", found.complaints)):
        for text in texts:
            results().print(f"{word} {escape(text)}", soft_wrap=True)
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    results().print(f"{escape(str(options.config.plan.file))}: {say_count(len(kinds), 'plan')}, {said}", soft_wrap=True)
    return 1 if found.complaints else 0


def _kind_of(plan: LinearPlan) -> str:
    """How it was come by. Neither measured nor chosen by the model: forced, a default, or as for another length."""
    if plan.reason.startswith(STORED):
        return "already there"
    if plan.measured_us is not None:
        return "measured"
    return "neither" if plan.predicted_us is None else "chosen by the model"
