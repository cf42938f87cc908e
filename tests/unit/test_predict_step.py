"""Predicted steps: what must hold of any, those that were measured, and the command."""

import functools
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.attention import AttentionCosts
from commfuse_megatron.plan.machine import Traits, assumed_machine
from commfuse_megatron.problem import AttentionProblem
from commfuse_megatron.tools import main as cli
from commfuse_megatron.tools.bench.report import read_rows
from commfuse_megatron.tools.common.cases import FREE, PLANNED, STEP_LAYERS, STOCK
from commfuse_megatron.tools.simulate import predict_step as module
from commfuse_megatron.tools.simulate.predict_step import (
    SHIPPED,
    VARIANTS,
    MeasuredStep,
    StepMachine,
    StepPrediction,
    StepSizes,
    measured_steps,
    predict_step,
)
from tests.harness.documents import section_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "results"
STEPS = RESULTS / "whole_step_h200_202611.json"
TRAITS = Traits(transport="copy_engine", adds_in_epilogue=True, replays=True)
MACHINE = StepMachine(
    "NVIDIA H200", "nvlink", lambda group_size: assumed_machine(TRAITS, "bfloat16", group_size=group_size)
)

BOTH_PASSES = ("forward", "backward")

# Whose step of 8B, 32 layers, S 8192 the share of hidden transfers was fitted to.
FITTED_TO = "e8c6fe5"


@functools.cache
def predict(model: str, layers: int, tokens: int, group_size: int) -> StepPrediction:
    return predict_step(StepSizes(model, layers, tokens, group_size), MACHINE)


def steps_of(commit: str, folder: Path, **wanted: object) -> list[MeasuredStep]:
    """The measured steps of one commit."""
    runs = [run for run in json.loads(STEPS.read_text())["runs"] if run["commit"] == commit]
    file = folder / f"{commit}.json"
    file.write_text(json.dumps({"runs": runs}))
    steps = measured_steps(file)
    return [step for step in steps if all(getattr(step.sizes, name) == value for name, value in wanted.items())]


# -- what was measured ------------------------------------------------------------------------------------------------


