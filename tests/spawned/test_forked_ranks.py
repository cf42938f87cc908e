"""The harness that forks ranks: what a rank sees of its caller, and what the caller sees of a rank that fails."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from tests.harness import run_spawned

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


def test_a_rank_that_dies_ends_the_others_and_the_next_group_starts() -> None:
    """Fails, for ever, if the others are waited for."""
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9"):
        run_spawned(2, die_on_rank_1)
    assert len(run_spawned(2, say_where)) == 2
