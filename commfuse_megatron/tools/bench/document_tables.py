"""The tables that documents hold, in Markdown, made of rows by kind: see `report`."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from commfuse_megatron.tools.bench.rows import Row, by_problem, has_word_prefix
from commfuse_megatron.tools.bench.summary import stock_times, summarize
from commfuse_megatron.tools.common.cases import PLANNED

_BOUNDS = ("compute", "transfers", "slices")
_PEERS = {"sequential": "sequential", "megatron": "Megatron", "async_tp": "async-TP", "userbuffers": "userbuffers"}


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown; columns without a word are left out."""
    lines = list(lines)
    kept = [n for n, _ in enumerate(headings) if any(line[n] for line in lines)]
    first, *rest = ("| " + " | ".join(row[n] for n in kept) + " |" for row in (headings, *lines))
    return "\n".join((first, "|" + "---|" * len(kept), *rest))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _by_problem(rows: Iterable[dict[str, Any]]) -> list[dict[str, Row]]:
    return by_problem(map(Row.from_json, rows))


def _ours(variants: dict[str, Row]) -> Row | None:
    """The planned one, or else the fastest of ours."""
    others = ("slicing", "transformer_engine", *_PEERS)
    own = [
        row
        for row in variants.values()
        if row.path not in _BOUNDS and not any(has_word_prefix(row.variant, other) for other in others)
    ]
    return variants.get(PLANNED) or min(own, key=lambda row: row.median_ms, default=None)


def _path(row: Row) -> str:
    chunks = f" m={row.chunks_per_shard}" if row.path in ("sliced", "query_split", "overlapped") else ""
    ring = " ring" if row.algorithm == "ring" else ""
    return f"{row.path}{ring}{chunks}"


def _label(row: Row, problems: Iterable[dict[str, Row]]) -> str:
    """The case, with what tells it from the others of the table."""
    others = [next(iter(variants.values())) for variants in problems]
    label = row.case
    telling = {"group_size": "TP{}", "M": "M {}", "link": "{}", "cuda_device_max_connections": "hardware queues {}"}
    for name, text in telling.items():
        if len({getattr(other, name) for other in others}) > 1:
            label += ", " + text.format(getattr(row, name) or "unset")
    return label if row.pass_name == "fprop" else f"{label}, backward"


def _linears(rows: Sequence[dict[str, Any]]) -> str:
    """One line per linear and pass, in ms per call; the last: ours over each column, geometric mean."""
    problems = [variants for variants in _by_problem(rows) if _ours(variants)]
    headings = ("linear", "GEMM", "transfers", *_PEERS.values(), "**ours**", "path", "/ sequential")
    lines, ratios = [], []
    for variants in problems:
        ours = _ours(variants)
        assert ours is not None
        others: list[float | None] = [ours.compute_only_ms, ours.comm_only_ms, ours.sequential_ms]
        others += [variants[name].median_ms if name in variants else None for name in list(_PEERS)[1:]]
        ratios.append([None if other is None else ours.median_ms / other for other in others])
        share = ours.median_ms / ours.sequential_ms
        label = _label(ours, problems)
        lines.append((label, *map(_ms, others), f"**{_ms(ours.median_ms)}**", _path(ours), f"{share:.3f}"))
    if len(lines) > 1:
        means = [_mean(column) if n != 1 else "" for n, column in enumerate(zip(*ratios, strict=True))]
        lines.append(("*ours / this, geometric mean*", *means, "", "", means[2]))
    return _table(headings, lines)


def _mean(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{statistics.geometric_mean(known):.3f}" if known else ""


def _grid(rows: Sequence[dict[str, Any]]) -> str:
    """One line per sequence length and pass: geometric means over all linears."""
    groups: dict[tuple[int, str], list[dict[str, Row]]] = {}
    for variants in _by_problem(rows):
        if PLANNED in variants:
            groups.setdefault((variants[PLANNED].M, variants[PLANNED].pass_name), []).append(variants)
    lines = []
    for (m, pass_name), members in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] != "fprop")):
        planned = [variants[PLANNED] for variants in members]
        stock = [variants[PLANNED].median_ms / min(stock_times(variants)) for variants in members]
        host = [row.host_us for row in planned if row.host_us is not None]
        lines.append(
            (
                str(m),
                "forward" if pass_name == "fprop" else pass_name,
                str(len(members)),
                _mean(row.median_ms / row.sequential_ms for row in planned),
                _mean(stock),
                f"{max(stock):.3f}",
                _mean(row.median_ms / row.ideal_ms for row in planned),
                f"{min(host):.0f} to {max(host):.0f}" if host else "",
            )
        )
    ratios = ("/ sequential", "/ stock", "worst of that", "/ max(GEMM, transfers)")
    return _table(("M", "pass", "linears", *ratios, "host us per call"), lines)


