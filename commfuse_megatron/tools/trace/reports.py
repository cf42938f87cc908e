"""What `commfuse trace` does on a rank, and says of it: tables, JSON, a trace for Perfetto, a picture."""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from commfuse_megatron.tools.common.cases import FREE
from commfuse_megatron.tools.common.models import MODELS
from commfuse_megatron.tools.common.output import make_progress, make_table, results, say_count, write_json
from commfuse_megatron.tools.common.pictures import missing_matplotlib
from commfuse_megatron.tools.common.ranks import Rank
from commfuse_megatron.tools.trace.figure import densest_calls, draw_runs, draw_timeline
from commfuse_megatron.tools.trace.operation import (
    BlockToTrace,
    BlockTrace,
    LinearToTrace,
    LinearTrace,
    attention_us,
    trace_block,
    trace_linear,
)
from commfuse_megatron.tools.trace.perfetto import write_perfetto
from commfuse_megatron.tools.trace.summary import Summary, worst_of
from commfuse_megatron.tools.trace.whole_step import (
    USERBUFFERS,
    StepToTrace,
    StepTrace,
    count_steps,
    trace_step,
    userbuffers_left_out,
)

MOST_RANKS_DRAWN = 4

Recording = Mapping[int, Any]


def _finish(
    rank: Rank,
    options: argparse.Namespace,
    data: dict[str, Any],
    show: Callable[[], None],
    recordings: Mapping[Any, Any],
    draw: Callable[[Path], Path],
) -> int:
    """On the first rank: write `data` with what it was measured on, show it, write trace and picture. 0: done."""
    if options.json:
        hardware = {
            "group_size": rank.world_size,
            "device": rank.device_name,
            "torch": torch.__version__,
            "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
            "month": time.strftime("%Y-%m"),
        }
        write_json(options.json, data | hardware)
    show()
    write_files(Path(options.output) / options.name, recordings, draw)
    return 0


def write_files(place: str | Path, recording: Mapping[Any, Any], draw: Callable[[Path], Path]) -> None:
    """Write `place`.json for Perfetto and, where matplotlib is installed, `place`.png, by `draw`; say where they are.

    recording: of one run, rank -> intervals, or of several, name -> such a recording.
    """
    console = results()
    trace = write_perfetto(f"{place}.json", recording)
    console.print(f"trace     {escape(str(trace))} (open it in ui.perfetto.dev)", soft_wrap=True)
    reason = missing_matplotlib()
    if reason is None:
        console.print(f"picture   {escape(str(draw(Path(f'{place}.png'))))}", soft_wrap=True)
    else:
        console.print(f"no picture: {escape(reason)}", soft_wrap=True)


def _shown(recording: Recording) -> dict[int, Any]:
    """The first ranks, as many as a picture has room for; the trace holds all."""
    return {rank: recording[rank] for rank in sorted(recording)[:MOST_RANKS_DRAWN]}


def _machine(rank: Rank, transport: str, dtype: str) -> str:
    """What it was measured on, for people: ranks, device, transport, dtype."""
    if rank.device_type == "cpu":
        return f"{say_count(rank.world_size, 'rank')} on the CPU, {transport}, {dtype}"
    return f"{rank.world_size} x {rank.device_name}, {transport}, {dtype}"


def _caption(rank: Rank, transport: str, dtype: str) -> str:
    return f"{_machine(rank, transport, dtype)}, {time.strftime('%B %Y')}"


def _source(options: argparse.Namespace) -> str:
    return "kernels seen by the profiler" if options.profiler else "recorded by the runtime"


# --- one linear -------------------------------------------------------------------------------------------------------


