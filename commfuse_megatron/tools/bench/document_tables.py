"""The tables that documents hold, in Markdown, made of rows by kind: see `report`."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from commfuse_megatron.tools.bench.rows import BOUND_PATHS, Problem, Row, by_problem, has_word_prefix, ratio
from commfuse_megatron.tools.bench.summary import summarize
from commfuse_megatron.tools.common.cases import FREE, PLANNED, STOCK

Json = dict[str, Any]

_PEERS = {"megatron": "Megatron", "async_tp": "async-TP", "userbuffers": "userbuffers"}


def _table(headings: Iterable[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown; columns without a word are left out."""
    headings, lines = list(headings), list(lines)
    kept = [n for n, _ in enumerate(headings) if any(line[n] for line in lines)]
    first, *rest = ("| " + " | ".join(row[n] for n in kept) + " |" for row in (headings, *lines))
    return "\n".join((first, "|" + "---|" * len(kept), *rest))


def _text(value: object) -> str:
    """Of a time, in ms."""
    if isinstance(value, float):
        return f"{value:.3f}" if value < 100 else f"{value:.1f}"
    return "" if value is None else str(value)


def _share(value: float | None, other: float | None) -> str | None:
    share = ratio(value, other)
    return None if share is None else f"{share:.3f}"


def _mean(ratios: Iterable[float | None]) -> str:
    known = [each for each in ratios if each is not None]
    return f"{statistics.geometric_mean(known):.3f}" if known else ""


def _pass(pass_name: str) -> str:
    return pass_name.replace("fprop", "forward")


# --- problems: one line for each, with a time of ours -----------------------------------------------------------------


def _ours(problem: Problem) -> Row | None:
    """The planned one, or else the fastest of ours."""
    others = ("sequential", "slicing", "transformer_engine", *_PEERS)
    own = [
        row
        for row in problem.values()
        if row.path not in BOUND_PATHS and not any(has_word_prefix(row.variant, other) for other in others)
    ]
    return problem.planned or min(own, key=lambda row: row.median_ms, default=None)


def _problems(rows: Iterable[Json]) -> list[tuple[str, Problem, Row]]:
    """(the case with what tells it from the others of the table, problem, row of ours)."""
    found = [(p, ours) for p in by_problem(map(Row.from_json, rows)) if (ours := _ours(p)) is not None]
    telling = {"group_size": "TP{}", "M": "M {}", "link": "{}", "cuda_device_max_connections": "hardware queues {}"}
    telling = {name: text for name, text in telling.items() if len({getattr(p.any, name) for p, _ in found}) > 1}
    named = []
    for problem, ours in found:
        words = [ours.case.removesuffix(".ulysses").replace(".attention", "")]
        words += [text.format(getattr(ours, name) or "unset") for name, text in telling.items()]
        named.append((", ".join(words + ["backward"] * (ours.pass_name != "fprop")), problem, ours))
    return named


def _path(row: Row) -> str:
    return row.schedule if row.path in ("sliced", "query_split", "overlapped") else row.path


def _linears(rows: Sequence[Json]) -> str:
    """One line per linear and pass, in ms per call; the last: ours over each column, geometric mean."""
    lines, ratios = [], []
    for label, problem, ours in _problems(rows):
        others = (ours.compute_only_ms, ours.comm_only_ms, ours.sequential_ms, *map(problem.ms, _PEERS))
        ratios.append([ratio(ours.median_ms, other) for other in others])
        share = _share(ours.median_ms, ours.sequential_ms) or ""
        lines.append((label, *map(_text, others), f"**{_text(ours.median_ms)}**", _path(ours), share))
    if len(lines) > 1:
        means = [_mean(column) if n != 1 else "" for n, column in enumerate(zip(*ratios, strict=True))]
        lines.append(("*ours / this, geometric mean*", *means, "", "", means[2]))
    others_named = ("GEMM", "transfers", "sequential", *_PEERS.values())
    return _table(("linear", *others_named, "**ours**", "path", "/ sequential"), lines)


def _attention(rows: Sequence[Json]) -> str:
    """One line per block and pass, in ms per call."""
    ways = ("sequential", "slicing", "row_parallel", "query_split", PLANNED)
    lines = []
    for label, problem, ours in _problems(rows):
        times = (ours.compute_only_ms, ours.comm_only_ms, *map(problem.best_ms, ways))
        lines.append((label, *map(_text, times), _path(ours), _share(ours.median_ms, ours.compute_only_ms) or ""))
    bounds = ("without communication", "transfers alone")
    return _table(("block", *bounds, *ways, "path", "/ without communication"), lines)


