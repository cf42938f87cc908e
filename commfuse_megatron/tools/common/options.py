"""What subcommands check of their options alike. Imports no torch."""

import argparse
from collections.abc import Sequence

from commfuse_megatron.tools.common.ranks import UsageError

__all__ = ["refuse_given", "require_positive"]


def refuse_given(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise UsageError where one of these options is given: another value than its default."""
    default = arguments.parser.get_default
    given = [
        f"--{name.removesuffix('_name').replace('_', '-')}"  # `pass` is a word of Python's
        for name in names
        if getattr(arguments, name) != default(name)
    ]
    if given:
        raise UsageError(f"{why} {', '.join(given)}")


def require_positive(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise UsageError where one of these options is given and below 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")
