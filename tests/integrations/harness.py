"""Runs checks of other people's libraries on two ranks that have Megatron on the CPU. Imports none of them itself.

One spawn runs all checks of a module, since these libraries take long to import.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.harness.checks import checks_in, make_test

RANKS = 2
HOW = "`make test-integrations` installs what it can, docs/support.md says how"


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that holds it
        return False


def needs(*names: str) -> pytest.MarkDecorator:
    """Skips where one of these modules is not installed, and says which and what to do."""
    missing = [name for name in names if not is_installed(name)]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed: {HOW}")


def make_module_test(module: str, *needed: str) -> Callable[..., None]:
    """The test of the functions `check_...(group_size)` of a module of this folder, which is not imported here."""
    checks = checks_in(f"{__package__}.{module}")
    enter = _with_transformer_engine if "transformer_engine" in needed else _on_the_cpu
    return needs(*needed)(make_test(RANKS, enter, checks, checks))


@contextmanager
def _on_the_cpu(
    group: dist.ProcessGroup, _: torch.device, checks: dict[str, Any], without: tuple[str, ...] = ()
) -> Iterator[Callable[[str], None]]:
    """Each check has tensor-parallel groups of its own."""
    from commfuse_megatron.testing import cpu_megatron

    def run(name: str) -> None:
        from commfuse_megatron.testing.gpt import tensor_parallel

        module, function, _ = checks[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check = getattr(importlib.import_module(module), function)
        with tensor_parallel(group.size()):
            check(group.size())

    with cpu_megatron(without=without):
        yield run


def _with_transformer_engine(group: dist.ProcessGroup, device: torch.device, checks: dict[str, Any]) -> Any:
    return _on_the_cpu(group, device, checks, ("transformer_engine",))
