"""Ranks as processes with torch.distributed initialised: what a user has. Slow to start, so few tests use it."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed as dist

__all__ = ["run_spawned"]


def _enter(rank: int, world_size: int, backend: str, folder: str, body: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    result = body(dist.group.WORLD, device, *args)
    torch.save(result, f"{folder}/result-{rank}")
    dist.barrier()
    # Not after an error: NCCL may wait here for ranks that are waiting elsewhere, and the error would never be seen.
    dist.destroy_process_group()


def run_spawned(world_size: int, body: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """Run the module-level function `body(group, device, *args)` in `world_size` processes; results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (world_size, backend, folder, body, args), nprocs=world_size, join=True)
        return [torch.load(f"{folder}/result-{rank}", weights_only=False) for rank in range(world_size)]
