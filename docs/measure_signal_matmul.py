"""Rows of GEMM times, `signal_matmul` beside `torch.mm`, for `docs/results`: python docs/measure_signal_matmul.py FILE

One GPU; nothing is late: all flags are set. Every result is held to `torch.mm`'s before anything is timed.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from commfuse_megatron.kernels import RowChunk, TileTable, persistent_matmul, signal_matmul
from commfuse_megatron.tools.common.cases import HEADLINE_M, HEADLINE_MODELS, LINEARS, linear_case

ROUNDS, CALLS_MS, BEYOND_L2 = 7, 4.0, 200e6
DEVICE = torch.device("cuda", 0)
GROUP_SIZES = (2, 4, 8)
MOST_ERROR = 1e-2  # of the largest element: half a unit of bfloat16, and the order of summation

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def calls(M: int, N: int, ranks: int, *, gathers: bool) -> dict[str, Call]:
    """What is timed, by name; the collective of the pass decides about signals."""
    flags = torch.ones(ranks, dtype=torch.int32, device=DEVICE)
    counters = torch.zeros(ranks, dtype=torch.int32, device=DEVICE)
    partials = torch.zeros(ranks - 1, M // ranks, N, dtype=torch.bfloat16, device=DEVICE)
    own, *others = ((M * rank // ranks, M * (rank + 1) // ranks) for rank in range(ranks))
    if gathers:
        kinds = {"flags": [RowChunk(*own), *(RowChunk(*rows, flag=i) for i, rows in enumerate(others))]}
    else:
        leaving = [RowChunk(*rows, counter=i) for i, rows in enumerate(others)]
        kinds = {
            "counters": [*leaving, RowChunk(*own)],
            "counters, partials": [*leaving, RowChunk(*own, partials=tuple(range(ranks - 1)))],
        }
    found: dict[str, Call] = {
        "torch.mm": lambda a, b, out: torch.mm(a, b, out=out),
        "persistent_matmul": lambda a, b, out: persistent_matmul(a, b, out=out),
    }
    for name, chunks in {"plain": [RowChunk(0, M)], **kinds}.items():
        table = TileTable(chunks, M, N, DEVICE)
        added = partials if table.num_partials else None

        def call(a, b, out, table=table, added=added):
            signal_matmul(a, b, out=out, table=table, flags=flags, counters=counters, partials=added)

        found[f"signal_matmul, {name}"] = call
    return found


def times_ms(found: dict[str, Call], sets: list[tuple[torch.Tensor, ...]], estimate_ms: float) -> dict[str, float]:
    """Medians over rounds, in each of which all variants have their turn; the first round is not counted."""
    count = max(3, min(20, int(CALLS_MS / estimate_ms)))
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in found}
    for _ in range(ROUNDS):
        for name, call in found.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for number in range(count):
                call(*sets[number % len(sets)])
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) / count for begin, end in pairs[1:])
        for name, pairs in events.items()
    }


def rows_of(case_name: str, ranks: int, pass_name: str) -> list[dict[str, object]]:
    """One row for each variant. Raises RuntimeError for a wrong result."""
    case = linear_case(case_name, HEADLINE_M, ranks)
    M, (N, K) = case.M, (case.N, case.K) if pass_name == "fprop" else (case.K, case.N)
    gathers = (case.op == "all_gather_linear") == (pass_name == "fprop")
    size_bytes = 2 * (M * K + K * N + M * N)
    sets: list[tuple[torch.Tensor, ...]] = []
    for _ in range(max(2, -(-int(BEYOND_L2) // size_bytes))):
        a, out = (torch.randn(M, size, device=DEVICE).bfloat16() for size in (K, N))
        weight = torch.randn(*((N, K) if pass_name == "fprop" else (K, N)), device=DEVICE).bfloat16()
        sets.append((a, weight.t() if pass_name == "fprop" else weight, out))
    found = calls(M, N, ranks, gathers=gathers)
    a, b, out = sets[0]
    wanted = torch.mm(a, b).float()
    for name, call in found.items():
        out.fill_(torch.nan)
        call(a, b, out)
        error = ((out.float() - wanted).abs().max() / wanted.abs().max()).item()
        if not error <= MOST_ERROR:
            raise RuntimeError(f"{case_name}, {pass_name}, {ranks} ranks: {name} is wrong by {error:.3g}")
    flops = 2 * M * N * K
    measured = times_ms(found, sets, flops / 7e11)
    common = {
        "section": "signals-built",
        "case": case_name,
        "pass": pass_name,
        "ranks": ranks,
        "M": M,
        "N": N,
        "K": K,
    }
    return [
        {**common, "variant": name, "median_ms": round(ms, 5), "tflop_s": round(flops / ms / 1e9, 2),
         "ratio": round(measured["torch.mm"] / ms, 4), "device": torch.cuda.get_device_name(DEVICE)}
        for name, ms in measured.items()
    ]  # fmt: skip


if __name__ == "__main__":
    names = [f"{model}.{linear}" for model in HEADLINE_MODELS for linear in LINEARS]
    rows = [
        row
        for ranks in GROUP_SIZES
        for name in names
        for pass_name in ("fprop", "dgrad")
        for row in rows_of(name, ranks, pass_name)
    ]
    Path(sys.argv[1]).write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")
