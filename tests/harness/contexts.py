"""Tests that all ranks run as threads, each with a context, over gloo or over the copy engine, which is emulated."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.transport import tape_graphs
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.harness.threads import run_threads

__all__ = ["in_context"]

_GLOO = OverlapConfig()


def in_context(
    group_size: int | str,
    config: OverlapConfig | str | Callable[..., OverlapConfig] = _GLOO,
    *,
    over_copies: bool | str = False,
    stepwise: int | str | None = None,
    timeout_s: float = 30.0,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorates a test `test(group, context, ...)` that all ranks run, each with a context that is closed behind it.

    A text in place of a value names the parameter of the test that has it.

    Args:
        config: or a function that makes it of parameters of the test.
        over_copies: whether the copy engine is emulated, which contexts then use.
        stepwise: after how many equal calls a tape becomes a graph; -1: every call is a graph.
    """
    options = [group_size, config, over_copies, stepwise]

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        of_config = list(inspect.signature(config).parameters) if callable(config) else []
        wanted = list(inspect.signature(test).parameters)[2:]
        named = [*of_config, *(option for option in options if isinstance(option, str))]

        @functools.wraps(test)
        def run(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
            given["monkeypatch"] = monkeypatch
            size, chosen, is_emulated, steps = (given[each] if isinstance(each, str) else each for each in options)
            if callable(chosen):
                chosen = chosen(**{name: given[name] for name in of_config})
            if is_emulated:
                emulate_copy_engine(monkeypatch)
            if steps is not None:
                monkeypatch.setattr(tape_graphs, "_STEPWISE", steps)

            def on_rank(group, device):
                with take_part(group), OverlapContext(group, chosen) as context:
                    test(group, context, **{name: given[name] for name in wanted})

            run_threads(size, on_rank, timeout_s=timeout_s)

        parameters = dict.fromkeys([*wanted, *named, "monkeypatch"])
        kind = inspect.Parameter.KEYWORD_ONLY
        run.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])  # type: ignore[attr-defined]
        return run

    return decorate
