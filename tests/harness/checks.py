"""Checks that share one group of ranks, since starting ranks takes long; each is a test of its own.

A check that fails leaves its ranks where nobody knows: those that follow run in a group started anew.
"""

import ast
import faulthandler
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.harness.spawned import run_spawned

__all__ = ["checks_in", "run_checks", "make_test"]

_SKIP = "skip: "

#: Called as enter(group, device, *args) on every rank; inside, the function that it gives runs the check of a name.
Enter = Callable[..., AbstractContextManager[Callable[[str], Any]]]


def make_test(ranks: int, enter: Enter, names: Iterable[str], *args: Any, backend: str = "gloo") -> Callable[..., None]:
    """A test with an id for each check; the first one that is asked for runs all that were selected."""
    outcomes: dict[str, str | None] = {}

    @pytest.mark.timeout(400)
    @pytest.mark.parametrize("name", list(names))
    def test(request: pytest.FixtureRequest, name: str) -> None:
        if name not in outcomes:
            items = [item for item in request.session.items if getattr(item, "function", None) is test]
            run_checks(
                ranks,
                enter,
                [item.callspec.params["name"] for item in items],
                *args,
                outcomes=outcomes,
                backend=backend,
            )
        outcome = outcomes[name]
        if outcome and outcome.startswith(_SKIP):
            pytest.skip(outcome)
        assert outcome is None, outcome

    return test


def checks_in(module: str, kinds: tuple[str, ...] = ()) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Id -> (module, function, further arguments) of its functions `check_...`. The module is read, not imported.

    A function with a parameter `kind` is a check of each of `kinds`.
    """
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    checks = {}
    for node in ast.parse(Path(found.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
            has_kind = "kind" in [argument.arg for argument in node.args.args]
            for kind in kinds if has_kind else (None,):
                key, more = (node.name, ()) if kind is None else (f"{node.name}-{kind}", (kind,))
                checks[key] = (module, node.name, more)
    return checks


def run_checks(
    ranks: int,
    enter: Enter,
    names: list[str],
    *args: Any,
    outcomes: dict[str, str | None],
    backend: str = "gloo",
    hangs_after_s: float = 90.0,
) -> None:
    """Add to `outcomes` by name: None, or what went wrong where.

    Collectives of gloo give up after 60 s, and say more than where a rank waits that hangs.
    """
    left, failed = [name for name in names if name not in outcomes], []
    while left:
        with TemporaryDirectory() as folder:
            failure = None
            try:
                run_spawned(ranks, _run_all, folder, hangs_after_s, left, enter, args, backend=backend)
            except RuntimeError as error:
                traces = sorted(Path(folder).glob("trace-*"))
                failure = "\n".join([str(error), *(trace.read_text() for trace in traces)])
            passed = min(len(list(Path(folder).glob(f"passed-*-{rank}"))) for rank in range(ranks))
            for number, name in enumerate(left[:passed]):
                outcomes[name] = (Path(folder) / f"passed-{number}-0").read_text() or None
        if failure is not None:
            assert passed < len(left), f"after all checks: {failure}"
            if failed:
                failure += f"\n(run in a group started anew, after {', '.join(failed)} failed)"
            outcomes[left[passed]] = failure
            failed.append(left[passed])
        left = left[passed + 1 :]


def _run_all(
    group: dist.ProcessGroup,
    device: torch.device,
    folder: str,
    hangs_after_s: float,
    names: list[str],
    enter: Enter,
    args: tuple,
) -> None:
    rank = dist.get_rank()
    with (Path(folder) / f"trace-{rank}").open("w") as trace, enter(group, device, *args) as run:
        for number, name in enumerate(names):
            said = ""
            faulthandler.dump_traceback_later(hangs_after_s, file=trace, exit=True)
            try:
                run(name)
            except pytest.skip.Exception as reason:  # by all ranks
                said = f"{_SKIP}{reason}"
            (Path(folder) / f"passed-{number}-{rank}").write_text(said)
            dist.barrier()  # nobody is blamed for what a rank fails in that is a check behind
    faulthandler.cancel_dump_traceback_later()
