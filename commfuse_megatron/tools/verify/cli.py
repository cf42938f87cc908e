"""`commfuse verify`: the operations against their reference, or models against stock Megatron, at the current ranks.

What runs on the ranks is in `report.py`.
"""

import argparse

from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import add_rank_options, choices_of, for_ranks
from commfuse_megatron.tools.common.ranks import UsageError, choose_num_ranks, choose_several_ranks, require_megatron
from commfuse_megatron.tools.verify.lora_cases import choose

SUMMARY = "compare every operation with its reference, or whole models with stock Megatron"
EXAMPLE = """commfuse verify --ranks 4 --json verify.json
  commfuse verify --megatron --ranks 4 --only dense mla pipeline
  commfuse verify --megatron --lora --ranks 2 --only dense fused
  torchrun --nproc-per-node 2 -m commfuse_megatron verify"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `commfuse verify` takes."""
    add_rank_options(parser)
    add = parser.add_argument
    dtypes = ("float32", "float64", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="only this one (default: all; float64 on the CPU only)")
    add("--transport", choices=choices_of(TransportConfig, "backend"), default="auto", help="default auto")
    what = "compare models instead: loss and every gradient against stock Megatron, float64, 2 or 4 CPU ranks"
    add("--megatron", action="store_true", help=what)
    what = (
        "with --megatron: the models with low-rank adapters at all linears, before and after conversion; all"
        " combinations of the options take ten minutes"
    )
    add("--lora", action="store_true", help=what)
    what = (
        "with --megatron: these configurations (default: all; an unknown name lists them); with --lora: words of"
        " its options, which leave the configurations that have them"
    )
    add("--only", nargs="+", metavar="NAME", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Verify on all ranks. 0: all is right and was overlapped; 1: not."""
    num_ranks = _checked_models(arguments) if arguments.megatron else _checked_ops(arguments)
    from commfuse_megatron.tools.verify.report import verify_models_on_rank, verify_ops_on_rank

    body = verify_models_on_rank if arguments.megatron else verify_ops_on_rank
    return launch(body, for_ranks(arguments), num_ranks=num_ranks, device_type=arguments.device)


def _checked_ops(arguments: argparse.Namespace) -> int:
    """How many ranks. Raises UsageError for what does not go together."""
    if arguments.only:
        raise UsageError("--only names configurations of --megatron")
    if arguments.lora:
        raise UsageError("--lora puts adapters into the models of --megatron: give that, too")
    if arguments.transport != "auto" and (arguments.transport == "gloo") != (arguments.device == "cpu"):
        other = "cpu" if arguments.transport == "gloo" else "cuda"
        raise UsageError(f"--transport {arguments.transport} carries tensors of --device {other} only")
    return choose_several_ranks(arguments.ranks)


def _checked_models(arguments: argparse.Namespace) -> int:
    if arguments.device != "cpu":
        raise UsageError("--megatron compares in float64, which is overlapped on the CPU only: use --device cpu")
    if arguments.dtype is not None or arguments.transport not in ("auto", "gloo"):
        raise UsageError("--megatron compares in float64 over gloo: leave --dtype and --transport out")
    num_ranks = choose_num_ranks(arguments.ranks)
    require_megatron()
    try:
        choose(num_ranks, arguments.only, lora=arguments.lora)
    except ConfigError as error:
        raise UsageError(f"--megatron: {error}") from None
    return num_ranks
