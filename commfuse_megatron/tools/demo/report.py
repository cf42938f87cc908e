"""What `commfuse demo` does on a rank, and says of it."""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from rich.markup import escape
from torch import distributed as dist

from commfuse_megatron.schedule import Algorithm, build_all_gather, build_reduce_scatter, render
from commfuse_megatron.tools.common.models import Task
from commfuse_megatron.tools.common.modes import describe_modes
from commfuse_megatron.tools.common.output import make_progress, make_table, results, write_json
from commfuse_megatron.tools.common.ranks import Rank
from commfuse_megatron.tools.demo.training import (
    Comparison,
    complaints_of,
    gradient_limit,
    loss_limits,
    task_for,
    train_both,
)
from commfuse_megatron.tools.trace.figure import densest_calls, draw_timeline
from commfuse_megatron.tools.trace.reports import write_files


def demo_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Train, compare, print, draw. 0: losses and gradients agree, every call was overlapped in its mode; 1: not."""
    # Under torchrun every rank has read its own file; the first one's counts.
    texts = [options.text]
    dist.broadcast_object_list(texts)
    dtype = getattr(torch, options.dtype)
    task = task_for(rank.device_type, dtype=dtype, num_steps=options.steps, text=texts[0])
    with make_progress(is_shown=rank.is_first) as progress:
        bar = progress.add_task("training stock and overlapped", total=task.num_steps)
        comparison = train_both(task, on_step=lambda: progress.advance(bar))
    limits = loss_limits(dtype, task.num_steps, rank.world_size)
    # The losses are equal on all ranks, but what each rank's layers did is its own.
    everyones: list[list[str]] = [[] for _ in range(rank.world_size)]
    dist.all_gather_object(everyones, complaints_of(comparison, limits, gradient_limit(dtype)))
    complaints = list(dict.fromkeys(complaint for own in everyones for complaint in own))
    if rank.is_first:
        if options.json:
            data = {
                "steps": task.num_steps,
                "stock_loss": comparison.stock_loss,
                "plugin_loss": comparison.recorded.loss,
                "max_loss_difference": comparison.max_loss_difference,
                "report": comparison.recorded.ops,
                "layers": comparison.recorded.layers,
                "runs": {mode: asdict(run) | {"modes": run.modes} for mode, run in comparison.runs.items()},
                "ranks": rank.world_size,
                "device": rank.device_type,
                "dtype": task.dtype_name,
            }
            write_json(options.json, data)
        _print(comparison, task, rank)
        for complaint in complaints:
            results().print(f"[red]failed:[/] {escape(complaint)}")
        place = Path(options.output) / "timeline"
        write_files(place, comparison.recording, lambda path: _draw(path, comparison, task, rank))
    return 1 if complaints else 0


def _print(comparison: Comparison, task: Task, rank: Rank) -> None:
    console = results()
    console.print(
        f"Megatron GPT, {task.num_layers} layers, hidden {task.hidden_size}, sequence {task.sequence}, batch"
        f" {task.batch}, {task.dtype_name}; tensor and sequence parallel over {rank.world_size} ranks"
        f" ({rank.device_type}); text of {len(task.text):,} bytes\n"
    )
    labels = ["plugin"] if len(comparison.runs) == 1 else list(comparison.runs)
    rows = []
    for number, stock in enumerate(comparison.stock_loss):
        cells = [str(number + 1), f"{stock:.9f}"]
        for mode, run in comparison.runs.items():
            difference = comparison.differences(mode)[number]
            cells += [f"{run.loss[number]:.9f}", f"{difference:.1e}" if difference else "0"]
        rows.append(cells)
    columns = (">step", ">stock", *(name for label in labels for name in (f">{label}", ">difference")))
    console.print(make_table("loss before each step (difference 0: bit-equal)", columns, rows))
    limits = "; ".join(
        f"steps {b.first}-{b.last} at most {b.limit:g}"
        for b in loss_limits(task.dtype, task.num_steps, rank.world_size)
    )
    console.print(f"largest difference {comparison.max_loss_difference:.1e} (allowed: {limits})")
    for mode, run in comparison.runs.items():
        console.print(
            f"{mode}: passes of this rank {describe_modes(run.modes)}; gradients by stock's weights differ by at most"
            f" {run.gradient_error:.1e} (allowed: {gradient_limit(task.dtype):g}), {escape(run.gradient)}"
        )
    console.print()
    used = {  # each schedule once
        (op["op"] == "all_gather_linear", op["algorithm"], op["chunks_per_shard"])
        for op in comparison.recorded.ops
        if op["path"] == "sliced" and op["pass_name"] == "fprop"
    }
    for gathers, algorithm, chunks in sorted(used, reverse=True):
        build = build_all_gather if gathers else build_reduce_scatter
        grid = render(build(rank.world_size, Algorithm(algorithm), chunks))
        console.print(escape(grid) + "\n", soft_wrap=True)
    title = "operations of the recorded run, this rank; exposed: last step, per call"
    sizes, plan = ("M", "N", "K", "calls"), ("path", "algorithm", "chunks_per_shard", "transport", "gemm")
    headings = ("path", "algorithm", "chunks/shard", "transport", "GEMM", ">exposed us")
    op_rows = [
        [str(op[name]) for name in ("op", "pass_name", *sizes, *plan)]
        + ["" if op["exposed_comm_us"] is None else f"{op['exposed_comm_us']:.0f}"]
        for op in comparison.recorded.ops
    ]
    console.print(make_table(title, ("op", "pass", *(f">{size}" for size in sizes), *headings), op_rows))
    for mode, run in comparison.runs.items():
        forward = sum(layer["overlapped_calls"] for layer in run.layers)
        calls = f"overlapped in {forward} forward and {run.sliced_calls('backward')} backward passes"
        console.print(f"{mode}: {len(run.layers)} layers, {calls}")


def _draw(path: Path, comparison: Comparison, task: Task, rank: Rank) -> Path:
    zoom = densest_calls(comparison.recording)
    transport = comparison.recorded.ops[0]["transport"] if comparison.recorded.ops else ""
    return draw_timeline(
        path,
        comparison.recording,
        title=f"Step {task.num_steps} of a small Megatron GPT on {rank.world_size} ranks, with the plugin",
        caption=f"{rank.device_type}, {transport}, {task.dtype_name}",
        zooms={} if zoom is None else {"two linears in a row, larger": zoom},
    )
