"""`commfuse trace`: one overlapped linear, call by call, as a trace for Perfetto, a picture and a table.

One attention block (`--attention`) is in `attention_cli.py`, a whole Megatron step (`--step`) in `step_cli.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from commfuse_megatron.config import PassConfig, TransportConfig
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import add_rank_options, choices_of, refuse_given, require_positive
from commfuse_megatron.tools.common.output import (
    make_progress,
    make_table,
    require_names_for_files,
    results,
    say_count,
    write_json,
)
from commfuse_megatron.tools.common.ranks import Rank, UsageError, choose_several_ranks
from commfuse_megatron.tools.trace.attention_cli import run_trace_attention
from commfuse_megatron.tools.trace.options import ATTENTION_PATHS, OF_STEPS, ready
from commfuse_megatron.tools.trace.step_cli import run_trace_step

if TYPE_CHECKING:
    from commfuse_megatron.tools.trace.operation import LinearTrace

SUMMARY = "show when what ran: a linear, an attention block or a Megatron step, as trace, picture and table"
EXAMPLE = """commfuse trace --op all_gather_linear --pass backward --ranks 2
  commfuse trace --case llama-70b.fc2 --device cuda --profiler --calls 2 --output figures
  commfuse trace --attention --ranks 2 --paths row_parallel query_split --splits 2
  commfuse trace --step --model llama-8b --device cuda --transformer-impl transformer_engine"""

OPS = ("all_gather_linear", "linear_reduce_scatter")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `commfuse trace` takes."""
    add_rank_options(parser)
    add = parser.add_argument
    add(
        "--path",
        choices=choices_of(PassConfig, "path"),
        help="of the traced linears (default: the configuration's)",
    )
    add("--algorithm", choices=choices_of(PassConfig, "algorithm"), help="default: the configuration's")
    add("--chunks", type=int, metavar="m", help="chunks per shard")
    add("--transport", choices=choices_of(TransportConfig, "backend"), help="default auto")
    add("--config", metavar="FILE", help="YAML that the options above change (default: $COMMFUSE_CONFIG)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default float32, cuda bfloat16")
    what = "where picture and trace go; made if missing (default trace_output)"
    add("--output", metavar="DIR", default="trace_output", help=what)
    add("--name", metavar="NAME", help="of the files (default: from what is traced)")
    what = "sequence of a block (default 8192) or a step (default 256 on cpu; on cuda 1024, llama 8192)"
    add("--seq", type=int, metavar="S", help=what)
    add = parser.add_argument_group("one operation (the default)").add_argument
    add("--op", choices=("all_gather_linear", "linear_reduce_scatter"), help="default: that of the case")
    add("--pass", dest="pass_name", choices=("fprop", "backward"), default="fprop", help="default fprop")
    what = "a linear of a known model, e.g. llama-70b.fc2 (cuda: the default), or an attention block of one"
    add("--case", metavar="CASE", help=what)
    add("--tokens", type=int, metavar="M", help="of the full sequence (default 512 on cpu, 8192 on cuda)")
    add("--N", type=int, help="output features of one rank's weight (default 512)")
    add("--K", type=int, help="input features of one rank's weight (default 512)")
    add("--calls", type=int, default=5, metavar="n", help="recorded calls (default 5)")
    add("--profiler", action="store_true", help="look at kernels and copies by stream (cuda only)")
    title = "one attention block (also --pass, --case, --calls, --profiler and --seq)"
    add = parser.add_argument_group(title).add_argument
    what = "attention with its projection; --path, --algorithm and --chunks are of row_parallel's projection"
    add("--attention", action="store_true", help=what)
    what = f"of {', '.join(ATTENTION_PATHS)} (default all, in this order)"
    add("--paths", nargs="+", choices=ATTENTION_PATHS, metavar="P", help=what)
    what = "splits per shard of query_split (default: the configuration's)"
    add("--splits", type=int, metavar="m", help=what)
    add("--shrink", type=int, metavar="F", help="divide all sizes by F (default 1; 64 on the CPU)")
    add = parser.add_argument_group("a whole step (also --seq)").add_argument
    add("--step", action="store_true", help="forward and backward of a Megatron GPT, stock and planned")
    add("--model", choices=("demo", "llama-8b", "llama-70b"), default="demo", help="default demo")
    add("--layers", type=int, metavar="L", help="default 2, llama 4")
    add("--batch", type=int, default=1, metavar="B", help="default 1")
    impls = ("local", "transformer_engine")
    add("--transformer-impl", choices=impls, default="local", help="attention and norms")
    add("--fusions", action="store_true", help="Megatron's fused activation, dropout and rotary kernels")
    add("--rounds", type=int, default=9, metavar="n", help="timed steps of each variant in a run (default 9)")
    add("--runs", type=int, default=1, metavar="n", help="in each, variants take turns (default 1)")


