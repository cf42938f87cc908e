"""From the samples of one case to its rows: what every row repeats, and what is found only beside other variants."""

import functools
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from commfuse_megatron.schedule import closed_form_us
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.rows import Row, has_word_prefix
from commfuse_megatron.tools.bench.timing import Sample
from commfuse_megatron.tools.bench.variant import Ready, link_name
from commfuse_megatron.tools.common.cases import attention_bound_ms


@dataclass(slots=True)
class Measured:
    """One variant's part of a case: what was built, timed and found out about it."""

    ready: Ready
    max_error: float | None
    gemm: str | None
    host_us: float | None = None
    tail_ms: float | None = None


def make_rows(
    work: Work, measured: Mapping[str, Measured], samples: Mapping[str, Sample], *, is_emulated: bool, commit: str
) -> list[Row]:
    """One row per variant; what all share (lower bounds, sequential) comes from the same `measure`."""
    case, device = work.case, work.pool.device

    def best(prefix: str) -> float | None:
        return min((s.median_ms for name, s in samples.items() if has_word_prefix(name, prefix)), default=None)

    compute_ms = best("compute_only")
    collective_ms = samples["comm_only collective"].median_ms
    comm_ms = best("comm_only")
    assert compute_ms is not None
    assert comm_ms is not None
    rows = []
    for name, sample in samples.items():
        entry = measured[name]
        ready = entry.ready
        chunks = ready.chunks_per_shard
        bound_ms = split_ms = None
        own_comm = samples.get(f"comm_only {ready.transport}")
        own_ms = comm_ms if own_comm is None else own_comm.median_ms
        if ready.path == "sliced" and chunks is not None:
            slices = samples.get(f"slices_only m={chunks} {entry.gemm}")
            split_ms = None if slices is None else slices.median_ms - compute_ms
            if work.pass_name == "fprop":
                bound_ms = closed_form_us(compute_ms, own_ms, case.group_size, chunks)
        if work.pass_name == "fprop" and ready.path == "query_split":
            bound_ms = attention_bound_ms(case, compute_ms, own_ms, chunks or 1)
        rows.append(
            Row(
                **case.sizes,
                pass_name=work.pass_name,
                dtype=work.dtype_name,
                emulated=is_emulated,
                variant=name,
                path=ready.path,
                transport=ready.transport,
                algorithm=ready.algorithm,
                chunks_per_shard=chunks,
                median_ms=sample.median_ms,
                p95_ms=sample.p95_ms,
                rounds=sample.rounds,
                compute_only_ms=compute_ms,
                comm_only_ms=comm_ms,
                comm_only_collective_ms=collective_ms,
                sequential_ms=samples["sequential"].median_ms,
                schedule_bound_ms=bound_ms,
                host_us=entry.host_us,
                tail_ms=entry.tail_ms,
                split_loss_ms=split_ms,
                max_error=entry.max_error,
                reason=ready.reason,
                shrink=case.shrink,
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                link=link_name(device),
                commit=commit,
                cuda_device_max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
            )
        )
    return rows


def run_header(device: torch.device, group_size: int, commit: str) -> dict[str, Any]:
    """What a file of rows says about the machine and the software."""
    header: dict[str, Any] = {"commit": commit, "ranks": group_size, "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        header |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    else:
        header |= {"device": "cpu"}
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
