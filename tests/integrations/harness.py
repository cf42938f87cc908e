"""Runs checks of other people's libraries on two ranks that have Megatron on the CPU. Imports none of them itself.

One spawn runs all checks of a module, since these libraries take long to import. Each check has tensor-parallel groups
of its own, so that one which fails alike on all ranks leaves nothing behind for the next.
"""

import ast
import importlib
import importlib.util
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.harness import run_spawned

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


def names_of_checks(module: str) -> list[str]:
    """The functions `check_...` of a module of this folder, which is read and not imported."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def run_module(module: str, *, with_transformer_engine: bool) -> dict[str, str | None]:
    """Run the checks `name(group_size)` of a module on two ranks: name -> None, or what went wrong where."""
    found = run_spawned(RANKS, _enter, f"{__package__}.{module}", names_of_checks(module), with_transformer_engine)
    return found[0]


def _enter(
    group: dist.ProcessGroup, _: torch.device, module: str, names: list[str], with_transformer_engine: bool
) -> dict[str, str | None]:
    from commfuse_megatron.testing import cpu_megatron

    with cpu_megatron(without=["transformer_engine"] if with_transformer_engine else []):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checks = importlib.import_module(module)
        return _run(group.size(), checks, names)


def _run(group_size: int, checks: Any, names: list[str]) -> dict[str, str | None]:
    from commfuse_megatron.testing.gpt import tensor_parallel

    outcomes: dict[str, str | None] = dict.fromkeys(names, "not run: a check before it failed on one rank alone")
    for name in names:
        error = None
        try:
            with tensor_parallel(group_size):
                getattr(checks, name)(group_size)
        except Exception:
            error = f"rank {dist.get_rank()}:\n{traceback.format_exc()}"
        errors: list[Any] = [None] * group_size
        dist.all_gather_object(errors, error)
        texts = [text for text in errors if text]
        outcomes[name] = "\n".join(texts) if texts else None
        if texts and len(texts) < group_size:  # the ranks no longer agree where they are
            break
    return outcomes
