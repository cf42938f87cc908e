"""Does training with the plugin stay as close to fp32 as stock training does, and do checkpoints interchange?

    torchrun --nproc-per-node 2 examples/check_training.py --steps 6 --exchange-at 3

A small GPT and a small hybrid model are trained on real text, stock and with the plugin, and held to a stock run in a
wider dtype; half way each writes a checkpoint in which the other goes on. Tensor parallel over all ranks. On GPUs with
Transformer Engine:

    torchrun --nproc-per-node 2 examples/check_training.py --device cuda --steps 50 --exchange-at 25 --json check.json
    torchrun --nproc-per-node 2 examples/check_training.py --device cuda --lora rows
    torchrun --nproc-per-node 2 examples/check_training.py --device cuda --steps 50 --context-parallel 2
    torchrun --nproc-per-node 2 examples/check_training.py --device cuda --memory

Prints a table; exits with 1 if a difference is too large or a linear was not overlapped. With --memory nothing is
compared: memory and time of a step, stock and with the plugin, trained and with adapters.
"""

import argparse
import dataclasses
import os
import sys
import time
from typing import Any

import torch
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.common.models import OVERLAPPED
from commfuse_megatron.tools.common.output import (
    make_progress,
    results,
    silence_foreign_warnings,
    why_file_cannot_be_written,
    write_json,
)
from commfuse_megatron.tools.common.ranks import require_launcher
from commfuse_megatron.tools.common.text import standard_library_text
from commfuse_megatron.tools.verify.convergence import (
    ALLOWED_RATIO,
    Convergence,
    ConvergenceTask,
    compare_runs,
    complaints_of,
    ratios_of,
)
from commfuse_megatron.tools.verify.step_costs import WARM_UP, measure_steps
from commfuse_megatron.transport.select import take_gpu

#: (dtype under test, reference) and sizes. A CPU has no use for bf16 at these sizes; float32 is held to float64 there.
DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.bfloat16, torch.float32)}
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"hidden_size": 64, "ffn_hidden_size": 128, "sequence": 64, "batch": 2},
    "cuda": {"hidden_size": 1024, "ffn_hidden_size": 4096, "sequence": 1024, "batch": 4, "num_layers": 4, "lr": 3e-4},
}
GATHERED = (
    "Transformer Engine 2.20 leaves out the gradient of the norm's output that it returns gathered; the plugin adds it."
    " So the plugin's adapters take it gathered, and all stock runs the same adapters on this rank's rows, where the"
    " gradient is complete."
)

WITHOUT_SHARING = (
    "Stock's runs have whole sequences on each rank: without the plugin these layers cannot share them, so stock is"
    " compared without context parallelism."
)

#: With --memory, on GPUs: Llama-8B's layers.
SIZES_OF_MEMORY: dict[str, dict[str, Any]] = {
    "cpu": SIZES["cpu"],
    "cuda": {
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "sequence": 8192,
        "batch": 1,
        "num_layers": 4,
    },
}


#: Complaints and data for JSON, both by task, and a table.
Found = tuple[dict[str, list[str]], dict[str, Any], Table]


def main() -> int:
    """Run all tasks, print, write. 0: passed; 1: a check failed."""
    parser, chosen = parse()
    if not chosen.memory and not 0 < chosen.exchange_at < chosen.steps:
        parser.error(f"--exchange-at must be between 0 and --steps, got {chosen.exchange_at} of {chosen.steps}")
    reason = None if chosen.json is None else why_file_cannot_be_written(chosen.json)
    if reason is not None:
        parser.error(f"--json {chosen.json}: {reason}")
    try:
        is_planned = chosen.memory and chosen.device == "cuda"
        default = OverlapConfig() if is_planned else OVERLAPPED
        config = default if chosen.config is None else OverlapConfig.from_file(chosen.config)
    except ConfigError as error:
        parser.error(f"--config: {error}")
    require_launcher()
    silence_foreign_warnings()
    if chosen.device == "cuda":
        take_gpu(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if chosen.device == "cuda" else "gloo")
    is_first, tasks = dist.get_rank() == 0, tasks_of(chosen, config)
    if dist.get_world_size() % chosen.context_parallel:
        parser.error(f"--context-parallel {chosen.context_parallel} does not divide the {dist.get_world_size()} ranks")
    with make_progress(is_shown=is_first) as progress:
        complaints, data, table = (measure if chosen.memory else train)(tasks, progress)
    if is_first:
        if chosen.json is not None:
            write_json(chosen.json, {name: data[name] | {"complaints": complaints[name]} for name in data})
        console = results()
        for name, failures in complaints.items():
            for failure in failures:
                console.print(f"[red]failed:[/] {name}: {escape(failure)}", soft_wrap=True)
        if chosen.lora == "gathered" and not chosen.memory:
            console.print(GATHERED, soft_wrap=True)
        if chosen.context_parallel > 1 and not next(iter(tasks.values())).stock_shares:
            console.print(WITHOUT_SHARING, soft_wrap=True)
        console.print(table)
    dist.destroy_process_group()
    return 1 if any(complaints.values()) else 0


