"""Checks in processes that have Megatron on the CPU, in tensor-parallel groups of all ranks or of their own.

Imports no Megatron itself: the shims come first.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.testing import cpu_megatron
from tests.harness.checks import checks_in, make_test

KINDS = ("column", "row")

#: Id -> (ranks in a tensor-parallel group, 0 where the check makes the groups; module; function; what it gets besides).
Checks = dict[str, tuple[int, str, str, tuple[Any, ...]]]


def checks_of_module(module: str, *group_sizes: int) -> Checks:
    """Its functions `check_...(group_size)`, and `check_...(group_size, kind)` for both kinds of linears."""
    return {
        f"{name}-{size}" if len(group_sizes) > 1 else name: (size, *check)
        for size in group_sizes
        for name, check in checks_in(module, KINDS).items()
    }


def make_cpu_test(ranks: int, checks: Checks, *, without_shims: tuple[str, ...] = ()) -> Callable[..., None]:
    """The test of all `checks`, which run in one group of `ranks` processes."""
    return make_test(ranks, _on_the_cpu, checks, checks, without_shims)


@contextmanager
def _on_the_cpu(
    group: dist.ProcessGroup, _: torch.device, checks: Checks, without_shims: tuple[str, ...]
) -> Iterator[Callable[[str], None]]:
    with cpu_megatron(without=without_shims), warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def run(name: str) -> None:
            size, module, function, more = checks[name]
            with tensor_parallel(size) if size else nullcontext():
                getattr(importlib.import_module(module), function)(size or group.size(), *more)

        yield run


#: What Megatron's parallel state holds at every layout that there was in this process; without one at ().
_states: dict[tuple, dict[str, Any]] = {}


@contextmanager
def tensor_parallel(size: int, *, seed: int = 1234, **other_sizes: Any) -> Iterator[None]:
    """As `testing.gpt.tensor_parallel`, and it may be nested. Groups stay for the next check that needs them: to make
    them takes longer than most models run."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    before = _held_by(parallel_state)
    _states.setdefault((), before)
    key = (size, *sorted(other_sizes.items()))
    vars(parallel_state).update(_states.get(key, _states[()]))
    if key not in _states:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size, **other_sizes)
        _states[key] = _held_by(parallel_state)
    model_parallel_cuda_manual_seed(seed)
    try:
        yield
    finally:
        if not parallel_state.is_initialized():  # a check has destroyed its groups
            del _states[key]
        vars(parallel_state).update(before)


def _held_by(parallel_state: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }
