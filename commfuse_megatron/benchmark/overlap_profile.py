"""Shows, with the profiler, where NCCL's point-to-point kernel runs: inside GEMM kernels or beside nothing.

    torchrun --nproc-per-node 2 -m commfuse_megatron.benchmark.overlap_profile --case llama-70b.fc2 --json FILE

The fraction is that of the transfer kernel's length that lies inside intervals of GEMM kernels, on every rank; a
transfer kernel that waits for its peer counts as running, so the figure is what the device's timeline shows.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.benchmark.cases import CASE_NAMES, linear_case

__all__ = ["main"]

Span = tuple[float, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile some calls; prints one line per rank and call; 0 when done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASE_NAMES, default="llama-70b.fc2", metavar="CASE")
    parser.add_argument("--tokens", type=int, default=8192, metavar="M")
    parser.add_argument("--algorithm", choices=["direct", "ring"], default="direct")
    parser.add_argument("--chunks", type=int, default=1, metavar="m")
    parser.add_argument("--channels", type=int, default=20)
    parser.add_argument("--tile-order", choices=["static", "stealing"], default="static")
    parser.add_argument("--regain", choices=["on", "off"], default="on")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the intervals of all ranks to this file")
    parser.add_argument("--trace", type=Path, help="write rank 0's profiler trace to this file")
    options = parser.parse_args(arguments)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        found = _profile(options)
        gathered: list[dict[str, object] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
        if dist.get_rank() == 0:
            for result in gathered:
                shown = {key: value for key, value in (result or {}).items() if key not in ("transfers", "gemms")}
                Console(width=150).print(shown)
            if options.json:
                options.json.write_text(json.dumps(gathered, indent=1))
    finally:
        dist.destroy_process_group()
    return 0


def _profile(options: argparse.Namespace) -> dict[str, object]:
    group = dist.group.WORLD
    assert group is not None
    case = linear_case(options.case, options.tokens, group.size())
    forced = {"path": "sliced", "algorithm": options.algorithm, "chunks_per_shard": options.chunks}
    kernel = {"tile_order": options.tile_order, "regain_sms": options.regain == "on"}
    transport = {"backend": "nccl", "nccl_channels": options.channels}
    config = OverlapConfig.from_dict({"linear": {"fprop": forced}, "transport": transport, "kernel": kernel})
    rows = case.M // case.group_size if case.op == "all_gather_linear" else case.M
    x = torch.randn(rows, 1, case.K, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(case.N, case.K, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), OverlapContext(group, config) as context:
        call = getattr(ops, case.op)
        for _ in range(5):
            call(x, weight, context=context)
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(1 + options.calls):
                call(x, weight, context=context)
            torch.cuda.synchronize()
    if options.trace and dist.get_rank() == 0:
        profiler.export_chrome_trace(str(options.trace))
    transfers, gemms = _kernel_spans(profiler)
    # The first call's transfers wait for the rank whose profiler started last.
    transfers = transfers[len(transfers) // (1 + options.calls) :]
    total = sum(end - start for start, end in transfers)
    inside = sum(_length_inside(span, gemms) for span in transfers)
    return {
        "rank": group.rank(),
        "case": case.name,
        "variant": f"{options.algorithm} m={options.chunks} {options.channels}ch {options.tile_order} {options.regain}",
        "device": torch.cuda.get_device_name(),
        "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "transfer_kernels": len(transfers),
        "transfer_us": round(total, 1),
        "inside_gemm_fraction": round(inside / total, 4) if total else None,
        "transfers": transfers,
        "gemms": gemms,
    }


def _kernel_spans(profiler: profile) -> tuple[list[Span], list[Span]]:
    """(transfer kernels, GEMM kernels) as spans in microseconds."""
    transfers, gemms = [], []
    for event in profiler.events() or []:
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        span = (event.time_range.start, event.time_range.end)
        name = event.name.lower()
        if "nccl" in name and "sendrecv" in name:
            transfers.append(span)
        elif "persistent_matmul" in name or "gemm" in name or "nvjet" in name or "cutlass" in name:
            gemms.append(span)
    return sorted(transfers), sorted(gemms)


def _length_inside(span: Span, others: list[Span]) -> float:
    """Length of `span` covered by the union of `others` (sorted by start)."""
    covered, position = 0.0, span[0]
    for start, end in others:
        start, end = max(start, position), min(end, span[1])
        if end > start:
            covered += end - start
            position = end
    return covered


if __name__ == "__main__":
    sys.exit(main())
