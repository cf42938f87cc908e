"""What `commfuse verify` does on a rank, and says of it: a table of operations, or one of models."""

import argparse
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from rich.markup import escape

from commfuse_megatron.tools.common.modes import badness, describe_modes
from commfuse_megatron.tools.common.output import make_progress, make_table, results, write_json
from commfuse_megatron.tools.common.ranks import Rank
from commfuse_megatron.tools.verify.cases import make_cases
from commfuse_megatron.tools.verify.lora_cases import choose, options_of
from commfuse_megatron.tools.verify.megatron_models import (
    PARAMETER_TOLERANCE,
    SHARED_LOSS_TOLERANCE,
    TOLERANCE,
    ModelResult,
    verify_models,
)
from commfuse_megatron.tools.verify.ops import CaseResult, verify_ops

TENSORS = ("y", "x.grad", "weight.grad", "bias.grad")
MAX_FAILURES_SHOWN = 20


def verify_ops_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Run all cases. 0: every case is right and took the path it asked for, on every rank; 1: not."""
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    cases = make_cases(rank.world_size, rank.device_type, dtype, options.transport)
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("verifying", total=len(cases))
        found = verify_ops(rank.group, rank.device, cases, on_case_done=lambda: progress.advance(task))
    data = {
        "group_size": rank.world_size,
        "transport": found[0].transport,
        "device": rank.device_name,
        "modes": _total_modes(found),
        "cases": [result.to_dict() for result in found],
    }
    return _say(rank, options, found, data, lambda failed: print_ops(found, failed, rank))


def verify_models_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Run the configurations. 0: all equal stock and were overlapped as expected; 1: not."""
    if not options.verbose:
        # The reasons stand in the table.
        logging.getLogger("commfuse_megatron.plugin").setLevel(logging.ERROR)
    from commfuse_megatron.testing import cpu_megatron

    configurations = choose(rank.world_size, options.only, lora=options.lora)
    with cpu_megatron(), make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("verifying models", total=len(configurations))
        found = verify_models(configurations, on_done=lambda _: progress.advance(task))
    rows = [each.to_dict() | ({"options": options_of(each.name)} if options.lora else {}) for each in found]
    tolerances = {"tolerance": TOLERANCE, "shared_loss_tolerance": SHARED_LOSS_TOLERANCE}
    tolerances |= {"parameter_tolerance": PARAMETER_TOLERANCE}
    data = {"ranks": rank.world_size, "dtype": "float64", **tolerances, "configurations": rows}
    return _say(rank, options, found, data, lambda failed: print_models(found, failed, rank, options.lora))


def _say[T: (CaseResult, ModelResult)](
    rank: Rank, options: argparse.Namespace, found: list[T], data: dict[str, Any], show: Callable[[list[T]], None]
) -> int:
    """Write `data`, with counts, and show what failed; the exit code."""
    failed = [result for result in found if not result.passed]
    if rank.is_first:
        if options.json:
            write_json(options.json, data | {"passed": len(found) - len(failed), "failed": len(failed)})
        show(failed)
    return 1 if failed else 0


def print_ops(found: Sequence[CaseResult], failed: Sequence[CaseResult], rank: Rank) -> None:
    """The table of operations."""
    console = results()
    groups: dict[tuple, list[CaseResult]] = {}
    for result in found:
        case = result.case
        key = (case.op, case.dtype_name, case.algorithm, str(case.chunks_per_shard), ", ".join(result.paths))
        groups.setdefault(key, []).append(result)
    rows = []
    for key, members in sorted(groups.items()):
        fractions: dict[str, list[float]] = {tensor: [0.0] for tensor in TENSORS}
        for deviation in (deviation for result in members for deviation in result.deviations):
            fractions[deviation.tensor].append(deviation.fraction)
        num_passed = sum(result.passed for result in members)
        color = "green" if num_passed == len(members) else "red"
        gemms = ", ".join(sorted({gemm for result in members for gemm in result.gemms}))
        errors = (f"{max(each, key=badness):.2f}" for each in fractions.values())
        verdict = f"[{color}]{num_passed} of {len(members)}[/]"
        rows.append((*key, gemms, describe_modes(_total_modes(members)), *errors, verdict))
    title = f"{rank.world_size} ranks, {rank.device_type}, {found[0].transport}: worst error / allowed, over ranks"
    columns = ("op", "dtype", "algorithm", "chunks/shard", "path", "GEMM", "passes by mode")
    numbers = (f">{name}" for name in (*TENSORS, "passed"))
    console.print(make_table(f"{title} (0 = bit-equal to fp64, rounded)", (*columns, *numbers), rows))
    for result in failed[:MAX_FAILURES_SHOWN]:
        case = result.case
        what = f"{case.op}, {case.dtype_name}, {case.algorithm}, m {case.chunks_per_shard}, {case.variant}"
        sizes = f"S {case.rows}, B {case.call.batch}, N {case.call.N}, K {case.call.K}"
        _print_failure(f"{what}, {sizes}", result.complaints)
    if len(failed) > MAX_FAILURES_SHOWN:
        console.print(f"... and {len(failed) - MAX_FAILURES_SHOWN} more (all are in --json FILE)")
    modes = describe_modes(_total_modes(found))
    console.print(f"{len(found) - len(failed)} passed, {len(failed)} failed; passes of the first rank by mode: {modes}")


def print_models(
    found: Sequence[ModelResult], failed: Sequence[ModelResult], rank: Rank, has_adapters: bool = False
) -> None:
    """The table of models."""
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
    allowed = f"allowed {TOLERANCE:g}; losses of ranks that share sequences {SHARED_LOSS_TOLERANCE:.1e}"
    console.print(make_table(f"{title} ({allowed}; 0 = bit-equal)", columns, rows))
    reasons = dict.fromkeys(reason for result in found for reason in result.stock)
    legend = "overlapped: calls in forward + backward passes; stock: forward calls on Megatron's own path"
    console.print(f"{legend}, because" if reasons else f"{legend}.")
    for reason in reasons:
        console.print(f"  - {escape(reason)}")
    for result in failed:
        _print_failure(result.name, result.complaints)
    console.print(f"{len(found) - len(failed)} equal to stock, {len(failed)} failed")


def _print_failure(what: str, complaints: Iterable[str]) -> None:
    for line in (f"[red]failed[/] {escape(what)}", *(f"    {escape(complaint)}" for complaint in complaints)):
        results().print(line)


def _error(error: float) -> str:
    return f"{error:.1e}" if error else "0"


def _total_modes(found: Iterable[CaseResult]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for result in found:
        total.update(result.modes)
    return dict(total)
