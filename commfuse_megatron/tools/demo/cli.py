"""`commfuse demo`: one small Megatron GPT, trained stock and overlapped on real text, compared step by step.

Prints and writes; what is trained and what counts as passed is in `tools/demo/training.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import add_rank_options, for_ranks
from commfuse_megatron.tools.common.output import make_progress, make_table, require_files, results, write_json
from commfuse_megatron.tools.common.ranks import Rank, UsageError, choose_num_ranks, require_megatron

if TYPE_CHECKING:
    from commfuse_megatron.tools.common.models import Task
    from commfuse_megatron.tools.demo.training import Comparison

SUMMARY = "train a small Megatron GPT twice on real text, stock and overlapped, and compare the losses"
EXAMPLE = """commfuse demo --ranks 2 --steps 20
  torchrun --nproc-per-node 2 -m commfuse_megatron demo --device cuda --dtype bfloat16"""

RANKS = (2, 4, 8)
LEAST_TEXT_BYTES = 10_000
#: Every rank gets a copy. Some 2000 steps on the CPU see as many bytes.
MOST_TEXT_BYTES = 2_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `commfuse demo` takes."""
    add_rank_options(parser, which="2, 4 or 8; default 2")
    add = parser.add_argument
    add("--steps", type=int, default=20, metavar="N", help="training steps (default 20)")
    dtypes = ("float32", "float64", "bfloat16")
    add("--dtype", choices=dtypes, default="float32", help="of the model (default float32)")
    what = (
        f"train on FILE, byte by byte: at least {LEAST_TEXT_BYTES} bytes, of which the first {MOST_TEXT_BYTES} are used"
        " (default: the Python standard library's sources)"
    )
    add("--text", metavar="FILE", help=what)
    what = "where picture and trace go; made if missing (default demo_output)"
    add("--output", metavar="DIR", default="demo_output", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Train, compare, print, draw. 0: losses and gradients agree, every call was overlapped in its mode; 1: not."""
    if arguments.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {arguments.steps}")
    num_ranks = choose_num_ranks(arguments.ranks)
    if num_ranks not in RANKS:
        raise UsageError(f"the demo's model can be cut for {', '.join(map(str, RANKS))} ranks, not {num_ranks}")
    require_megatron()
    require_files(arguments.output, ("timeline.json", "timeline.png"))
    options = for_ranks(arguments, text=_read_text(arguments.text))
    return launch(_demo_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _read_text(file: str | None) -> bytes:
    from commfuse_megatron.tools.common.text import standard_library_text

    try:
        if file is None:
            text = standard_library_text(MOST_TEXT_BYTES)
        else:
            with Path(file).open("rb") as opened:  # which may be a device without an end
                text = opened.read(MOST_TEXT_BYTES)
    except OSError as error:
        raise UsageError(f"the text cannot be read: {error}") from error
    if len(text) < LEAST_TEXT_BYTES:
        raise UsageError(f"--text {file} has {len(text)} bytes; the demo needs at least {LEAST_TEXT_BYTES} to train on")
    return text


def _demo_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    import torch
    from torch import distributed as dist

    from commfuse_megatron.tools.demo.training import complaints_of, gradient_limit, loss_limits, task_for, train_both
    from commfuse_megatron.tools.trace.output import write_files

    # Under torchrun every rank has read its own file; the first one's counts.
    texts = [options.text]
    dist.broadcast_object_list(texts)
    dtype = getattr(torch, options.dtype)
    task = task_for(rank.device_type, dtype=dtype, num_steps=options.steps, text=texts[0])
    with make_progress(is_shown=rank.is_first) as progress:
        bar = progress.add_task("training stock and overlapped", total=task.num_steps)
        comparison = train_both(task, on_step=lambda *_: progress.advance(bar))
    limits = loss_limits(dtype, task.num_steps, rank.world_size)
    complaints = complaints_of(comparison, limits, gradient_limit(dtype))
    # The losses are equal on all ranks, but what each rank's layers did is its own.
    everyones: list[list[str]] = [[] for _ in range(rank.world_size)]
    dist.all_gather_object(everyones, complaints)
    complaints = list(dict.fromkeys(complaint for own in everyones for complaint in own))
    if rank.is_first:
        if options.json:
            write_json(options.json, _to_dict(comparison, task, rank))
        _print(comparison, task, rank, complaints)
        place = Path(options.output) / "timeline"
        write_files(place, comparison.recording, lambda path: _draw(path, comparison, task, rank))
    return 1 if complaints else 0


# --- results ----------------------------------------------------------------------------------------------------------


def _print(comparison: Comparison, task: Task, rank: Rank, complaints: list[str]) -> None:
    from commfuse_megatron.tools.common.modes import describe_modes
    from commfuse_megatron.tools.demo.training import gradient_limit, loss_limits

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
    for grid in _grids(comparison, rank.world_size):
        console.print(escape(grid) + "\n", soft_wrap=True)
    console.print(_op_table(comparison))
    for mode, run in comparison.runs.items():
        forward = sum(layer["overlapped_calls"] for layer in run.layers)
        backward = sum(op["calls"] for op in run.ops if op["pass_name"] == "backward" and op["path"] == "sliced")
        calls = f"overlapped in {forward} forward and {backward} backward passes"
        console.print(f"{mode}: {len(run.layers)} layers, {calls}")
    for complaint in complaints:
        console.print(f"[red]failed:[/] {escape(complaint)}")


def _grids(comparison: Comparison, group_size: int) -> list[str]:
    """The schedules that ran, each once, as step-by-rank grids."""
    from commfuse_megatron.schedule import Algorithm, build_all_gather, build_reduce_scatter, render

    used = {
        (op["op"] == "all_gather_linear", op["algorithm"], op["chunks_per_shard"])
        for op in comparison.recorded.ops
        if op["path"] == "sliced" and op["pass_name"] == "fprop"
    }
    return [
        render((build_all_gather if gathers else build_reduce_scatter)(group_size, Algorithm(algorithm), chunks))
        for gathers, algorithm, chunks in sorted(used, reverse=True)
    ]


def _op_table(comparison: Comparison) -> Table:
    title = "operations of the recorded run, this rank; exposed: last step, per call"
    sizes, plan = ("M", "N", "K", "calls"), ("path", "algorithm", "chunks_per_shard", "transport", "gemm")
    columns = ("op", "pass", *(f">{size}" for size in sizes), "path", "algorithm", "chunks/shard", "transport", "GEMM")
    rows = [
        [str(op[name]) for name in ("op", "pass_name", *sizes, *plan)]
        + ["" if op["exposed_comm_us"] is None else f"{op['exposed_comm_us']:.0f}"]
        for op in comparison.recorded.ops
    ]
    return make_table(title, (*columns, ">exposed us"), rows)


def _draw(path: Path, comparison: Comparison, task: Task, rank: Rank) -> Path:
    from commfuse_megatron.tools.trace.figure import densest_calls, draw_timeline

    zoom = densest_calls(comparison.recording)
    transport = comparison.recorded.ops[0]["transport"] if comparison.recorded.ops else ""
    return draw_timeline(
        path,
        comparison.recording,
        title=f"Step {task.num_steps} of a small Megatron GPT on {rank.world_size} ranks, with the plugin",
        caption=f"{rank.device_type}, {transport}, {task.dtype_name}",
        zooms={} if zoom is None else {"two linears in a row, larger": zoom},
    )


def _to_dict(comparison: Comparison, task: Task, rank: Rank) -> dict[str, Any]:
    return {
        "steps": task.num_steps,
        "stock_loss": list(comparison.stock_loss),
        "plugin_loss": list(comparison.recorded.loss),
        "max_loss_difference": comparison.max_loss_difference,
        "report": list(comparison.recorded.ops),
        "layers": list(comparison.recorded.layers),
        "runs": {mode: asdict(run) | {"modes": run.modes} for mode, run in comparison.runs.items()},
        "ranks": rank.world_size,
        "device": rank.device_type,
        "dtype": task.dtype_name,
    }