def _ulysses(rows: Sequence[Json]) -> str:
    """One line per block and pass, in ms per call; exposed: beyond the block without communication."""
    lines = []
    for label, problem, ours in _problems(rows):
        theirs_ms, least_ms = problem.ms("transformer_engine"), ours.compute_only_ms
        times = (least_ms, ours.comm_only_ms, problem.ms("sequential"), theirs_ms, ours.median_ms)
        theirs, own = None if theirs_ms is None else theirs_ms - least_ms, ours.median_ms - least_ms
        share = "" if theirs is None else f"{max(own, 0.0) / theirs:.2f}"
        lines.append((label, *map(_text, times), f"{_path(ours)}, {ours.transport}", _text(theirs), _text(own), share))
    bounds = ("without communication", "all-to-alls alone")
    exposed = ("exposed, Transformer Engine", "exposed, ours", "ours / theirs")
    return _table(("block", *bounds, "sequential", "Transformer Engine", "ours", "path", *exposed), lines)


def _grid(rows: Sequence[Json]) -> str:
    """One line per sequence length and pass: geometric means over all linears."""
    groups: dict[tuple[int, bool, str], list[tuple[Row, Problem]]] = {}
    for problem in by_problem(map(Row.from_json, rows)):
        if (row := problem.planned) is not None:
            groups.setdefault((row.M, row.pass_name != "fprop", row.pass_name), []).append((row, problem))
    lines = []
    for (m, _, pass_name), members in sorted(groups.items(), key=lambda item: item[0]):
        planned = [row for row, _ in members]
        stock = [share for row, problem in members if (share := ratio(row.median_ms, problem.stock_ms)) is not None]
        host = [row.host_us for row in planned if row.host_us is not None]
        means = [_mean(row.median_ms / row.sequential_ms for row in planned), _mean(stock), f"{max(stock):.3f}"]
        means.append(_mean(row.median_ms / row.ideal_ms for row in planned))
        host_us = f"{min(host):.0f} to {max(host):.0f}" if host else ""
        lines.append((str(m), _pass(pass_name), str(len(members)), *means, host_us))
    ratios = ("/ sequential", "/ stock", "worst of that", "/ max(GEMM, transfers)")
    return _table(("M", "pass", "linears", *ratios, "host us per call"), lines)


def _slower(rows: Sequence[Json]) -> str:
    """Passes in which the planned path took longer than the better of sequential and Megatron's own."""
    offenders = summarize([Row.from_json(row) for row in rows]).offenders
    slower = [(share, row) for share, row in offenders if share > 1]
    count = sum(share > 1.02 for share, _ in slower)
    lines = [
        (row.case, str(row.M), _pass(row.pass_name), _text(row.median_ms), _path(row), f"{share:.3f}")
        for share, row in slower
    ]
    lines.append((f"*{len(slower)} of {len(offenders)} passes, {count} by more than 2 %*", "", "", "", "", ""))
    return _table(("linear", "M", "pass", "planned, ms", "path", "/ stock"), lines)


# --- other rows: of steps of whole models, and of what has a line of its own ------------------------------------------


def _steps(rows: Sequence[Json]) -> list[tuple[str, dict[str, Json]]]:
    """(model and sizes, rows by variant) of each step that was timed."""
    steps: dict[tuple[object, ...], dict[str, Json]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("case", "layers", "sequence", "group_size", "commit"))
        steps.setdefault(key, {})[row["variant"]] = row
    return [("{case}, {layers} layers, S {sequence}".format_map(step[STOCK]), step) for step in steps.values()]


def _whole_step(rows: Sequence[Json]) -> str:
    """Forward and backward of a Megatron GPT, in ms; exposed: beyond the step without communication."""
    lines = []
    for name, step in _steps(rows):
        variants = (STOCK, "stock with tp_comm_overlap", PLANNED, FREE)
        stock, tp_overlap, ours, least = (step[v]["step_ms"] if v in step else math.nan for v in variants)
        cells = ["" if math.isnan(ms) else f"{ms:.1f}" for ms in (stock, tp_overlap, ours, least)]
        exposed = ["" if math.isnan(ms - least) else f"{ms - least:.1f}" for ms in (stock, ours)]
        lines.append((name, *cells[:2], f"**{cells[2]}**", cells[3], f"{ours / stock:.3f}", *exposed))
    times = ("stock", "stock, tp_comm_overlap", "**plugin**", "without communication")
    return _table(("step", *times, "plugin / stock", "exposed, stock", "exposed, plugin"), lines)


