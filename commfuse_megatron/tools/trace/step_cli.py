"""`commfuse trace --step`: a Megatron step, stock and planned by the plugin, beside the step without communication."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import refuse_given, require_positive
from commfuse_megatron.tools.common.output import make_progress, make_table, results, say_count, write_json
from commfuse_megatron.tools.common.ranks import Rank, UsageError, choose_num_ranks, require_megatron
from commfuse_megatron.tools.trace.options import ready

if TYPE_CHECKING:
    from commfuse_megatron.tools.trace.whole_step import StepToTrace, StepTrace


def run_trace_step(arguments: argparse.Namespace) -> int:
    """Time and trace. 0: done; 2: the plugin overlapped nothing."""
    num_ranks = choose_num_ranks(arguments.ranks)
    require_megatron()
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
    layers = arguments.layers or (2 if is_demo else 4)
    options = ready(arguments, f"step_{arguments.model}", layers=layers, seq=sequence)
    return launch(_trace_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _trace_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    import torch

    from commfuse_megatron.tools.common.models import MODELS
    from commfuse_megatron.tools.trace.figure import draw_runs
    from commfuse_megatron.tools.trace.output import caption, shown_ranks, write_files
    from commfuse_megatron.tools.trace.whole_step import StepToTrace, count_steps, trace_step

    wanted = StepToTrace(
        **MODELS[options.model],
        num_layers=options.layers,
        sequence=options.seq,
        batch=options.batch,
        dtype=getattr(torch, options.dtype),
        device_type=rank.device_type,
        config=options.config,
        transformer_impl=options.transformer_impl,
        has_fusions=options.fusions,
        rounds=options.rounds,
        runs=options.runs,
    )
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("timing variants of the step", total=count_steps(wanted))
        traced = trace_step(wanted, on_step=lambda: progress.advance(task))
    if not rank.is_first:
        return 0
    if options.json:
        write_json(options.json, _to_dict(traced, rank, options))
    _print(traced, wanted, rank, options)

    def draw(path: Path) -> Path:
        runs = {name: shown_ranks(recording) for name, recording in traced.runs.items()}
        line = caption(rank, traced.transport, options.dtype)
        return draw_runs(path, runs, title=_what(options, rank), caption=line)

    write_files(Path(options.output) / options.name, traced.runs, draw)
    return 0


def _print(traced: StepTrace, wanted: StepToTrace, rank: Rank, options: argparse.Namespace) -> None:
    from commfuse_megatron.tools.common.cases import FREE
    from commfuse_megatron.tools.trace.output import machine_line
    from commfuse_megatron.tools.trace.whole_step import USERBUFFERS, userbuffers_left_out

    console = results()
    console.print(f"{_what(options, rank)}; {machine_line(rank, traced.transport, options.dtype)}")
    console.print(
        f"milliseconds; medians over {say_count(wanted.runs, 'run')} of medians over {wanted.rounds} steps, the slowest"
        " rank's; exposed: longer than without communication\ntraced: one more step of each"
        f" ({'kernels' if rank.device_type == 'cuda' else 'GEMMs and transfers'}), the largest of all ranks"
    )
    rows = []
    for name, times in traced.times.items():
        row = [f"{times.forward_ms:.2f}", f"{times.step_ms:.2f}"]
        sizes = (times.peak_allocated_bytes, times.device_bytes)
        memory = [f"{size / 2**30:.2f}" if size else "" for size in sizes]
        if name == FREE:
            rows.append((f"{name} *", *row, *[""] * 5, *memory))
            continue
        summary = traced.summary(name)
        times_us = (summary.gemm_us, summary.compute_us, summary.transfer_us, summary.exposed_us)
        row += [f"{traced.exposed_ms(name):.2f}", *(f"{us / 1e3:.2f}" for us in times_us)]
        rows.append((name, *row, *memory))
    columns = (">forward", ">step", ">exposed", ">traced: GEMM", ">compute", ">communication", ">exposed")
    memory_columns = (">allocated GiB", ">device GiB")
    console.print(make_table("forward and backward, no optimizer", ("", *columns, *memory_columns), rows))
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


def _what(options: argparse.Namespace, rank: Rank) -> str:
    return (
        f"step of a Megatron GPT ({options.model}, {options.layers} layers, sequence {options.seq},"
        f" batch {options.batch}, {options.transformer_impl}), tensor parallel {rank.world_size}"
    )


def _to_dict(traced: StepTrace, rank: Rank, options: argparse.Namespace) -> dict[str, Any]:
    from commfuse_megatron.tools.common.cases import FREE
    from commfuse_megatron.tools.trace.output import hardware

    return {
        "model": options.model,
        "layers": options.layers,
        "sequence": options.seq,
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
                "layers": options.layers,
                "forward_ms": times.forward_ms,
                "step_ms": times.step_ms,
                "runs": [{"forward_ms": forward_ms, "step_ms": step_ms} for forward_ms, step_ms in times.runs],
                "exposed_ms": None if name == FREE else traced.exposed_ms(name),
                "peak_allocated_bytes": times.peak_allocated_bytes or None,
                "device_bytes": times.device_bytes or None,
                "traced": None if name == FREE else dataclasses.asdict(traced.summary(name)),
            }
            for name, times in traced.times.items()
        ],
        "linears": traced.layers,
        "report": [dataclasses.asdict(op) for op in traced.ops],
        **hardware(rank),
    }