def test_steps_that_come_along_are_the_newest_rows():
    spec = importlib.util.spec_from_file_location("make_measured_steps", DOCS / "make_measured_steps.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert SHIPPED.read_text(encoding="utf-8") == make.make(), "run `python docs/make_measured_steps.py`"
    assert {(step.sizes.model, step.sizes.group_size) for step in measured_steps(SHIPPED)} == {
        ("llama-8b", 2),
        ("llama-70b", 2),
    }


@pytest.mark.parametrize("step", measured_steps(SHIPPED), ids=lambda step: f"{step.sizes.model}-{step.sizes.tokens}")
def test_the_newest_steps_are_predicted_to_a_tenth(step):
    """Fails for the gain, and by half at S 2048, without what was fitted: host times, and the share of hidden transfers
    to an earlier step."""
    prediction = predict_step(step.sizes, MACHINE)
    assert set(step.step_ms) == set(VARIANTS)
    assert prediction.step_ms == pytest.approx(step.step_ms, rel=0.1)
    gain, measured_gain = (ms[PLANNED] / ms[STOCK] for ms in (prediction.step_ms, step.step_ms))
    assert gain == pytest.approx(measured_gain, rel=0.1)
    if step.sizes.tokens >= 8192:
        assert not prediction.host_bound
        assert prediction.step_ms == pytest.approx(step.step_ms, rel=0.03)
        assert gain == pytest.approx(measured_gain, rel=0.02)
    else:
        assert prediction.host_bound == dict.fromkeys(VARIANTS, BOTH_PASSES)


def test_all_measured_steps_are_predicted_to_a_tenth():
    steps = measured_steps(STEPS)
    assert len(steps) == 14
    for step in steps:
        assert predict_step(step.sizes, MACHINE).step_ms == pytest.approx(step.step_ms, rel=0.1), step


@pytest.mark.parametrize("variant", VARIANTS)
def test_host_times_lie_amid_those_of_the_hosts_they_name(variant):
    """As far in percent from the fastest host as from the slowest, and parted between the passes as in the mean."""
    rows = [row for row in read_rows(STEPS) if (row.get("variant"), row.get("sequence")) == (variant, 2048)]
    rows = [row for row in rows if row["commit"] in ("e8c6fe5", "0694a0a", "2bf6ab1")]
    assert len(rows) == 3
    forward_us, backward_us = module._HOST_US_OF_A_LAYER[variant]
    fastest, *_, slowest = sorted(row["step_ms"] * 1e3 / row["layers"] for row in rows)
    assert (forward_us + backward_us) / fastest - 1 == pytest.approx(1 - (forward_us + backward_us) / slowest, abs=1e-3)
    shares = [row["forward_ms"] / row["step_ms"] for row in rows]
    assert forward_us / (forward_us + backward_us) == pytest.approx(sum(shares) / 3, rel=1e-3)


def shown_by(step: MeasuredStep, monkeypatch: pytest.MonkeyPatch) -> float:
    """The share of hidden transfers that this step shows."""

    def gap_ms(ms: dict[str, float]) -> float:
        return ms[PLANNED] - ms[FREE]

    gaps = []
    for share in (0.0, 0.2):
        monkeypatch.setattr(module, "_SHOWN_OF_HIDDEN", share)
        gaps.append(gap_ms(predict_step(step.sizes, MACHINE).step_ms))
    return 0.2 * (gap_ms(step.step_ms) - gaps[0]) / (gaps[1] - gaps[0])


def test_the_share_of_hidden_transfers_is_what_its_step_shows(tmp_path, monkeypatch):
    (step,) = steps_of(FITTED_TO, tmp_path, model="llama-8b", tokens=8192)
    share = module._SHOWN_OF_HIDDEN
    assert shown_by(step, monkeypatch) == pytest.approx(share, abs=0.01)


def test_any_step_would_give_a_share_that_suits_the_others(monkeypatch):
    steps = [step for step in measured_steps(STEPS) if step.sizes.tokens >= 8192]
    assert len(steps) == 10
    for left_in in steps:
        share = shown_by(left_in, monkeypatch)
        assert 0.3 < share < 0.6
        monkeypatch.setattr(module, "_SHOWN_OF_HIDDEN", share)
        for step in steps:
            assert predict_step(step.sizes, MACHINE).step_ms[PLANNED] == pytest.approx(
                step.step_ms[PLANNED], rel=0.08
            ), (left_in, step)


# -- any step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", STEP_LAYERS)
def test_a_step_is_its_layers_and_its_ends(model):
    one, two, five = (predict(model, layers, 8192, 2) for layers in (1, 2, 5))
    for variant in VARIANTS:
        layer_ms = two.step_ms[variant] - one.step_ms[variant]
        assert five.step_ms[variant] == pytest.approx(one.step_ms[variant] + 4 * layer_ms)
        assert 0 < five.forward_ms[variant] < five.step_ms[variant]
    assert five.step_ms[PLANNED] < five.step_ms[STOCK]


GRID = [(model, tokens) for model in STEP_LAYERS for tokens in (2048, 8192, 32768)]


@pytest.mark.parametrize(("model", "tokens"), GRID)
def test_a_step_is_no_longer_with_more_ranks(model, tokens):
    steps = [predict(model, STEP_LAYERS[model], tokens, group_size) for group_size in (2, 4, 8, 16)]
    for few, many in itertools.pairwise(steps):
        assert all(many.step_ms[variant] <= few.step_ms[variant] for variant in VARIANTS)


@pytest.mark.parametrize(("model", "tokens"), GRID)
def test_the_plugin_gains_no_more_than_there_is_to_gain(model, tokens):
    """Only where the host decides, for which it is less work. Failed at two ranks before hidden transfers cost time."""
    for group_size in (2, 4, 8, 16):
        step = predict(model, STEP_LAYERS[model], tokens, group_size)
        assert step.step_ms[PLANNED] <= step.step_ms[STOCK]
        if FREE not in step.host_bound:
            assert step.step_ms[PLANNED] >= step.step_ms[FREE]


@pytest.mark.parametrize("tokens", [8192, 32768, 65536])
@pytest.mark.parametrize(("group_size", "sharing"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 8), (16, 16)])
def test_steps_whose_ranks_share_a_sequence(group_size, sharing, tokens):
    step = predict_step(StepSizes("llama-8b", 4, tokens, group_size, sharing), MACHINE)
    assert step.step_ms[PLANNED] <= step.step_ms[STOCK], "auto keeps what is faster"
    if not step.host_bound:
        assert step.step_ms[FREE] <= step.step_ms[PLANNED]
    # Of tensor-parallel ranks each has whole sequences of some heads, too; what else is computed is as much. More than
    # there are heads of keys have one each, and their weights.
    cut = predict_step(StepSizes("llama-8b", 4, tokens, group_size), MACHINE)
    if group_size <= 8 and not (step.host_bound or cut.host_bound):
        assert step.step_ms[FREE] == pytest.approx(cut.step_ms[FREE], rel=0.05)


