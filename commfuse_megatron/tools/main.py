"""The command line of `commfuse`: subcommands, their options, exit codes. Imports a subcommand's code when it runs.

Exit codes: 0 passed, 1 a check failed or a rank ended with an error, 2 wrong usage or cannot run here, 130 interrupted.
"Cannot run here" is said of this machine only; what would be wrong on any other, too, is an error of usage.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from commfuse_megatron import __version__
from commfuse_megatron.errors import CommFuseError, ConfigError, UnsupportedError
from commfuse_megatron.tools.common.ranks import (
    CannotRunError,
    RankFailedError,
    UsageError,
    is_speaker,
    leave_it_to_the_first_rank,
)

PASSED, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

_PICTURES = (".png", ".svg")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    try:
        with _imports_end_when_interrupted():
            return _run(build_parser().parse_args(argv))
    except KeyboardInterrupt:
        _say_interrupted()
        return INTERRUPTED


@contextmanager
def _imports_end_when_interrupted() -> Iterator[None]:
    """Ctrl-C while something is imported ends the process; else it is KeyboardInterrupt, as usual.

    Importing torch takes seconds, and its C++ loses the exception or has Python take it for unhandled.
    """
    is_ours_to_handle = threading.current_thread() is threading.main_thread()
    if not is_ours_to_handle or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                _say_interrupted()
                os._exit(INTERRUPTED)
            frame = frame.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _say_interrupted() -> None:
    if is_speaker():
        # A progress bar has left the cursor hidden and in its line.
        print("\x1b[?25h\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr, flush=True)


def _run(arguments: argparse.Namespace) -> int:
    from commfuse_megatron.tools.common.output import configure_logging

    configure_logging(logging.INFO if arguments.verbose else logging.WARNING)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        _require_writable(arguments)
        return run(arguments)
    except RankFailedError as error:
        print(f"commfuse {arguments.command} failed.\n{error}", file=sys.stderr)
        return FAILED
    except (UsageError, ConfigError) as error:
        leave_it_to_the_first_rank()
        if isinstance(error, UsageError):  # of a mistake in a file the options say nothing
            arguments.parser.print_usage(sys.stderr)
        print(f"commfuse {arguments.command}: error: {error}", file=sys.stderr)
        return REFUSED
    except (CannotRunError, UnsupportedError) as error:
        leave_it_to_the_first_rank()
        print(f"commfuse {arguments.command} cannot run here: {error}", file=sys.stderr)
        return REFUSED
    except CommFuseError as error:
        print(f"commfuse {arguments.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED


def _require_writable(arguments: argparse.Namespace) -> None:
    """Before any work is done: results that cannot be written are found out now. Makes nothing yet."""
    from commfuse_megatron.tools.common.output import why_file_cannot_be_written, why_folder_cannot_be_written

    checks = (
        ("json", why_file_cannot_be_written),
        ("figure", why_file_cannot_be_written),
        ("write_plans", why_file_cannot_be_written),
        ("output", why_folder_cannot_be_written),
    )
    for option, why_not in checks:
        place = getattr(arguments, option, None)
        reason = why_not(place) if place else None
        if reason is not None:
            raise UsageError(f"--{option.replace('_', '-')} {place}: {reason}")
    if getattr(arguments, "figure", None):
        if Path(arguments.figure).suffix.lower() not in _PICTURES:
            raise UsageError(f"--figure {arguments.figure}: pictures are {' or '.join(_PICTURES)}")
        from commfuse_megatron.tools.common.pictures import missing_matplotlib

        missing = missing_matplotlib()
        if missing is not None:
            raise CannotRunError(f"--figure {arguments.figure}: {missing}")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands; every one's help ends with an example."""
    parser = argparse.ArgumentParser(
        prog="commfuse",
        description="Tensor-parallel communication of Megatron-Core hidden under partial GEMMs.",
        epilog="exit codes: 0 passed, 1 a check failed, 2 wrong usage or cannot run here; the message says why",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    _add_demo(commands)
    _add_verify(commands)
    _add_trace(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_simulate(commands)
    return parser


class _CommandParser(argparse.ArgumentParser):
    """A subcommand's: what it does not know is its own error, with its own usage, said by one rank."""

    def parse_known_args(self, args=None, namespace=None):
        """Nothing unknown is left to the parser above."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Under a launcher all ranks read the same command line."""
        leave_it_to_the_first_rank()
        super().error(message)


def _add_command(
    commands: "argparse._SubParsersAction[_CommandParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE; missing folders are made")
    parser.add_argument("-v", "--verbose", action="store_true", help="more logs on stderr")
    parser.set_defaults(run=run, parser=parser)
    return parser


def _add_demo(commands: "argparse._SubParsersAction[_CommandParser]") -> None:
    def run(arguments: argparse.Namespace) -> int:
        from commfuse_megatron.tools.demo.cli import run_demo

        return run_demo(arguments)

    parser = _add_command(
        commands,
        "demo",
        run,
        summary="train a small Megatron GPT twice on real text, stock and overlapped, and compare the losses",
        example="commfuse demo --ranks 2 --steps 20\n"
        "  torchrun --nproc-per-node 2 -m commfuse_megatron demo --device cuda --dtype bfloat16",
    )
    _add_rank_options(parser, which="2, 4 or 8; default 2")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="training steps (default 20)")
    parser.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16"), default="float32", help="of the model (default float32)"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="train on FILE, byte by byte: at least 10000 bytes, of which the first 2000000 are used (default: the"
        " Python standard library's sources)",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        default="demo_output",
        help="where picture and trace go; made if missing (default demo_output)",
    )


def _add_doctor(commands: "argparse._SubParsersAction[_CommandParser]") -> None:
    def run(arguments: argparse.Namespace) -> int:
        from commfuse_megatron.tools.doctor.cli import run_doctor

        return run_doctor(arguments)

    _add_command(
        commands,
        "doctor",
        run,
        summary="show versions, GPUs and links, what will run here and what not, and why",
        example="commfuse doctor --json doctor.json",
    )


def _add_verify(commands: "argparse._SubParsersAction[_CommandParser]") -> None:
    def run(arguments: argparse.Namespace) -> int:
        if arguments.megatron:
            from commfuse_megatron.tools.verify.megatron_cli import run_verify_megatron

            return run_verify_megatron(arguments)
        if arguments.only:
            raise UsageError("--only names configurations of --megatron")
        if arguments.lora:
            raise UsageError("--lora puts adapters into the models of --megatron: give that, too")
        from commfuse_megatron.tools.verify.cli import run_verify

        return run_verify(arguments)

    parser = _add_command(
        commands,
        "verify",
        run,
        summary="compare every operation with its reference, or whole models with stock Megatron",
        example="commfuse verify --ranks 4 --json verify.json\n"
        "  commfuse verify --megatron --ranks 4 --only dense mla pipeline\n"
        "  commfuse verify --megatron --lora --ranks 2 --only dense fused\n"
        "  torchrun --nproc-per-node 2 -m commfuse_megatron verify",
    )
    _add_rank_options(parser, which="default 2")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16", "float16"),
        help="only this one (default: all; float64 on the CPU only)",
    )
    parser.add_argument(
        "--transport", choices=("auto", "gloo", "nccl", "copy_engine"), default="auto", help="default auto"
    )
    parser.add_argument(
        "--megatron",
        action="store_true",
        help="compare models instead: loss and every gradient against stock Megatron, float64, 2 or 4 CPU ranks",
    )
    parser.add_argument(
        "--lora",
        action="store_true",
        help="with --megatron: the models with low-rank adapters at all linears, before and after conversion; all"
        " combinations of the options take minutes",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="with --megatron: these configurations (default: all; an unknown name lists them); with --lora: words of"
        " its options, which leave the configurations that have them",
    )


