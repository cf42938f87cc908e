"""`commfuse verify --megatron`: whole models against stock Megatron at the same parallel layout, as a table."""

from __future__ import annotations

import argparse
import logging

from rich.markup import escape

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import for_ranks
from commfuse_megatron.tools.common.output import make_progress, make_table, results, write_json
from commfuse_megatron.tools.common.ranks import Rank, UsageError, choose_num_ranks, require_megatron
from commfuse_megatron.tools.verify.lora_cases import choose_lora, options_of
from commfuse_megatron.tools.verify.megatron_cases import Configuration, choose_configurations
from commfuse_megatron.tools.verify.megatron_models import TOLERANCE, ModelResult, verify_models


def run_verify_megatron(arguments: argparse.Namespace) -> int:
    """Run the configurations on all ranks. 0: all equal stock and were overlapped as expected; 1: not."""
    if arguments.device != "cpu":
        raise UsageError("--megatron compares in float64, which is overlapped on the CPU only: use --device cpu")
    if arguments.dtype is not None or arguments.transport not in ("auto", "gloo"):
        raise UsageError("--megatron compares in float64 over gloo: leave --dtype and --transport out")
    num_ranks = choose_num_ranks(arguments.ranks)
    require_megatron()
    try:
        _choose(arguments, num_ranks)
    except ConfigError as error:
        raise UsageError(f"--megatron: {error}") from None
    return launch(_verify_on_rank, for_ranks(arguments), num_ranks=num_ranks, device_type="cpu")


def _choose(options: argparse.Namespace, num_ranks: int) -> list[Configuration]:
    """The configurations to run. Raises ConfigError for names that there is nothing for."""
    return (choose_lora if options.lora else choose_configurations)(num_ranks, options.only)


def _verify_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    if not options.verbose:
        # The reasons stand in the table.
        logging.getLogger("commfuse_megatron.plugin").setLevel(logging.ERROR)
    from commfuse_megatron.testing import cpu_megatron

    configurations = _choose(options, rank.world_size)
    with cpu_megatron(), make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("verifying models", total=len(configurations))
        found = verify_models(configurations, on_done=lambda _: progress.advance(task))
    failed = [result for result in found if not result.passed]
    if rank.is_first:
        if options.json:
            data = {
                "ranks": rank.world_size,
                "dtype": "float64",
                "tolerance": TOLERANCE,
                "passed": len(found) - len(failed),
                "failed": len(failed),
                "configurations": [
                    result.to_dict() | ({"options": options_of(result.name)} if options.lora else {})
                    for result in found
                ],
            }
            write_json(options.json, data)
        _print(found, failed, rank, has_adapters=options.lora)
    return 1 if failed else 0


def _print(found: list[ModelResult], failed: list[ModelResult], rank: Rank, *, has_adapters: bool = False) -> None:
    console = results()
    title = f"{rank.world_size} ranks, cpu, float64: relative errors against stock Megatron at the same layout"
    title += " with the same adapters" if has_adapters else ""
    columns = ("configuration", "ranks", ">loss error", ">worst gradient", "of", ">overlapped", ">stock", "verdict")
    rows = [
        (
            result.name,
            result.layout,
            _error(result.loss_error),
            _error(result.gradient_error) if result.num_gradients else "-",
            escape(result.gradient) if result.gradient_error else f"{result.num_gradients} gradients",
            f"{result.overlapped} + {result.backward}",
            str(sum(result.stock.values())),
            "[green]equal[/]" if result.passed else "[red]FAILED[/]",
        )
        for result in found
    ]
    console.print(make_table(f"{title} (allowed {TOLERANCE:g}; 0 = bit-equal)", columns, rows))
    reasons = list(dict.fromkeys(reason for result in found for reason in result.stock))
    legend = "overlapped: calls in forward + backward passes; stock: forward calls on Megatron's own path"
    console.print(f"{legend}, because" if reasons else f"{legend}.")
    for reason in reasons:
        console.print(f"  - {escape(reason)}")
    for result in failed:
        console.print(f"[red]failed[/] {result.name}")
        for complaint in result.complaints:
            console.print(f"    {escape(complaint)}")
    console.print(f"{len(found) - len(failed)} equal to stock, {len(failed)} failed")


def _error(error: float) -> str:
    return f"{error:.1e}" if error else "0"
