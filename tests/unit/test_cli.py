"""The command line: help, exit codes, and the doctor on whatever machine this is."""

import argparse
import json
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from commfuse_megatron.errors import ConfigError, UnsupportedError, VerificationError
from commfuse_megatron.tools import main as cli
from commfuse_megatron.tools.common.ranks import CannotRunError, Rank, RankFailedError, UsageError
from commfuse_megatron.tools.doctor import machine as machine_module
from commfuse_megatron.tools.doctor.machine import Ability, Machine, Setting
from commfuse_megatron.tools.verify import report
from commfuse_megatron.tools.verify.megatron_models import ModelResult
from tests.harness import run_python


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Their parsers, by name."""
    (action,) = [a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return action.choices


@pytest.mark.parametrize("command", subcommands())
def test_every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"example:\n  commfuse {command}" in capsys.readouterr().out


def test_a_part_of_an_option_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--rank", "2"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --rank" in capsys.readouterr().err


def test_options_are_read_without_torch() -> None:
    """Fails where a room's `cli` imports it, or the room itself: every `--help` then took as long as that does."""
    check = "import sys; from commfuse_megatron.tools.main import build_parser; build_parser(); print(*sys.modules)"
    ran = run_python("-c", check)
    assert ran.returncode == 0, ran.stderr
    assert "torch" not in ran.stdout.split()


@pytest.mark.parametrize(("wrong", "usage"), [
    ([], "commfuse [-h]"), (["nonsense"], "commfuse [-h]"), (["--nonsense", "doctor"], "commfuse [-h]"),
    (["doctor", "--nonsense"], "commfuse doctor [-h]"), (["trace", "--path", "nonsense"], "commfuse trace [-h]"),
    (["verify", "nonsense"], "commfuse verify [-h]"),
])  # fmt: skip
def test_wrong_usage_is_exit_code_2_with_usage(wrong, usage, capsys):
    """Fails without the subcommands' own parser class: unknown options are then the top-level parser's."""
    with pytest.raises(SystemExit) as ended:
        cli.main(wrong)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"usage: {usage}")


def require_usage_error(capsys, command: str, message: str, *, with_usage: bool = True) -> None:
    """Of what makes no sense anywhere it is not said that it cannot run *here*."""
    err = capsys.readouterr().err
    assert "cannot run here" not in err
    assert f"commfuse {command}: error: " in err
    assert message in err
    assert err.startswith(f"usage: commfuse {command} [-h]") or not with_usage, err


@pytest.mark.parametrize(("error", "exit_code", "words"), [
    (CannotRunError("no GPU here"), 2, "commfuse doctor cannot run here: no GPU here"),
    (UnsupportedError("needs matplotlib"), 2, "cannot run here: needs matplotlib"),
    (ConfigError('unknown key "x"'), 2, 'commfuse doctor: error: unknown key "x"'),
    (UsageError("--x goes with --y"), 2, "commfuse doctor: error: --x goes with --y"),
    (VerificationError("wrong sum"), 1, "commfuse doctor: VerificationError: wrong sum"),
    (RankFailedError("rank 1 raised\nTraceback"), 1, "commfuse doctor failed.\nrank 1 raised\nTraceback"),
    (KeyboardInterrupt(), 130, "interrupted"),
])  # fmt: skip
def test_errors_become_exit_codes(error, exit_code, words, monkeypatch, capsys):
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("commfuse_megatron.tools.doctor.cli.run", fail)
    assert cli.main(["doctor"]) == exit_code
    out, err = capsys.readouterr()
    assert words in err
    assert not out


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"commfuse {metadata.version('commfuse-megatron')}\n"


def test_python_m_is_the_same_command() -> None:
    ran = run_python("-m", "commfuse_megatron", "--help")
    assert ran.returncode == 0
    assert ran.stdout.startswith("usage: commfuse ")
    assert all(command in ran.stdout for command in subcommands())