def _step_memory(rows: Sequence[Json]) -> str:
    """The most memory that a rank used in a step, GiB."""
    lines = []
    for name, step in _steps(rows):
        if "peak_allocated_bytes" in step[STOCK]:
            sizes = (step[v][key] for key in ("peak_allocated_bytes", "device_bytes") for v in (STOCK, PLANNED))
            lines.append((name, *(f"{size / 2**30:.2f}" for size in sizes)))
    headings = ("allocated, stock", "allocated, plugin", "whole device, stock", "whole device, plugin")
    return _table(("step, GiB", *headings), lines)


def _gemm(rows: Sequence[Json]) -> str:
    """TFLOP/s of each variant by size, with the speed relative to torch.mm."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        speed = "{tflop_s:.0f} ({ratio:.3f})".format_map(row)
        found.setdefault(row["variant"], {})["{M} x {N} x {K}".format_map(row)] = speed
    sizes = list(dict.fromkeys("{M} x {N} x {K}".format_map(row) for row in rows))
    lines = [(name, *(cells.get(size, "") for size in sizes)) for name, cells in found.items()]
    return _table(("TFLOP/s", *sizes), lines)


def _plain(columns: str) -> Callable[[Sequence[Json]], str]:
    """A table with one line per row. columns: "heading: {key}", apart by " | "."""
    headings, cells = zip(*(column.split(": ", 1) for column in columns.split(" | ")), strict=True)
    return lambda rows: _table(headings, [[cell.format_map(_with_derived(row)) for cell in cells] for row in rows])


def _with_derived(row: Json) -> Json:
    """With what follows from a row: sizes in MiB, the ratio of two distances, in how many layers calls overlapped."""
    sizes = {key.removesuffix("_bytes"): n for key, n in row.items() if key.endswith("_bytes") and n is not None}
    derived: Json = {f"{name}_mib": size / 2**20 for name, size in sizes.items()}
    if "pass_name" in row:
        derived["pass"] = _pass(row["pass_name"])
    if "distance" in row:
        derived["ratio"] = row["distance"] / row["stock"]
        derived["overlapped"] = "stock"
    if "layers_overlapped" in row:
        derived["overlapped"] = "{layers_overlapped} of {layers}".format_map(row)
    return row | derived


_OF_LINEARS = ("all_gather_linear", "linear_reduce_scatter")
# By the name in a document and the operation whose rows it takes.
_PLAIN: dict[tuple[str, str | None], str] = {
    ("embedding", "embedding_reduce_scatter"): "pass: {pass} | tokens: {M} | features: {N} | planned: {path}"
    " | why: {reason}",
    ("training", "training"): "model: {case} | run: {run} | quantity: {quantity}"
    " | distance from stock in fp32: {distance:.3g} | stock's own in bf16: {stock:.3g} | ratio: {ratio:.2f}"
    " | layers overlapped: {overlapped}",
    ("demo", "demo"): "dtype: {dtype} | steps: {steps} | forward calls overlapped: {calls}"
    " | largest difference of a loss from stock's: {max_loss_difference:.2g}",
    ("memory", "memory"): "weights: {weights} | run: {run} | saved by autograd, MiB: {saved_mib:.1f}"
    " | peak, MiB: {peak_mib:.1f} | step, ms: {step_ms:.2f}",
    ("fp8", None): "linear: {case} | recipe: {recipe} | by: {by} | ms: {median_ms:.3f} | host, us: {host_us:.0f}"
    " | equals general_gemm: {equals_general_gemm} | in 2, 4, 8 parts bitwise the whole:"
    " {bitwise_in_2}, {bitwise_in_4}, {bitwise_in_8} | time over the whole:"
    " {ratio_in_2:.2f}, {ratio_in_4:.2f}, {ratio_in_8:.2f} | codes of casts in 8 parts equal: {same_codes}",
    ("transfers", "transfer"): "link: {link} | channels: {channels} | MiB: {mebibytes} | us: {median_us:.0f}"
    " | GB/s: {bandwidth_gb_s:.0f}",
    ("lost", "lost"): "tried: {tried} | case: {case} | took: {took:g} {unit}"
    " | what took its place: {instead}: {instead_took:g} | where: {device}, {commit}",
}

#: By the name in a document: the operations whose rows it takes, and what makes the table.
KINDS: dict[str, tuple[Sequence[str | None], Callable[[Sequence[Json]], str]]] = {
    "linears": (_OF_LINEARS, _linears),
    "grid": (_OF_LINEARS, _grid),
    "slower": (_OF_LINEARS, _slower),
    "attention": (("query_split_attention",), _attention),
    "ulysses": (("ulysses_attention",), _ulysses),
    "whole-step": (("whole_step",), _whole_step),
    "step-memory": (("whole_step",), _step_memory),
    "gemm": ((None,), _gemm),
    **{kind: ((op,), _plain(columns)) for (kind, op), columns in _PLAIN.items()},
}
