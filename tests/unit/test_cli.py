"""The command line: help, exit codes, and the doctor on whatever machine this is."""

import argparse
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from commfuse_megatron.cli import bench, verify_megatron
from commfuse_megatron.cli import main as cli
from commfuse_megatron.cli.ranks import CannotRunError, Rank, RankFailedError, UsageError
from commfuse_megatron.cli.trace import config_of
from commfuse_megatron.errors import ConfigError, UnsupportedError, VerificationError
from commfuse_megatron.verify import machine as machine_module
from commfuse_megatron.verify.machine import Ability, Machine, Setting
from commfuse_megatron.verify.megatron_models import ModelResult


def subcommands() -> list[str]:
    (action,) = [a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return list(action.choices)


@pytest.mark.parametrize("command", subcommands())
def test_every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"example:\n  commfuse {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "usage"),
    [
        ([], "commfuse [-h]"),
        (["nonsense"], "commfuse [-h]"),
        (["--nonsense", "doctor"], "commfuse [-h]"),
        (["doctor", "--nonsense"], "commfuse doctor [-h]"),
        (["trace", "--path", "nonsense"], "commfuse trace [-h]"),
        (["verify", "nonsense"], "commfuse verify [-h]"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_the_usage_of_what_was_called(
    wrong: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [
        (CannotRunError("no GPU here"), 2, "commfuse doctor cannot run here: no GPU here"),
        (UnsupportedError("needs matplotlib"), 2, "cannot run here: needs matplotlib"),
        (ConfigError('unknown key "x"'), 2, 'commfuse doctor: error: unknown key "x"'),
        (UsageError("--x goes with --y"), 2, "commfuse doctor: error: --x goes with --y"),
        (VerificationError("wrong sum"), 1, "commfuse doctor: VerificationError: wrong sum"),
        (RankFailedError("rank 1 raised\nTraceback"), 1, "commfuse doctor failed.\nrank 1 raised\nTraceback"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException,
    exit_code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("commfuse_megatron.cli.doctor.run_doctor", fail)
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
    ran = subprocess.run(
        [sys.executable, "-m", "commfuse_megatron", "--help"], capture_output=True, text=True, timeout=50, check=True
    )
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


@pytest.mark.parametrize(("transport", "device"), [("nccl", "cpu"), ("copy_engine", "cpu"), ("gloo", "cuda")])
def test_a_transport_of_other_devices_is_refused_before_any_rank_starts(transport, device, capsys):
    assert cli.main(["verify", "--transport", transport, "--device", device]) == 2
    require_usage_error(capsys, "verify", f"--transport {transport} carries tensors of")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--megatron", "--device", "cuda"), "float64"),
        (("--megatron", "--dtype", "float32"), "leave --dtype and --transport out"),
        (("--megatron", "--ranks", "3"), "2 or 4 ranks, not for 3"),
        (("--megatron", "--only", "sparse"), "no configuration is called sparse; there are dense, "),
        (("--megatron", "--only", "pipeline"), "needs 4 ranks, there are 2"),
        (("--only", "dense"), "--only names configurations of --megatron"),
    ],
)
def test_models_that_cannot_be_verified_are_refused_before_any_rank_starts(words, complaint, capsys):
    assert cli.main(["verify", *words]) == 2
    require_usage_error(capsys, "verify", complaint)


@pytest.mark.parametrize(
    ("stock", "end"),
    [
        ({}, "on Megatron's own path.\n1 equal to stock"),
        ({"it is off": 2}, "on Megatron's own path, because\n  - it is off\n1 equal to stock"),
    ],
)
def test_the_legend_of_verified_models_is_a_whole_sentence(stock, end, capsys):
    """Fails without the look at the reasons: it ended in "because" where nothing was stock."""
    result = ModelResult(
        name="dense",
        layout="TP2",
        loss_error=0.0,
        gradient_error=0.0,
        gradient="",
        num_gradients=3,
        parameter_error=None,
        parameter="",
        overlapped=4,
        backward=4,
        stock=stock,
    )
    verify_megatron._print([result], [], Rank(0, 2, "cpu"))
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
    ("machine", "exit_code"),
    [(a_machine(), 0), (a_machine(is_config_wrong=True), 2), (a_machine(has_gloo=False), 2)],
)
def test_exit_codes_of_the_doctor(
    machine: Machine, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("commfuse_megatron.cli.doctor.inspect_machine", lambda: machine)
    assert cli.main(["doctor"]) == exit_code
    out, err = capsys.readouterr()
    assert "x[y]" in out, "brackets are text, not markup"
    assert "buffers of one context" in out, "all is shown, whatever is wrong"
    assert ("commfuse doctor: error: COMMFUSE_CONFIG is wrong: no such key" in err) == machine.settings[0].is_wrong


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--json", "{folder}"], "--json {folder}: is a folder; name a file"),
        (["verify", "--json", "{file}/x.json"], "--json {file}/x.json: the folder cannot be made: "),
        (["demo", "--output", "{file}"], "--output {file}: the folder cannot be made: "),
        (["bench", "--device", "cuda", "--figure", "{folder}"], "--figure {folder}: is a folder; name a file"),
        (["simulate", "--figure", "{folder}/x.bmp"], "--figure {folder}/x.bmp: pictures are .png or .svg"),
        (["simulate", "--figure", "{folder}/x"], "--figure {folder}/x: pictures are .png or .svg"),
        (["bench", "--json", "/dev/null"], "--json /dev/null: is no regular file"),
        (["trace", "--output", "{folder}", "--name", "a/b"], "--name a/b: name the files, not a folder"),
        (["trace", "--output", "{folder}", "--name", "taken"], "{folder}/taken.png: is a folder; name a file"),
        (["trace", "--attention", "--output", "{folder}", "--name", "taken"], "{folder}/taken.png: is a folder"),
        (["trace", "--step", "--output", "{folder}", "--name", "taken"], "{folder}/taken.png: is a folder"),
        (["demo", "--output", "{folder}"], "{folder}/timeline.png: is a folder; name a file"),
    ],
)
def test_results_that_cannot_be_written_are_refused_before_any_work(arguments, message, tmp_path, capsys):
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
    (commands,) = [a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    helps = {
        (name, action.dest): action.help
        for name, parser in commands.choices.items()
        for action in parser._actions
        if action.dest in ("json", "output", "figure")
    }
    assert len(helps) >= len(commands.choices) + 4
    assert [key for key, text in helps.items() if "made" not in text] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "one rank has nothing to communicate"),
        (["--check", "ideal=1.1"], "times from a CPU are neither compared nor drawn"),
        (["--figure", "rows.png"], "times from a CPU are neither compared nor drawn"),
        (["--device", "cuda", "--check", "speed=2"], 'unknown figure "speed"'),
        (["--ranks", "4", "--virtual-ranks", "8"], "on exactly two ranks"),
        (["--resume"], "--resume needs the --json FILE"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--models", "paper"], "there are no linears of paper"),
        (["--attention", "--models", "llama-405b"], "there are no attention blocks of llama-405b"),
        (["--attention", "--linears", "qkv"], "--linears: for linears, not for --attention"),
        (
            ["--models", "llama-8b", "--tokens", "32"],
            "M=32 divided by 64 leaves 0 rows for 2 ranks, each of which needs one",
        ),
        (["--models", "llama-8b", "--tokens", "64"], "M=64 divided by 64 leaves 1 rows for 2 ranks"),
        (["--attention", "--models", "llama-8b", "--tokens", "63"], "M=63 divided by 64 leaves 0 rows for 2 ranks"),
        (["--tokens", "131072", "--shrink", "65536"], "nothing is left of its features, divided by 65536"),
        (["--attention", "--ranks", "3"], "with these options groups of 2, 4, 8, 16 can"),
        (["--variants", "planned", "nonsense"], 'is called "nonsense"; there are compute_only, '),
        (["--variants", "bulk", "--passes", "fprop"], 'no variant of these cases is called "bulk"'),
        (["--attention", "--variants", "sliced"], "row_parallel gloo, query_split m=1 gloo"),
        (["--models", "paper-mlp", "--linears", "qkv"], "which are paper-mlp.fc1, paper-mlp.fc2"),
        (["--virtual-ranks", "4", "--config", "f"], "leave it or --virtual-ranks out"),
        (["--virtual-ranks", "4", "--passes", "backward"], "an emulated group runs forward only"),
        (["--virtual-ranks", "4", "--chunks", "4"], "emulated groups run one per shard, but for --attention on"),
        (["--virtual-ranks", "4", "--attention", "--chunks", "4"], "emulated groups run one per shard"),
        (
            ["--models", "llama-8b", "--tokens", "1024", "--chunks", "2", "9"],
            "of llama-8b.qkv M=1024 fprop it has 8 rows",
        ),
        (
            ["--attention", "--models", "llama-8b", "--tokens", "1024", "--chunks", "9"],
            "9 chunks of a shard were asked",
        ),
        (
            ["--models", "llama-8b", "--variants", "planned", "megatron", "--chunks", "3"],
            "none of the variants that are asked for has chunks to force; those that have: slices_only m=3 torch,",
        ),
        (
            ["--attention", "--models", "llama-8b", "--variants", "row_parallel", "--chunks", "3"],
            "has chunks to force; those that have: query_split m=3 gloo",
        ),
        (["--shrink", "0"], "--shrink must be at least 1, got 0"),
        (["--case-s", "-1"], "--case-s must be a time in seconds, got -1.0"),
        (["--budget-s", "nan"], "--budget-s must be a time in seconds, got nan"),
        (["--ranks", "999"], "as many processes would start here; at most 64 do"),
    ],
)
def test_a_benchmark_that_makes_no_sense_is_refused_before_any_rank_starts(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    require_usage_error(capsys, "bench", message, with_usage=False)


UNKNOWN_BLOCKS = (
    "paper",
    "paper-8192",
    "paper-axb",
    "paper-mlp.fc1",
    "paper.attention-2x4x1",
    "paper.attention-3x4096",
)

#: What an option gives to a configuration, and what `linear_case` says, is worded by them.
OF_THE_CONFIGURATION = (
    'unknown case "llama-9b.fc2"',
    'unknown case "llama-8b.fc2"',
    *(f'unknown case "{name}"; known are llama-8b.attention' for name in UNKNOWN_BLOCKS),
    "chunks_per_shard must be at least 1",
    "100 rows (6400 divided by 64: --shrink) must be a multiple of the group size 3",
    "32 heads must be a multiple of the group size 3",
    "leaves 1 rows for 2 ranks",
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profiler"], "--profiler looks at GPU kernels; use it with --device cuda"),
        (["--path", "bulk"], "--path bulk is a way of the backward pass"),
        (["--path", "async"], "--path async is a way of the backward pass"),
        (["--path", "sequential", "--chunks", "4"], "--path sequential sends no chunks: leave out --chunks"),
        (["--path", "bulk", "--pass", "backward", "--algorithm", "ring"], "sends no chunks: leave out --algorithm"),
        (["--calls", "0"], "--calls must be at least 1, got 0"),
        (["--case", "llama-70b.fc2", "--N", "8"], "--case gives N and K"),
        (["--case", "llama-9b.fc2"], 'unknown case "llama-9b.fc2"'),
        (
            ["--case", "llama-8b.fc2", "--op", "all_gather_linear"],
            "is a case of linear_reduce_scatter, not all_gather_linear",
        ),
        (["--step", "--op", "all_gather_linear"], "--step traces a whole model"),
        (["--step", "--model", "llama-8b"], "--model llama-8b is for GPUs"),
        (["--step", "--ranks", "3", "--seq", "33"], "can be cut for 2, 4 or 8 ranks, not 3"),
        (["--step", "--seq", "33"], "--seq 33 must be a multiple of the 2 ranks"),
        (["--step", "--path", "sequential"], "every step is traced without the plugin, too; leave it out"),
        (["--step", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--chunks", "0"], "chunks_per_shard must be at least 1"),
        (["--seq", "64"], "one linear has --tokens: leave out --seq"),
        (["--splits", "2", "--paths", "sequential"], "add --attention, or leave out --paths, --splits"),
        (["--step", "--shrink", "2"], "add --attention, or leave out --shrink"),
        (["--attention", "--step"], "--step traces a whole model; leave out --attention"),
        (["--step", "--pass", "backward", "--calls", "3"], "--step traces a whole model; leave out --pass, --calls"),
        (["--step", "--tokens", "64", "--profiler"], "--step traces a whole model; leave out --tokens, --profiler"),
        (["--model", "llama-8b"], "of a whole step; add --step, or leave out --model"),
        (
            ["--layers", "2", "--batch", "2", "--rounds", "3", "--fusions"],
            "add --step, or leave out --layers, --batch, --fusions, --rounds",
        ),
        (["--chunks", "300"], "--chunks 300: a shard of 512 tokens on 2 ranks has 256 rows"),
        (["--pass", "backward", "--path", "async"], "--path async is a way of all_gather_linear's backward pass"),
        (
            ["--pass", "backward", "--path", "async", "--attention"],
            "--path async is a way of all_gather_linear's backward pass",
        ),
        (["--transport", "nccl"], "--transport nccl carries tensors of --device cuda only"),
        (
            ["--attention", "--layers", "2", "--transformer-impl", "transformer_engine", "--tokens", "8"],
            "leave out --tokens, --layers, --transformer-impl",
        ),
        (["--attention", "--ranks", "1"], "one rank has nothing to communicate"),
        (["--attention", "--profiler"], "--profiler looks at GPU kernels; use it with --device cuda"),
        (["--attention", "--path", "bulk"], "--path bulk is a way of the backward pass"),
        (["--attention", "--calls", "0"], "--calls must be at least 1, got 0"),
        (["--attention", "--splits", "0"], "--splits must be at least 1, got 0"),
        (["--attention", "--paths", "sequential", "sequential"], "name each one once"),
        (["--attention", "--paths", "query_split", "--chunks", "2"], "whose projection is meant: leave out --chunks"),
        (["--attention", "--paths", "row_parallel", "--splits", "2"], "no path is query_split: leave out --splits"),
        (["--attention", "--case", "llama-8b.fc2"], 'unknown case "llama-8b.fc2"'),
        *(
            (["--attention", "--case", name], f'unknown case "{name}"; known are llama-8b.attention')
            for name in UNKNOWN_BLOCKS
        ),
        (["--attention", "--case", "paper.attention-4x8192", "--seq", "64"], "has a sequence of its own"),
        (
            ["--attention", "--ranks", "3", "--seq", "6400"],
            "100 rows (6400 divided by 64: --shrink) must be a multiple of the group size 3",
        ),
        (
            ["--attention", "--ranks", "3", "--seq", "99", "--shrink", "1"],
            "32 heads must be a multiple of the group size 3",
        ),
        (["--attention", "--seq", "128", "--splits", "2"], "a shard has 1 rows (sizes are divided by 64: --shrink)"),
        (["--attention", "--seq", "64", "--shrink", "64"], "leaves 1 rows for 2 ranks"),
        (["--attention", "--chunks", "0"], "chunks_per_shard must be at least 1"),
    ],
)
def test_traces_that_cannot_be_made_are_refused_before_any_work(arguments, message, tmp_path, capsys):
    assert cli.main(["trace", "--output", str(tmp_path), *arguments]) == 2
    require_usage_error(capsys, "trace", message, with_usage=message not in OF_THE_CONFIGURATION)


WITH_A_FILE = [
    ["trace", "--config", "{file}"],
    ["trace", "--attention", "--config", "{file}"],
    ["trace", "--step", "--config", "{file}"],
    ["bench", "--config", "{file}"],
    ["bench", "--resume", "--json", "{file}"],
    ["simulate", "--rows", "{file}"],
    ["demo", "--text", "{file}"],
]


@pytest.mark.parametrize("arguments", WITH_A_FILE, ids=" ".join)
@pytest.mark.parametrize("content", [None, "folder", b"\xff\x00", b"[1]"])
def test_files_that_cannot_be_read_are_wrong_usage(arguments, content, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where folders for results are made
    file = tmp_path / "file"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    elif "--resume" in arguments:
        pytest.skip("rows that are not there yet are none")
    assert cli.main([argument.format(file=file) for argument in arguments]) == 2
    require_usage_error(capsys, arguments[0], str(file), with_usage=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--variants", "megatron"], "was measured with --variants sliced, and this is --variants megatron"),
        ([], "was measured with --variants sliced, and this is --variants none"),
        (["--variants", "sliced", "--chunks", "1", "2"], "with --chunks 1, and this is --chunks 1 2"),
    ],
)
def test_a_benchmark_goes_on_with_the_same_variants_only(options, words, tmp_path, capsys):
    """Else its cases would count as done, and what was asked for would never be measured."""
    file = tmp_path / "rows.json"
    settings = {"variants": ["sliced"], "chunks": [1], "config_files": []}
    file.write_text(json.dumps({"settings": settings, "rows": []}), encoding="utf-8")
    assert cli.main(["bench", "--models", "llama-8b", "--resume", "--json", str(file), *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [["trace"], ["trace", "--attention"], ["trace", "--step"], ["bench"]], ids=" ".join)
def test_the_environment_names_a_configuration(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMMFUSE_CONFIG", str(tmp_path / "missing.yaml"))
    assert cli.main(command) == 2
    assert "missing.yaml: cannot be read" in capsys.readouterr().err


def test_the_environments_configuration_is_the_one_that_options_change(monkeypatch, tmp_path):
    own, other = tmp_path / "own.yaml", tmp_path / "other.yaml"
    own.write_text("{linear: {fprop: {path: sliced, chunks_per_shard: 4}}, check_agreement: false}", encoding="utf-8")
    other.write_text("{check_agreement: true}", encoding="utf-8")
    monkeypatch.setenv("COMMFUSE_CONFIG", str(own))
    found = config_of(cli.build_parser().parse_args(["trace", "--algorithm", "ring"]))
    assert (found.check_agreement, found.linear.fprop.chunks_per_shard) == (False, 4)
    assert found.linear.fprop.algorithm == "ring"
    named = config_of(cli.build_parser().parse_args(["trace", "--config", str(other)]))
    assert (named.check_agreement, named.linear.fprop.chunks_per_shard) == (True, None)
    assert bench._config_files(cli.build_parser().parse_args(["bench"])) == (str(own),)
    assert bench._config_files(cli.build_parser().parse_args(["bench", "--config", "x"])) == ("x",)


@pytest.mark.parametrize("path", ["bulk", "async"])
def test_a_way_of_backward_passes_leaves_the_forward_ones_of_a_step_alone(path):
    forced = config_of(cli.build_parser().parse_args(["trace", "--step", "--path", path])).linear
    assert (forced.fprop.path, forced.dgrad.path) == ("auto", path)


@pytest.mark.parametrize("option", [["--attention"], ["--virtual-ranks", "4"]], ids=" ".join)
def test_a_configuration_of_the_environment_that_no_variant_takes_is_refused(option, monkeypatch, capsys):
    monkeypatch.setenv("COMMFUSE_CONFIG", "some.yaml")
    assert cli.main(["bench", *option]) == 2
    assert f"COMMFUSE_CONFIG is some.yaml; {option[0]} has fixed variants" in capsys.readouterr().err


def test_a_configuration_named_like_a_variant_is_refused(tmp_path, capsys):
    file = tmp_path / "sequential.yaml"
    file.write_text("{}", encoding="utf-8")
    assert cli.main(["bench", "--config", str(file)]) == 2
    assert "give the file another name" in capsys.readouterr().err