def run(arguments: argparse.Namespace) -> int:
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
        return run_trace_step(arguments)
    if arguments.profiler and arguments.device != "cuda":
        raise UsageError("--profiler looks at GPU kernels; use it with --device cuda")
    if arguments.path in ("bulk", "async") and arguments.pass_name == "fprop":
        raise UsageError(f"--path {arguments.path} is a path of the backward pass; add --pass backward")
    if arguments.attention:
        _require_path_of(OPS[1], arguments)  # the projection's
        return run_trace_attention(arguments)
    num_ranks = choose_several_ranks(arguments.ranks)
    refuse_given(arguments, ("seq",), "of --attention and --step; one linear has --tokens: leave out")
    refuse_given(arguments, OF_STEPS, "of a whole step; add --step, or leave out")
    require_positive(arguments, ("calls", "tokens", "N", "K"))
    op, M, N, K = _problem(arguments, num_ranks)
    _require_path_of(op, arguments)
    rows = M // num_ranks
    if (arguments.chunks or 1) > max(1, rows):
        raise UsageError(f"--chunks {arguments.chunks}: a shard of {M} tokens on {num_ranks} ranks has {rows} rows")
    options = ready(arguments, f"{op}_{arguments.pass_name}", op=op, M=M, N=N, K=K)
    return launch(_trace_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _require_path_of(op: str, arguments: argparse.Namespace) -> None:
    if arguments.path == "async" and op != OPS[0]:
        raise UsageError(f"--path async is a path of {OPS[0]}'s backward pass, whose GEMMs need not wait; not of {op}")


def _problem(arguments: argparse.Namespace, num_ranks: int) -> tuple[str, int, int, int]:
    """(op, M, N, K), N and K of one rank's weight."""
    from commfuse_megatron.tools.common.cases import linear_case

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


def _trace_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    import torch

    from commfuse_megatron.tools.trace.figure import densest_calls, draw_timeline
    from commfuse_megatron.tools.trace.operation import LinearToTrace, trace_linear
    from commfuse_megatron.tools.trace.output import caption, hardware, shown_ranks, write_files

    wanted = LinearToTrace(
        op=options.op,
        pass_name=options.pass_name,
        M=options.M,
        N=options.N,
        K=options.K,
        dtype=getattr(torch, options.dtype),
        calls=options.calls,
        is_profiled=options.profiler,
    )
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("tracing", total=wanted.warm_up + wanted.calls)
        traced = trace_linear(wanted, options.config, rank.group, rank.device, on_call=lambda: progress.advance(task))
    if not rank.is_first:
        return 0
    if options.json:
        data = {
            "record": dataclasses.asdict(traced.record),
            "case": options.case,
            "calls": options.calls,
            "source": "profiler" if options.profiler else "recorder",
            "ranks": [{"rank": number, **dataclasses.asdict(summary)} for number, summary in traced.summaries.items()],
        }
        write_json(options.json, data | hardware(rank))
    _print(traced, rank, options)

    def draw(path: Path) -> Path:
        shown = shown_ranks(traced.recording)
        zoom = densest_calls(shown) if options.calls > 2 else None
        return draw_timeline(
            path,
            shown,
            title=_what(traced, options),
            caption=caption(rank, traced.record.transport, options.dtype),
            zooms={} if zoom is None else {"two calls in a row, larger": zoom},
        )

    write_files(Path(options.output) / options.name, traced.recording, draw)
    return 0


def _print(traced: LinearTrace, rank: Rank, options: argparse.Namespace) -> None:
    from commfuse_megatron.tools.trace.output import machine_line
    from commfuse_megatron.tools.trace.summary import worst_of

    console = results()
    source = "kernels seen by the profiler" if options.profiler else "recorded by the runtime"
    calls = say_count(options.calls, "call")
    console.print(f"{_what(traced, options)}; {machine_line(rank, traced.record.transport, options.dtype)}")
    console.print(f"{traced.record.reason}; {source}; microseconds per call, means over {calls}")
    rows = []
    summaries = {str(number): summary for number, summary in traced.summaries.items()}
    for label, each in (summaries | {"worst": worst_of(list(summaries.values()))}).items():
        times_us = (each.span_us, each.compute_us, each.gemm_us, each.transfer_us, each.exposed_us)
        hidden = f"{100 * each.hidden_fraction:.1f}" if each.transfer_us else ""
        rows.append((label, *(f"{us:.0f}" for us in times_us), hidden, f"{each.tail_us:.0f}"))
    title = "exposed: a transfer runs and nothing computes; tail: after the last GEMM or attention"
    columns = ("rank", ">call", ">compute", ">GEMM", ">transfer", ">exposed", ">hidden %", ">tail")
    console.print(make_table(title, columns, rows))
    if not any(summary.compute_us for summary in summaries.values()):
        console.print("no GEMM was recorded: this path runs kernels that only --profiler sees")


def _what(traced: LinearTrace, options: argparse.Namespace) -> str:
    record = traced.record
    path = record.path
    if path == "sliced":
        path = f"{record.path}, {record.algorithm}, {record.chunks_per_shard} per shard"
    what = options.case or options.op
    return f"{what} {options.pass_name}, M {options.M}, N {options.N}, K {options.K}: {path}"
