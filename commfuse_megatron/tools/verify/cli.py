"""`commfuse verify`: the operations against their reference at the current ranks, as a table."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.output import make_progress, results, write_json
from commfuse_megatron.tools.common.ranks import Rank, UsageError, choose_num_ranks

if TYPE_CHECKING:
    from commfuse_megatron.tools.verify.cases import TransportName
    from commfuse_megatron.tools.verify.ops import CaseResult


TENSORS = ("y", "x.grad", "weight.grad", "bias.grad")
MAX_FAILURES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class _Options:
    json: str | None
    dtype: str | None
    transport: TransportName


def run_verify(arguments: argparse.Namespace) -> int:
    """Run all cases on all ranks. 0: every case is right and took the path it asked for, on every rank; 1: not."""
    if arguments.transport != "auto" and (arguments.transport == "gloo") != (arguments.device == "cpu"):
        other = "cpu" if arguments.transport == "gloo" else "cuda"
        raise UsageError(f"--transport {arguments.transport} carries tensors of --device {other} only")
    num_ranks = choose_num_ranks(arguments.ranks)
    options = _Options(arguments.json, arguments.dtype, arguments.transport)
    return launch(_verify_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _verify_on_rank(rank: Rank, options: _Options) -> int:
    import torch
    from torch import distributed as dist

    from commfuse_megatron.tools.verify.cases import make_cases
    from commfuse_megatron.tools.verify.ops import verify_ops

    device = torch.device("cuda", torch.cuda.current_device()) if rank.device_type == "cuda" else torch.device("cpu")
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    cases = make_cases(rank.world_size, rank.device_type, dtype, options.transport)
    group = dist.group.WORLD
    assert group is not None
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("verifying", total=len(cases))
        found = verify_ops(group, device, cases, on_case_done=lambda: progress.advance(task))
    failed = [result for result in found if not result.passed]
    if rank.is_first:
        if options.json:
            data = {
                "group_size": rank.world_size,
                "transport": found[0].transport,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                "passed": len(found) - len(failed),
                "failed": len(failed),
                "modes": _total_modes(found),
                "cases": [result.to_dict() for result in found],
            }
            write_json(options.json, data)
        _print(found, failed, rank)
    return 1 if failed else 0


def _print(found: list[CaseResult], failed: list[CaseResult], rank: Rank) -> None:
    from commfuse_megatron.tools.verify.ops import describe_modes

    console = results()
    title = f"{rank.world_size} ranks, {rank.device_type}, {found[0].transport}: worst error / allowed, over ranks"
    table = Table(title=f"{title} (0 = bit-equal to fp64, rounded)", title_justify="left")
    for column in ("op", "dtype", "algorithm", "chunks/shard", "path", "GEMM", "passes by mode"):
        table.add_column(column, no_wrap=True)
    for column in (*TENSORS, "passed"):
        table.add_column(column, justify="right")
    groups: dict[tuple, list[CaseResult]] = {}
    for result in found:
        case = result.case
        key = (case.op, case.dtype_name, case.algorithm, str(case.chunks_per_shard), ", ".join(result.paths))
        groups.setdefault(key, []).append(result)
    for key, members in sorted(groups.items()):
        worst = [
            max((d.fraction for result in members for d in result.deviations if d.tensor == tensor), default=0.0)
            for tensor in TENSORS
        ]
        num_passed = sum(result.passed for result in members)
        color = "green" if num_passed == len(members) else "red"
        gemms = ", ".join(sorted({gemm for result in members for gemm in result.gemms}))
        fractions = [f"{fraction:.2f}" for fraction in worst]
        table.add_row(
            *key,
            gemms,
            describe_modes(_total_modes(members)),
            *fractions,
            f"[{color}]{num_passed} of {len(members)}[/]",
        )
    console.print(table)
    for result in failed[:MAX_FAILURES_SHOWN]:
        case = result.case
        what = f"{case.op}, {case.dtype_name}, {case.algorithm}, m {case.chunks_per_shard}, {case.variant}"
        sizes = f"S {case.rows}, B {case.call.batch}, N {case.call.N}, K {case.call.K}"
        console.print(f"[red]failed[/] {escape(f'{what}, {sizes}')}")
        for complaint in result.complaints:
            console.print(f"    {escape(complaint)}")
    if len(failed) > MAX_FAILURES_SHOWN:
        console.print(f"... and {len(failed) - MAX_FAILURES_SHOWN} more (all are in --json FILE)")
    if rank.world_size == 1:
        console.print("one rank: nothing was sent, and no transport tested")
    modes = describe_modes(_total_modes(found))
    console.print(f"{len(found) - len(failed)} passed, {len(failed)} failed; passes of the first rank by mode: {modes}")


def _total_modes(found: list[CaseResult]) -> dict[str, int]:
    """How many passes ran in each mode."""
    total: Counter[str] = Counter()
    for result in found:
        total.update(result.modes)
    return dict(total)
