"""Runs code of ours in processes that have Megatron on the CPU, with tensor-parallel groups of all ranks.

Starting such processes takes seconds, so one run makes many checks. Imports no Megatron itself: the shims come first.
"""

import importlib
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.testing import cpu_megatron
from tests.harness import run_spawned

Check = Callable[[int], None]


def run_megatron(group_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run the module-level `body(group_size, *args)` on every rank; results by rank."""
    return run_spawned(group_size, _enter, body.__module__, body.__name__, args)


def run_checks(group_size: int, checks: list[tuple[str, str]]) -> dict[str, str | None]:
    """Run functions `name(group_size)`, given as (module, name), in one spawn: name -> None, or what went wrong where.

    After a failure the ranks no longer agree where they are; the checks that follow count as not run.
    """
    return run_spawned(group_size, _enter, __name__, _run_checks.__name__, (checks,))[0]


def names_of_checks(module: Any) -> list[str]:
    return [name for name in vars(module) if name.startswith("check_")]


def _enter(group: dist.ProcessGroup, _: torch.device, module: str, name: str, args: tuple) -> Any:
    with cpu_megatron():
        body = getattr(importlib.import_module(module), name)
        from commfuse_megatron.testing.gpt import tensor_parallel

        with tensor_parallel(group.size()):
            return body(group.size(), *args)


def _run_checks(group_size: int, checks: list[tuple[str, str]]) -> dict[str, str | None]:
    results: dict[str, str | None] = {}
    has_failed = False
    for module_name, name in checks:
        if has_failed:
            results[name] = "not run: a check before it failed"
            continue
        error = None
        try:
            getattr(importlib.import_module(module_name), name)(group_size)
        except Exception:
            error = f"rank {dist.get_rank()}:\n{traceback.format_exc()}"
        errors: list[Any] = [None] * group_size
        dist.all_gather_object(errors, error)
        texts = [text for text in errors if text]
        has_failed = bool(texts)
        results[name] = "\n".join(texts) if texts else None
    return results
