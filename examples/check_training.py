"""Does training with the plugin stay as close to fp32 as stock training does, and do checkpoints interchange?

    torchrun --nproc-per-node 2 examples/check_training.py --steps 6 --exchange-at 3

A small GPT and a small hybrid model are trained on real text, stock and with the plugin, and held to a stock run in a
wider dtype; half way each writes a checkpoint in which the other goes on. Tensor parallel over all ranks. On GPUs with
Transformer Engine:

    torchrun --nproc-per-node 2 examples/check_training.py --device cuda --steps 50 --exchange-at 25 --json check.json
    torchrun --nproc-per-node 2 examples/check_training.py --device cuda --lora rows

Prints a table; exits with 1 if a difference is too large or a linear was not overlapped.
"""

import argparse
import dataclasses
import os
import sys
import time
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.cli.output import (
    make_progress,
    results,
    silence_foreign_warnings,
    why_file_cannot_be_written,
    write_json,
)
from commfuse_megatron.cli.ranks import require_launcher
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.verify.convergence import (
    ALLOWED_RATIO,
    OVERLAPPED,
    Convergence,
    Task,
    compare_runs,
    complaints_of,
    ratios_of,
)
from commfuse_megatron.verify.text import standard_library_text

#: (dtype under test, reference) and sizes. A CPU has no use for bf16 at these sizes; float32 is held to float64 there.
DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.bfloat16, torch.float32)}
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"hidden_size": 64, "ffn_hidden_size": 128, "sequence": 64, "batch": 2},
    "cuda": {"hidden_size": 1024, "ffn_hidden_size": 4096, "sequence": 1024, "batch": 4, "num_layers": 4, "lr": 3e-4},
}


def main() -> int:
    """Run all tasks, print, write. 0: passed; 1: a check failed."""
    parser, chosen = parse()
    if not 0 < chosen.exchange_at < chosen.steps:
        parser.error(f"--exchange-at must be between 0 and --steps, got {chosen.exchange_at} of {chosen.steps}")
    reason = None if chosen.json is None else why_file_cannot_be_written(chosen.json)
    if reason is not None:
        parser.error(f"--json {chosen.json}: {reason}")
    try:
        config = OVERLAPPED if chosen.config is None else OverlapConfig.from_file(chosen.config)
    except ConfigError as error:
        parser.error(f"--config: {error}")
    require_launcher()
    silence_foreign_warnings()
    if chosen.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if chosen.device == "cuda" else "gloo")
    is_first = dist.get_rank() == 0
    start_s = time.perf_counter()
    tasks = tasks_of(chosen, config)
    found: dict[str, Convergence] = {}
    with make_progress(is_shown=is_first) as progress:
        bar = progress.add_task("training", total=sum(task.num_runs_steps for task in tasks.values()))
        for name, task in tasks.items():
            found[name] = compare_runs(task, on_step=lambda: progress.advance(bar))
    complaints = {name: complaints_of(converged) for name, converged in found.items()}
    if is_first:
        if chosen.json is not None:
            write_json(chosen.json, to_dict(tasks, found, complaints))
        print_tables(tasks, found, complaints, time.perf_counter() - start_s)
    dist.destroy_process_group()
    return 1 if any(complaints.values()) else 0


def tasks_of(chosen: argparse.Namespace, config: OverlapConfig) -> dict[str, Task]:
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
        **SIZES[chosen.device],
    }
    patterns = {"gpt": None, "hybrid": chosen.pattern}
    return {name: Task(pattern=patterns[name], **common) for name in chosen.models}


def print_tables(
    tasks: dict[str, Task], found: dict[str, Convergence], complaints: dict[str, list[str]], seconds: float
) -> None:
    """What was not overlapped, what failed, and last one row per run and quantity."""
    console = results()
    for name, failures in complaints.items():
        for failure in failures:
            console.print(f"[red]failed:[/] {name}: {escape(failure)}", soft_wrap=True)
    task = next(iter(tasks.values()))
    dtype, reference = (str(d).removeprefix("torch.") for d in (task.dtype, task.reference_dtype))
    table = Table(
        title=f"mean distance from stock in {reference}: {task.num_steps} steps in {dtype},"
        f" {dist.get_world_size()} ranks of {task.device_type}, {task.transformer_impl} layers"
        f"{', adapters only' if task.lora else ''},\n"
        f"checkpoints after step {task.exchange_at}; allowed ratio {ALLOWED_RATIO:g}; {seconds:.0f} s",
        title_justify="left",
    )
    for column in ("model", "run", "quantity", "distance", f"stock {dtype}", "ratio", "linears overlapped"):
        table.add_column(column, justify="left" if column in ("model", "run", "quantity") else "right")
    for name, converged in found.items():
        for (run, quantity), (distance, stock) in ratios_of(converged).items():
            layers = converged.layers.get(run)
            overlapped = "stock" if layers is None else f"{list(layers.values()).count(None)} of {len(layers)}"
            ratio = f"{distance / stock:.2f}" if stock else "equal" if not distance else "inf"
            table.add_row(name, run, quantity, f"{distance:.3g}", f"{stock:.3g}", ratio, overlapped)
    console.print(table)


def to_dict(
    tasks: dict[str, Task], found: dict[str, Convergence], complaints: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Everything for JSON."""
    report = {}
    for name, task in tasks.items():
        described = {
            key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
            for key, value in dataclasses.asdict(task).items()
            if key not in ("text", "config")
        }
        report[name] = {
            "task": described | {"ranks": dist.get_world_size(), "text_bytes": len(task.text)},
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
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="default: 50")
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
        help="train low-rank adapters at all linears of the GPT, whose weights are frozen; they take the norm's output"
        " of this rank's rows, or gathered (Transformer Engine 2.20 leaves out its gradient then)",
    )
    parser.add_argument("--config", metavar="FILE", help="OverlapConfig of the plugin's runs; default: sliced, always")
    parser.add_argument("--json", metavar="FILE", help="write curves, distances and layers; missing folders are made")
    chosen = parser.parse_args()
    if chosen.lora:
        chosen.models = ["gpt"]
    return parser, chosen


if __name__ == "__main__":
    sys.exit(main())
