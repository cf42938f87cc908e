"""Many checks in one spawned group: what went wrong in each, on whatever rank, known on all of them."""

import sys
import time
import traceback
from collections.abc import Callable

import torch.distributed as dist

__all__ = ["outcome_on_all_ranks"]


def outcome_on_all_ranks(name: str, check: Callable[[], object]) -> str | None:
    """The tracebacks of all ranks of the default group; None where the check passed on every one. Collective."""
    rank, began = dist.get_rank(), time.monotonic()
    error = None
    try:
        check()
    except Exception:
        error = f"rank {rank}: {traceback.format_exc()}"
        sys.stderr.write(f"{name}: {error}\n")  # the other ranks may be waiting for this one
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    found = "\n".join(filter(None, errors)) or None
    if rank == 0:
        sys.stderr.write(f"{name}: {found or 'passed'} ({time.monotonic() - began:.1f} s)\n")
    return found