def _add_bench(commands: "argparse._SubParsersAction[_CommandParser]") -> None:
    from commfuse_megatron.tools.bench.cli import add_bench_options, run_bench

    parser = _add_command(
        commands,
        "bench",
        run_bench,
        summary="time the linears beside their bounds, the stock ones and the peers; on the CPU, check them only",
        example="commfuse bench --models llama-8b --tokens 1024\n"
        "  torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda --budget-s 300 --json rows.json\n"
        "  torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda --write-plans plans.json",
    )
    _add_rank_options(parser, which="default 2")
    add_bench_options(parser)


def _add_simulate(commands: "argparse._SubParsersAction[_CommandParser]") -> None:
    from commfuse_megatron.tools.simulate.cli import add_simulate_options, run_simulate

    parser = _add_command(
        commands,
        "simulate",
        run_simulate,
        summary="predict larger groups and slower links from measured rows, and say how wrong that is where measured",
        example="commfuse simulate --rows rows.json --ranks 8 16 64 --link 25",
    )
    add_simulate_options(parser)


def _add_trace(commands: "argparse._SubParsersAction[_CommandParser]") -> None:
    from commfuse_megatron.tools.trace.cli import run_trace
    from commfuse_megatron.tools.trace.options import add_trace_options

    parser = _add_command(
        commands,
        "trace",
        run_trace,
        summary="show when what ran: a linear, an attention block or a Megatron step, as trace, picture and table",
        example="commfuse trace --op all_gather_linear --pass backward --ranks 2\n"
        "  commfuse trace --case llama-70b.fc2 --device cuda --profiler --calls 2 --output figures\n"
        "  commfuse trace --attention --ranks 2 --paths row_parallel query_split --splits 2\n"
        "  commfuse trace --step --model llama-8b --device cuda --transformer-impl transformer_engine",
    )
    _add_rank_options(parser, which="default 2")
    add_trace_options(parser)


def _add_rank_options(parser: argparse.ArgumentParser, *, which: str) -> None:
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"ranks to start here ({which}); leave out under torchrun",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: gloo; cuda: NCCL (default cpu)")
