"""The memory that each variant of a step takes, though the models of others are there, too.

Knows nothing of models. Beware: from each variant is taken away what it found, but for what all of them use (NCCL's
buffers, workspaces), which is there since the steps of the first one.
"""

from collections.abc import Callable
from typing import Any

import torch

#: What builds a variant's model; None: it is that of the first variant.
Builders = dict[str, Callable[[], Any] | None]


def warm_up(
    builders: Builders, run: Callable[[str, Any], object], count: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Build all, `run(variant, model)` `count` times; their [largest allocated, whole device] in bytes, of this rank.

    The first step also plans: its peak counts only where there is no other one.
    """
    memory: dict[str, torch.Tensor] = {}
    first = None
    for name, build in builders.items():
        found = _bytes_in_use(device)
        model = first if build is None else build()
        weights = _bytes_in_use(device) - found
        for number in range(count):
            if number == 1:
                _bytes_in_use(device)
            run(name, model)
        peak = _peak_bytes(device)
        if first is None:
            first, memory[name] = model, peak
            alone = _bytes_in_use(device)  # what all use, and its model
            without_model = alone - weights
        else:
            memory[name] = peak - found + (alone if build is None else without_model)
    return memory


def _bytes_in_use(device: torch.device) -> torch.Tensor:
    """[allocated, whole device] while nothing runs and PyTorch keeps nothing unused; the peak begins anew."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return _peak_bytes(device)


def _peak_bytes(device: torch.device) -> torch.Tensor:
    """[largest allocated, whole device] since `_bytes_in_use`: PyTorch has kept what it took. Zeros on the CPU."""
    if device.type != "cuda":
        return torch.zeros(2, dtype=torch.int64)
    free, total = torch.cuda.mem_get_info()
    return torch.tensor([torch.cuda.max_memory_allocated(), total - free])
