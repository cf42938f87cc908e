"""`commfuse simulate`: what larger groups and slower links would take, from rows that `commfuse bench` measured.

Needs no GPU and no ranks, only the file. No linear is predicted without measurements, and every prediction stands
beside the error that the same model makes on the rows it can be checked with. Whole steps need no rows (`steps.py`).
"""

import argparse

from commfuse_megatron.tools.common.options import refuse_given, require_positive
from commfuse_megatron.tools.common.output import each_once
from commfuse_megatron.tools.common.ranks import UsageError

SUMMARY = "predict larger groups and slower links from measured rows, and say how wrong that is where measured"
EXAMPLE = """commfuse simulate --rows rows.json --ranks 8 16 64 --link 25
  commfuse simulate --step llama-70b --ranks 2 4 8 --tokens 4096 8192"""

_RANKS, _RANKS_OF_STEPS = (8, 16, 64), (2, 4, 8, 16)

_MOST_RANKS = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `commfuse simulate`. Imports no torch."""
    from commfuse_megatron.tools.common.cases import LINEARS, STEP_LAYERS

    models = list(dict.fromkeys(name.split(".")[0] for name in _selectable_linears()))
    add = parser.add_argument
    rows = "rows that `commfuse bench --json FILE` measured on GPUs; with --step, the machine that steps are predicted"
    add("--rows", metavar="FILE", help=f"{rows} for (default: H200 and NVLink as the planner assumes them)")
    against = "rows of a larger group on such a machine: how wrong emulation and model are; with --step, of steps that"
    add("--against", metavar="FILE", help=f"{against} `commfuse trace --step --json FILE` measured (default: ours)")
    sizes = "group sizes (default 8 16 64; with --step 2 4 8 16)"
    add("--ranks", nargs="+", type=int, metavar="N", help=sizes)
    add("--link", metavar="LINK", help="nvlink or host, as in the rows, or a bandwidth in GB/s per rank and direction")
    add(
        "--models",
        nargs="+",
        choices=models,
        default=models,
        metavar="MODEL",
        help=f"of {', '.join(models)}; not with --step",
    )
    add("--linears", nargs="+", choices=LINEARS, default=list(LINEARS), metavar="L", help=f"of {', '.join(LINEARS)}")
    add("--tokens", nargs="+", type=int, default=[8192], metavar="M", help="of the whole sequence (default 8192)")
    add(
        "--figure",
        metavar="FILE",
        help="draw the predictions into FILE (.png or .svg), not of --step; missing folders are made",
    )
    step = f"whole training steps of MODEL, of {', '.join(STEP_LAYERS)}, and the error on those that were measured"
    add("--step", choices=STEP_LAYERS, metavar="MODEL", help=f"{step}; needs no rows")
    add("--layers", type=int, metavar="N", help="with --step: layers of the model (default: as published)")
    sharing = "with --step: so many of the ranks share a sequence (cp_comm_type a2a), the others are tensor-parallel"
    add("--context-parallel", type=int, default=1, metavar="C", help=f"{sharing} (default 1)")


def _selectable_linears() -> list[str]:
    from commfuse_megatron.tools.common.cases import CASE_NAMES

    return [name for name in CASE_NAMES if not name.startswith("paper-mlp.")]


def run(arguments: argparse.Namespace) -> int:
    """Check the options and predict. 0: done; 2: measurements are missing."""
    arguments.ranks = each_once(arguments.ranks or (_RANKS if arguments.step is None else _RANKS_OF_STEPS))
    arguments.tokens = each_once(arguments.tokens)
    if min(arguments.ranks) < 2:
        raise UsageError(f"--ranks must be at least 2, got {min(arguments.ranks)}")
    if max(arguments.ranks) > _MOST_RANKS:
        largest = f"{_MOST_RANKS}, got {max(arguments.ranks)}"
        raise UsageError(f"--ranks must be at most {largest}: every step of a rank is simulated")
    require_positive(arguments, ("layers", "context_parallel"))
    if min(arguments.tokens) < 1:
        raise UsageError(f"--tokens must be at least 1, got {min(arguments.tokens)}")
    if arguments.step is not None:
        from commfuse_megatron.tools.simulate.steps import run_simulate_step

        refuse_given(arguments, ("models", "linears", "figure"), "--step predicts a whole model; leave out")
        return run_simulate_step(arguments)
    refuse_given(arguments, ("layers", "context_parallel"), "only --step takes")
    if arguments.rows is None:
        raise UsageError(
            "no measurements: name a file of rows with --rows FILE. On two or more GPUs of one host,\n"
            "  torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda --json FILE\n"
            "measures the GEMMs, messages and collectives that predictions start from."
        )
    from commfuse_megatron.tools.simulate.linears import run_simulate_linears

    return run_simulate_linears(arguments, _selectable_linears())
