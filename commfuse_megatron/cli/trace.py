"""`commfuse trace`: one overlapped linear, call by call, as a trace for Perfetto, a picture and a table.

`commfuse trace --attention`, one attention block, is in `cli/trace_attention.py`; `commfuse trace --step`, a whole
Megatron step, in `cli/trace_step.py`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from commfuse_megatron.cli.launch import launch
from commfuse_megatron.cli.output import (
    make_progress,
    require_files,
    require_names_for_files,
    results,
    say_count,
    write_json,
)
from commfuse_megatron.cli.ranks import Rank, UsageError, choose_num_ranks
from commfuse_megatron.config import OverlapConfig, config_file_from_environment

if TYPE_CHECKING:
    from commfuse_megatron.runtime.recorder import Interval
    from commfuse_megatron.tracing.linear import LinearToTrace, LinearTrace

__all__ = [
    "add_trace_options",
    "config_of",
    "hardware",
    "machine_line",
    "refuse_given",
    "require_positive",
    "run_trace",
    "shown_ranks",
]

OPS = ("all_gather_linear", "linear_reduce_scatter")
ATTENTION_PATHS = ("sequential", "row_parallel", "query_split")
OF_STEPS = ("model", "layers", "batch", "transformer_impl", "fusions", "rounds", "runs")
MOST_RANKS_DRAWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    op: str
    pass_name: str
    case: str | None
    M: int
    N: int
    K: int
    dtype: str
    config: OverlapConfig
    calls: int
    is_profiled: bool
    output: str
    name: str
    json: str | None


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """What `commfuse trace` takes besides ranks and device. Imports no torch."""
    paths = ("auto", "sliced", "bulk", "async", "sequential")
    parser.add_argument("--path", choices=paths, help="way of the traced linears (default: the configuration's)")
    parser.add_argument("--algorithm", choices=("auto", "direct", "ring"), help="default: the configuration's")
    parser.add_argument("--chunks", type=int, metavar="m", help="chunks per shard")
    parser.add_argument("--transport", choices=("auto", "gloo", "nccl", "copy_engine"), help="default auto")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML that the options above change (default: $COMMFUSE_CONFIG)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default float32, cuda bfloat16")
    parser.add_argument(
        "--output",
        metavar="DIR",
        default="trace_output",
        help="where picture and trace go; made if missing (default trace_output)",
    )
    parser.add_argument("--name", metavar="NAME", help="of the files (default: from what is traced)")
    parser.add_argument(
        "--seq",
        type=int,
        metavar="S",
        help="sequence of a block (default 8192) or a step (default 256 on cpu; on cuda 1024, llama 8192)",
    )
    one = parser.add_argument_group("one operation (the default)")
    one.add_argument("--op", choices=("all_gather_linear", "linear_reduce_scatter"), help="default: that of the case")
    one.add_argument("--pass", dest="pass_name", choices=("fprop", "backward"), default="fprop", help="default fprop")
    one.add_argument(
        "--case",
        metavar="CASE",
        help="a linear of a known model, e.g. llama-70b.fc2 (cuda: the default), or an attention block of one",
    )
    one.add_argument("--tokens", type=int, metavar="M", help="of the full sequence (default 512 on cpu, 8192 on cuda)")
    one.add_argument("--N", type=int, help="output features of one rank's weight (default 512)")
    one.add_argument("--K", type=int, help="input features of one rank's weight (default 512)")
    one.add_argument("--calls", type=int, default=5, metavar="n", help="recorded calls (default 5)")
    one.add_argument("--profiler", action="store_true", help="look at kernels and copies by stream (cuda only)")
    block = parser.add_argument_group("one attention block (also --pass, --case, --calls, --profiler and --seq)")
    block.add_argument(
        "--attention",
        action="store_true",
        help="attention with its projection; --path, --algorithm and --chunks are of row_parallel's projection",
    )
    block.add_argument(
        "--paths",
        nargs="+",
        choices=ATTENTION_PATHS,
        metavar="P",
        help=f"of {', '.join(ATTENTION_PATHS)} (default all, in this order)",
    )
    block.add_argument(
        "--splits", type=int, metavar="m", help="splits per shard of query_split (default: the configuration's)"
    )
    block.add_argument("--shrink", type=int, metavar="F", help="divide all sizes by F (default 1; 64 on the CPU)")
    step = parser.add_argument_group("a whole step (also --seq)")
    step.add_argument("--step", action="store_true", help="forward and backward of a Megatron GPT, stock and planned")
    step.add_argument("--model", choices=("demo", "llama-8b", "llama-70b"), default="demo", help="default demo")
    step.add_argument("--layers", type=int, metavar="L", help="default 2, llama 4")
    step.add_argument("--batch", type=int, default=1, metavar="B", help="default 1")
    step.add_argument(
        "--transformer-impl", choices=("local", "transformer_engine"), default="local", help="attention and norms"
    )
    step.add_argument("--fusions", action="store_true", help="Megatron's fused activation, dropout and rotary kernels")
    step.add_argument(
        "--rounds", type=int, default=9, metavar="n", help="timed steps of each variant in a run (default 9)"
    )
    step.add_argument("--runs", type=int, default=1, metavar="n", help="in each, variants take turns (default 1)")


def run_trace(arguments: argparse.Namespace) -> int:
    """Trace what is asked for. 0: done."""
    if not arguments.attention:
        refuse_given(arguments, ("paths", "splits", "shrink"), "of an attention block; add --attention, or leave out")
    if arguments.name is not None:
        require_names_for_files("--name", arguments.name)
    if arguments.transport in ("nccl", "copy_engine") and arguments.device != "cuda":
        raise UsageError(f"--transport {arguments.transport} carries tensors of --device cuda only")
    if arguments.path not in (None, "auto", "sliced"):
        refuse_given(arguments, ("algorithm", "chunks"), f"--path {arguments.path} sends no chunks: leave out")
    if arguments.step:
        from commfuse_megatron.cli.trace_step import run_trace_step

        return run_trace_step(arguments)
    if arguments.profiler and arguments.device != "cuda":
        raise UsageError("--profiler looks at GPU kernels; use it with --device cuda")
    if arguments.path in ("bulk", "async") and arguments.pass_name == "fprop":
        raise UsageError(f"--path {arguments.path} is a way of the backward pass; add --pass backward")
    if arguments.attention:
        _require_path_of(OPS[1], arguments)  # the projection's
        from commfuse_megatron.cli.trace_attention import run_trace_attention

        return run_trace_attention(arguments)
    num_ranks = choose_num_ranks(arguments.ranks)
    refuse_given(arguments, ("seq",), "of --attention and --step; one linear has --tokens: leave out")
    refuse_given(arguments, OF_STEPS, "of a whole step; add --step, or leave out")
    require_positive(arguments, ("calls", "tokens", "N", "K"))
    op, M, N, K = _problem(arguments, num_ranks)
    _require_path_of(op, arguments)
    rows = M // num_ranks
    if (arguments.chunks or 1) > max(1, rows):
        raise UsageError(f"--chunks {arguments.chunks}: a shard of {M} tokens on {num_ranks} ranks has {rows} rows")
    name = arguments.name or f"{op}_{arguments.pass_name}"
    require_files(arguments.output, (f"{name}.json", f"{name}.png"))
    options = _Options(
        op=op,
        pass_name=arguments.pass_name,
        case=arguments.case,
        M=M,
        N=N,
        K=K,
        dtype=arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32"),
        config=config_of(arguments),
        calls=arguments.calls,
        is_profiled=arguments.profiler,
        output=arguments.output,
        name=name,
        json=arguments.json,
    )
    return launch(_trace_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _require_path_of(op: str, arguments: argparse.Namespace) -> None:
    if arguments.path == "async" and op != OPS[0]:
        raise UsageError(f"--path async is a way of {OPS[0]}'s backward pass, whose GEMMs need not wait; not of {op}")


def _problem(arguments: argparse.Namespace, num_ranks: int) -> tuple[str, int, int, int]:
    """(op, M, N, K), N and K of one rank's weight."""
    from commfuse_megatron.benchmark.cases import linear_case

    is_small = arguments.device == "cpu"
    M = arguments.tokens or (512 if is_small else 8192)
    if arguments.case is None and (arguments.N or arguments.K or is_small):
        return arguments.op or OPS[1], M, arguments.N or 512, arguments.K or 512
    if arguments.N or arguments.K:
        raise UsageError("--case gives N and K; leave out --N and --K, or --case")
    name = arguments.case or ("llama-70b.qkv" if arguments.op == OPS[0] else "llama-70b.fc2")
    case = linear_case(name, M, num_ranks)
    if arguments.op not in (None, case.op):
        raise UsageError(f"--case {name} is a case of {case.op}, not {arguments.op}; leave --op out")
    return case.op, case.M, case.N, case.K