def linear_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Trace one linear. 0: done."""
    asked = {name: getattr(options, name) for name in ("op", "pass_name", "M", "N", "K", "calls")}
    wanted = LinearToTrace(**asked, dtype=getattr(torch, options.dtype), is_profiled=options.profiler)
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("tracing", total=wanted.warm_up + wanted.calls)
        traced = trace_linear(wanted, options.config, rank.group, on_call=lambda: progress.advance(task))
    if not rank.is_first:
        return 0
    record, path = traced.record, traced.record.path
    if path == "sliced":
        path = f"{path}, {record.algorithm}, {record.chunks_per_shard} per shard"
    sizes = f"M {options.M}, N {options.N}, K {options.K}"
    what = f"{options.case or options.op} {options.pass_name}, {sizes}: {path}"

    def draw(file: Path) -> Path:
        shown = _shown(traced.recording)
        zoom = densest_calls(shown) if options.calls > 2 else None
        zooms = {} if zoom is None else {"two calls in a row, larger": zoom}
        return draw_timeline(
            file, shown, title=what, caption=_caption(rank, record.transport, options.dtype), zooms=zooms
        )

    data = {
        "record": asdict(record),
        "case": options.case,
        "calls": options.calls,
        "source": "profiler" if options.profiler else "recorder",
        "ranks": [{"rank": number, **asdict(summary)} for number, summary in traced.summaries.items()],
    }
    return _finish(rank, options, data, lambda: _print_linear(traced, what, rank, options), traced.recording, draw)


def _print_linear(traced: LinearTrace, what: str, rank: Rank, options: argparse.Namespace) -> None:
    console, calls = results(), say_count(options.calls, "call")
    console.print(f"{what}; {_machine(rank, traced.record.transport, options.dtype)}")
    console.print(f"{traced.record.reason}; {_source(options)}; microseconds per call, means over {calls}")
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


# --- one attention block ----------------------------------------------------------------------------------------------


def block_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Trace every path that is asked for. 0: done."""
    case = options.case
    sizes = {name: getattr(case, name) for name in ("rows", "batch", "heads", "kv_heads", "head_dim", "N")}
    wanted = BlockToTrace(
        **sizes,
        pass_name=options.pass_name,
        dtype=getattr(torch, options.dtype),
        calls=options.calls,
        is_profiled=options.profiler,
        forces_projection=options.path not in (None, "auto"),
    )
    traced: dict[str, BlockTrace] = {}
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("tracing", total=len(options.configs) * (wanted.warm_up + wanted.calls))
        for path, config in options.configs.items():
            traced[path] = trace_block(wanted, config, rank.group, on_call=lambda: progress.advance(task))
    if not rank.is_first:
        return 0
    # Those that carried something: the sequential path has the collective of PyTorch's.
    carried = [trace.record.transport for path, trace in traced.items() if path != "sequential"]
    transport = " and ".join(dict.fromkeys(carried or ["nccl" if rank.device_type == "cuda" else "gloo"]))
    shrink = f" / {case.shrink}" if case.shrink > 1 else ""
    what = (
        f"{case.name}{shrink}, {options.pass_name}: sequence {case.rows}, batch {case.batch}, per rank"
        f" {case.heads} heads ({case.kv_heads} of keys) of {case.head_dim}, projected to {case.N}"
    )
    recordings = {path: trace.typical for path, trace in traced.items()}

    def draw(file: Path) -> Path:
        runs = {
            f"{_with_options(path, trace)}: {trace.duration_us / 1e3:.2f} ms": _shown(recordings[path])
            for path, trace in traced.items()
        }
        return draw_runs(file, runs, title=what, caption=_caption(rank, transport, options.dtype))

    data = {
        "case": asdict(case),
        "pass": options.pass_name,
        "dtype": options.dtype,
        "calls": options.calls,
        "source": "profiler" if options.profiler else "recorder",
        "paths": {path: _path_to_dict(trace, options.configs[path]) for path, trace in traced.items()},
    }
    line = f"{what}; {_machine(rank, transport, options.dtype)}"
    return _finish(rank, options, data, lambda: _print_blocks(traced, line, options), recordings, draw)


def _path_to_dict(trace: BlockTrace, config: Any) -> dict[str, Any]:
    return {
        "duration_us": trace.duration_us,
        "durations_us": trace.durations_us,
        "record": asdict(trace.record),
        "projection": None if trace.projection is None else asdict(trace.projection),
        "config": config.to_dict(),
        "ranks": [
            {"rank": number, **asdict(summary), "attention_us": attention_us(trace.typical[number])}
            for number, summary in trace.summaries.items()
        ],
    }


def _print_blocks(traced: dict[str, BlockTrace], line: str, options: argparse.Namespace) -> None:
    console = results()
    calls = f"the call of median duration among {say_count(options.calls, 'call')}, the worst of all ranks"
    console.print(f"{line}\n{_source(options)}; milliseconds of {calls}", soft_wrap=True)
    rows = []
    for path, trace in traced.items():
        worst = worst_of(list(trace.summaries.values()))
        durations_us = (trace.duration_us, min(trace.durations_us), max(trace.durations_us))
        attention = max(map(attention_us, trace.typical.values()))
        times_us = (*durations_us, attention, worst.gemm_us, worst.transfer_us, worst.exposed_us)
        hidden = f"{100 * worst.hidden_fraction:.0f} %"
        rows.append((_label(path, trace), *(f"{us / 1e3:.3f}" for us in times_us), hidden))
    columns = (">duration", ">shortest", ">longest", ">attention", ">GEMM", ">transfers", ">exposed", ">hidden")
    console.print(make_table(f"one attention block, {options.pass_name}", ("", *columns), rows))
    for path, trace in traced.items():
        said = f"{_with_options(path, trace)}: {trace.record.reason}; kernel {trace.record.attention}"
        if trace.projection is not None:
            said += f"; projection: {trace.projection.reason}"
        console.print(f"    {escape(said)}", soft_wrap=True)


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


# --- a whole step -----------------------------------------------------------------------------------------------------