def _slower(rows: Sequence[dict[str, Any]]) -> str:
    """Passes in which the planned path took longer than the better of sequential and Megatron's own."""
    offenders = summarize([Row.from_json(row) for row in rows]).offenders
    slower = [(ratio, row) for ratio, row in offenders if ratio > 1]
    count = sum(ratio > 1.02 for ratio, _ in slower)
    lines = [
        [
            row.case,
            str(row.M),
            row.pass_name.replace("fprop", "forward"),
            _ms(row.median_ms),
            _path(row),
            f"{ratio:.3f}",
        ]
        for ratio, row in slower
    ]
    lines.append([f"*{len(slower)} of {len(offenders)} passes, {count} by more than 2 %*", *[""] * 5])
    return _table(("linear", "M", "pass", "planned, ms", "path", "/ stock"), lines)


def _attention(rows: Sequence[dict[str, Any]]) -> str:
    """One line per block and pass, in ms per call."""
    problems = [variants for variants in _by_problem(rows) if _ours(variants)]
    names = ("sequential", "slicing", "row_parallel", "query_split", PLANNED)
    headings = ("block", "without communication", "transfers alone", *names, "path", "/ without communication")
    lines = []
    for variants in problems:
        ours = _ours(variants)
        assert ours is not None
        best = [
            min((row.median_ms for variant, row in variants.items() if has_word_prefix(variant, name)), default=None)
            for name in names
        ]
        lines.append(
            (
                _label(ours, problems).replace(".attention", ""),
                *map(_ms, (ours.compute_only_ms, ours.comm_only_ms, *best)),
                _path(ours),
                f"{ours.median_ms / ours.compute_only_ms:.3f}",
            )
        )
    return _table(headings, lines)


def _ulysses(rows: Sequence[dict[str, Any]]) -> str:
    """One line per block and pass, in ms per call; exposed: beyond the block without communication."""
    problems = [variants for variants in _by_problem(rows) if _ours(variants)]
    lines = []
    for variants in problems:
        ours = _ours(variants)
        assert ours is not None
        found = [variants.get(name) for name in ("sequential", "transformer_engine")]
        times = [None if row is None else row.median_ms for row in (*found, ours)]
        theirs, own = (None if ms is None else ms - ours.compute_only_ms for ms in times[1:])
        lines.append(
            (
                _label(ours, problems).replace(".ulysses", ""),
                *map(_ms, (ours.compute_only_ms, ours.comm_only_ms, *times)),
                f"{_path(ours)}, {ours.transport}",
                *map(_ms, (theirs, own)),
                "" if theirs is None or own is None else f"{max(own, 0.0) / theirs:.2f}",
            )
        )
    headings = (
        "block",
        "without communication",
        "all-to-alls alone",
        "sequential",
        "Transformer Engine",
        "ours",
        "path",
    )
    return _table((*headings, "exposed, Transformer Engine", "exposed, ours", "ours / theirs"), lines)


