"""The command line of `commfuse`: subcommands and exit codes. What a subcommand is and takes is in its room's `cli.py`.

Exit codes: 0 passed, 1 a check failed or a rank ended with an error, 2 wrong usage or cannot run here, 130 interrupted.
"Cannot run here" is said of this machine only; what would be wrong on any other, too, is an error of usage.
"""

import argparse
import importlib
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

#: Each a room beside this file. Its `cli`, which imports no torch, has SUMMARY, EXAMPLE, `add_options` and `run`.
COMMANDS = ("demo", "verify", "trace", "doctor", "bench", "simulate")

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
        if place == "":
            raise UsageError(f"--{option.replace('_', '-')}: a name is missing")
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
        allow_abbrev=False,
        epilog="exit codes: 0 passed, 1 a check failed, 2 wrong usage or cannot run here; the message says why",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name in COMMANDS:
        room = importlib.import_module(f"commfuse_megatron.tools.{name}.cli")
        command = commands.add_parser(
            name,
            allow_abbrev=False,
            help=room.SUMMARY,
            description=f"{room.SUMMARY[0].upper()}{room.SUMMARY[1:]}.",
            epilog=f"example:\n  {room.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", metavar="FILE", help="also write the results to FILE; missing folders are made")
        command.add_argument("-v", "--verbose", action="store_true", help="more logs on stderr")
        command.set_defaults(run=room.run, parser=command)
        room.add_options(command)
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
