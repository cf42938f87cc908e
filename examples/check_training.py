"""Does training with the plugin stay as close to fp32 as stock training does, and do checkpoints interchange?

    torchrun --nproc-per-node 2 examples/check_training.py --steps 6 --exchange-at 3

A small GPT and a small hybrid model are trained on real text, stock and with the plugin, and held to a stock run in a
wider dtype; half way each writes a checkpoint in which the other goes on. Tensor parallel over all ranks. On GPUs with
Transformer Engine:

    torchrun --nproc-per-node 2 examples/check_training.py --device cuda --steps 50 --exchange-at 25 --json check.json
    torchrun --nproc-per-node 2 examples/check_training.py --device cuda --lora rows
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
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.common.models import OVERLAPPED
from commfuse_megatron.tools.common.output import (
    make_progress,
    make_table,
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
from commfuse_megatron.tools.verify.step_costs import WARM_UP, StepCosts, measure_steps

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
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if chosen.device == "cuda" else "gloo")
    complaints = (measure if chosen.memory else train)(tasks_of(chosen, config), chosen.json)
    dist.destroy_process_group()
    return 1 if any(complaints.values()) else 0


def train(tasks: dict[str, ConvergenceTask], json: str | None) -> dict[str, list[str]]:
    """Train all tasks, write and print what was found; complaints by task."""
    is_first = dist.get_rank() == 0
    start_s = time.perf_counter()
    found: dict[str, Convergence] = {}
    with make_progress(is_shown=is_first) as progress:
        bar = progress.add_task("training", total=sum(task.num_runs_steps for task in tasks.values()))
        for name, task in tasks.items():
            found[name] = compare_runs(task, on_step=lambda: progress.advance(bar))
    complaints = {name: complaints_of(converged) for name, converged in found.items()}
    if is_first:
        if json is not None:
            write_json(json, to_dict(tasks, found, complaints))
        print_tables(tasks, found, complaints, time.perf_counter() - start_s)
    return complaints


def measure(tasks: dict[str, ConvergenceTask], json: str | None) -> dict[str, list[str]]:
    """Measure steps of the one task, write and print them; complaints by task."""
    ((name, task),) = tasks.items()
    is_first = dist.get_rank() == 0
    with make_progress(is_shown=is_first) as progress:
        bar = progress.add_task("measuring", total=4 * (WARM_UP + task.num_steps))
        found = measure_steps(task, on_step=lambda: progress.advance(bar))
    complaints = [
        f"{weights}: {layer}: {reason}"
        for (weights, _), costs in found.items()
        for layer, reason in (costs.layers or {}).items()
        if reason is not None and not reason.startswith("sequential: ")  # which may have been planned
    ]
    if is_first:
        if json is not None:
            rows = [{"weights": key[0], "run": key[1], **dataclasses.asdict(costs)} for key, costs in found.items()]
            write_json(json, {name: {"task": describe(task), "steps": rows, "complaints": complaints}})
        print_costs(task, found, complaints)
    return {name: complaints}


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
        **(SIZES_OF_MEMORY if chosen.memory else SIZES)[chosen.device],
    }
    patterns = {"gpt": None, "hybrid": chosen.pattern}
    return {name: ConvergenceTask(pattern=patterns[name], **common) for name in chosen.models}


def print_tables(
    tasks: dict[str, ConvergenceTask], found: dict[str, Convergence], complaints: dict[str, list[str]], seconds: float
) -> None:
    """What was not overlapped, what failed, and last one row per run and quantity."""
    console = results()
    for name, failures in complaints.items():
        for failure in failures:
            console.print(f"[red]failed:[/] {name}: {escape(failure)}", soft_wrap=True)
    task = next(iter(tasks.values()))
    if task.lora == "gathered":
        console.print(GATHERED, soft_wrap=True)
    dtype, reference = (str(d).removeprefix("torch.") for d in (task.dtype, task.reference_dtype))
    rows = []
    for name, converged in found.items():
        for (run, quantity), (distance, stock) in ratios_of(converged).items():
            ratio = f"{distance / stock:.2f}" if stock else "equal" if not distance else "inf"
            overlapped = count_overlapped(converged.layers.get(run))
            rows.append((name, run, quantity, f"{distance:.3g}", f"{stock:.3g}", ratio, overlapped))
    title = (
        f"mean distance from stock in {reference}: {task.num_steps} steps in {dtype},"
        f" {dist.get_world_size()} ranks of {task.device_type}, {task.transformer_impl} layers"
        f"{', adapters only' if task.lora else ''},\n"
        f"checkpoints after step {task.exchange_at}; allowed ratio {ALLOWED_RATIO:g}; {seconds:.0f} s"
    )
    columns = ("model", "run", "quantity", ">distance", f">stock {dtype}", ">ratio", ">linears overlapped")
    console.print(make_table(title, columns, rows))


def print_costs(task: ConvergenceTask, found: dict[tuple[str, str], StepCosts], complaints: list[str]) -> None:
    """What was not overlapped, and one row per model."""
    console = results()
    for failure in complaints:
        console.print(f"[red]failed:[/] {escape(failure)}", soft_wrap=True)
    rows = []
    for key, costs in found.items():
        sizes = ("" if size is None else f"{size / 2**20:.1f}" for size in (costs.saved_bytes, costs.peak_bytes))
        rows.append((*key, *sizes, f"{costs.step_ms:.2f}", count_overlapped(costs.layers)))
    title = (
        f"memory and time of a step: median of {task.num_steps} in {task.dtype_name},"
        f" {dist.get_world_size()} ranks of {task.device_type}, {task.num_layers} {task.transformer_impl} layers,\n"
        f"hidden {task.hidden_size} and {task.ffn_hidden_size}, sequence {task.sequence}, batch {task.batch};"
        f" adapters: {task.lora or 'rows'}"
    )
    columns = ("weights", "run", ">saved, MiB", ">peak, MiB", ">step, ms", ">linears overlapped")
    console.print(make_table(title, columns, rows))


def count_overlapped(layers: dict[str, str | None] | None) -> str:
    """How many linears of a run were overlapped, in words."""
    return "stock" if layers is None else f"{list(layers.values()).count(None)} of {len(layers)}"


def describe(task: ConvergenceTask) -> dict[str, Any]:
    """The task for JSON."""
    described = {
        key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for key, value in dataclasses.asdict(task).items()
        if key not in ("text", "config")
    }
    return described | {"ranks": dist.get_world_size(), "text_bytes": len(task.text)}


def to_dict(
    tasks: dict[str, ConvergenceTask], found: dict[str, Convergence], complaints: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Everything for JSON."""
    report = {}
    for name, task in tasks.items():
        report[name] = {
            "task": describe(task),
            "curves": {run: dataclasses.asdict(curve) for run, curve in found[name].curves.items()},
            "distances": [
                {"run": run, "quantity": quantity, "distance": distance, "stock": stock}
                for (run, quantity), (distance, stock) in ratios_of(found[name]).items()
            ],
            "layers": found[name].layers,
            "complaints": complaints[name],
        }
    return report


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The parser, for its errors, and what the command line chooses."""
    parser = argparse.ArgumentParser(
        description="Compare training with the plugin, stock training, and stock training in a wider dtype.",
        epilog="example:\n  torchrun --nproc-per-node 2 examples/check_training.py --device cuda --json check.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=list(DTYPES), default="cpu", help="default: cpu")
    parser.add_argument(
        "--transformer-impl",
        choices=["local", "transformer_engine"],
        help="default: transformer_engine on GPUs, local on the CPU",
    )
    parser.add_argument(
        "--models", nargs="+", choices=["gpt", "hybrid"], default=["gpt", "hybrid"], help="default: both"
    )
    parser.add_argument(
        "--pattern", default="*-*-", help="layers of the hybrid model: * attention, - MLP, M Mamba (default: *-*-)"
    )
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="trained, or measured; default: 50")
    parser.add_argument(
        "--exchange-at",
        type=int,
        default=25,
        metavar="N",
        help="step after which checkpoints are written (default: 25)",
    )
    parser.add_argument(
        "--lora",
        choices=["rows", "gathered"],
        help="train low-rank adapters at all linears of the GPT, whose weights are frozen; the plugin's take the norm's"
        " output of this rank's rows, or gathered, stock's always that of the rows",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="instead, measure steps of the GPT, trained and with adapters (--lora, default: rows): what is saved for"
        " the backward pass, peak of memory, time; on GPUs 4 layers of Llama-8B's sizes, planned as by default",
    )
    parser.add_argument("--config", metavar="FILE", help="OverlapConfig of the plugin's runs; default: sliced, always")
    parser.add_argument("--json", metavar="FILE", help="write all that was found; missing folders are made")
    chosen = parser.parse_args()
    if chosen.lora or chosen.memory:
        chosen.models = ["gpt"]
    return parser, chosen


if __name__ == "__main__":
    sys.exit(main())