def _steps(rows: Sequence[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    steps: dict[tuple[object, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("case", "layers", "sequence", "group_size", "commit"))
        steps.setdefault(key, {})[row["variant"]] = row
    return list(steps.values())


def _step_name(row: dict[str, Any]) -> str:
    return f"{row['case']}, {row['layers']} layers, S {row['sequence']}"


def _whole_step(rows: Sequence[dict[str, Any]]) -> str:
    """Forward and backward of a Megatron GPT, in ms; exposed: beyond the step without communication."""
    variants = ("stock", "stock with tp_comm_overlap", PLANNED, "no_communication")
    headings = ("step", "stock", "stock, tp_comm_overlap", "**plugin**", "without communication", "plugin / stock")
    lines = []
    for step in _steps(rows):
        stock, ours, tp_overlap, least = (
            step.get(name, {}).get("step_ms", math.nan) for name in (variants[0], variants[2], variants[1], variants[3])
        )
        times = (stock, tp_overlap, ours, least, stock - least, ours - least)
        cells = ["" if math.isnan(ms) else f"{ms:.1f}" for ms in times]
        share = f"{ours / stock:.3f}"
        lines.append((_step_name(step["stock"]), *cells[:2], f"**{cells[2]}**", cells[3], share, *cells[4:]))
    return _table((*headings, "exposed, stock", "exposed, plugin"), lines)


def _step_memory(rows: Sequence[dict[str, Any]]) -> str:
    """The most memory that a rank used in a step, GiB."""
    lines = []
    for step in _steps(rows):
        if "peak_allocated_bytes" in step["stock"]:
            both = (step[name][key] for key in ("peak_allocated_bytes", "device_bytes") for name in ("stock", PLANNED))
            lines.append((_step_name(step["stock"]), *(f"{size / 2**30:.2f}" for size in both)))
    headings = ("allocated, stock", "allocated, plugin", "whole device, stock", "whole device, plugin")
    return _table(("step, GiB", *headings), lines)


def _gemm(rows: Sequence[dict[str, Any]]) -> str:
    """TFLOP/s of each variant by size, with the speed relative to torch.mm."""
    sizes = list(dict.fromkeys((row["M"], row["N"], row["K"]) for row in rows))
    found = {(row["variant"], (row["M"], row["N"], row["K"])): row for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = [found.get((variant, size)) for size in sizes]
        lines.append((variant, *("" if c is None else f"{c['tflop_s']:.0f} ({c['ratio']:.3f})" for c in cells)))
    return _table(("TFLOP/s", *(" x ".join(map(str, size)) for size in sizes)), lines)


def _plain(*columns: tuple[str, Callable[[dict[str, Any]], str]]) -> Callable[[Sequence[dict[str, Any]]], str]:
    """A table with one line per row."""
    return lambda rows: _table([name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def _overlapped(row: dict[str, Any]) -> str:
    return f"{row['layers_overlapped']} of {row['layers']}" if "layers_overlapped" in row else "stock"


_TRAINING = _plain(
    ("model", lambda row: row["case"]),
    ("run", lambda row: row["run"]),
    ("quantity", lambda row: row["quantity"]),
    ("distance from stock in fp32", lambda row: f"{row['distance']:.3g}"),
    ("stock's own in bf16", lambda row: f"{row['stock']:.3g}"),
    ("ratio", lambda row: f"{row['distance'] / row['stock']:.2f}"),
    ("layers overlapped", _overlapped),
)
_DEMO = _plain(
    ("dtype", lambda row: row["dtype"]),
    ("steps", lambda row: str(row["steps"])),
    ("forward calls overlapped", lambda row: str(row["calls"])),
    ("largest difference of a loss from stock's", lambda row: f"{row['max_loss_difference']:.2g}"),
)
_MEMORY = _plain(
    ("weights", lambda row: row["weights"]),
    ("run", lambda row: row["run"]),
    ("saved by autograd, MiB", lambda row: f"{row['saved_bytes'] / 2**20:.1f}"),
    ("peak, MiB", lambda row: f"{row['peak_bytes'] / 2**20:.1f}"),
    ("step, ms", lambda row: f"{row['step_ms']:.2f}"),
)
_TRANSFERS = _plain(
    ("link", lambda row: row["link"]),
    ("channels", lambda row: str(row["channels"])),
    ("MiB", lambda row: str(row["mebibytes"])),
    ("us", lambda row: f"{row['median_us']:.0f}"),
    ("GB/s", lambda row: f"{row['bandwidth_gb_s']:.0f}"),
)
_LOST = _plain(
    ("tried", lambda row: row["tried"]),
    ("case", lambda row: row["case"]),
    ("took", lambda row: f"{row['took']:g} {row['unit']}"),
    ("what took its place", lambda row: f"{row['instead']}: {row['instead_took']:g}"),
    ("where", lambda row: f"{row['device']}, {row['commit']}"),
)

_TRIALS = _plain(
    ("pass", lambda row: row["pass_name"].replace("fprop", "forward")),
    ("tokens", lambda row: str(row["M"])),
    ("features", lambda row: str(row["N"])),
    ("planned", lambda row: row["path"]),
    ("why", lambda row: row["reason"]),
)

_LINEARS = ("all_gather_linear", "linear_reduce_scatter")

#: By the name in a document: the operations whose rows it takes, and what makes the table.
KINDS: dict[str, tuple[Sequence[str | None], Callable[[Sequence[dict[str, Any]]], str]]] = {
    "linears": (_LINEARS, _linears),
    "grid": (_LINEARS, _grid),
    "slower": (_LINEARS, _slower),
    "attention": (("query_split_attention",), _attention),
    "embedding": (("embedding_reduce_scatter",), _TRIALS),
    "ulysses": (("ulysses_attention",), _ulysses),
    "whole-step": (("whole_step",), _whole_step),
    "step-memory": (("whole_step",), _step_memory),
    "training": (("training",), _TRAINING),
    "demo": (("demo",), _DEMO),
    "memory": (("memory",), _MEMORY),
    "gemm": ((None,), _gemm),
    "transfers": (("transfer",), _TRANSFERS),
    "lost": (("lost",), _LOST),
}
