"""Times `persistent_matmul` beside `torch.mm`: `python -m commfuse_megatron.benchmark.matmul --json FILE`.

Owns the cases, the candidates and the way of timing; must not know communication. The contract that bites: a variant is
timed only after its result was found right, and the variants of a case take turns in random order.
"""

import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from commfuse_megatron.errors import VerificationError
from commfuse_megatron.kernels import persistent_matmul, persistent_matmul_unavailable_reason, sum_partials
from commfuse_megatron.kernels.support import multiprocessor_count
from commfuse_megatron.kernels.tiles import TILES, Tile

__all__ = ["main"]

BASELINE = "torch.mm"
PASSES = ("fprop", "dgrad", "wgrad")
LARGE = ((8192, 5120, 8192), (8192, 8192, 4096), (8192, 8192, 14336), (8192, 3072, 4096))
# Slices and small N, where a wave is not full: what the table of tiles decides.
SMALL = (
    (8192, 1280, 8192),
    (4096, 5120, 8192),
    (4096, 4096, 2048),
    (2048, 1536, 4096),
    (1024, 4096, 4096),
    (512, 1024, 8192),
)
SM_BUDGETS = (132, 124, 116, 108)

CANDIDATES = {
    "128x256x64 s3 g8": Tile(128, 256, 64, num_warps=8, num_stages=3, group_m=8, speed=1.0),
    "128x256x64 s3 g4": Tile(128, 256, 64, num_warps=8, num_stages=3, group_m=4, speed=1.0),
    "128x256x64 s3 g16": Tile(128, 256, 64, num_warps=8, num_stages=3, group_m=16, speed=1.0),
    "128x256x64 s3 g8 2 parts": Tile(128, 256, 64, num_warps=8, num_stages=3, group_m=8, speed=1.0, min_parts=2),
    "128x256x64 s3 g8 4 parts": Tile(128, 256, 64, num_warps=8, num_stages=3, group_m=8, speed=1.0, min_parts=4),
    "128x256x64 s4 g8 4 parts": Tile(128, 256, 64, num_warps=8, num_stages=4, group_m=8, speed=1.0, min_parts=4),
    "128x256x64 s3 g8 two loops": Tile(128, 256, 64, num_warps=8, num_stages=3, group_m=8, speed=1.0, flatten=False),
    "128x256x128 s2 g8 4 parts": Tile(128, 256, 128, num_warps=8, num_stages=2, group_m=8, speed=1.0, min_parts=4),
    "256x128x64 s3 g4": Tile(256, 128, 64, num_warps=8, num_stages=3, group_m=4, speed=1.0),
    "256x128x64 s3 g8": Tile(256, 128, 64, num_warps=8, num_stages=3, group_m=8, speed=1.0),
    "128x128x64 w8 s4": Tile(128, 128, 64, num_warps=8, num_stages=4, group_m=8, speed=1.0),
    "128x128x64 w4 s4": Tile(128, 128, 64, num_warps=4, num_stages=4, group_m=8, speed=1.0),
    "128x128x64 w8 s5": Tile(128, 128, 64, num_warps=8, num_stages=5, group_m=8, speed=1.0),
    "64x256x64 w4 s4": Tile(64, 256, 64, num_warps=4, num_stages=4, group_m=8, speed=1.0),
    "64x256x64 w8 s4": Tile(64, 256, 64, num_warps=8, num_stages=4, group_m=8, speed=1.0),
    "64x128x64 w4 s4": Tile(64, 128, 64, num_warps=4, num_stages=4, group_m=8, speed=1.0),
    "64x128x64 w4 s6": Tile(64, 128, 64, num_warps=4, num_stages=6, group_m=8, speed=1.0),
    "64x64x64 w4 s6": Tile(64, 64, 64, num_warps=4, num_stages=6, group_m=8, speed=1.0),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One case and variant. `ratio` is its speed over the baseline's; above 1 is faster."""

    section: str
    case: str
    variant: str
    M: int
    N: int
    K: int
    median_ms: float
    p95_ms: float
    tflop_s: float
    ratio: float
    device: str


Variants = dict[str, Callable[[], torch.Tensor]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections asked for; 0 when done, 2 when there is nothing to run on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=["orders", "small", "host", "sum"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--burst", type=int, default=5, help="calls between one pair of events")
    parser.add_argument("--candidates", nargs="+", choices=list(CANDIDATES), help="time these only, not all")
    parser.add_argument("--commit", default="", help="recorded in the JSON")
    options = parser.parse_args(arguments)
    reason = persistent_matmul_unavailable_reason("cuda", torch.bfloat16)
    if reason is not None:
        Console(stderr=True).print(reason)
        return 2
    for name in set(CANDIDATES) - set(options.candidates or CANDIDATES):
        del CANDIDATES[name]
    torch.manual_seed(0)
    random.seed(0)
    _warm_up()
    rows: list[Row] = []
    for section in options.sections:
        rows += SECTIONS[section](options.rounds, options.burst)
        if options.json:  # after each section: a run cut short leaves what it has
            environment = {"torch": torch.__version__, "cuda": torch.version.cuda, "commit": options.commit}
            options.json.write_text(
                json.dumps({**environment, "rounds": options.rounds, "rows": [asdict(row) for row in rows]}, indent=1)
            )
    for section in options.sections:
        Console(width=120).print(_table(section, [row for row in rows if row.section == section]))
    return 0


# ---- sections ----


def _orders(rounds: int, burst: int) -> list[Row]:
    """The large shapes in every layout, every SM budget, and accumulation in fp32."""
    rows = []
    for pass_name in PASSES:
        for sizes in LARGE:
            a, b, out = _operands(sizes, pass_name)
            variants: Variants = {BASELINE: functools.partial(torch.mm, a, b, out=out)}
            for num_sms in SM_BUDGETS:
                variants[f"static {num_sms}"] = functools.partial(persistent_matmul, a, b, out=out, num_sms=num_sms)
            _check(variants)
            if pass_name == "wgrad":
                total = torch.zeros(out.shape, device="cuda")
                variants["mm, then fp32 add_"] = functools.partial(_add_product, total, a, b, out)
                variants["static 132, fp32 accumulate"] = functools.partial(
                    persistent_matmul, a, b, out=total, addend=total
                )
            else:
                bias, addend = torch.randn(out.shape[1], device="cuda").to(out.dtype), torch.randn_like(out)
                variants["static 132, bias"] = functools.partial(
                    persistent_matmul, a, b, out=out, addend=bias.expand_as(out)
                )
                variants["static 132, bf16 addend"] = functools.partial(persistent_matmul, a, b, out=out, addend=addend)
            rows += _time("orders", pass_name, sizes, variants, rounds, burst)
    return rows


def _small(rounds: int, burst: int) -> list[Row]:
    """Shapes whose waves are not full, with the tile that the table chooses and with every tile of the table."""
    rows = []
    for sizes in SMALL:
        a, b, out = _operands(sizes, "fprop")
        variants: Variants = {
            BASELINE: functools.partial(torch.mm, a, b, out=out),
            "chosen": functools.partial(persistent_matmul, a, b, out=out),
            "chosen, 116": functools.partial(persistent_matmul, a, b, out=out, num_sms=116),
        }
        for tile in TILES:
            name = f"{tile.block_m}x{tile.block_n}"
            variants[name] = functools.partial(persistent_matmul, a, b, out=out, tile=tile)
        _check(variants)
        rows += _time("small", "fprop", sizes, variants, rounds, 4 * burst)
    return rows


def _candidates(rounds: int, burst: int) -> list[Row]:
    """Every candidate tile on large and small shapes: where the constants of tiles.py come from."""
    rows = []
    for pass_name, shapes in (("fprop", (*LARGE, *SMALL)), ("dgrad", LARGE[1:2]), ("wgrad", LARGE[1:2])):
        for sizes in shapes:
            a, b, out = _operands(sizes, pass_name)
            variants: Variants = {BASELINE: functools.partial(torch.mm, a, b, out=out)}
            for name, tile in CANDIDATES.items():
                variants[name] = functools.partial(persistent_matmul, a, b, out=out, tile=tile)
            _check(variants)
            rows += _time("candidates", pass_name, sizes, variants, rounds, burst)
    return rows


def _host(rounds: int, burst: int) -> list[Row]:
    """Host time of one call, from many calls on matrices so small that the GPU waits for the host."""
    sizes = (128, 256, 64)
    a, b, out = _operands(sizes, "fprop")
    unaligned = torch.empty(128 * 64 + 1, device="cuda", dtype=a.dtype)[1:].view(128, 64).copy_(a)
    addend = torch.randn_like(out)
    calls: Variants = {
        BASELINE: functools.partial(torch.mm, a, b, out=out),
        "static": functools.partial(persistent_matmul, a, b, out=out),
        "static, addend": functools.partial(persistent_matmul, a, b, out=out, addend=addend),
        "static, accumulate": functools.partial(persistent_matmul, a, b, out=out, addend=out),
        "static, pointers": functools.partial(persistent_matmul, unaligned, b, out=out),
    }
    own, partials = torch.randn(64, 256, device="cuda"), torch.randn(3, 64, 256, device="cuda").to(a.dtype)
    sum_out = torch.empty(64, 256, device="cuda", dtype=a.dtype)
    calls["sum_partials"] = functools.partial(sum_partials, own, partials, out=sum_out)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                calls[name]()
            times[name].append((time.perf_counter() - start) * 1e3 / 200)
            torch.cuda.synchronize()
    return [_row("host", "host time of one call", name, (0, 0, 0), times, 0.0) for name in calls]


def _sum(rounds: int, burst: int) -> list[Row]:
    """sum_partials: tflop_s holds TB/s here, bytes read and written over time."""
    rows = []
    for num_rows, N, num_partials in ((4096, 8192, 1), (2048, 8192, 3), (1024, 8192, 7), (1024, 8192, 31)):
        own = torch.randn(num_rows, N, device="cuda")
        partials = torch.randn(num_partials, num_rows, N, device="cuda").bfloat16()
        bias, out = torch.randn(N, device="cuda").bfloat16(), torch.empty(num_rows, N, device="cuda").bfloat16()
        variants: Variants = {
            "sum_partials": functools.partial(sum_partials, own, partials, out=out),
            "sum_partials, bias": functools.partial(sum_partials, own, partials, bias=bias, out=out),
        }
        times = _burst_times(variants, rounds, 4 * burst)
        size_bytes = own.nbytes + partials.nbytes + out.nbytes
        case = f"{num_partials} partials"
        rows += [_row("sum", case, name, (num_rows, N, 0), times, float(size_bytes)) for name in variants]
    return rows


SECTIONS: dict[str, Callable[[int, int], list[Row]]] = {
    "orders": _orders,
    "small": _small,
    "candidates": _candidates,
    "host": _host,
    "sum": _sum,
}


# ---- the way of timing ----


def _operands(sizes: tuple[int, int, int], pass_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    M, N, K = sizes

    def matrix(rows: int, cols: int, transposed: bool) -> torch.Tensor:
        shape = (cols, rows) if transposed else (rows, cols)
        values = torch.randn(shape, device="cuda").to(torch.bfloat16)
        return values.t() if transposed else values

    out = torch.full((M, N), torch.nan, device="cuda", dtype=torch.bfloat16)
    return matrix(M, K, pass_name == "wgrad"), matrix(K, N, pass_name == "fprop"), out


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.mm(a, b, out=out)
    return total.add_(out)


def _warm_up() -> None:
    a = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        for _ in range(10):
            torch.mm(a, a)
        torch.cuda.synchronize()


def _check(variants: Variants) -> None:
    """Every variant gives the baseline's result, to bf16 rounding."""
    wanted = variants[BASELINE]().float()
    for name, call in variants.items():
        out = call()
        error = ((out.float() - wanted).norm() / wanted.norm()).item()
        if not error < 5e-3:  # typically 1e-4: few elements are rounded the other way
            raise VerificationError(f"benchmark: {name} is off by {error:.1e} relative to {BASELINE}; 5e-3 is allowed.")
        out.fill_(torch.nan)


def _burst_times(variants: Variants, rounds: int, burst: int) -> dict[str, list[float]]:
    """Milliseconds per call, by variant: in every round each variant once, in random order."""
    for call in variants.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        events = {}
        for name in random.sample(list(variants), len(variants)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            variants[name]()  # the previous variant's data leave the cache here, untimed
            start.record()
            for _ in range(burst):
                variants[name]()
            end.record()
            events[name] = (start, end)
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end) / burst)
    return times


def _time(
    section: str, case: str, sizes: tuple[int, int, int], variants: Variants, rounds: int, burst: int
) -> list[Row]:
    M, N, K = sizes
    times = _burst_times(variants, rounds, burst)
    return [_row(section, case, name, sizes, times, 2.0 * M * N * K) for name in variants]


def _row(
    section: str, case: str, name: str, sizes: tuple[int, int, int], times: dict[str, list[float]], amount: float
) -> Row:
    median = statistics.median(times[name])
    p95 = sorted(times[name])[int(0.95 * (len(times[name]) - 1))]
    baseline = statistics.median(times[BASELINE]) if BASELINE in times else median
    M, N, K = sizes
    return Row(
        section=section,
        case=case,
        variant=name,
        M=M,
        N=N,
        K=K,
        median_ms=round(median, 5),
        p95_ms=round(p95, 5),
        tflop_s=round(amount / median / 1e9, 2),
        ratio=round(baseline / median, 4),
        device=torch.cuda.get_device_name(),
    )


def _table(section: str, rows: list[Row]) -> Table:
    """One line per case, one column per variant where there are few; else one line per row."""
    device = rows[0].device if rows else ""
    sms = multiprocessor_count(torch.cuda.current_device())
    table = Table(title=f"{section}: {device}, {sms} SMs")
    for name in ("case", "MxNxK", "variant", "median ms", "p95 ms", "TB/s" if section == "sum" else "TFLOP/s", "speed"):
        table.add_column(name, justify="left" if name in ("case", "MxNxK", "variant") else "right")
    for row in rows:
        sizes = f"{row.M}x{row.N}x{row.K}"
        table.add_row(
            row.case, sizes, row.variant, f"{row.median_ms:.4f}", f"{row.p95_ms:.4f}", f"{row.tflop_s:.1f}",
            f"{row.ratio:.3f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
