"""What subcommands check of their options alike, and what they hand to the ranks. Imports no torch."""

import argparse
import typing
from collections.abc import Sequence
from typing import Any

from commfuse_megatron.tools.common.ranks import UsageError


def choices_of(part: type, key: str) -> tuple[str, ...]:
    """What this key of the configuration may be."""
    return typing.get_args(typing.get_type_hints(part)[key])


def for_ranks(arguments: argparse.Namespace, **worked_out: Any) -> argparse.Namespace:
    """The options without what cannot be sent to other processes, and with what has been worked out from them."""
    given = {name: value for name, value in vars(arguments).items() if name not in ("run", "parser")}
    return argparse.Namespace(**given | worked_out)


def refuse_given(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise UsageError where one of these options is given: another value than its default.

    why: says so of the options, which stand where it has "{}", else at its end.
    """
    default = arguments.parser.get_default
    given = [
        f"--{name.removesuffix('_name').replace('_', '-')}"  # `pass` is a word of Python's
        for name in names
        if getattr(arguments, name) != default(name)
    ]
    if given:
        raise UsageError((why if "{}" in why else f"{why} {{}}").format(", ".join(given)))


def require_positive(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise UsageError where one of these options is given and below 1, or has such a value among several."""
    for name in names:
        given = getattr(arguments, name)
        values = given if isinstance(given, list) else [given]
        if any(value is not None and value < 1 for value in values):
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {min(values)}")


def add_rank_options(parser: argparse.ArgumentParser, *, which: str = "default 2") -> None:
    """How many ranks, and where."""
    what = f"ranks to start here ({which}); leave out under torchrun"
    parser.add_argument("--ranks", type=int, metavar="N", help=what)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: gloo; cuda: NCCL (default cpu)")