def train(tasks: dict[str, ConvergenceTask], progress: Progress) -> Found:
    """Train all tasks; one row per run and quantity."""
    start_s = time.perf_counter()
    bar = progress.add_task("training", total=sum(task.num_runs_steps for task in tasks.values()))
    found = {name: compare_runs(task, on_step=lambda: progress.advance(bar)) for name, task in tasks.items()}
    task = next(iter(tasks.values()))
    reference = name_of(task.reference_dtype)
    table = make_table(
        f"mean distance from stock in {reference}: {task.num_steps} steps in {say(task)}"
        f"{', adapters only' if task.lora else ''},\ncheckpoints after step {task.exchange_at};"
        f" allowed ratio {ALLOWED_RATIO:g}{asked(found)}; {time.perf_counter() - start_s:.0f} s",
        texts=("model", "run", "quantity"),
        values=("distance", f"stock {name_of(task.dtype)}", "ratio", "layers overlapped"),
    )
    data: dict[str, Any] = {}
    for name, converged in found.items():
        distances = []
        for (run, quantity), (distance, stock) in ratios_of(converged).items():
            distances.append({"run": run, "quantity": quantity, "distance": distance, "stock": stock})
            ratio = f"{distance / stock:.2f}" if stock else "equal" if not distance else "inf"
            overlapped = count_overlapped(converged.layers.get(run))
            table.add_row(name, run, quantity, f"{distance:.3g}", f"{stock:.3g}", ratio, overlapped)
        curves = {run: dataclasses.asdict(curve) for run, curve in converged.curves.items()}
        data[name] = {
            "task": describe(tasks[name]),
            "curves": curves,
            "distances": distances,
            "layers": converged.layers,
        }
    return {name: complaints_of(converged) for name, converged in found.items()}, data, table


def asked(found: dict[str, Convergence]) -> str:
    """What is asked of the plugin's losses beside, for the title."""
    ratio = next(iter(found.values())).allowed_of("plugin", "loss")
    return "" if ratio == ALLOWED_RATIO else f", of the plugin's losses {ratio:g}"


def measure(tasks: dict[str, ConvergenceTask], progress: Progress) -> Found:
    """Measure steps of the one task; one row per model."""
    ((name, task),) = tasks.items()
    bar = progress.add_task("measuring", total=4 * (WARM_UP + task.num_steps))
    found = measure_steps(task, on_step=lambda: progress.advance(bar))
    complaints = [
        f"{weights}: {layer}: {reason}"
        for (weights, _), costs in found.items()
        for layer, reason in (costs.layers or {}).items()
        if reason is not None and not reason.startswith("sequential: ")  # which may have been planned
    ]
    table = make_table(
        f"memory and time of a step: median of {task.num_steps} in {say(task)}, {task.num_layers} of them,\n"
        f"hidden {task.hidden_size} and {task.ffn_hidden_size}, sequence {task.sequence}, batch {task.batch};"
        f" adapters: {task.lora or 'rows'}",
        texts=("weights", "run"),
        values=("saved, MiB", "peak, MiB", "step, ms", "layers overlapped"),
    )
    for key, costs in found.items():
        saved, peak = ("" if size is None else f"{size / 2**20:.1f}" for size in (costs.saved_bytes, costs.peak_bytes))
        table.add_row(*key, saved, peak, f"{costs.step_ms:.2f}", count_overlapped(costs.layers))
    rows = [{"weights": key[0], "run": key[1], **dataclasses.asdict(costs)} for key, costs in found.items()]
    return {name: complaints}, {name: {"task": describe(task), "steps": rows}}, table


