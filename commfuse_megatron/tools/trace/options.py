"""What all kinds of `commfuse trace` read from its options. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from commfuse_megatron.config import OverlapConfig, config_file_from_environment
from commfuse_megatron.tools.common.options import for_ranks
from commfuse_megatron.tools.common.output import require_files

ATTENTION_PATHS = ("sequential", "row_parallel", "query_split")
OF_STEPS = ("model", "layers", "batch", "transformer_impl", "fusions", "rounds", "runs")


def config_of(arguments: argparse.Namespace) -> OverlapConfig:
    """The configuration of `--config`, else the environment's, with what other options force in the traced passes."""
    file = arguments.config or config_file_from_environment()
    base = OverlapConfig.from_file(file) if file else OverlapConfig()
    data = base.to_dict()
    passes = {None: ("fprop", "dgrad"), "fprop": ("fprop",), "backward": ("dgrad",)}
    for name in passes[None if arguments.step else arguments.pass_name]:
        is_backward_only = arguments.path in ("bulk", "async") and name == "fprop"
        if arguments.path and not is_backward_only:
            data["linear"][name]["path"] = arguments.path
        if arguments.algorithm:
            data["linear"][name]["algorithm"] = arguments.algorithm
        if arguments.chunks is not None:
            data["linear"][name]["chunks_per_shard"] = arguments.chunks
    if arguments.transport:
        data["transport"]["backend"] = arguments.transport
    if arguments.path == "sequential" and not arguments.step and not arguments.attention:
        data["kernel"]["gemm"] = "torch"  # plain collective, plain GEMM
    return OverlapConfig.from_dict(data, source="these options")


def ready(arguments: argparse.Namespace, name: str, **worked_out: Any) -> argparse.Namespace:
    """What the ranks get: the options, with name, dtype and configuration. Files that cannot be are refused."""
    name = arguments.name or name
    require_files(arguments.output, (f"{name}.json", f"{name}.png"))
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    return for_ranks(arguments, **{"name": name, "dtype": dtype, "config": config_of(arguments)} | worked_out)
