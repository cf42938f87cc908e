"""`commfuse verify`: the operations against their reference at the current ranks, as a table."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from rich.markup import escape

from commfuse_megatron.config import TransportConfig
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import add_rank_options, choices_of, for_ranks
from commfuse_megatron.tools.common.output import make_progress, make_table, results, write_json
from commfuse_megatron.tools.common.ranks import Rank, UsageError, choose_several_ranks

if TYPE_CHECKING:
    from commfuse_megatron.tools.verify.ops import CaseResult

SUMMARY = "compare every operation with its reference, or whole models with stock Megatron"
EXAMPLE = """commfuse verify --ranks 4 --json verify.json
  commfuse verify --megatron --ranks 4 --only dense mla pipeline
  commfuse verify --megatron --lora --ranks 2 --only dense fused
  torchrun --nproc-per-node 2 -m commfuse_megatron verify"""

TENSORS = ("y", "x.grad", "weight.grad", "bias.grad")
MAX_FAILURES_SHOWN = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `commfuse verify` takes."""
    add_rank_options(parser)
    add = parser.add_argument
    dtypes = ("float32", "float64", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="only this one (default: all; float64 on the CPU only)")
    add("--transport", choices=choices_of(TransportConfig, "backend"), default="auto", help="default auto")
    what = "compare models instead: loss and every gradient against stock Megatron, float64, 2 or 4 CPU ranks"
    add("--megatron", action="store_true", help=what)
    what = (
        "with --megatron: the models with low-rank adapters at all linears, before and after conversion; all"
        " combinations of the options take ten minutes"
    )
    add("--lora", action="store_true", help=what)
    what = (
        "with --megatron: these configurations (default: all; an unknown name lists them); with --lora: words of"
        " its options, which leave the configurations that have them"
    )
    add("--only", nargs="+", metavar="NAME", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Run all cases on all ranks. 0: every case is right and took the path it asked for, on every rank; 1: not."""
    if arguments.megatron:
        from commfuse_megatron.tools.verify.megatron_cli import run_verify_megatron

        return run_verify_megatron(arguments)
    if arguments.only:
        raise UsageError("--only names configurations of --megatron")
    if arguments.lora:
        raise UsageError("--lora puts adapters into the models of --megatron: give that, too")
    if arguments.transport != "auto" and (arguments.transport == "gloo") != (arguments.device == "cpu"):
        other = "cpu" if arguments.transport == "gloo" else "cuda"
        raise UsageError(f"--transport {arguments.transport} carries tensors of --device {other} only")
    num_ranks = choose_several_ranks(arguments.ranks)
    return launch(_verify_on_rank, for_ranks(arguments), num_ranks=num_ranks, device_type=arguments.device)


def _verify_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    import torch

    from commfuse_megatron.tools.verify.cases import make_cases
    from commfuse_megatron.tools.verify.ops import verify_ops

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    cases = make_cases(rank.world_size, rank.device_type, dtype, options.transport)
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("verifying", total=len(cases))
        found = verify_ops(rank.group, rank.device, cases, on_case_done=lambda: progress.advance(task))
    failed = [result for result in found if not result.passed]
    if rank.is_first:
        if options.json:
            data = {
                "group_size": rank.world_size,
                "transport": found[0].transport,
                "device": rank.device_name,
                "passed": len(found) - len(failed),
                "failed": len(failed),
                "modes": _total_modes(found),
                "cases": [result.to_dict() for result in found],
            }
            write_json(options.json, data)
        _print(found, failed, rank)
    return 1 if failed else 0


def _print(found: list[CaseResult], failed: list[CaseResult], rank: Rank) -> None:
    from commfuse_megatron.tools.common.modes import describe_modes

    console = results()
    groups: dict[tuple, list[CaseResult]] = {}
    for result in found:
        case = result.case
        key = (case.op, case.dtype_name, case.algorithm, str(case.chunks_per_shard), ", ".join(result.paths))
        groups.setdefault(key, []).append(result)
    rows = []
    for key, members in sorted(groups.items()):
        worst = [
            max((d.fraction for result in members for d in result.deviations if d.tensor == tensor), default=0.0)
            for tensor in TENSORS
        ]
        num_passed = sum(result.passed for result in members)
        color = "green" if num_passed == len(members) else "red"
        gemms = ", ".join(sorted({gemm for result in members for gemm in result.gemms}))
        fractions = [f"{fraction:.2f}" for fraction in worst]
        verdict = f"[{color}]{num_passed} of {len(members)}[/]"
        rows.append((*key, gemms, describe_modes(_total_modes(members)), *fractions, verdict))
    title = f"{rank.world_size} ranks, {rank.device_type}, {found[0].transport}: worst error / allowed, over ranks"
    columns = ("op", "dtype", "algorithm", "chunks/shard", "path", "GEMM", "passes by mode")
    numbers = (f">{name}" for name in (*TENSORS, "passed"))
    console.print(make_table(f"{title} (0 = bit-equal to fp64, rounded)", (*columns, *numbers), rows))
    for result in failed[:MAX_FAILURES_SHOWN]:
        case = result.case
        what = f"{case.op}, {case.dtype_name}, {case.algorithm}, m {case.chunks_per_shard}, {case.variant}"
        sizes = f"S {case.rows}, B {case.call.batch}, N {case.call.N}, K {case.call.K}"
        console.print(f"[red]failed[/] {escape(f'{what}, {sizes}')}")
        for complaint in result.complaints:
            console.print(f"    {escape(complaint)}")
    if len(failed) > MAX_FAILURES_SHOWN:
        console.print(f"... and {len(failed) - MAX_FAILURES_SHOWN} more (all are in --json FILE)")
    modes = describe_modes(_total_modes(found))
    console.print(f"{len(found) - len(failed)} passed, {len(failed)} failed; passes of the first rank by mode: {modes}")


def _total_modes(found: list[CaseResult]) -> dict[str, int]:
    """How many passes ran in each mode."""
    total: Counter[str] = Counter()
    for result in found:
        total.update(result.modes)
    return dict(total)