def refuse_given(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise UsageError where one of these options is given: another value than its default."""
    default = arguments.parser.get_default
    given = [
        f"--{name.removesuffix('_name').replace('_', '-')}"  # `pass` is a word of Python's
        for name in names
        if getattr(arguments, name) != default(name)
    ]
    if given:
        raise UsageError(f"{why} {', '.join(given)}")


def require_positive(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise UsageError where one of these options is given and below 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")


def config_of(arguments: argparse.Namespace) -> OverlapConfig:
    """The configuration of `--config`, else the environment's, with what other options force in the traced passes."""
    file = arguments.config or config_file_from_environment()
    base = OverlapConfig.from_file(file) if file else OverlapConfig()
    data = base.to_dict()
    passes = {None: ("fprop", "dgrad"), "fprop": ("fprop",), "backward": ("dgrad",)}
    for name in passes[None if arguments.step else arguments.pass_name]:
        is_backward_only = arguments.path in ("bulk", "async") and name == "fprop"
        if arguments.path and not is_backward_only:
            data["linear"][name]["path"] = arguments.path
        if arguments.algorithm:
            data["linear"][name]["algorithm"] = arguments.algorithm
        if arguments.chunks is not None:
            data["linear"][name]["chunks_per_shard"] = arguments.chunks
    if arguments.transport:
        data["transport"]["backend"] = arguments.transport
    if arguments.path == "sequential" and not arguments.step and not arguments.attention:
        data["kernel"]["gemm"] = "torch"  # plain collective, plain GEMM
    return OverlapConfig.from_dict(data, source="these options")


def _trace_on_rank(rank: Rank, options: _Options) -> int:
    import torch
    from torch import distributed as dist

    from commfuse_megatron.tracing.linear import LinearToTrace, trace_linear

    device = torch.device("cuda", torch.cuda.current_device()) if rank.device_type == "cuda" else torch.device("cpu")
    group = dist.group.WORLD
    assert group is not None
    wanted = LinearToTrace(
        op=options.op,  # type: ignore[arg-type]
        pass_name=options.pass_name,  # type: ignore[arg-type]
        M=options.M,
        N=options.N,
        K=options.K,
        dtype=getattr(torch, options.dtype),
        config=options.config,
        calls=options.calls,
        is_profiled=options.is_profiled,
    )
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("tracing", total=wanted.warm_up + wanted.calls)
        traced = trace_linear(wanted, group, device, on_call=lambda: progress.advance(task))
    if rank.is_first:
        if options.json:
            write_json(options.json, _to_dict(traced, rank, options))
        _print(traced, wanted, rank, options)
        _write_files(traced, wanted, rank, options)
    return 0


# --- results ----------------------------------------------------------------------------------------------------------


def _print(traced: LinearTrace, wanted: LinearToTrace, rank: Rank, options: _Options) -> None:
    from commfuse_megatron.tracing.summary import worst_of

    console = results()
    source = "kernels seen by the profiler" if options.is_profiled else "recorded by the runtime"
    console.print(f"{_what(traced, options)}; {machine_line(rank, traced.record.transport, options.dtype)}")
    console.print(
        f"{traced.record.reason}; {source}; microseconds per call, means over {say_count(wanted.calls, 'call')}"
    )
    table = Table(
        title="exposed: a transfer runs and nothing computes; tail: after the last GEMM or attention",
        title_justify="left",
    )
    table.add_column("rank", no_wrap=True)
    for column in ("call", "compute", "GEMM", "transfer", "exposed", "hidden %", "tail"):
        table.add_column(column, justify="right")
    summaries = traced.summaries
    rows = [(str(number), summary) for number, summary in summaries.items()]
    for label, summary in [*rows, ("worst", worst_of(list(summaries.values())))]:
        times_us = (summary.span_us, summary.compute_us, summary.gemm_us, summary.transfer_us, summary.exposed_us)
        hidden = f"{100 * summary.hidden_fraction:.1f}" if summary.transfer_us else ""
        table.add_row(label, *(f"{us:.0f}" for us in times_us), hidden, f"{summary.tail_us:.0f}")
    console.print(table)
    if not any(summary.compute_us for summary in summaries.values()):
        console.print("no GEMM was recorded: this path runs kernels that only --profiler sees")


def _write_files(traced: LinearTrace, wanted: LinearToTrace, rank: Rank, options: _Options) -> None:
    from commfuse_megatron.tracing.figure import densest_calls, draw_timeline, missing_matplotlib
    from commfuse_megatron.tracing.perfetto import write_perfetto

    console = results()
    folder = Path(options.output)
    trace = write_perfetto(folder / f"{options.name}.json", traced.recording)
    console.print(f"trace     {escape(str(trace))} (open it in ui.perfetto.dev)", soft_wrap=True)
    reason = missing_matplotlib()
    if reason is None:
        shown = shown_ranks(traced.recording)
        zoom = densest_calls(shown) if wanted.calls > 2 else None
        picture = draw_timeline(
            folder / f"{options.name}.png",
            shown,
            title=_what(traced, options),
            caption=f"{machine_line(rank, traced.record.transport, options.dtype)}, {time.strftime('%B %Y')}",
            zooms={} if zoom is None else {"two calls in a row, larger": zoom},
        )
        console.print(f"picture   {escape(str(picture))}", soft_wrap=True)
    else:
        console.print(f"no picture: {escape(reason)}", soft_wrap=True)


def _what(traced: LinearTrace, options: _Options) -> str:
    record = traced.record
    way = record.path
    if record.path == "sliced":
        way = f"{record.path}, {record.algorithm}, {record.chunks_per_shard} per shard"
    what = options.case or options.op
    return f"{what} {options.pass_name}, M {options.M}, N {options.N}, K {options.K}: {way}"


def _to_dict(traced: LinearTrace, rank: Rank, options: _Options) -> dict[str, Any]:
    import dataclasses

    return {
        "record": dataclasses.asdict(traced.record),
        "case": options.case,
        "calls": options.calls,
        "source": "profiler" if options.is_profiled else "recorder",
        "ranks": [{"rank": number, **summary.to_dict()} for number, summary in traced.summaries.items()],
        **hardware(rank),
    }


def shown_ranks(recording: dict[int, list[Interval]]) -> dict[int, list[Interval]]:
    """The first ranks, as many as a picture has room for; the trace holds all."""
    return {rank: recording[rank] for rank in sorted(recording)[:MOST_RANKS_DRAWN]}


def hardware(rank: Rank) -> dict[str, Any]:
    """What a result was measured on, for JSON."""
    import torch

    return {
        "group_size": rank.world_size,
        "device": torch.cuda.get_device_name() if rank.device_type == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "month": time.strftime("%Y-%m"),
    }


def machine_line(rank: Rank, transport: str, dtype: str) -> str:
    """The same for people: ranks, device, transport, dtype."""
    import torch

    if rank.device_type == "cpu":
        return f"{say_count(rank.world_size, 'rank')} on the CPU, {transport}, {dtype}"
    return f"{rank.world_size} x {torch.cuda.get_device_name()}, {transport}, {dtype}"