@pytest.mark.timeout(180)  # it imports Megatron in a process of its own, which takes 15 s where nothing else runs
def test_the_doctor_sees_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "doctor.json"
    assert cli.main(["doctor", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "gloo transport" in out
    data = json.loads(file.read_text(encoding="utf-8"))
    assert set(data) == {"versions", "gpus", "links", "abilities", "settings", "buffers"}
    abilities = {row["name"]: row for row in data["abilities"]}
    assert abilities["gloo transport"]["will_run"]
    assert all(row["will_run"] or row["missing"] for row in data["abilities"])
    assert data["versions"]["torch"]
    # 70B, M 8192, two ranks: gathered x (128 MiB), one shard received and one sent (64 each), one in fp32 (128).
    assert data["buffers"]["llama-70b"] == 384 if len(data["gpus"]) <= 2 else data["buffers"]["llama-70b"] > 384
    assert "buffers of one context" in out
    assert {"CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_P2P_DISABLE", "COMMFUSE_CONFIG"} <= {
        row["name"] for row in data["settings"]
    }


@pytest.mark.parametrize(("command", "complaint"), [
    *((f"verify --transport {transport} --device {device}", f"--transport {transport} carries tensors of")
     for transport, device in (("nccl", "cpu"), ("copy_engine", "cpu"), ("gloo", "cuda"))),
    ("verify --megatron --device cuda", "float64"),
    ("verify --megatron --dtype float32", "leave --dtype and --transport out"),
    ("verify --megatron --ranks 3", "2 or 4 ranks, not for 3"),
    ("verify --megatron --only sparse", "no configuration is called sparse; there are dense, "),
    ("verify --megatron --only pipeline", "needs 4 ranks, there are 2"),
    ("verify --only dense", "--only names configurations of --megatron"),
    ("verify --ranks 1", "one rank has nothing to communicate; use --ranks 2 or more"),
    ("verify --lora", "--lora puts adapters into the models of --megatron: give that, too"),
    ("verify --megatron --lora --only sparse", "no option of --lora has the word sparse. There are model: "),
    ("demo --steps 0", "--steps must be at least 1"), ("demo --ranks 3", "can be cut for 2, 4, 8 ranks, not 3"),
    ("demo --ranks 1", "can be cut for 2, 4, 8 ranks, not 1"), ("demo --text no/such/file", "the text cannot be read"),
    (f"demo --text {Path(__file__).parents[1] / 'conftest.py'}", "the demo needs at least 10000"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_before_start(command, complaint, capsys):
    assert cli.main(command.split()) == 2
    require_usage_error(capsys, command.split()[0], complaint)


@pytest.mark.parametrize(("stock", "end"), [
    ({}, "on Megatron's own path.\n1 equal to stock"),
    ({"it is off": 2}, "on Megatron's own path, because\n  - it is off\n1 equal to stock"),
])  # fmt: skip
def test_the_legend_of_verified_models_is_a_whole_sentence(stock, end, capsys):
    """Fails without the look at the reasons: it ended in "because" where nothing was stock."""
    result = ModelResult(
        name="dense", layout="TP2", loss_error=0.0, gradient_error=0.0, gradient="", num_gradients=3,
        parameter_error=None, parameter="", overlapped=4, backward=4, stock=stock,
    )  # fmt: skip
    report.print_models([result], [], Rank(0, 2, "cpu"))
    assert end in capsys.readouterr().out


def a_machine(*, has_gloo: bool = True, is_config_wrong: bool = False) -> Machine:
    return Machine(
        versions={"python": "3"},
        gpus=(),
        links=(),
        abilities=(
            Ability(name="gloo transport", needs="", missing=None if has_gloo else "absent"),
            Ability(name="nccl transport", needs="", missing="pip install 'x[y]'"),
        ),
        settings=(Setting(name="COMMFUSE_CONFIG", value="f", meaning="no such key", is_wrong=is_config_wrong),),
    )


@pytest.mark.parametrize(
    ("machine", "exit_code"), [(a_machine(), 0), (a_machine(is_config_wrong=True), 2), (a_machine(has_gloo=False), 2)]
)
def test_exit_codes_of_the_doctor(machine, exit_code, monkeypatch, capsys):
    monkeypatch.setattr("commfuse_megatron.tools.doctor.machine.inspect_machine", lambda: machine)
    assert cli.main(["doctor"]) == exit_code
    out, err = capsys.readouterr()
    assert "x[y]" in out, "brackets are text, not markup"
    assert "buffers of one context" in out, "all is shown, whatever is wrong"
    complaint = "COMMFUSE_CONFIG is wrong: no such key"
    assert (f"commfuse doctor: error: {complaint}" in err) == machine.settings[0].is_wrong
    assert out.startswith(complaint) == machine.settings[0].is_wrong, "before the tables, which take the defaults"


def test_a_reader_that_leaves_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the console's own answer: `commfuse doctor | head -1` said that a check had failed."""
    monkeypatch.setattr("commfuse_megatron.tools.doctor.machine.inspect_machine", a_machine)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["doctor"]) == 0


def test_a_wrong_configuration_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    monkeypatch.setenv("COMMFUSE_CONFIG", str(file))
    assert machine_module._config_file().is_wrong
    file.write_text("linear: {fprop: {chunk_per_shard: 2}}", encoding="utf-8")
    setting = machine_module._config_file()
    assert setting.is_wrong
    assert "chunks_per_shard" in setting.meaning
    file.write_text("{}", encoding="utf-8")
    assert not machine_module._config_file().is_wrong


def test_a_package_that_cannot_be_imported_says_why() -> None:
    assert machine_module._why_import_fails("json", "torch") is None
    assert machine_module._why_import_fails("json", "no-such-distribution") == "no-such-distribution is not installed"
    reason = machine_module._why_import_fails("no_such_module", "torch")
    assert reason is not None
    assert "No module named 'no_such_module'" in reason


@pytest.mark.parametrize(("arguments", "message"), [
    (["doctor", "--json", "{folder}"], "--json {folder}: is a folder; name a file"),
    (["verify", "--json", "{file}/x.json"], "--json {file}/x.json: the folder cannot be made: "),
    (["demo", "--output", "{file}"], "--output {file}: the folder cannot be made: {file} is a file"),
    (["doctor", "--json", ""], "--json: a name is missing"),
    (["bench", "--device", "cuda", "--figure", "{folder}"], "--figure {folder}: is a folder; name a file"),
    (["simulate", "--figure", "{folder}/x.bmp"], "--figure {folder}/x.bmp: pictures are .png or .svg"),
    (["simulate", "--figure", "{folder}/x"], "--figure {folder}/x: pictures are .png or .svg"),
    (["bench", "--json", "/dev/null"], "--json /dev/null: is no regular file"),
    (["trace", "--output", "{folder}", "--name", "a/b"], "--name a/b: name the files, not a folder"),
    (["trace", "--output", "{folder}", "--name", "taken"], "{folder}/taken.png: is a folder; name a file"),
    (["trace", "--attention", "--output", "{folder}", "--name", "taken"], "{folder}/taken.png: is a folder"),
    (["trace", "--step", "--output", "{folder}", "--name", "taken"], "{folder}/taken.png: is a folder"),
    (["demo", "--output", "{folder}"], "{folder}/timeline.png: is a folder; name a file"),
])  # fmt: skip
def test_results_that_cannot_be_written_are_refused_before_work(arguments, message, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    for taken in ("taken.png", "timeline.png"):
        (tmp_path / taken).mkdir()
    names = {"folder": str(tmp_path), "file": str(file)}
    assert cli.main([argument.format(**names) for argument in arguments]) == 2
    require_usage_error(capsys, arguments[0], message.format(**names))


@pytest.mark.parametrize("option", ["--json", "--figure", "--output"])
def test_folders_are_made_for_results_only(option, tmp_path, capsys):
    """Fails without the look that makes nothing: a command that is refused left empty folders behind."""
    place = str(tmp_path / "some" / "missing" / "x.png")
    command = {"--json": ["demo"], "--figure": ["simulate"], "--output": ["trace"]}[option]
    wrong = {"demo": ["--steps", "0"], "simulate": [], "trace": ["--calls", "0"]}[command[0]]
    assert cli.main([*command, option, place, *wrong]) == 2
    require_usage_error(capsys, command[0], "error: ")
    assert list(tmp_path.iterdir()) == []


def test_help_says_that_folders_are_made():
    helps = {
        (name, action.dest): action.help
        for name, parser in subcommands().items()
        for action in parser._actions
        if action.dest in ("json", "output", "figure")
    }
    assert len(helps) >= len(subcommands()) + 4
    assert [key for key, text in helps.items() if "made" not in text] == []
