"""Tests with other people's libraries on two ranks that have Megatron on the CPU. Imports none of them itself.

One spawn runs all checks of a module, since these libraries take long to import.
"""

import importlib.util
from collections.abc import Callable

import pytest

from tests.megatron.harness import checks_of_module, make_cpu_test

RANKS = 2
HOW = "`make test-integrations` installs what it can, docs/support.md says how"


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that holds it
        return False


def make_module_test(module: str, *needed: str) -> Callable[..., None]:
    """The test of the functions `check_...(group_size)` of a module of this folder, which is not imported here.

    Skips where one of the `needed` modules is not installed, and says which and what to do.
    """
    missing = [name for name in needed if not is_installed(name)]
    skip = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed: {HOW}")
    without = ("transformer_engine",) if "transformer_engine" in needed else ()
    return skip(make_cpu_test(RANKS, checks_of_module(f"{__package__}.{module}", RANKS), without_shims=without))
