"""How calls may run, and which of two errors is worse."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from commfuse_megatron.config import KernelConfig, OverlapConfig

Mode = Literal["stepped", "tape", "graph"]

#: How the copy engine may run a call, each faster than the one before: on tensors, from a tape, as a CUDA graph of one.
MODES: tuple[Mode, ...] = ("stepped", "tape", "graph")


def with_mode(config: OverlapConfig, mode: Mode) -> OverlapConfig:
    """`config`, under which no call runs in a faster mode."""
    if mode == "stepped":
        return dataclasses.replace(config, kernel=KernelConfig(gemm="torch"))
    if mode == "tape":
        return dataclasses.replace(config, transport=dataclasses.replace(config.transport, graph_memory_mib=0))
    return config


def describe_modes(modes: Mapping[str, int]) -> str:
    """E.g. "stepped 12, tape 8, graph 24"."""
    return ", ".join(f"{mode} {modes[mode]}" for mode in MODES if modes.get(mode)) or "none"


def badness(error: float) -> tuple[bool, float]:
    """What errors are compared by: NaN is worse than all."""
    return (math.isnan(error), error)
