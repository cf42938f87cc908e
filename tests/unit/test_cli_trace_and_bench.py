"""What `commfuse trace` and `commfuse bench` refuse before any rank starts, and which configuration they take."""

import json

import pytest

from commfuse_megatron.tools import main as cli
from commfuse_megatron.tools.bench import cli as bench
from commfuse_megatron.tools.trace.cli import config_of
from tests.unit.test_cli import require_usage_error


@pytest.mark.parametrize(("arguments", "message"), [
    (["--ranks", "1"], "one rank has nothing to communicate"),
    (["--check", "ideal=1.1"], "times from a CPU are neither compared nor drawn"),
    (["--figure", "rows.png"], "times from a CPU are neither compared nor drawn"),
    (["--device", "cuda", "--check", "speed=2"], 'unknown figure "speed"'),
    (["--ranks", "4", "--virtual-ranks", "8"], "on exactly two ranks"),
    (["--resume"], "--resume needs the --json FILE"), (["--tokens", "0"], "--tokens must be at least 1, got 0"),
    (["--models", "paper"], "there are no linears of paper"),
    (["--attention", "--models", "llama-405b"], "there are no attention blocks of llama-405b"),
    (["--all-reduce", "--virtual-ranks", "4"], "no larger groups are emulated for it"),
    (["--all-reduce", "--write-plans", "f"], "--write-plans plans linears of sequence parallelism"),
    (["--all-reduce", "--linears", "qkv", "--passes", "fprop"], "or none that sends in fprop"),
    (["--attention", "--linears", "qkv"], "--linears: for linears, not for --attention"),
    (["--models", "llama-8b", "--tokens", "32"],
     "M=32 divided by 64 leaves 0 rows for 2 ranks, each of which needs one"),
    (["--models", "llama-8b", "--tokens", "64"], "M=64 divided by 64 leaves 1 rows for 2 ranks"),
    (["--attention", "--models", "llama-8b", "--tokens", "63"], "M=63 divided by 64 leaves 0 rows for 2 ranks"),
    (["--tokens", "131072", "--shrink", "65536"], "nothing is left of its features, divided by 65536"),
    (["--attention", "--ranks", "3"], "with these options groups of 2, 4, 8, 16 can"),
    (["--variants", "planned", "nonsense"], 'is called "nonsense"; there are compute_only, '),
    (["--variants", "bulk", "--passes", "fprop"], 'no variant of these cases is called "bulk"'),
    (["--attention", "--variants", "sliced"], "row_parallel gloo, query_split m=1 gloo"),
    (["--models", "paper-mlp", "--linears", "qkv"], "which are paper-mlp.fc1, paper-mlp.fc2"),
    (["--virtual-ranks", "4", "--config", "f"], "leave it or --virtual-ranks out"),
    (
        ["--attention", "--virtual-ranks", "4", "--passes", "backward"],
        "an emulated group runs --attention forward only",
    ),
    (["--virtual-ranks", "4", "--chunks", "4"], "emulated groups run one per shard, but for --ulysses, and"),
    (["--virtual-ranks", "4", "--attention", "--chunks", "4"], "emulated groups run one per shard"),
    (["--models", "llama-8b", "--tokens", "1024", "--chunks", "2", "9"], "of llama-8b.qkv M=1024 fprop it has 8 rows"),
    (["--attention", "--models", "llama-8b", "--tokens", "1024", "--chunks", "9"], "9 chunks of a shard were asked"),
    (["--models", "llama-8b", "--variants", "planned", "megatron", "--chunks", "3"],
     "none of the variants that are asked for has chunks to force; those that have: slices_only m=3 torch,"),
    (["--attention", "--models", "llama-8b", "--variants", "row_parallel", "--chunks", "3"],
     "has chunks to force; those that have: query_split m=3 gloo"),
    (["--shrink", "0"], "--shrink must be at least 1, got 0"),
    (["--case-s", "-1"], "--case-s must be a time in seconds, got -1.0"),
    (["--budget-s", "nan"], "--budget-s must be a time in seconds, got nan"),
    (["--write-plans", "f", "--variants", "planned", "--rounds", "3"], "--variants, --rounds: of rows, which"),
    (["--write-plans", "f", "--passes", "fprop"], "--passes: of rows, which --write-plans does not make"),
    (["--write-plans", "f", "--config", "a", "b"], "--config: plans are of one configuration, not of 2"),
    (["--write-plans", "configs"], "--write-plans configs: is a folder; name a file"),
    (["--write-plans", "README.md"], "README.md is no file of plans"),
    (["--ranks", "999"], "as many processes would start here; at most 64 do"),
])  # fmt: skip
def test_a_senseless_benchmark_is_refused_before_ranks_start(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    require_usage_error(capsys, "bench", message, with_usage=False)


UNKNOWN_BLOCKS = (
    "paper", "paper-8192", "paper-axb", "paper-mlp.fc1", "paper.attention-2x4x1", "paper.attention-3x4096",
)  # fmt: skip

#: What an option gives to a configuration, and what `linear_case` says, is worded by them.
OF_THE_CONFIGURATION = (
    'unknown case "llama-9b.fc2"',
    'unknown case "llama-8b.fc2"',
    *(f'unknown case "{name}"; known are llama-8b.attention' for name in UNKNOWN_BLOCKS),
    "--chunks must be at least 1",
    "100 rows (6400 divided by 64: --shrink) must be a multiple of the group size 3",
    "32 heads must be a multiple of the group size 3",
    "leaves 1 rows for 2 ranks",
)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--profiler"], "--profiler looks at GPU kernels; use it with --device cuda"),
    (["--path", "bulk"], "--path bulk is a path of the backward pass"),
    (["--path", "async"], "--path async is a path of the backward pass"),
    (["--path", "sequential", "--chunks", "4"], "--path sequential sends no chunks: leave out --chunks"),
    (["--path", "bulk", "--pass", "backward", "--algorithm", "ring"], "sends no chunks: leave out --algorithm"),
    (["--calls", "0"], "--calls must be at least 1, got 0"),
    (["--case", "llama-70b.fc2", "--N", "8"], "--case gives N and K"),
    (["--case", "llama-9b.fc2"], 'unknown case "llama-9b.fc2"'),
    (["--case", "llama-8b.fc2", "--op", "all_gather_linear"],
     "is a case of linear_reduce_scatter, not all_gather_linear"),
    (["--step", "--op", "all_gather_linear"], "--step traces a whole model"),
    (["--step", "--model", "llama-8b"], "--model llama-8b is for GPUs"),
    (["--step", "--ranks", "3", "--seq", "33"], "can be cut for 2, 4 or 8 ranks, not 3"),
    (["--step", "--seq", "33"], "--seq 33 must be a multiple of the 2 ranks"),
    (["--step", "--context-parallel", "3", "--ranks", "2"], "--context-parallel 3 does not divide the 2 ranks"),
    (["--step", "--context-parallel", "2", "--ranks", "2"], "there is no stock step to compare with"),
    (["--step", "--context-parallel", "2", "--ranks", "2", "--seq", "66", "--transformer-impl", "transformer_engine"],
     "--seq 66 must be a multiple of 4, twice"),
    (["--step", "--transformer-impl", "transformer_engine"], "--transformer-impl transformer_engine is for GPUs"),
    (["--context-parallel", "2"], "of a whole step; add --step, or leave out --context-parallel"),
    (["--step", "--path", "sequential"], "every step is traced without the plugin, too; leave it out"),
    (["--step", "--rounds", "0"], "--rounds must be at least 1, got 0"),
    (["--step", "--runs", "0"], "--runs must be at least 1, got 0"),
    (["--chunks", "0"], "--chunks must be at least 1"),
    (["--seq", "64"], "one linear has --tokens: leave out --seq"),
    (["--splits", "2", "--paths", "sequential"], "add --attention, or leave out --paths, --splits"),
    (["--step", "--shrink", "2"], "add --attention, or leave out --shrink"),
    (["--attention", "--step"], "--step traces a whole model; leave out --attention"),
    (["--step", "--pass", "backward", "--calls", "3"], "--step traces a whole model; leave out --pass, --calls"),
    (["--step", "--tokens", "64", "--profiler"], "--step traces a whole model; leave out --tokens, --profiler"),
    (["--model", "llama-8b"], "of a whole step; add --step, or leave out --model"),
    (["--layers", "2", "--batch", "2", "--rounds", "3", "--fusions", "--runs", "3"],
     "add --step, or leave out --layers, --batch, --fusions, --rounds, --runs"),
    (["--chunks", "300"], "--chunks 300: a shard of 512 tokens on 2 ranks has 256 rows"),
    (["--pass", "backward", "--path", "async"], "--path async is a path of all_gather_linear's backward pass"),
    (["--pass", "backward", "--path", "async", "--attention"],
     "--path async is a path of all_gather_linear's backward pass"),
    (["--transport", "nccl"], "--transport nccl carries tensors of --device cuda only"),
    (["--attention", "--layers", "2", "--transformer-impl", "transformer_engine", "--tokens", "8"],
     "leave out --tokens, --layers, --transformer-impl"),
    (["--ranks", "1"], "one rank has nothing to communicate"),
    (["--attention", "--ranks", "1"], "one rank has nothing to communicate"),
    (["--attention", "--profiler"], "--profiler looks at GPU kernels; use it with --device cuda"),
    (["--attention", "--path", "bulk"], "--path bulk is a path of the backward pass"),
    (["--attention", "--calls", "0"], "--calls must be at least 1, got 0"),
    (["--attention", "--splits", "0"], "--splits must be at least 1, got 0"),
    (["--attention", "--paths", "sequential", "sequential"], "name each one once"),
    (["--attention", "--paths", "query_split", "--chunks", "2"], "whose projection is meant: leave out --chunks"),
    (["--attention", "--paths", "row_parallel", "--splits", "2"], "no path is query_split: leave out --splits"),
    (["--attention", "--case", "llama-8b.fc2"], 'unknown case "llama-8b.fc2"'),
    *((["--attention", "--case", name],
     f'unknown case "{name}"; known are llama-8b.attention') for name in UNKNOWN_BLOCKS),
    (["--attention", "--case", "paper.attention-4x8192", "--seq", "64"], "has a sequence of its own"),
    (["--attention", "--ranks", "3", "--seq", "6400"],
     "100 rows (6400 divided by 64: --shrink) must be a multiple of the group size 3"),
    (["--attention", "--ranks", "3", "--seq", "99", "--shrink", "1"],
     "32 heads must be a multiple of the group size 3"),
    (["--attention", "--seq", "128", "--splits", "2"], "a shard has 1 rows (sizes are divided by 64: --shrink)"),
    (["--attention", "--seq", "64", "--shrink", "64"], "leaves 1 rows for 2 ranks"),
    (["--attention", "--chunks", "0"], "--chunks must be at least 1"),
])  # fmt: skip
def test_traces_that_cannot_be_made_are_refused_before_any_work(arguments, message, tmp_path, capsys):
    assert cli.main(["trace", "--output", str(tmp_path), *arguments]) == 2
    require_usage_error(capsys, "trace", message, with_usage=message not in OF_THE_CONFIGURATION)


