"""`commfuse trace`: one overlapped linear, call by call, as a trace for Perfetto, a picture and a table.

One attention block (`--attention`) is in `attention_cli.py`, a whole Megatron step (`--step`) in `step_cli.py`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import refuse_given, require_positive
from commfuse_megatron.tools.common.output import (
    make_progress,
    require_files,
    require_names_for_files,
    results,
    say_count,
    write_json,
)
from commfuse_megatron.tools.common.ranks import Rank, UsageError, choose_num_ranks
from commfuse_megatron.tools.trace.attention_cli import run_trace_attention
from commfuse_megatron.tools.trace.options import (
    OF_STEPS,
    config_of,
    hardware,
    machine_line,
    shown_ranks,
)
from commfuse_megatron.tools.trace.step_cli import run_trace_step

if TYPE_CHECKING:
    from commfuse_megatron.tools.trace.linear import LinearToTrace, LinearTrace

__all__ = ["run_trace"]

OPS = ("all_gather_linear", "linear_reduce_scatter")


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
        return run_trace_step(arguments)
    if arguments.profiler and arguments.device != "cuda":
        raise UsageError("--profiler looks at GPU kernels; use it with --device cuda")
    if arguments.path in ("bulk", "async") and arguments.pass_name == "fprop":
        raise UsageError(f"--path {arguments.path} is a way of the backward pass; add --pass backward")
    if arguments.attention:
        _require_path_of(OPS[1], arguments)  # the projection's
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


def _trace_on_rank(rank: Rank, options: _Options) -> int:
    import torch
    from torch import distributed as dist

    from commfuse_megatron.tools.trace.linear import LinearToTrace, trace_linear

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
    from commfuse_megatron.tools.trace.summary import worst_of

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
    from commfuse_megatron.tools.trace.figure import densest_calls, draw_timeline, missing_matplotlib
    from commfuse_megatron.tools.trace.perfetto import write_perfetto

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
