"""From text to curves with the example scripts, as `examples/README.md` describes it."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.harness import run_python
from tests.megatron.pretraining_runs import EXAMPLES, load_example

Script = Callable[..., tuple[int, str, str]]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    return run_python(*arguments, cwd=folder, timeout_s=200, PYTHONPATH=path, **exported_by_the_readme())


def exported_by_the_readme() -> dict[str, str]:
    """What its block on pretraining puts into the environment; of this process's nothing of that kind counts."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    return {"CUDA_DEVICE_MAX_CONNECTIONS": ""} | dict(re.findall(r"^    export (\w+)=(\S+)$", text, re.MULTILINE))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Runs an example in `tmp_path`: (exit code, stdout, stderr). In this process, which imports Megatron only once."""

    def run_main(name: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        return load_example(name).main(), *capsys.readouterr()

    return run_main


def commands_of_the_readme() -> list[list[str]]:
    """Indented commands under the heading on pretraining, with continued lines joined."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8").split("## Pretraining")[1]
    joined = text.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^    ((?:python|torchrun) .*)$", joined, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    prepare, stock, plugin, compare = commands_of_the_readme()
    for words in (prepare, stock, plugin, compare):
        program, *arguments = words
        launcher = ["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else []
        ran = run(*launcher, *arguments, folder=tmp_path)
        assert ran.returncode == 0, ran.stderr[-4000:]
        if words is stock:
            assert "10 layers (10 of them stock): Megatron's own classes, whose calls are not counted" in ran.stdout
        if words is plugin:
            assert re.search(
                r"10 layers \(0 of them stock\): [1-9]\d* forward passes overlapped, 0 sequential", ran.stdout
            )
    assert "gradient norm" in ran.stdout
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    losses = [
        [json.loads(line)["lm loss"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("stock", "plugin")
    ]
    assert len(losses[0]) == 5
    assert losses[0] == pytest.approx(losses[1], rel=5e-7)


def test_documents_keep_their_bytes(tmp_path: Path, script: Script) -> None:
    (tmp_path / "texts").mkdir()
    for name, content in {"b.txt": "zwei\n", "a.md": "eins \u00fc", "c.bin": "no", "empty.txt": ""}.items():
        (tmp_path / "texts" / name).write_text(content, encoding="utf-8")
    exit_code, out, err = script("prepare_text", "texts", "--output", "out/data")
    assert exit_code == 0, err
    assert "2 documents, 14 tokens" in out
    assert "1/1" in err, "the bar reaches its end"
    tokens = np.fromfile(tmp_path / "out" / "data.bin", dtype=np.uint16).tolist()
    assert tokens == [*"eins \u00fc".encode(), 256, *b"zwei\n", 256]


def test_the_bar_ends_where_reading_does(tmp_path: Path, script: Script) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(b"x" * 3000)
    exit_code, out, err = script("prepare_text", "texts", "--output", "data", "--max-mib", str(8 / 1024))
    assert exit_code == 0, err
    assert "3 documents, 9,003 tokens" in out
    assert "8/8" in err


@pytest.mark.parametrize(("arguments", "message"), [
    (("nowhere",), "nowhere does not exist"), (("folder",), "no files that end in .py or .txt or .md in folder"),
    (("folder", "--suffix", ".empty"), "all files are empty"),
    (("folder/x.empty", "--output", "folder/x.empty/data"), "the folder cannot be made"),
])  # fmt: skip
def test_text_that_cannot_be_used(tmp_path: Path, script: Script, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.empty").touch()
    output = () if "--output" in arguments else ("--output", "data")
    exit_code, _, err = script("prepare_text", *arguments, *output)
    assert exit_code == 2
    assert message in err
    assert not (tmp_path / "data.idx").exists()


def write_log(file: Path, losses: list[float]) -> None:
    lines = [{"step": step, "lm loss": loss, "grad-norm": 1.0} for step, loss in enumerate(losses, 1)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_curves_are_compared_step_by_step(tmp_path: Path, script: Script) -> None:
    write_log(tmp_path / "a.jsonl", [3.0, 2.0, 1.0])
    write_log(tmp_path / "b.jsonl", [3.0, 2.25])
    exit_code, out, err = script("compare_curves", "first=a.jsonl", "b.jsonl", "--limit", "0.3")
    assert exit_code == 0, err
    assert re.search(r"b\W+loss\W+2\W+0\.25\W+0\.125", out)
    exit_code, out, _ = script("compare_curves", "a.jsonl", "b.jsonl", "--limit", "0.2")
    assert exit_code == 1
    assert "losses differ by 0.25, allowed 0.2" in out


@pytest.mark.parametrize(
    ("content", "message"), [("", "no losses"), ("x\n", "line 1: not a line of a loss log"), (None, "No such file")]
)
def test_logs_that_cannot_be_compared(tmp_path: Path, script: Script, content: str | None, message: str) -> None:
    write_log(tmp_path / "a.jsonl", [3.0])
    if content is not None:
        (tmp_path / "b.jsonl").write_text(content)
    exit_code, _, err = script("compare_curves", "a.jsonl", "b.jsonl")
    assert exit_code == 2
    assert message in err