WITH_A_FILE = [
    ["trace", "--config", "{file}"], ["trace", "--attention", "--config", "{file}"],
    ["trace", "--step", "--config", "{file}"], ["bench", "--config", "{file}"],
    ["bench", "--resume", "--json", "{file}"], ["simulate", "--rows", "{file}"], ["demo", "--text", "{file}"],
]  # fmt: skip


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


@pytest.mark.parametrize(("options", "words"), [
    (["--variants", "megatron"], "has --variants sliced, and this is --variants megatron"),
    ([], "has --variants sliced, and this is --variants none"),
    (["--variants", "sliced", "--chunks", "1", "2"], "has --chunks 1, and this is --chunks 1 2"),
    (["--variants", "sliced", "--chunks", "1", "--ranks", "4"], "has --ranks 2, and this is --ranks 4"),
    (["--attention"], "has cases of linears, and this is cases of attention"),
])  # fmt: skip
def test_a_benchmark_goes_on_with_the_same_variants_only(options, words, tmp_path, capsys):
    """Else its cases would count as done, and what was asked for would never be measured."""
    file = tmp_path / "rows.json"
    settings = {"variants": ["sliced"], "chunks": [1], "config_files": []}
    settings["kind"] = "linears"
    file.write_text(json.dumps({"ranks": 2, "settings": settings, "rows": []}), encoding="utf-8")
    assert cli.main(["bench", "--models", "llama-8b", "--resume", "--json", str(file), *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [["trace"], ["trace", "--attention"], ["trace", "--step"], ["bench"]], ids=" ".join)
def test_the_environment_names_a_configuration(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMMFUSE_CONFIG", str(tmp_path / "missing.yaml"))
    assert cli.main(command) == 2
    assert "missing.yaml: cannot be read" in capsys.readouterr().err


def test_options_change_the_environments_configuration(monkeypatch, tmp_path):
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
def test_a_way_of_backward_passes_leaves_the_forward_ones_alone(path):
    forced = config_of(cli.build_parser().parse_args(["trace", "--step", "--path", path])).linear
    assert (forced.fprop.path, forced.dgrad.path) == ("auto", path)


@pytest.mark.parametrize("option", [["--attention"], ["--virtual-ranks", "4"]], ids=" ".join)
def test_a_configuration_that_no_variant_takes_is_refused(option, monkeypatch, capsys):
    monkeypatch.setenv("COMMFUSE_CONFIG", "some.yaml")
    assert cli.main(["bench", *option]) == 2
    assert f"COMMFUSE_CONFIG is some.yaml; {option[0]} has fixed variants" in capsys.readouterr().err


def test_a_configuration_named_like_a_variant_is_refused(tmp_path, capsys):
    file = tmp_path / "sequential.yaml"
    file.write_text("{}", encoding="utf-8")
    assert cli.main(["bench", "--config", str(file)]) == 2
    assert "give the file another name" in capsys.readouterr().err
