"""`commfuse demo`: one small Megatron GPT, trained stock and overlapped on real text, compared step by step.

Prints and writes; what is trained and what counts as passed is in `tools/demo/training.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.output import make_progress, require_files, results, write_json
from commfuse_megatron.tools.common.ranks import CannotRunError, Rank, UsageError, choose_num_ranks

if TYPE_CHECKING:
    from commfuse_megatron.tools.demo.training import Comparison, Recipe

__all__ = ["run_demo"]

RANKS = (2, 4, 8)
LEAST_TEXT_BYTES = 10_000
#: Every rank gets a copy. Some 2000 steps on the CPU see as many bytes.
MOST_TEXT_BYTES = 2_000_000


@dataclass(frozen=True, slots=True)
class _Options:
    num_steps: int
    dtype: str
    text: bytes
    output: str
    json: str | None


def run_demo(arguments: argparse.Namespace) -> int:
    """Train, compare, print, draw. 0: losses and gradients agree, every call was overlapped in its mode; 1: not."""
    if arguments.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {arguments.steps}")
    num_ranks = choose_num_ranks(arguments.ranks)
    if num_ranks not in RANKS:
        raise UsageError(f"the demo's model can be cut for {', '.join(map(str, RANKS))} ranks, not {num_ranks}")
    if util.find_spec("megatron") is None:
        raise CannotRunError("Megatron-Core is not installed: pip install megatron-core")
    require_files(arguments.output, ("timeline.json", "timeline.png"))
    options = _Options(
        num_steps=arguments.steps,
        dtype=arguments.dtype,
        text=_read_text(arguments.text),
        output=arguments.output,
        json=arguments.json,
    )
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


def _demo_on_rank(rank: Rank, options: _Options) -> int:
    import torch
    from torch import distributed as dist

    from commfuse_megatron.tools.demo.training import Recipe, bounds_of, complaints_of, gradient_limit, train_both

    # Under torchrun every rank has read its own file; the first one's counts.
    texts = [options.text]
    dist.broadcast_object_list(texts)
    dtype = getattr(torch, options.dtype)
    recipe = Recipe.for_device(rank.device_type, dtype=dtype, num_steps=options.num_steps, text=texts[0])
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("training stock and overlapped", total=recipe.num_steps)
        comparison = train_both(recipe, on_step=lambda *_: progress.advance(task))
    bounds = bounds_of(dtype, recipe.num_steps, rank.world_size)
    complaints = complaints_of(comparison, bounds, gradient_limit(dtype))
    # The losses are equal on all ranks, but what each rank's layers did is its own.
    everyones: list[list[str]] = [[] for _ in range(rank.world_size)]
    dist.all_gather_object(everyones, complaints)
    complaints = list(dict.fromkeys(complaint for own in everyones for complaint in own))
    if rank.is_first:
        if options.json:
            write_json(options.json, _to_dict(comparison, recipe, rank))
        _print(comparison, recipe, rank, complaints)
        _write_files(comparison, recipe, rank, options)
    return 1 if complaints else 0


# --- results ----------------------------------------------------------------------------------------------------------


def _print(comparison: Comparison, recipe: Recipe, rank: Rank, complaints: list[str]) -> None:
    from commfuse_megatron.tools.demo.training import bounds_of, gradient_limit
    from commfuse_megatron.tools.verify.ops import describe_modes

    console = results()
    console.print(
        f"Megatron GPT, {recipe.num_layers} layers, hidden {recipe.hidden_size}, sequence {recipe.sequence}, batch"
        f" {recipe.batch}, {recipe.dtype_name}; tensor and sequence parallel over {rank.world_size} ranks"
        f" ({rank.device_type}); text of {len(recipe.text):,} bytes\n"
    )
    losses = Table(title="loss before each step (difference 0: bit-equal)", title_justify="left")
    labels = ["plugin"] if len(comparison.runs) == 1 else list(comparison.runs)
    for column in ("step", "stock", *(name for label in labels for name in (label, "difference"))):
        losses.add_column(column, justify="right")
    for number, stock in enumerate(comparison.stock_loss):
        cells = [str(number + 1), f"{stock:.9f}"]
        for mode, run in comparison.runs.items():
            difference = comparison.differences(mode)[number]
            cells += [f"{run.loss[number]:.9f}", f"{difference:.1e}" if difference else "0"]
        losses.add_row(*cells)
    console.print(losses)
    limits = "; ".join(
        f"steps {b.first}-{b.last} at most {b.limit:g}"
        for b in bounds_of(recipe.dtype, recipe.num_steps, rank.world_size)
    )
    console.print(f"largest difference {comparison.max_loss_difference:.1e} (allowed: {limits})")
    for mode, run in comparison.runs.items():
        console.print(
            f"{mode}: passes of this rank {describe_modes(run.modes)}; gradients by stock's weights differ by at most"
            f" {run.gradient_error:.1e} (allowed: {gradient_limit(recipe.dtype):g}), {escape(run.gradient)}"
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
    table = Table(title="operations of the recorded run, this rank; exposed: last step, per call", title_justify="left")
    for column in ("op", "pass"):
        table.add_column(column, no_wrap=True)
    for column in ("M", "N", "K", "calls"):
        table.add_column(column, justify="right")
    for column in ("path", "algorithm", "chunks/shard", "transport", "GEMM"):
        table.add_column(column)
    table.add_column("exposed us", justify="right")
    for op in comparison.recorded.ops:
        exposed = op["exposed_comm_us"]
        table.add_row(
            op["op"],
            op["pass_name"],
            *(str(op[name]) for name in ("M", "N", "K", "calls")),
            op["path"],
            op["algorithm"],
            str(op["chunks_per_shard"]),
            op["transport"],
            op["gemm"],
            "" if exposed is None else f"{exposed:.0f}",
        )
    return table


def _write_files(comparison: Comparison, recipe: Recipe, rank: Rank, options: _Options) -> None:
    from commfuse_megatron.tools.trace.figure import densest_calls, draw_timeline, missing_matplotlib
    from commfuse_megatron.tools.trace.perfetto import write_perfetto

    console = results()
    folder = Path(options.output)
    trace = write_perfetto(folder / "timeline.json", comparison.recording)
    console.print(f"trace     {escape(str(trace))} (open it in ui.perfetto.dev)", soft_wrap=True)
    reason = missing_matplotlib()
    if reason is None:
        zoom = densest_calls(comparison.recording)
        picture = draw_timeline(
            folder / "timeline.png",
            comparison.recording,
            title=f"Step {recipe.num_steps} of a small Megatron GPT on {rank.world_size} ranks, with the plugin",
            caption=f"{rank.device_type}, {comparison.recorded.ops[0]['transport'] if comparison.recorded.ops else ''},"
            f" {recipe.dtype_name}",
            zooms={} if zoom is None else {"two linears in a row, larger": zoom},
        )
        console.print(f"picture   {escape(str(picture))}", soft_wrap=True)
    else:
        console.print(f"no picture: {escape(reason)}", soft_wrap=True)


def _to_dict(comparison: Comparison, recipe: Recipe, rank: Rank) -> dict[str, Any]:
    return {
        "steps": recipe.num_steps,
        "stock_loss": list(comparison.stock_loss),
        "plugin_loss": list(comparison.recorded.loss),
        "max_loss_difference": comparison.max_loss_difference,
        "report": list(comparison.recorded.ops),
        "layers": list(comparison.recorded.layers),
        "runs": {mode: asdict(run) | {"modes": run.modes} for mode, run in comparison.runs.items()},
        "ranks": rank.world_size,
        "device": rank.device_type,
        "dtype": recipe.dtype_name,
    }
