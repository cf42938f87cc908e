"""The options of `commfuse trace`, and what all its kinds read from them. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from commfuse_megatron.config import OverlapConfig, config_file_from_environment
from commfuse_megatron.tools.common.options import for_ranks
from commfuse_megatron.tools.common.output import require_files

ATTENTION_PATHS = ("sequential", "row_parallel", "query_split")
OF_STEPS = ("model", "layers", "batch", "transformer_impl", "fusions", "rounds", "runs")


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """What `commfuse trace` takes besides ranks and device."""
    paths = ("auto", "sliced", "bulk", "async", "sequential")
    parser.add_argument("--path", choices=paths, help="way of the traced linears (default: the configuration's)")
    parser.add_argument("--algorithm", choices=("auto", "direct", "ring"), help="default: the configuration's")
    parser.add_argument("--chunks", type=int, metavar="m", help="chunks per shard")
    parser.add_argument("--transport", choices=("auto", "gloo", "nccl", "copy_engine"), help="default auto")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML that the options above change (default: $COMMFUSE_CONFIG)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default float32, cuda bfloat16")
    parser.add_argument(
        "--output",
        metavar="DIR",
        default="trace_output",
        help="where picture and trace go; made if missing (default trace_output)",
    )
    parser.add_argument("--name", metavar="NAME", help="of the files (default: from what is traced)")
    parser.add_argument(
        "--seq",
        type=int,
        metavar="S",
        help="sequence of a block (default 8192) or a step (default 256 on cpu; on cuda 1024, llama 8192)",
    )
    one = parser.add_argument_group("one operation (the default)")
    one.add_argument("--op", choices=("all_gather_linear", "linear_reduce_scatter"), help="default: that of the case")
    one.add_argument("--pass", dest="pass_name", choices=("fprop", "backward"), default="fprop", help="default fprop")
    one.add_argument(
        "--case",
        metavar="CASE",
        help="a linear of a known model, e.g. llama-70b.fc2 (cuda: the default), or an attention block of one",
    )
    one.add_argument("--tokens", type=int, metavar="M", help="of the full sequence (default 512 on cpu, 8192 on cuda)")
    one.add_argument("--N", type=int, help="output features of one rank's weight (default 512)")
    one.add_argument("--K", type=int, help="input features of one rank's weight (default 512)")
    one.add_argument("--calls", type=int, default=5, metavar="n", help="recorded calls (default 5)")
    one.add_argument("--profiler", action="store_true", help="look at kernels and copies by stream (cuda only)")
    block = parser.add_argument_group("one attention block (also --pass, --case, --calls, --profiler and --seq)")
    block.add_argument(
        "--attention",
        action="store_true",
        help="attention with its projection; --path, --algorithm and --chunks are of row_parallel's projection",
    )
    block.add_argument(
        "--paths",
        nargs="+",
        choices=ATTENTION_PATHS,
        metavar="P",
        help=f"of {', '.join(ATTENTION_PATHS)} (default all, in this order)",
    )
    block.add_argument(
        "--splits", type=int, metavar="m", help="splits per shard of query_split (default: the configuration's)"
    )
    block.add_argument("--shrink", type=int, metavar="F", help="divide all sizes by F (default 1; 64 on the CPU)")
    step = parser.add_argument_group("a whole step (also --seq)")
    step.add_argument("--step", action="store_true", help="forward and backward of a Megatron GPT, stock and planned")
    step.add_argument("--model", choices=("demo", "llama-8b", "llama-70b"), default="demo", help="default demo")
    step.add_argument("--layers", type=int, metavar="L", help="default 2, llama 4")
    step.add_argument("--batch", type=int, default=1, metavar="B", help="default 1")
    step.add_argument(
        "--transformer-impl", choices=("local", "transformer_engine"), default="local", help="attention and norms"
    )
    step.add_argument("--fusions", action="store_true", help="Megatron's fused activation, dropout and rotary kernels")
    step.add_argument(
        "--rounds", type=int, default=9, metavar="n", help="timed steps of each variant in a run (default 9)"
    )
    step.add_argument("--runs", type=int, default=1, metavar="n", help="in each, variants take turns (default 1)")


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
