"""Whole commands with real ranks, as a user starts them."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_on_ranks, run_python

# Seconds each on an idle machine; importing Megatron in two ranks takes long on a busy one.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run_commfuse(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "commfuse_megatron", *arguments, **{"timeout_s": 160, **options})


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def test_verify_passes_on_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    narrow = {"COLUMNS": "80", "PYTHONIOENCODING": "latin-1"}
    ran = run_commfuse("verify", "--ranks", "2", "--dtype", "float32", "--json", str(file), **narrow)
    assert ran.returncode == 0, ran.stderr
    data = read(file)
    assert data["group_size"] == 2
    assert data["failed"] == 0
    assert data["passed"] == len(data["cases"]) > 100
    assert {case["dtype"] for case in data["cases"]} == {"float32"}
    assert f"{data['passed']} passed, 0 failed" in ran.stdout
    tensors = r"\W+".join(rf"{name} [\d.]+" for name in ("y", r"x\.grad", r"weight\.grad", r"bias\.grad"))
    rows = re.findall(rf"{tensors}\W+passed (\d+)", ran.stdout)
    assert sum(map(int, rows)) == data["passed"], "at 80 columns results had none"
    assert "verifying" in ran.stderr, "progress belongs on stderr"
    assert "verifying" not in ran.stdout


def test_verify_compares_models_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    words = ("verify", "--megatron", "--only", "dense", "sequence_parallel_off", "--json", str(file))
    ran = run_commfuse(*words, ranks=2, COLUMNS="60", PYTHONIOENCODING="latin-1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    data = read(file)
    assert (data["ranks"], data["passed"], data["failed"]) == (2, 2, 0)
    dense, without = data["configurations"]
    assert (dense["name"], dense["layout"]) == ("dense", "TP2")
    assert dense["loss_error"] <= data["tolerance"] == 1e-13
    assert dense["gradient_error"] <= data["tolerance"]
    assert dense["overlapped"] == dense["backward"] == 2 * 2 * 10, "ranks, micro-batches, layers"
    assert without["overlapped"] == without["backward"] == 2 * 2 * 9
    assert without["stock"] == {
        "the embedding all-reduces (no sequence parallelism, or positions are added first): not overlapped": 4
    }
    assert "2 equal to stock, 0 failed" in ran.stdout
    for word in ("dense", "sequence_parallel_off", "TP2", "40 + 40", "36 + 36", "equal"):
        assert re.search(rf"(?<!\S){re.escape(word)}(?!\S)", ran.stdout), f"at 60 columns there is no {word}"
    assert "the embedding all-reduces" in ran.stdout


def test_the_demo_trains_and_agrees(tmp_path: Path) -> None:
    text, file, output = (tmp_path / name for name in ("text", "demo.json", "output"))
    text.write_bytes(Path(subprocess.__file__).read_bytes())
    words = ("--ranks", "2", "--steps", "3", "--text", str(text), "--json", str(file), "--output", str(output))
    ran = run_commfuse("demo", *words, COLUMNS="80", PYTHONIOENCODING="ascii")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    data = read(file)
    assert data["steps"] == len(data["stock_loss"]) == len(data["plugin_loss"]) == 3
    assert data["stock_loss"][0] > data["stock_loss"][-1], "nothing was learned"
    assert data["max_loss_difference"] <= 1e-6
    assert {op["path"] for op in data["report"]} == {"sliced"}, "attention was not asked for: Megatron's own"
    assert sum(op["calls"] for op in data["report"] if op["pass_name"] == "fprop") == 3 * len(data["layers"])
    for loss in (*data["stock_loss"], *data["plugin_loss"]):
        assert f" {loss:.9f} " in ran.stdout
    assert "10 layers, overlapped in 30 forward and 30 backward passes" in ran.stdout
    assert "direct all-gather: 2 ranks" in ran.stdout
    assert "direct reduce-scatter: 2 ranks" in ran.stdout
    assert (output / "timeline.png").stat().st_size > 10_000
    slices = [event for event in read(output / "timeline.json")["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    assert {event["cat"] for event in slices} == {"compute", "transfer"}
    # A speed-up on a CPU would mean nothing, so none is shown.
    assert "speed" not in ran.stdout.lower()


def test_the_benchmark_checks_attention_blocks_on_cpu_ranks(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    sizes = ("--models", "llama-8b", "paper", "--tokens", "2048", "--passes", "fprop", "--chunks", "1")
    ran = run_on_ranks(2, "bench", "--attention", *sizes, "--json", str(file))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    data = read(file)
    assert data["failures"] == data["missing"] == []
    assert data["left_out"] == {}
    assert len({row["case"] for row in data["rows"]}) == 5
    variants = {"sequential", "slicing C=4", "row_parallel gloo", "query_split m=1 gloo", "planned"}
    assert variants <= {row["variant"] for row in data["rows"]}
    assert " ms" not in ran.stdout, "times of a CPU say nothing"
    assert "sizes are the models' divided by " in ran.stdout


def test_the_benchmark_checks_every_variant_on_cpu_ranks(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("bench", "--models", "llama-8b", "--linears", "qkv", "proj", "--tokens", "2048", "--json", str(file))
    ran = run_on_ranks(2, *options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    data = read(file)
    assert data["failures"] == data["missing"] == []
    assert set(data["left_out"]) == {"async_tp", "userbuffers"}
    rows = data["rows"]
    assert {"planned", "megatron", "sequential", "slicing C=4", "bulk gloo"} <= {row["variant"] for row in rows}
    assert {(row["case"], row["pass"]) for row in rows} == {
        (case, pass_name) for case in ("llama-8b.qkv", "llama-8b.proj") for pass_name in ("fprop", "backward")
    }
    assert max(row["max_error"] for row in rows if row["max_error"] is not None) < 1e-5
    assert "left out userbuffers" in ran.stdout
    assert "speed" not in ran.stdout.lower()
    assert " ms" not in ran.stdout, "times of a CPU say nothing"
    assert "sizes are the models' divided by " in ran.stdout
    # Another run goes on where this one ended, and does not forget what had failed.
    data["failures"] = ["planned: another result"]
    file.write_text(json.dumps(data), encoding="utf-8")
    again = run_on_ranks(2, *options, "--virtual-ranks", "4", "--resume")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "planned: another result" in again.stdout
    data = read(file)
    assert data["failures"] == ["planned: another result"]
    more = data["rows"]
    assert more[: len(rows)] == rows
    assert "userbuffers" in data["left_out"]
    assert data["settings"]["virtual_ranks"] == [4]
    assert {(row["emulated"], row["group_size"]) for row in more[len(rows) :]} == {(True, 4)}


@pytest.mark.parametrize(("cases", "config", "count"), [
    (("--linears", "qkv", "proj"), "linear: {wgrad: {keep_gathered_input: true}}", 4),
    # Attention decides for both passes; its projection is a linear of its own.
    (("--attention",), "attention: {path: auto}", 3),
])  # fmt: skip
def test_plans_are_written_and_taken_on_cpu_ranks(cases, config, count, tmp_path):
    settings, file, found = (tmp_path / name for name in ("job.yaml", "of/plans.json", "found.json"))
    settings.write_text(config, encoding="utf-8")
    words = ("bench", *cases, "--models", "llama-8b", "--tokens", "2048", "--config", str(settings))
    words += ("--write-plans", str(file), "--json", str(found))
    for neither, there in ((count, 0), (0, count)):  # on the CPU no model is asked
        ran = run_on_ranks(2, *words)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        said = f"{count} plans, 0 measured, 0 chosen by the model, {neither} forced or a default, {there} already there"
        assert ran.stdout.splitlines() == [f"{file}: {said}"], "one rank speaks"
        assert "planning" in ran.stderr or "llama-8b" in ran.stderr, "progress belongs on stderr"
        data = read(found)
        assert (data["forced or a default"], data["already there"], data["failures"]) == (neither, there, [])
        stored = read(file)["sections"]
        assert {text for section in stored for text in section["plans"]} == {plan["problem"] for plan in data["plans"]}


def test_a_benchmark_without_a_row_does_not_pass(tmp_path: Path) -> None:
    asked = ["--models", "llama-8b", "--linears", "qkv", "--tokens", "2048", "--budget-s", "0"]
    ran = run_commfuse("bench", *asked, "--config", "configs/host_link.yaml")
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "missing llama-8b.qkv M=2048 fprop: no time left" in ran.stdout
    assert "not run host_link: see what was left out" in ran.stdout
    assert "0 rows of 0 cases, 2 missing, 0 variants left out, 0 failed" in ran.stdout
    assert "CUDA_HOME" not in ran.stderr, "what Megatron's import logs helps nobody here"
