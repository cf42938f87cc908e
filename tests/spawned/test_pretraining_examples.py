"""From text to curves with the example scripts, as `examples/README.md` describes it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, env=environment)


def script(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(EXAMPLES / name), *arguments, folder=folder)


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
        ran = run(sys.executable, *launcher, *arguments, folder=tmp_path)
        assert ran.returncode == 0, ran.stderr[-4000:]
        if words is stock:
            assert "10 layers, 0 calls overlapped" in ran.stdout
        if words is plugin:
            assert re.search(r"10 layers, [1-9]\d* calls overlapped", ran.stdout)
    assert "gradient norm" in ran.stdout
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    losses = [
        [json.loads(line)["lm loss"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("stock", "plugin")
    ]
    assert len(losses[0]) == 5
    assert losses[0] == pytest.approx(losses[1], rel=5e-7)


def test_documents_keep_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name, content in {"b.txt": "zwei\n", "a.md": "eins \u00fc", "c.bin": "no", "empty.txt": ""}.items():
        (tmp_path / "texts" / name).write_text(content, encoding="utf-8")
    ran = script("prepare_text.py", "texts", "--output", "out/data", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "2 documents, 14 tokens" in ran.stdout
    tokens = np.fromfile(tmp_path / "out" / "data.bin", dtype=np.uint16).tolist()
    assert tokens == [*"eins \u00fc".encode(), 256, *b"zwei\n", 256]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere does not exist"),
        (("folder",), "no files that end in .py or .txt or .md in folder"),
        (("folder", "--suffix", ".empty"), "all files are empty"),
        (("folder/x.empty", "--output", "folder/x.empty/data"), "the folder cannot be made"),
    ],
)
def test_text_that_cannot_be_used(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.empty").touch()
    output = () if "--output" in arguments else ("--output", "data")
    ran = script("prepare_text.py", *arguments, *output, folder=tmp_path)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert not (tmp_path / "data.idx").exists()


def write_log(file: Path, losses: list[float]) -> None:
    lines = [{"step": step, "lm loss": loss, "grad-norm": 1.0} for step, loss in enumerate(losses, 1)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_curves_are_compared_step_by_step(tmp_path: Path) -> None:
    write_log(tmp_path / "a.jsonl", [3.0, 2.0, 1.0])
    write_log(tmp_path / "b.jsonl", [3.0, 2.25])
    ran = script("compare_curves.py", "first=a.jsonl", "b.jsonl", "--limit", "0.3", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"b\W+loss\W+2\W+0\.25\W+0\.125", ran.stdout)
    ran = script("compare_curves.py", "a.jsonl", "b.jsonl", "--limit", "0.2", folder=tmp_path)
    assert ran.returncode == 1
    assert "losses differ by 0.25, allowed 0.2" in ran.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no losses"), ("x\n", "line 1: not a line of a loss log"), (None, "No such file")],
)
def test_logs_that_cannot_be_compared(tmp_path: Path, content: str | None, message: str) -> None:
    write_log(tmp_path / "a.jsonl", [3.0])
    if content is not None:
        (tmp_path / "b.jsonl").write_text(content)
    ran = script("compare_curves.py", "a.jsonl", "b.jsonl", folder=tmp_path)
    assert ran.returncode == 2
    assert message in ran.stderr
