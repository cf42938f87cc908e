"""Runs a function on every rank: under torchrun in this process, else in local ranks that it starts itself.

Beware: a body that returns must return the same exit code on all ranks, or its caller sees the largest; a body that
raises on one rank ends all ranks.
"""

from __future__ import annotations

from typing import Any

from commfuse_megatron.tools.common.local_ranks import launch_local
from commfuse_megatron.tools.common.ranks import Body, CannotRunError, Rank, process_group, read_launcher


def why_device_cannot_run(device_type: str, num_ranks: int) -> str | None:
    """Why `num_ranks` ranks cannot run on this machine's `device_type`, None if they can."""
    import torch
    from torch import distributed as dist

    if not dist.is_available():
        return "this PyTorch was built without torch.distributed"
    if device_type == "cpu":
        return None if dist.is_gloo_available() else "--device cpu needs gloo, which this PyTorch was built without"
    if not torch.cuda.is_available():
        return "--device cuda needs a CUDA device and driver, and PyTorch found none; try --device cpu"
    if not dist.is_nccl_available():
        return "--device cuda needs NCCL, which this PyTorch was built without"
    num_local = (read_launcher() or {}).get("LOCAL_WORLD_SIZE", num_ranks)
    from commfuse_megatron.transport.select import SHARED_GPUS, may_share_gpus

    if torch.cuda.device_count() < num_local and not may_share_gpus():
        return (
            f"NCCL takes one rank per GPU: {num_local} ranks on this machine, {torch.cuda.device_count()} GPUs;"
            f" use --ranks with fewer, --device cpu, or {SHARED_GPUS}=1, to share GPUs in tests of correctness"
        )
    return None


def launch(body: Body, options: Any, *, num_ranks: int, device_type: str, timeout_s: float = 600.0) -> int:
    """The exit code of `body(rank, options)`: this rank's under torchrun, else the largest of `num_ranks` local ranks.

    Args:
        body: a module-level function; local ranks are spawned, so it and `options` are pickled.
        timeout_s: how long the ranks may take to meet, and the timeout of the default group's collectives.

    Raises:
        CannotRunError: the device cannot run here (before anything starts), or a local rank found that it cannot run.
        UsageError: a launcher's variables are wrong (before anything starts), or a local rank found a wrong option.
        RankFailedError: a local rank raised anything else or died. All others are stopped first.
    """
    reason = why_device_cannot_run(device_type, num_ranks)
    if reason is not None:
        raise CannotRunError(reason)
    numbers = read_launcher()
    if numbers is not None:
        rank = Rank(numbers["RANK"], numbers["WORLD_SIZE"], device_type)
        with process_group(rank, numbers.get("LOCAL_RANK", rank.global_rank), None, timeout_s):
            return body(rank, options)
    return launch_local(body, options, num_ranks=num_ranks, device_type=device_type, timeout_s=timeout_s)
