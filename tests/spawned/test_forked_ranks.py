"""The harness that forks ranks: what a rank sees of its caller, and what the caller sees of a rank that fails."""

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from tests.harness import run_spawned
from tests.harness.checks import run_checks

pytestmark = [
    pytest.mark.timeout(120),  # the first group imports Megatron
    pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are started anew where there is a GPU"),
]


def say_where(group: dist.ProcessGroup, device: torch.device) -> tuple[int, str | None, str, int]:
    return os.getpid(), os.environ.get("SAID_BY_THE_CALLER"), os.getcwd(), hash("text")


def fail_on_rank_1(group: dist.ProcessGroup, device: torch.device) -> None:
    if group.rank() == 1:
        raise ValueError("the reason is here")
    dist.barrier()


def die_on_rank_1(group: dist.ProcessGroup, device: torch.device) -> None:
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def test_ranks_are_new_processes_in_the_state_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID_BY_THE_CALLER", "one")
    first = run_spawned(2, say_where)
    monkeypatch.delenv("SAID_BY_THE_CALLER")
    second = run_spawned(2, say_where)
    assert len({pid for pid, *_ in first + second}) == 4
    assert [said for _, said, *_ in first + second] == ["one", "one", None, None]
    assert {folder for _, _, folder, _ in first} == {str(tmp_path)}
    if "PYTHONHASHSEED" not in os.environ:
        assert first[0][3] != first[1][3], "ranks of one hash seed hide orders of sets in which ranks differ"


def test_a_rank_that_raises_shows_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 raised\n") as caught:
        run_spawned(2, fail_on_rank_1)
    assert "in fail_on_rank_1" in str(caught.value)
    assert "ValueError: the reason is here" in str(caught.value)


def test_a_rank_that_dies_ends_the_others_and_a_new_group_starts() -> None:
    """Fails, for ever, if the others are waited for."""
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9"):
        run_spawned(2, die_on_rank_1)
    assert len(run_spawned(2, say_where)) == 2


@contextmanager
def _checks_that_fail(group: dist.ProcessGroup, device: torch.device):
    def run(name: str) -> None:
        if name == "fails on rank 1" and group.rank() == 1:
            raise ValueError("the reason is here")
        if name == "hangs on rank 0" and group.rank() == 0:
            threading.Event().wait()
        if name == "is skipped":
            pytest.skip("nothing to see")
        dist.barrier()

    yield run


def test_checks_after_one_that_fails_or_hangs_run() -> None:
    names = ["passes", "fails on rank 1", "hangs on rank 0", "is skipped", "runs"]
    outcomes: dict[str, str | None] = {}
    run_checks(2, _checks_that_fail, names, outcomes=outcomes, hangs_after_s=2.0)
    assert [name for name in names if outcomes[name] is None] == ["passes", "runs"]
    assert "ValueError: the reason is here" in str(outcomes["fails on rank 1"])
    assert "threading.py" in str(outcomes["hangs on rank 0"]), "where it waits"
    assert "started anew, after fails on rank 1 failed" in str(outcomes["hangs on rank 0"])
    assert outcomes["is skipped"] == "skip: nothing to see"
