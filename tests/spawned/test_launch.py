"""Local ranks start, fail and stop as they should; under a launcher the body runs in place."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron.errors import ConfigError, ShapeError
from commfuse_megatron.tools import main as cli
from commfuse_megatron.tools.common import ranks
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.ranks import (
    CannotRunError,
    Rank,
    RankFailedError,
    UsageError,
    choose_num_ranks,
    is_speaker,
)
from tests.harness import run_python

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def set_launcher(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    for name, value in zip(LAUNCHER_VARIABLES, values, strict=False):
        monkeypatch.setenv(name, value)


def write_sum(rank: Rank, folder: str) -> int:
    total = torch.tensor([float(rank.global_rank + 1)])
    dist.all_reduce(total)
    text = f"{total.item()} {rank.world_size} {os.environ['OMP_NUM_THREADS']}"
    Path(folder, f"rank{rank.global_rank}").write_text(text, encoding="utf-8")
    return 0


def return_own_rank(rank: Rank, options: None) -> int:
    return rank.global_rank


def raise_on_rank_1(rank: Rank, options: None) -> int:
    if rank.global_rank == 1:
        raise ValueError("the reason is here")
    return wait_for_all(rank)


def wait_for_all(rank: Rank) -> int:
    dist.all_reduce(torch.zeros(1))  # never completes: rank 1 does not come
    return 0


def refuse_on_rank_1(rank: Rank, options: None) -> int:
    if rank.global_rank == 1:
        raise ConfigError("transport.backend is not for here")
    return wait_for_all(rank)


def fail_each_in_its_own_way(rank: Rank, options: None) -> int:
    if rank.is_first:
        time.sleep(0.3)
        raise ShapeError("theirs is another")
    raise ConfigError("no such transport") from ValueError("the real cause")


def return_two_and_one(rank: Rank, options: None) -> int:
    return 2 - rank.global_rank


def die_on_rank_1(rank: Rank, options: None) -> int:
    if rank.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return wait_for_all(rank)


def wait_forever(rank: Rank, folder: str) -> int:
    dist.all_reduce(torch.zeros(1))
    Path(folder, f"pid{rank.global_rank}").write_text(str(os.getpid()), encoding="utf-8")
    dist.barrier()
    if rank.is_first:
        Path(folder, "ready").touch()
    while True:
        time.sleep(3600)


def test_every_rank_runs_the_body_in_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(write_sum, str(tmp_path), num_ranks=3, device_type="cpu") == 0
    texts = {file.name: file.read_text(encoding="utf-8").split() for file in tmp_path.iterdir()}
    assert sorted(texts) == ["rank0", "rank1", "rank2"]
    assert all(text[:2] == ["6.0", "3"] and int(text[2]) >= 1 for text in texts.values())
    assert "OMP_NUM_THREADS" not in os.environ


def launch_two(body, device_type: str = "cpu") -> int:
    return launch(body, None, num_ranks=2, device_type=device_type)


def test_a_failed_check_counts_for_more_than_one_that_cannot_run() -> None:
    assert launch_two(return_own_rank) == 1, "the largest exit code"
    assert launch_two(return_two_and_one) == 1


def test_a_rank_that_raises_ends_the_others_with_its_traceback() -> None:
    with pytest.raises(RankFailedError) as caught:
        launch_two(raise_on_rank_1)
    message = str(caught.value)
    assert message.startswith("rank 1 raised\nTraceback"), message
    assert "ValueError: the reason is here" in message
    assert "raise_on_rank_1" in message


@pytest.mark.parametrize(("body", "lines"), [
    (refuse_on_rank_1, ["transport.backend is not for here"]),
    (fail_each_in_its_own_way,
     ["no such transport (ValueError: the real cause)", "rank 0: ShapeError: theirs is another"]),
])  # fmt: skip
def test_a_refusal_is_said_with_what_is_no_consequence_of_it(body, lines: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        launch_two(body)
    assert str(caught.value).splitlines() == lines


def test_a_body_starts_when_all_ranks_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that were done and gone by then would make those fail that still connect to it."""
    calls: list[str] = []
    for name in ("init_process_group", "all_reduce", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
    with ranks.process_group(Rank(0, 2, "cpu"), 0, None, 60.0):
        calls.append("body")
    assert calls == ["init_process_group", "all_reduce", "body", "destroy_process_group"]


def test_a_rank_that_is_killed_ends_the_others_and_is_named() -> None:
    with pytest.raises(RankFailedError, match=r"^rank 1 was ended by SIGKILL"):
        launch_two(die_on_rank_1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu_is_refused_before_anything_starts() -> None:
    with pytest.raises(CannotRunError, match="needs a CUDA device and driver"):
        launch_two(return_own_rank, "cuda")


def test_ranks_must_not_contradict_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_num_ranks(None) == 2
    assert choose_num_ranks(5) == 5
    with pytest.raises(UsageError, match="at least 1"):
        choose_num_ranks(0)
    set_launcher(monkeypatch, "0", "4", "localhost", "1", "0", "4")
    assert choose_num_ranks(None) == choose_num_ranks(4) == 4
    with pytest.raises(UsageError, match="--ranks 2 under a launcher that started 4 ranks"):
        choose_num_ranks(2)


@pytest.mark.parametrize(("variables", "words"), [
    ({"RANK": "1"}, "it has RANK, not WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start it with torchrun"),
    ({"WORLD_SIZE": "two"}, "it has WORLD_SIZE, not RANK, MASTER_ADDR, MASTER_PORT"),
    ({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE='two', which is not"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": ""}, "MASTER_PORT='', which is not"),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 and WORLD_SIZE=2; ranks"),
])  # fmt: skip
def test_half_a_launcher_is_refused_by_name(variables, words, monkeypatch, capsys):
    """Fails without the check: local ranks start beside a launcher's, or int() raises."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["verify"]) == 2
    assert words in capsys.readouterr().err
    assert is_speaker(), "where nobody knows who is first, everyone speaks"


def test_what_one_rank_alone_has_met_it_says_after_a_while(monkeypatch, capsys):
    set_launcher(monkeypatch, "1", "2", "localhost", "1", "1", "2")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert not capsys.readouterr().err, "the first rank comes first"

    monkeypatch.setattr(ranks.time, "sleep", wait)
    assert cli.main(["demo", "--text", "no/such/file"]) == 2
    assert waits == [ranks._FIRST_RANK_SPEAKS_S]
    assert "the text cannot be read" in capsys.readouterr().err


def test_under_torchrun_one_rank_says_why_none_can_run() -> None:
    """Fails without waiting for the first rank: every rank says it."""
    ran = run_python("-m", "commfuse_megatron", "demo", ranks=3)
    assert ran.returncode != 0
    assert ran.stderr.count("error: the demo's model can be cut for") == ran.stderr.count("usage: ") == 1, ran.stderr


# A shell that runs the tests in the background has them, and all they start, ignore Ctrl-C.
STARTER = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = {folders!r}
import test_launch
from commfuse_megatron.tools.common.launch import launch
if __name__ == "__main__":
    sys.exit(launch(test_launch.{body}, {folder!r}, num_ranks=2, device_type="cpu"))
"""


def write_starter(folder: Path, body: str) -> Path:
    script = folder / "starter.py"
    script.write_text(
        STARTER.format(folders=[str(Path(__file__).parents[up]) for up in (0, 2)], body=body, folder=str(folder)),
        encoding="utf-8",
    )
    return script


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(180)  # where many tests run at a time, ranks take that long to start
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_starter_leaves_no_ranks_behind(tmp_path: Path, ending: signal.Signals) -> None:
    script = write_starter(tmp_path, "wait_forever")
    process = subprocess.Popen([sys.executable, script], start_new_session=True, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "ready").exists():
            assert process.poll() is None, "the starter ended early"
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)
        pids = [int((tmp_path / f"pid{rank}").read_text(encoding="utf-8")) for rank in range(2)]
        process.send_signal(ending)
        _, errors = process.communicate(timeout=20)
        assert process.returncode != 0
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < deadline, f"ranks still run after {ending.name}: {errors!r}"
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()  # closes the pipe, too


def test_under_torchrun_the_body_runs_in_place(tmp_path: Path) -> None:
    run_python(write_starter(tmp_path, "write_sum"), ranks=2).check_returncode()
    assert [(tmp_path / f"rank{rank}").read_text(encoding="utf-8") for rank in range(2)] == ["3.0 2 1"] * 2


def test_an_error_is_raised_before_groups_are_destroyed(monkeypatch):
    # NCCL destroys a group when all its ranks do: a rank that failed would wait for those that wait for it.
    set_launcher(monkeypatch, "0", "1", "127.0.0.1", "29999")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: pytest.fail("destroyed"))

    def fail(rank: Rank, options: None) -> int:
        raise ValueError("the reason is here")

    with pytest.raises(ValueError, match="the reason is here"):
        launch(fail, None, num_ranks=1, device_type="cpu")
