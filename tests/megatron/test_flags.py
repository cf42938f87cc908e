"""The switches: command line, plain attributes of a configuration, environment variable; the log of losses."""

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import CONFIG_VARIABLE
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import add_arguments, arguments, compat_training
from commfuse_megatron.plugin.pretraining import ScalarLog, pretrain


def parse(*words: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser()).parse_args(words)


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)


def test_only_given_flags_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").touch()
    for given, expected in (
        (parse(), {}), (parse("--commfuse"), {"commfuse": True}), (parse("--no-commfuse"), {"commfuse": False}),
        (parse("--commfuse-config", "a.yaml"), {"commfuse_config": "a.yaml"}),
        (argparse.Namespace(lr=1.0), {}),  # of a script without ours
    ):  # fmt: skip
        config = SimpleNamespace()
        arguments.set_flags(config, given)
        assert vars(config) == expected


@pytest.mark.parametrize(("text", "message"), [
    (None, r"--commfuse-config: .*a\.yaml: cannot be read: No such file"),
    ("chunks: 2", r"--commfuse-config: .*a\.yaml: .*chunks"),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_a_usage_error(text, message, tmp_path: Path, capsys) -> None:
    """Not a traceback out of Megatron's model provider, when all ranks are up."""
    if text is not None:
        (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as raised:
        parse("--commfuse-config", str(tmp_path / "a.yaml"))
    assert raised.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_file_that_nothing_would_read_is_an_error(tmp_path: Path) -> None:
    """Fails without the check: the whole run was stock, and only the report at its end said so."""
    (tmp_path / "a.yaml").touch()
    given = parse("--commfuse-config", str(tmp_path / "a.yaml"))
    given.spec = None
    with pytest.raises(ConfigError, match=r"--commfuse-config .*a\.yaml is given, .* add --commfuse"):
        pretrain(given, None, None)


def test_help_is_printed_though_other_texts_hold_a_lone_percent() -> None:
    """Fails without the correction: some of Megatron's do, and --help raised ValueError."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", default=7, help="a share (50%) of %(default)s%, not 5%% of it")
    assert "a share (50%) of 7%, not 5% of it" in add_arguments(parser).format_help()
    compat_training.make_help_printable(parser)
    assert "a share (50%) of 7%, not 5% of it" in parser.format_help(), "correcting it again changes nothing"


@pytest.mark.parametrize(("flag", "expected"), [(True, True), (False, False), (None, True), (0, False)])
def test_switch(flag: object, expected: bool) -> None:
    assert arguments.is_switched_on(SimpleNamespace(commfuse=flag)) is expected
    assert arguments.is_switched_on(SimpleNamespace())


def test_attribute_wins_over_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments.config_file(SimpleNamespace()) is None
    monkeypatch.setenv(CONFIG_VARIABLE, "env.yaml")
    assert arguments.config_file(SimpleNamespace()) == "env.yaml"
    assert arguments.config_file(SimpleNamespace(commfuse_config="own.yaml")) == "own.yaml"
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    assert arguments.config_file(SimpleNamespace()) is None


def test_file(tmp_path: Path) -> None:
    assert arguments.read_config(None) == OverlapConfig()
    file = tmp_path / "a.yaml"
    file.write_text("linear: {fprop: {chunks_per_shard: 3}}\n")
    assert arguments.read_config(str(file)).linear.fprop.chunks_per_shard == 3
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        arguments.read_config(str(tmp_path / "missing.yaml"))


def test_the_environment_is_read_in_one_file_of_the_plugin() -> None:
    folder = Path(arguments.__file__).parent
    assert [file.name for file in folder.glob("*.py") if "environ" in file.read_text()] == ["arguments.py"]


def test_no_training_arguments_outside_megatron_training() -> None:
    assert compat_training.training_arguments() is None


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_one_line_per_step(tmp_path: Path) -> None:
    file = tmp_path / "made" / "log.jsonl"
    log = ScalarLog(file)
    log.add_text("args", "ignored", global_step=0)
    for step in (1, 2):
        log.add_scalar("lm loss", torch.tensor(step / 3), step)
        log.add_scalar("lm loss vs samples", 99.0, 8 * step)
        log.add_scalar("grad-norm", 0.5, step)
    assert [line["step"] for line in lines(file)] == [1], "a step is written when the next one begins"
    log.close()
    loss = float(torch.tensor(2 / 3))
    assert lines(file)[1] == {"step": 2, "lm loss": loss, "grad-norm": 0.5}


def test_a_new_run_begins_anew_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    for is_resumed, expected in ((False, [1]), (True, [1, 1]), (False, [1])):
        log = ScalarLog(file, is_resumed=is_resumed)
        log.add_scalar("lm loss", 1.0, 1)
        log.close()
        assert [line["step"] for line in lines(file)] == expected