def step_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Time all variants of a step and trace some. 0: done."""
    names = ("batch", "config", "transformer_impl", "rounds", "runs", "context_parallel")
    asked = {name: getattr(options, name) for name in names}
    wanted = StepToTrace(
        **MODELS[options.model],
        **asked,
        num_layers=options.layers,
        sequence=options.seq,
        dtype=getattr(torch, options.dtype),
        device_type=rank.device_type,
        has_fusions=options.fusions,
    )
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("timing variants of the step", total=count_steps(wanted))
        traced = trace_step(wanted, on_step=lambda: progress.advance(task))
    if not rank.is_first:
        return 0
    sharing = f", context parallel {options.context_parallel}" if options.context_parallel > 1 else ""
    what = (
        f"step of a Megatron GPT ({options.model}, {options.layers} layers, sequence {options.seq},"
        f" batch {options.batch}, {options.transformer_impl}), tensor parallel"
        f" {rank.world_size // options.context_parallel}{sharing}"
    )

    def draw(file: Path) -> Path:
        runs = {name: _shown(recording) for name, recording in traced.runs.items()}
        return draw_runs(file, runs, title=what, caption=_caption(rank, traced.transport, options.dtype))

    def show() -> None:
        results().print(f"{what}; {_machine(rank, traced.transport, options.dtype)}")
        _print_step(traced, wanted)

    names = ("model", "layers", "batch", "dtype", "transformer_impl", "context_parallel")
    data = {
        **{name: getattr(options, name) for name in names},
        "sequence": options.seq,
        "transport": traced.transport,
        "config": options.config.to_dict(),
        "rows": [_row_of_step(traced, name, rank, options) for name in traced.times],
        "linears": traced.layers,
        "report": list(map(asdict, traced.ops)),
    }
    return _finish(rank, options, data, show, traced.runs, draw)


def _row_of_step(traced: StepTrace, variant: str, rank: Rank, options: argparse.Namespace) -> dict[str, Any]:
    times = traced.times[variant]
    return {
        "case": options.model,
        "op": "whole_step",
        "pass": "step",
        "variant": variant,
        "dtype": options.dtype,
        "recipe": None,
        "group_size": rank.world_size,
        "emulated": False,
        "layers": options.layers,
        "forward_ms": times.forward_ms,
        "step_ms": times.step_ms,
        "runs": [{"forward_ms": forward_ms, "step_ms": step_ms} for forward_ms, step_ms in times.runs],
        "exposed_beyond_no_communication_ms": None if variant == FREE else traced.exposed_ms(variant),
        "peak_allocated_bytes": times.peak_allocated_bytes or None,
        "device_bytes": times.device_bytes or None,
        "traced": None if variant == FREE else _traced(traced.summary(variant)),
    }


def _traced(summary: Summary) -> dict[str, float]:
    """The numbers of a traced step; what is exposed in it says of what, beside what is exposed of the timed ones."""
    numbers = asdict(summary)
    return numbers | {"exposed_without_compute_us": numbers.pop("exposed_us")}


def _print_step(traced: StepTrace, wanted: StepToTrace) -> None:
    console = results()
    seen = "kernels" if wanted.device_type == "cuda" else "GEMMs and transfers"
    console.print(
        f"milliseconds; medians over {say_count(wanted.runs, 'run')} of medians over {wanted.rounds} steps, the slowest"
        f" rank's; exposed: longer than without communication\ntraced: one more step of each ({seen}), the largest of"
        " all ranks"
    )
    rows = []
    for name, times in traced.times.items():
        row = [f"{times.forward_ms:.2f}", f"{times.step_ms:.2f}"]
        if name == FREE:
            label, row = f"{name} *", row + [""] * 5
        else:
            label, summary = name, traced.summary(name)
            times_us = (summary.gemm_us, summary.compute_us, summary.transfer_us, summary.exposed_us)
            row += [f"{traced.exposed_ms(name):.2f}", *(f"{us / 1e3:.2f}" for us in times_us)]
        sizes = (times.peak_allocated_bytes, times.device_bytes)
        rows.append((label, *row, *(f"{size / 2**30:.2f}" if size else "" for size in sizes)))
    columns = (">forward", ">step", ">exposed", ">traced: GEMM", ">compute", ">communication", ">exposed")
    memory_columns = (">allocated GiB", ">device GiB")
    console.print(make_table("forward and backward, no optimizer", ("", *columns, *memory_columns), rows))
    console.print(
        "* lower bound; results are wrong on purpose: every all-gather and reduce-scatter of the stock step is a local"
        " copy; all-reduces stay",
        soft_wrap=True,
    )
    left_out = userbuffers_left_out(wanted)
    if left_out is not None:
        console.print(f"left out: {USERBUFFERS}: {escape(left_out)}", soft_wrap=True)
    reasons = {name: reason for name, reason in traced.layers.items() if reason is not None}
    layers = len(traced.layers)
    console.print(f"{layers - len(reasons)} of {layers} layers were overlapped in their forward passes")
    for name, reason in reasons.items():
        console.print(f"    {escape(name)}: {escape(reason)}", soft_wrap=True)
    for op in traced.ops:
        problem = f"{op.op} {op.pass_name}, M {op.M}, N {op.N}, K {op.K}"
        console.print(f"    {problem}: {op.path}, {op.transport}; {escape(op.reason)}", soft_wrap=True)