def test_exchanges_are_what_their_bytes_take():
    """Of one layer: stock's are exposed as a whole, queries, keys, values and the output, forward and backward."""
    step = predict_step(StepSizes("llama-8b", 1, 32768, 2, 2), MACHINE)
    sent_bytes = 16384 // 2 * (2 * 32 + 2 * 8) * 128 * 2
    machine = MACHINE.of_group(2)
    expected_ms = 2 * (sent_bytes / machine.collective.bandwidth_gb_s / 1e6)
    assert step.step_ms[STOCK] - step.step_ms[FREE] == pytest.approx(expected_ms, rel=0.1)


def test_the_host_or_the_device_decides():
    layers = 32
    short, long = (predict("llama-8b", layers, tokens, 2) for tokens in (2048, 8192))
    for variant, host_us in module._HOST_US_OF_A_LAYER.items():
        assert short.step_ms[variant] * 1e3 == pytest.approx(layers * sum(host_us))
        assert short.forward_ms[variant] * 1e3 == pytest.approx(layers * host_us[0])
    assert (short.host_bound, long.host_bound) == (dict.fromkeys(VARIANTS, BOTH_PASSES), {})
    # The forward pass is the host's, so the backward pass begins late and is the device's.
    mixed = predict("llama-8b", layers, 8192, 4)
    host_us = module._HOST_US_OF_A_LAYER[PLANNED]
    assert mixed.forward_ms[PLANNED] * 1e3 == pytest.approx(layers * host_us[0])
    assert mixed.step_ms[PLANNED] * 1e3 > layers * sum(host_us)
    assert mixed.host_bound[PLANNED] == ("forward",)


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
        costs = AttentionCosts(problem, MACHINE.of_group(2))
        for name, is_backward in (("forward", False), ("backward", True)):
            us = costs.at_once_us(is_backward=is_backward)
            errors.append(abs(us / row[f"{name}_top_left_us"] - 1))
    assert max(errors) < 0.3
    assert sorted(errors)[len(errors) // 2] < 0.15


# -- the command ------------------------------------------------------------------------------------------------------


def run(*options, expected=0):
    assert cli.main(["simulate", "--step", *map(str, options)]) == expected


BAR = "\u2503"  # between the headings of a table


def headings(out: str) -> list[list[str]]:
    """Of the tables that were printed."""
    return [[cell.strip() for cell in line.split(BAR)[1:-1]] for line in out.splitlines() if line.startswith(BAR)]


def test_the_command_predicts_and_says_how_wrong_it_is(tmp_path, capsys):
    file = tmp_path / "out.json"
    run("llama-70b", "--json", file)
    out = capsys.readouterr().out
    assert "predicted, not measured: step of llama-70b, 80 layers, ms, NVIDIA H200, link nvlink" in out
    assert "the same model on steps measured on NVIDIA H200" in out
    assert "median size of the error of 12 figures: " in out
    assert "no step of more than 2 ranks was measured" in out
    tables = headings(out)
    assert len(tables) == 2
    assert all(all(table) for table in tables)
    data = json.loads(file.read_text())
    assert (data["device"], data["link"]) == ("NVIDIA H200", "nvlink")
    assert [each["group_size"] for each in data["predictions"]] == [2, 4, 8, 16]
    assert {each["what"] for each in data["against"]} == {*VARIANTS, "plugin / stock"}
    assert {each["model"] for each in data["against"]} == set(STEP_LAYERS)
    assert all(each["predicted"] / each["measured"] - 1 == each["error"] for each in data["against"])


def test_the_guides_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, file in {"rows.json": "linears_h200_202611.json", "step.json": STEPS.name}.items():
        (tmp_path / name).symlink_to(RESULTS / file)
    section = section_of(DOCS / "guide.md", "### What to expect before renting GPUs")
    commands = re.findall(r"^ {4,}commfuse (simulate .*)$", section, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert cli.main(command.split()) == 0
    assert capsys.readouterr().out.count("median size of the error of") == 2


def test_a_step_that_waits_for_the_host_is_marked(capsys):
    run("llama-8b", "--layers", 4, "--tokens", 2048, "--ranks", 2)
    out = capsys.readouterr().out
    assert "host-bound: the passes in which the device waits for the host" in " ".join(out.split())
    assert "no step of more than" not in out
    run("llama-8b", "--tokens", 8192, "--ranks", 2)
    assert "a faster host" not in capsys.readouterr().out


def test_where_the_forward_pass_alone_waits_it_says_so(capsys):
    """Fails without the passes: such steps, whose backward pass is the device's, were marked "all"."""
    run("llama-8b", "--tokens", 6144, "--ranks", 4, 8)
    out = " ".join(capsys.readouterr().out.split())
    assert "forward: all" in out
    assert "both: stock, without communication; forward: with the plugin" in out
    assert "no step of more than 2 ranks was measured: expect at least these errors" in out
    assert "errors, of host-bound ones -7.8 to +6.5 %, and that more ranks wait for the host sooner" in out


def test_against_takes_the_place_of_what_comes_along(tmp_path, capsys):
    """Each run by its commit: several are of one step."""
    told = tmp_path / "told.json"
    run("llama-8b", "--ranks", 2, "--against", STEPS, "--json", told)
    out = capsys.readouterr().out
    assert "llama-8b, 4 layers, S 8192" in out
    assert "of 56 figures" in out
    against = json.loads(told.read_text())["against"]
    lines = {tuple(each[name] for name in ("model", "layers", "tokens", "run", "what")) for each in against}
    assert len(lines) == len(against) == 56
    assert all(each["run"] in out for each in against)


def test_rows_are_another_machine_of_nearly_the_same_steps(tmp_path, capsys):
    """Of rows that were measured on what is assumed, the answers are those without rows."""
    told, assumed = tmp_path / "told.json", tmp_path / "assumed.json"
    run("llama-8b", "--ranks", 2, "--rows", RESULTS / "linears_h200_202611.json", "--json", told)
    run("llama-8b", "--ranks", 2, "--json", assumed)
    first, second = (json.loads(file.read_text()) for file in (told, assumed))
    assert first["predictions"][0]["step_ms"] == pytest.approx(second["predictions"][0]["step_ms"], rel=0.01)
    assert len(first["against"]) == len(second["against"]) == 12
    capsys.readouterr()


def test_no_step_was_measured_through_host_memory(capsys):
    run("llama-8b", "--link", "host", "--ranks", 2)
    assert "no step was measured on NVIDIA H200, link host" in capsys.readouterr().out


def test_other_rows_are_no_steps(tmp_path):
    row = {"op": "whole_step", "step_ms": 3.0}
    rows = [{**row, "variant": "stock"}, {**row, "variant": "planned"}, {"op": "all_gather_linear", "variant": "x"}]
    rows.append({**row, "variant": "no_communication", "recipe": "delayed"})
    run_of = {"model": "llama-8b", "layers": 2, "sequence": 64, "batch": 1, "group_size": 2, "device": "NVIDIA H200"}
    run_of["transport"] = "copy_engine"
    others = [{"device": "cpu"}, {"batch": 2}, {"model": "demo"}]
    runs = [{**run_of, **other, "rows": rows} for other in ({}, *others, {})]
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"runs": runs}))
    times = {"stock": 3.0, "planned": 3.0}
    step = MeasuredStep("NVIDIA H200", "copy_engine", StepSizes("llama-8b", 2, 64, 2), times, "run 1")
    assert measured_steps(file) == [step, step._replace(run="run 2")]
    named = [{**run_of, "commit": commit, "rows": rows} for commit in ("abc", "abc", "def")]
    file.write_text(json.dumps({"runs": named}))
    assert [step.run for step in measured_steps(file)] == ["commit abc, run 1", "commit abc, run 2", "commit def"]
    file.write_text(json.dumps({"runs": [{**run_of, "context_parallel": 2, "rows": rows[:2]}]}))
    (shared,) = measured_steps(file)
    assert shared.sizes == StepSizes("llama-8b", 2, 64, 2, 2), "else a split sequence were taken for split weights"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="has no steps of llama-8b, llama-70b that `commfuse trace --step --json`"):
        measured_steps(file)


