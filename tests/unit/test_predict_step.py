"""Predicted steps: what must hold of any, those that were measured, and the command."""

import itertools
import json
from pathlib import Path

import pytest

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.attention import AttentionCosts
from commfuse_megatron.plan.machine import Traits, assumed_machine
from commfuse_megatron.problem import AttentionProblem
from commfuse_megatron.tools import main as cli
from commfuse_megatron.tools.bench.report import read_rows
from commfuse_megatron.tools.common.cases import FREE, PLANNED, STEP_LAYERS, STOCK
from commfuse_megatron.tools.simulate.predict_step import MeasuredStep, measured_steps, predict_step

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
MACHINE = assumed_machine(Traits(transport="copy_engine", replays=True), "bfloat16")
FILES = sorted(path.name for path in RESULTS.glob("whole_step*.json"))


@pytest.mark.parametrize("file", FILES)
def test_steps_that_were_measured_are_predicted_to_a_tenth(file):
    steps = [step for step in measured_steps(RESULTS / file) if step.tokens >= 8192]
    assert {step.variant for step in steps} == {STOCK, PLANNED, FREE}
    for step in steps:
        prediction = predict_step(step.model, step.layers, step.tokens, step.group_size, MACHINE)
        assert prediction.step_ms[step.variant] == pytest.approx(step.step_ms, rel=0.1), step
        assert not prediction.is_host_bound


@pytest.mark.parametrize("model", STEP_LAYERS)
def test_a_step_is_its_layers_and_its_ends(model):
    one, two, five = (predict_step(model, layers, 8192, 2, MACHINE) for layers in (1, 2, 5))
    for variant in (STOCK, PLANNED, FREE):
        layer_ms = two.step_ms[variant] - one.step_ms[variant]
        assert five.step_ms[variant] == pytest.approx(one.step_ms[variant] + 4 * layer_ms)
        assert 0 < five.forward_ms[variant] < five.step_ms[variant]
    assert five.step_ms[PLANNED] < five.step_ms[STOCK]


def test_with_more_ranks_a_step_is_shorter_until_hosts_decide():
    steps = [predict_step("llama-8b", 32, 8192, group_size, MACHINE) for group_size in (2, 4, 8)]
    for few, many in itertools.pairwise(steps):
        assert all(many.step_ms[variant] < few.step_ms[variant] for variant in few.step_ms)
    assert [step.is_host_bound for step in steps] == [False, True, True]
    assert predict_step("llama-8b", 32, 2048, 2, MACHINE).is_host_bound
    assert not predict_step("llama-70b", 80, 8192, 4, MACHINE).is_host_bound


def test_attention_takes_what_was_measured():
    """cuDNN's kernels alone, forward and backward, from S 2048 to 16384."""
    measured = [row for row in read_rows(RESULTS / "attention_h200_202611.json") if "forward_top_left_us" in row]
    assert len(measured) == 5
    errors = []
    for row in measured:
        problem = AttentionProblem(
            pass_name="fprop", rows=row["rows"], batch=row["batch"], heads=row["heads"], kv_heads=row["kv_heads"],
            head_dim=128, value_dim=128, N=4096, dtype="bfloat16", group_size=2, right=0,
        )  # fmt: skip
        costs = AttentionCosts(problem, MACHINE)
        for name, is_backward in (("forward", False), ("backward", True)):
            us = costs.at_once_us(is_backward=is_backward)
            errors.append(abs(us / row[f"{name}_top_left_us"] - 1))
    assert max(errors) < 0.3
    assert sorted(errors)[len(errors) // 2] < 0.15


def run(*options, expected=0):
    assert cli.main(["simulate", "--step", *map(str, options)]) == expected


def test_the_command_predicts_and_says_how_wrong_it_is(tmp_path, capsys):
    file = tmp_path / "out.json"
    measured = RESULTS / "whole_step_h200_202611.json"
    run("llama-70b", "--against", measured, "--json", file)
    out = capsys.readouterr().out
    assert "predicted, not measured: step of llama-70b, 80 layers" in out
    assert "of 6 steps that are not host-bound: " in out
    data = json.loads(file.read_text())
    assert [each["group_size"] for each in data["predictions"]] == [2, 4, 8, 16]
    assert {each["variant"] for each in data["against"]} == {STOCK, PLANNED, FREE}
    assert all(each["predicted_ms"] / each["measured_ms"] - 1 == each["error"] for each in data["against"])
    run("llama-8b", "--layers", 4, "--tokens", 2048, "--ranks", 2)
    assert "host-bound: the host is likely to take longer" in capsys.readouterr().out


def test_other_rows_are_no_steps(tmp_path):
    row = {"op": "whole_step", "step_ms": 3.0}
    rows = [{**row, "variant": "stock"}, {**row, "variant": "planned"}, {"op": "all_gather_linear", "variant": "x"}]
    rows.append({**row, "variant": "no_communication", "recipe": "delayed"})
    run_of = {"model": "llama-8b", "layers": 2, "sequence": 64, "batch": 1, "group_size": 2, "device": "NVIDIA H200"}
    runs = [{**run_of, "rows": rows}, {**run_of, "device": "cpu", "rows": rows}, {**run_of, "batch": 2, "rows": rows}]
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"runs": runs}))
    sizes = ("llama-8b", 2, 64, 2)
    assert measured_steps(file) == [MeasuredStep(*sizes, "stock", 3.0), MeasuredStep(*sizes, "planned", 3.0)]
    file.write_text("{}")
    with pytest.raises(ConfigError, match="has no steps that `commfuse trace --step --json` wrote"):
        measured_steps(file)


@pytest.mark.parametrize(("options", "message"), [
    (["llama-8b", "--ranks", "3"], "llama-8b: 8192 tokens cannot be cut for 3 ranks"),
    (["llama-8b", "--models", "llama-70b"], "--step predicts a whole model; leave out --models"),
    (["llama-8b", "--figure", "x.png"], "--step predicts a whole model; leave out --figure"),
    (["llama-8b", "--layers", "0"], "--layers"), (["llama-8b", "--tokens", "0"], "--tokens must be at least 1"),
    (["llama-8b", "--link", "25"], "of a bandwidth only --rows tells the rest"),
    (["llama-8b", "--against", "{none}"], "none.json: no file of rows"),
    (["llama-8b", "--against", "{steps}"], "it has no steps of llama-8b"),
])  # fmt: skip
def test_what_cannot_be_predicted_is_refused(options, message, tmp_path, capsys):
    steps = tmp_path / "steps.json"
    rows = [{"op": "whole_step", "variant": "stock", "step_ms": 5.0}]
    run_of = {"model": "llama-70b", "layers": 2, "sequence": 64, "batch": 1, "group_size": 2}
    steps.write_text(json.dumps({**run_of, "rows": rows}))
    run(*(option.format(none=tmp_path / "none.json", steps=steps) for option in options), expected=2)
    assert message in capsys.readouterr().err


def test_layers_are_for_steps(capsys):
    assert cli.main(["simulate", "--rows", "x.json", "--layers", "2"]) == 2
    assert "is for --step: --layers" in capsys.readouterr().err
