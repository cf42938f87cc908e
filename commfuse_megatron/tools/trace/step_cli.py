"""`commfuse trace --step`: a Megatron step, stock and planned by the plugin, beside the step without communication."""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import refuse_given, require_positive
from commfuse_megatron.tools.common.output import make_progress, require_files, results, say_count, write_json
from commfuse_megatron.tools.common.ranks import CannotRunError, Rank, UsageError, choose_num_ranks
from commfuse_megatron.tools.trace.options import (
    config_of,
    hardware,
    machine_line,
    shown_ranks,
)

if TYPE_CHECKING:
    from commfuse_megatron.tools.trace.whole_step import StepToTrace, StepTrace

__all__ = ["run_trace_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    model: str
    num_layers: int
    sequence: int
    batch: int
    dtype: str
    config: OverlapConfig
    transformer_impl: str
    has_fusions: bool
    rounds: int
    runs: int
    output: str
    name: str
    json: str | None


def run_trace_step(arguments: argparse.Namespace) -> int:
    """Time and trace. 0: done; 2: the plugin overlapped nothing."""
    num_ranks = choose_num_ranks(arguments.ranks)
    if util.find_spec("megatron") is None:
        raise CannotRunError("Megatron-Core is not installed: pip install megatron-core")
    others = ("op", "case", "N", "K", "tokens", "pass_name", "calls", "profiler", "attention")
    refuse_given(arguments, others, "--step traces a whole model; leave out")
    if arguments.path == "sequential":
        raise UsageError("--path sequential: every step is traced without the plugin, too; leave it out")
    is_demo = arguments.model == "demo"
    if not is_demo and arguments.device == "cpu":
        raise UsageError(f"--model {arguments.model} is for GPUs; use --model demo, or --device cuda")
    sequence = arguments.seq or (1024 if arguments.device == "cuda" else 256) * (1 if is_demo else 8)
    if sequence % num_ranks:
        raise UsageError(f"--seq {sequence} must be a multiple of the {num_ranks} ranks")
    if num_ranks not in (2, 4, 8):
        raise UsageError(f"the models can be cut for 2, 4 or 8 ranks, not {num_ranks}")
    require_positive(arguments, ("seq", "layers", "batch", "rounds", "runs"))
    name = arguments.name or f"step_{arguments.model}"
    require_files(arguments.output, (f"{name}.json", f"{name}.png"))
    options = _Options(
        model=arguments.model,
        num_layers=arguments.layers or (2 if is_demo else 4),
        sequence=sequence,
        batch=arguments.batch,
        dtype=arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32"),
        config=config_of(arguments),
        transformer_impl=arguments.transformer_impl,
        has_fusions=arguments.fusions,
        rounds=arguments.rounds,
        runs=arguments.runs,
        output=arguments.output,
        name=name,
        json=arguments.json,
    )
    return launch(_trace_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _trace_on_rank(rank: Rank, options: _Options) -> int:
    import torch

    from commfuse_megatron.tools.trace.whole_step import StepToTrace, count_steps, trace_step

    wanted = StepToTrace(
        model=options.model,
        num_layers=options.num_layers,
        sequence=options.sequence,
        batch=options.batch,
        dtype=getattr(torch, options.dtype),
        device_type=rank.device_type,
        config=options.config,
        transformer_impl=options.transformer_impl,  # type: ignore[arg-type]
        has_fusions=options.has_fusions,
        rounds=options.rounds,
        runs=options.runs,
    )
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("timing variants of the step", total=count_steps(wanted))
        traced = trace_step(wanted, on_step=lambda: progress.advance(task))
    if rank.is_first:
        if options.json:
            write_json(options.json, _to_dict(traced, rank, options))
        _print(traced, wanted, rank, options)
        _write_files(traced, rank, options)
    return 0


def _print(traced: StepTrace, wanted: StepToTrace, rank: Rank, options: _Options) -> None:
    from commfuse_megatron.tools.trace.whole_step import FREE, USERBUFFERS, userbuffers_left_out

    console = results()
    console.print(f"{_what(options, rank)}; {machine_line(rank, traced.transport, options.dtype)}")
    console.print(
        f"milliseconds; medians over {say_count(wanted.runs, 'run')} of medians over {wanted.rounds} steps, the slowest"
        " rank's; exposed: longer than without communication\ntraced: one more step of each"
        f" ({'kernels' if rank.device_type == 'cuda' else 'GEMMs and transfers'}), the largest of all ranks"
    )
    table = Table(title="forward and backward, no optimizer", title_justify="left")
    table.add_column("", no_wrap=True)
    columns = ("forward", "step", "exposed", "traced: GEMM", "compute", "communication", "exposed")
    for column in (*columns, "allocated GiB", "device GiB"):
        table.add_column(column, justify="right")
    for name, times in traced.times.items():
        row = [f"{times.forward_ms:.2f}", f"{times.step_ms:.2f}"]
        sizes = (times.peak_allocated_bytes, times.device_bytes)
        memory = [f"{size / 2**30:.2f}" if size else "" for size in sizes]
        if name == FREE:
            table.add_row(f"{name} *", *row, *[""] * 5, *memory)
            continue
        summary = traced.summary(name)
        times_us = (summary.gemm_us, summary.compute_us, summary.transfer_us, summary.exposed_us)
        row += [f"{traced.exposed_ms(name):.2f}", *(f"{us / 1e3:.2f}" for us in times_us)]
        table.add_row(name, *row, *memory)
    console.print(table)
    console.print(
        "* lower bound; results are wrong on purpose: every all-gather and reduce-scatter of the stock step is a local"
        " copy; all-reduces stay",
        soft_wrap=True,
    )
    left_out = userbuffers_left_out(wanted)
    if left_out is not None:
        console.print(f"left out: {USERBUFFERS}: {escape(left_out)}", soft_wrap=True)
    reasons = {name: reason for name, reason in traced.layers.items() if reason is not None}
    console.print(
        f"{len(traced.layers) - len(reasons)} of {len(traced.layers)} layers were overlapped in their forward passes"
    )
    for name, reason in reasons.items():
        console.print(f"    {escape(name)}: {escape(reason)}", soft_wrap=True)
    for op in traced.ops:
        problem = f"{op.op} {op.pass_name}, M {op.M}, N {op.N}, K {op.K}"
        console.print(f"    {problem}: {op.path}, {op.transport}; {escape(op.reason)}", soft_wrap=True)


def _write_files(traced: StepTrace, rank: Rank, options: _Options) -> None:
    from commfuse_megatron.tools.trace.figure import draw_runs, missing_matplotlib
    from commfuse_megatron.tools.trace.perfetto import write_perfetto

    console = results()
    folder = Path(options.output)
    trace = write_perfetto(folder / f"{options.name}.json", traced.runs)
    console.print(f"trace     {escape(str(trace))} (open it in ui.perfetto.dev)", soft_wrap=True)
    reason = missing_matplotlib()
    if reason is None:
        picture = draw_runs(
            folder / f"{options.name}.png",
            {name: shown_ranks(recording) for name, recording in traced.runs.items()},
            title=_what(options, rank),
            caption=f"{machine_line(rank, traced.transport, options.dtype)}, {time.strftime('%B %Y')}",
        )
        console.print(f"picture   {escape(str(picture))}", soft_wrap=True)
    else:
        console.print(f"no picture: {escape(reason)}", soft_wrap=True)


def _what(options: _Options, rank: Rank) -> str:
    return (
        f"step of a Megatron GPT ({options.model}, {options.num_layers} layers, sequence {options.sequence},"
        f" batch {options.batch}, {options.transformer_impl}), tensor parallel {rank.world_size}"
    )


def _to_dict(traced: StepTrace, rank: Rank, options: _Options) -> dict[str, Any]:
    from commfuse_megatron.tools.trace.whole_step import FREE

    return {
        "model": options.model,
        "layers": options.num_layers,
        "sequence": options.sequence,
        "batch": options.batch,
        "dtype": options.dtype,
        "transformer_impl": options.transformer_impl,
        "transport": traced.transport,
        "config": options.config.to_dict(),
        "rows": [
            {
                "case": options.model,
                "op": "whole_step",
                "pass": "step",
                "variant": name,
                "dtype": options.dtype,
                "recipe": None,
                "group_size": rank.world_size,
                "emulated": False,
                "layers": options.num_layers,
                "forward_ms": times.forward_ms,
                "step_ms": times.step_ms,
                "runs": [{"forward_ms": forward_ms, "step_ms": step_ms} for forward_ms, step_ms in times.runs],
                "exposed_ms": None if name == FREE else traced.exposed_ms(name),
                "peak_allocated_bytes": times.peak_allocated_bytes or None,
                "device_bytes": times.device_bytes or None,
                "traced": None if name == FREE else traced.summary(name).to_dict(),
            }
            for name, times in traced.times.items()
        ],
        "linears": traced.layers,
        "report": [dataclasses.asdict(op) for op in traced.ops],
        **hardware(rank),
    }