@pytest.mark.parametrize(("options", "message"), [
    (["llama-8b", "--ranks", "3"], "llama-8b: 8192 tokens cannot be cut for 3 ranks"),
    (["llama-8b", "--models", "llama-70b"], "--step predicts a whole model; leave out --models"),
    (["llama-8b", "--figure", "x.png"], "--step predicts a whole model; leave out --figure"),
    (["llama-8b", "--layers", "0"], "--layers"), (["llama-8b", "--tokens", "0"], "--tokens must be at least 1"),
    (["llama-8b", "--context-parallel", "3"], "2 ranks cannot be cut for a context-parallel size of 3"),
    (["llama-8b", "--context-parallel", "2", "--tokens", "8194"], "8194 tokens cannot be cut for 4 parts"),
    (["llama-8b", "--context-parallel", "64", "--ranks", "64"], "32 attention heads cannot be cut for 64 ranks"),
    (["llama-8b", "--context-parallel", "2", "--link", "host"], "exchanges are predicted over nvlink alone, not over"),
    (["llama-8b", "--context-parallel", "0"], "--context-parallel must be at least 1"),
    (["llama-8b", "--link", "25"], "of a bandwidth only --rows tells the rest"),
    (["llama-8b", "--against", "{none}"], "none.json: no file of rows"),
    (["llama-8b", "--against", "{steps}"], "it has no steps of NVIDIA H200 over nvlink; steps of other machines"),
])  # fmt: skip
def test_what_cannot_be_predicted_is_refused(options, message, tmp_path, capsys):
    steps = tmp_path / "steps.json"
    rows = [{"op": "whole_step", "variant": "stock", "step_ms": 5.0}]
    run_of = {"model": "llama-70b", "layers": 2, "sequence": 64, "batch": 1, "group_size": 2}
    steps.write_text(json.dumps({**run_of, "rows": rows}))
    run(*(option.format(none=tmp_path / "none.json", steps=steps) for option in options), expected=2)
    assert message in capsys.readouterr().err


def test_what_the_measured_steps_do_not_tell_is_said(capsys):
    run("llama-8b", "--ranks", 2, "--context-parallel", 2)
    out = " ".join(capsys.readouterr().out.split())
    assert "step of llama-8b, 32 layers, context parallel 2, ms" in out
    assert "no step whose ranks share a sequence is among these" in out
    run("llama-8b", "--ranks", 2)
    assert "share a sequence" not in capsys.readouterr().out


def test_layers_are_for_steps(capsys):
    assert cli.main(["simulate", "--rows", "x.json", "--layers", "2"]) == 2
    assert "only --step takes --layers" in capsys.readouterr().err
