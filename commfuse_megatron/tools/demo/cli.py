"""`commfuse demo`: one small Megatron GPT, trained stock and overlapped on real text, compared step by step.

What is trained and what counts as passed is in `training.py`, what is printed and written in `report.py`.
"""

import argparse
from pathlib import Path

from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import add_rank_options, for_ranks
from commfuse_megatron.tools.common.output import require_files
from commfuse_megatron.tools.common.ranks import UsageError, choose_num_ranks, require_megatron

SUMMARY = "train a small Megatron GPT twice on real text, stock and overlapped, and compare the losses"
EXAMPLE = """commfuse demo --ranks 2 --steps 20
  torchrun --nproc-per-node 2 -m commfuse_megatron demo --device cuda --dtype bfloat16"""

RANKS = (2, 4, 8)
LEAST_TEXT_BYTES = 10_000
#: Every rank gets a copy. Some 2000 steps on the CPU see as many bytes.
MOST_TEXT_BYTES = 2_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `commfuse demo` takes."""
    add_rank_options(parser, which="2, 4 or 8; default 2")
    add = parser.add_argument
    add("--steps", type=int, default=20, metavar="N", help="training steps (default 20)")
    dtypes = ("float32", "float64", "bfloat16")
    add("--dtype", choices=dtypes, default="float32", help="of the model (default float32)")
    what = (
        f"train on FILE, byte by byte: at least {LEAST_TEXT_BYTES} bytes, of which the first {MOST_TEXT_BYTES} are used"
        " (default: the Python standard library's sources)"
    )
    add("--text", metavar="FILE", help=what)
    what = "where picture and trace go; made if missing (default demo_output)"
    add("--output", metavar="DIR", default="demo_output", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Train and compare on all ranks. 0: losses and gradients agree, every call was overlapped in its mode; 1: not."""
    if arguments.steps < 1:
        raise UsageError(f"--steps must be at least 1, got {arguments.steps}")
    num_ranks = choose_num_ranks(arguments.ranks)
    if num_ranks not in RANKS:
        raise UsageError(f"the demo's model can be cut for {', '.join(map(str, RANKS))} ranks, not {num_ranks}")
    require_megatron()
    require_files(arguments.output, ("timeline.json", "timeline.png"))
    options = for_ranks(arguments, text=_read_text(arguments.text))
    from commfuse_megatron.tools.demo.report import demo_on_rank

    return launch(demo_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _read_text(file: str | None) -> bytes:
    from commfuse_megatron.tools.common.text import standard_library_text

    try:
        if file is None:
            text = standard_library_text(MOST_TEXT_BYTES)
        else:
            with Path(file).open("rb") as opened:  # which may be a device without an end
                text = opened.read(MOST_TEXT_BYTES)
    except OSError as error:
        raise UsageError(f"the text cannot be read: {error}") from error
    if len(text) < LEAST_TEXT_BYTES:
        raise UsageError(f"--text {file} has {len(text)} bytes; the demo needs at least {LEAST_TEXT_BYTES} to train on")
    return text
