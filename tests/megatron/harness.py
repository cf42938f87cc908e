"""Runs code of ours in processes that have Megatron on the CPU, with tensor-parallel groups of all ranks.

Imports no Megatron itself: the shims come first.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.testing import cpu_megatron
from tests.harness import run_spawned
from tests.harness.checks import checks_in, make_test

KINDS = ("column", "row")

#: Id -> (ranks in a tensor-parallel group, 0 where the check makes the groups; module; function; what it gets besides).
Checks = dict[str, tuple[int, str, str, tuple[Any, ...]]]


def run_megatron(group_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run the module-level `body(group_size, *args)` on every rank; results by rank."""
    return run_spawned(group_size, _enter, body.__module__, body.__name__, args)


def checks_of_module(module: str, *group_sizes: int) -> Checks:
    """Its functions `check_...(group_size)`, and `check_...(group_size, kind)` for both kinds of linears."""
    return {
        f"{name}-{size}" if len(group_sizes) > 1 else name: (size, *check)
        for size in group_sizes
        for name, check in checks_in(module, KINDS).items()
    }


def make_cpu_test(ranks: int, checks: Checks) -> Callable[..., None]:
    """The test of all `checks`, which run in one group of `ranks` processes."""
    return make_test(ranks, on_the_cpu, checks, checks)


@contextmanager
def on_the_cpu(
    group: dist.ProcessGroup, _: torch.device, checks: Checks, without_shims: tuple[str, ...] = ()
) -> Iterator[Callable[[str], None]]:
    with cpu_megatron(without=without_shims), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

        yield lambda name: _run(group.size(), *checks[name])
        parallel_state.destroy_model_parallel()


def _run(ranks: int, group_size: int, module: str, function: str, more: tuple[Any, ...]) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    is_there = parallel_state.is_initialized()
    if not is_there or parallel_state.get_tensor_model_parallel_world_size() != group_size:
        parallel_state.destroy_model_parallel()
        if group_size:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=group_size)
            model_parallel_cuda_manual_seed(1234)
    getattr(importlib.import_module(module), function)(group_size or ranks, *more)


def _enter(group: dist.ProcessGroup, _: torch.device, module: str, name: str, args: tuple) -> Any:
    with cpu_megatron():
        body = getattr(importlib.import_module(module), name)
        from commfuse_megatron.testing.gpt import tensor_parallel

        with tensor_parallel(group.size()):
            return body(group.size(), *args)
