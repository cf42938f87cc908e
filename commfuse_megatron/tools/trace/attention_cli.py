"""`commfuse trace --attention`: one attention block, path below path on one scale of time: picture, trace and table."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.tools.common.cases import CPU_SHRINK
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import refuse_given, require_positive
from commfuse_megatron.tools.common.output import make_progress, make_table, results, say_count, write_json
from commfuse_megatron.tools.common.ranks import Rank, UsageError, choose_several_ranks
from commfuse_megatron.tools.trace.options import ATTENTION_PATHS, OF_STEPS, config_of, ready

if TYPE_CHECKING:
    from commfuse_megatron.tools.common.cases import Case
    from commfuse_megatron.tools.trace.operation import BlockTrace


DEFAULT_CASE = "llama-8b.attention"
DEFAULT_ROWS = 8192

_OF_LINEARS = ("op", "tokens", "N", "K")
_OF_PROJECTIONS = ("path", "algorithm", "chunks")


def run_trace_attention(arguments: argparse.Namespace) -> int:
    """Trace every path that is asked for. 0: done."""
    num_ranks = choose_several_ranks(arguments.ranks)
    refuse_given(arguments, (*_OF_LINEARS, *OF_STEPS), "--attention traces one attention block; leave out")
    require_positive(arguments, ("calls", "seq", "splits", "shrink"))
    paths = arguments.paths or ATTENTION_PATHS
    if len(set(paths)) < len(paths):
        raise UsageError(f"--paths {' '.join(paths)}: name each one once")
    if "row_parallel" not in paths:
        refuse_given(arguments, _OF_PROJECTIONS, "no path is row_parallel, whose projection is meant: leave out")
    if "query_split" not in paths:
        refuse_given(arguments, ("splits",), "no path is query_split: leave out")
    case = _case(arguments, num_ranks)
    configs = {path: _config(arguments, path) for path in paths}
    splits = configs["query_split"].attention.splits_per_shard if "query_split" in configs else None
    rows = case.rows // num_ranks
    if splits is not None and splits > rows:
        shrunk = f" (sizes are divided by {case.shrink}: --shrink)" if case.shrink > 1 else ""
        given = "--splits" if arguments.splits is not None else "attention.splits_per_shard"
        raise UsageError(f"{given} {splits}: a shard has {rows} rows{shrunk}")
    options = ready(arguments, f"{case.name}_{arguments.pass_name}", case=case, configs=configs)
    return launch(_trace_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _case(arguments: argparse.Namespace, num_ranks: int) -> Case:
    from commfuse_megatron.tools.common.cases import attention_case, tokens_of

    name = arguments.case or DEFAULT_CASE
    asked = arguments.seq or DEFAULT_ROWS
    (M,) = tokens_of(name, (asked,))
    case = attention_case(name, M, num_ranks, arguments.shrink or (1 if arguments.device == "cuda" else CPU_SHRINK))
    if arguments.seq and tokens_of(name, (0,)) != (0,):
        raise UsageError(f"--case {name} has a sequence of its own; leave out --seq")
    return case


def _config(arguments: argparse.Namespace, path: str) -> OverlapConfig:
    """The configuration, its attention forced to `path`."""
    data = config_of(arguments).to_dict()
    data["attention"]["path"] = path
    if path != "query_split":
        data["attention"].update(splits_per_shard=None, backward="auto")
    else:
        if arguments.splits is not None:
            data["attention"]["splits_per_shard"] = arguments.splits
        if data["attention"]["backward"] == "auto":
            data["attention"]["backward"] = path
    if path == "sequential":
        data["kernel"]["gemm"] = "torch"  # plain collective, plain GEMM
    return OverlapConfig.from_dict(data, source="these options")


def _trace_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    import torch

    from commfuse_megatron.tools.trace.figure import draw_runs
    from commfuse_megatron.tools.trace.operation import BlockToTrace, trace_block
    from commfuse_megatron.tools.trace.output import caption, shown_ranks, write_files

    case = options.case
    wanted = BlockToTrace(
        pass_name=options.pass_name,
        rows=case.rows,
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        N=case.N,
        dtype=getattr(torch, options.dtype),
        calls=options.calls,
        is_profiled=options.profiler,
        forces_projection=options.path not in (None, "auto"),
    )
    traced: dict[str, BlockTrace] = {}
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("tracing", total=len(options.configs) * (wanted.warm_up + wanted.calls))
        for path, config in options.configs.items():
            traced[path] = trace_block(wanted, config, rank.group, rank.device, on_call=lambda: progress.advance(task))
    if not rank.is_first:
        return 0
    if options.json:
        write_json(options.json, _to_dict(traced, rank, options))
    _print(traced, rank, options)
    recordings = {path: trace.typical for path, trace in traced.items()}

    def draw(file: Path) -> Path:
        runs = {
            f"{_with_options(path, trace)}: {trace.duration_us / 1e3:.2f} ms": shown_ranks(recordings[path])
            for path, trace in traced.items()
        }
        line = caption(rank, _transport(traced, rank), options.dtype)
        return draw_runs(file, runs, title=_what(options), caption=line)

    write_files(Path(options.output) / options.name, recordings, draw)
    return 0


def _print(traced: dict[str, BlockTrace], rank: Rank, options: argparse.Namespace) -> None:
    from commfuse_megatron.tools.trace.operation import attention_us
    from commfuse_megatron.tools.trace.output import machine_line
    from commfuse_megatron.tools.trace.summary import worst_of

    console = results()
    source = "kernels seen by the profiler" if options.profiler else "recorded by the runtime"
    machine = machine_line(rank, _transport(traced, rank), options.dtype)
    console.print(f"{_what(options)}; {machine}", soft_wrap=True)
    console.print(
        f"{source}; milliseconds of the call of median duration among {say_count(options.calls, 'call')}, the worst"
        " of all ranks",
        soft_wrap=True,
    )
    rows = []
    for path, trace in traced.items():
        worst = worst_of(list(trace.summaries.values()))
        attention = max(map(attention_us, trace.typical.values()))
        times_us = (
            trace.duration_us, min(trace.durations_us), max(trace.durations_us), attention, worst.gemm_us,
            worst.transfer_us, worst.exposed_us,
        )  # fmt: skip
        hidden = f"{100 * worst.hidden_fraction:.0f} %"
        rows.append((_label(path, trace), *(f"{us / 1e3:.3f}" for us in times_us), hidden))
    columns = (">duration", ">shortest", ">longest", ">attention", ">GEMM", ">transfers", ">exposed", ">hidden")
    console.print(make_table(f"one attention block, {options.pass_name}", ("", *columns), rows))
    for path, trace in traced.items():
        said = f"{_with_options(path, trace)}: {trace.record.reason}; kernel {trace.record.attention}"
        if trace.projection is not None:
            said += f"; projection: {trace.projection.reason}"
        console.print(f"    {escape(said)}", soft_wrap=True)


def _what(options: argparse.Namespace) -> str:
    case = options.case
    shrink = f" / {case.shrink}" if case.shrink > 1 else ""
    return (
        f"{case.name}{shrink}, {options.pass_name}: sequence {case.rows}, batch {case.batch}, per rank"
        f" {case.heads} heads ({case.kv_heads} of keys) of {case.head_dim}, projected to {case.N}"
    )


def _label(path: str, trace: BlockTrace) -> str:
    """The path, and where a backward pass takes another one than its forward pass, that."""
    return path if trace.record.path == path else f"{path}, {trace.record.path} backward"


def _with_options(path: str, trace: BlockTrace) -> str:
    record, projection = trace.record, trace.projection
    if record.path == "query_split":
        return f"{record.path}, {say_count(record.chunks_per_shard, 'split')} per shard"
    label = _label(path, trace)
    if projection is None:
        return label
    pieces = f" {projection.algorithm}, {projection.chunks_per_shard} per shard" if projection.path == "sliced" else ""
    return f"{label}, projection {projection.path}{pieces}"


def _transport(traced: dict[str, BlockTrace], rank: Rank) -> str:
    """Those that carried something: the sequential path has the collective of PyTorch's."""
    own = [trace.record.transport for path, trace in traced.items() if path != "sequential"]
    plain = "nccl" if rank.device_type == "cuda" else "gloo"
    return " and ".join(dict.fromkeys(own or [plain]))


def _to_dict(traced: dict[str, BlockTrace], rank: Rank, options: argparse.Namespace) -> dict[str, Any]:
    from commfuse_megatron.tools.trace.operation import attention_us
    from commfuse_megatron.tools.trace.output import hardware

    return {
        "case": dataclasses.asdict(options.case),
        "pass": options.pass_name,
        "dtype": options.dtype,
        "calls": options.calls,
        "source": "profiler" if options.profiler else "recorder",
        "paths": {
            path: {
                "duration_us": trace.duration_us,
                "durations_us": trace.durations_us,
                "record": dataclasses.asdict(trace.record),
                "projection": None if trace.projection is None else dataclasses.asdict(trace.projection),
                "config": options.configs[path].to_dict(),
                "ranks": [
                    {"rank": number, **dataclasses.asdict(summary), "attention_us": attention_us(trace.typical[number])}
                    for number, summary in trace.summaries.items()
                ],
            }
            for path, trace in traced.items()
        },
        **hardware(rank),
    }
