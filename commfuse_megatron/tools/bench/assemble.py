"""From the samples of one case to its rows: what every row repeats, and what is found only beside other variants."""

import functools
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from commfuse_megatron.schedule import closed_form_us
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.rows import Row, has_word_prefix
from commfuse_megatron.tools.bench.timing import Sample
from commfuse_megatron.tools.bench.variant import Ready, link_name
from commfuse_megatron.tools.common.cases import attention_bound_ms


def make_rows(
    work: Work, measured: Mapping[str, Ready], samples: Mapping[str, Sample], *, is_emulated: bool, commit: str
) -> list[Row]:
    """One row per variant; what all share (lower bounds, sequential) comes from the same `measure`."""
    case, device = work.case, work.pool.device

    def best(prefix: str) -> float:
        return min(sample.median_ms for name, sample in samples.items() if has_word_prefix(name, prefix))

    def bounds_of(ready: Ready) -> dict[str, Any]:
        """What the schedule allows, and what the split costs, of a variant that has them."""
        own = samples.get(f"comm_only {ready.transport}")
        comm_ms, chunks = best("comm_only") if own is None else own.median_ms, ready.chunks_per_shard
        bound_ms = split_ms = None
        if ready.path == "sliced" and chunks is not None:
            slices = samples.get(f"slices_only m={chunks} {ready.gemm}")
            split_ms = None if slices is None else slices.median_ms - shared["compute_only_ms"]
            bound_ms = closed_form_us(shared["compute_only_ms"], comm_ms, case.group_size, chunks)
        if ready.path == "query_split":
            bound_ms = attention_bound_ms(case, shared["compute_only_ms"], comm_ms, chunks or 1)
        has_bound = work.pass_name == "fprop" and not case.all_reduces  # nobody has worked out theirs
        return {"schedule_bound_ms": bound_ms if has_bound else None, "split_loss_ms": split_ms}

    shared: dict[str, Any] = {
        **case.sizes,
        "pass_name": work.pass_name,
        "dtype": work.dtype_name,
        "emulated": is_emulated,
        "shrink": case.shrink,
        "compute_only_ms": best("compute_only"),
        "comm_only_ms": best("comm_only"),
        "comm_only_collective_ms": samples["comm_only collective"].median_ms,
        "sequential_ms": samples["sequential"].median_ms,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "link": link_name(device),
        "commit": commit,
        "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    }
    known = ("path", "transport", "algorithm", "chunks_per_shard", "reason", "max_error", "host_us", "tail_ms")
    return [
        Row(
            variant=name,
            **shared,
            **asdict(sample),
            **{key: getattr(measured[name], key) for key in known},
            **bounds_of(measured[name]),
        )
        for name, sample in samples.items()
    ]


def run_header(device: torch.device, group_size: int, commit: str) -> dict[str, Any]:
    """What a file of rows says about the machine and the software."""
    header: dict[str, Any] = {"commit": commit, "ranks": group_size, "torch": torch.__version__, "device": "cpu"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        header |= {"device": properties.name, "multiprocessors": properties.multi_processor_count}
        header |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    header["link"] = link_name(device)
    header["environment"] = {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(("NCCL_", "TORCH_SYMM_MEM_", "UB_")) or name == "CUDA_DEVICE_MAX_CONNECTIONS"
    }
    return header


@functools.cache
def this_commit() -> str:
    """The commit of this source tree; "unknown" outside of a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