def tasks_of(chosen: argparse.Namespace, config: OverlapConfig) -> dict[str, ConvergenceTask]:
    """What is trained, by name."""
    dtype, reference = DTYPES[chosen.device]
    impl = chosen.transformer_impl or ("transformer_engine" if chosen.device == "cuda" else "local")
    common: dict[str, Any] = {
        "device_type": chosen.device,
        "dtype": dtype,
        "reference_dtype": reference,
        "text": standard_library_text(),
        "transformer_impl": impl,
        "num_steps": chosen.steps,
        "exchange_at": chosen.exchange_at,
        "config": config,
        "lora": chosen.lora,
        "context_parallel": chosen.context_parallel,
        **(SIZES_OF_MEMORY if chosen.memory else SIZES)[chosen.device],
    }
    patterns = {"gpt": None, "hybrid": chosen.pattern}
    return {name: ConvergenceTask(pattern=patterns[name], **common) for name in chosen.models}


def make_table(title: str, texts: tuple[str, ...], values: tuple[str, ...]) -> Table:
    """An empty one; columns of values are justified to the right."""
    table = Table(title=title, title_justify="left")
    for column in (*texts, *values):
        table.add_column(column, justify="left" if column in texts else "right")
    return table


def say(task: ConvergenceTask) -> str:
    """What was run, for titles."""
    ranks = f"{dist.get_world_size()} ranks of {task.device_type}"
    sharing = f", {task.context_parallel} of them to a sequence" if task.context_parallel > 1 else ""
    return f"{name_of(task.dtype)}, {ranks}{sharing}, {task.transformer_impl} layers"


def name_of(dtype: torch.dtype) -> str:
    """Without the "torch."."""
    return str(dtype).removeprefix("torch.")


def count_overlapped(layers: dict[str, str | None] | None) -> str:
    """How many linears of a run, or core attentions that share sequences, were overlapped, in words."""
    return "stock" if layers is None else f"{list(layers.values()).count(None)} of {len(layers)}"


def describe(task: ConvergenceTask) -> dict[str, Any]:
    """The task for JSON."""
    described = {
        key: name_of(value) if isinstance(value, torch.dtype) else value
        for key, value in dataclasses.asdict(task).items()
        if key not in ("text", "config")
    }
    return described | {"ranks": dist.get_world_size(), "text_bytes": len(task.text)}


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, for its errors, and what the command line chooses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, impls, models = parser.add_argument, ["local", "transformer_engine"], ["gpt", "hybrid"]
    add("--device", choices=list(DTYPES), default="cpu", help="default: cpu")
    add("--transformer-impl", choices=impls, help="default: transformer_engine on GPUs, local on the CPU")
    add("--models", nargs="+", choices=models, default=models, help="default: both")
    add("--pattern", default="*-*-", help="layers of the hybrid model: * attention, - MLP, M Mamba (default: *-*-)")
    add("--steps", type=int, default=50, metavar="N", help="trained, or measured; default: 50")
    add("--exchange-at", type=int, default=25, metavar="N", help="write checkpoints after this step (default: 25)")
    add(
        "--lora",
        choices=["rows", "gathered"],
        help="train low-rank adapters at all linears of the GPT, whose weights are frozen; the plugin's take the norm's"
        " output of this rank's rows, or gathered, stock's always that of the rows",
    )
    add(
        "--memory",
        action="store_true",
        help="instead, measure steps of the GPT, trained and with adapters (--lora, default: rows): what is saved for"
        " the backward pass, peak of memory, time; on GPUs 4 layers of Llama-8B's sizes, planned as by default",
    )
    sharing = "so many ranks share a sequence (cp_comm_type a2a), the others are tensor-parallel (default: 1)"
    add("--context-parallel", type=int, default=1, metavar="C", help=sharing)
    add("--config", metavar="FILE", help="OverlapConfig of the plugin's runs; default: sliced, always")
    add("--json", metavar="FILE", help="write all that was found; missing folders are made")
    chosen = parser.parse_args()
    if chosen.context_parallel < 1:
        parser.error(f"--context-parallel must be at least 1, got {chosen.context_parallel}")
    if chosen.context_parallel > 1 and (chosen.lora or chosen.memory):
        parser.error("--context-parallel: neither adapters (--lora) nor --memory are compared so; leave them out")
    if chosen.lora or chosen.memory:
        chosen.models = ["gpt"]
    return parser, chosen


if __name__ == "__main__":
    sys.exit(main())
