"""Megatron's own training program with every way to switch the plugin on, against the same program without it."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_spawned
from tests.megatron.pretraining_runs import Run, load_example, run_all

OFF = "config.commfuse is False: switched off"
SPEC = ["--spec", "commfuse_megatron.plugin.spec"]
HYBRID = ["--hybrid-layer-pattern=*-*-"]
HYBRID_SPEC = [*HYBRID, "--spec", "commfuse_megatron.plugin.hybrid_spec"]
# Not with the distributed optimizer, whose state Megatron cannot load where Apex and Transformer Engine are missing.
SAVE = ["--train-iters=4", "--save-interval=2"]
DATA_PARALLEL = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]

# Losses and norms in float32 of two right programs. With two ranks the sum of two partials has one value, so a step is
# off by nothing; gradients are summed in another order only inside Megatron's own optimizer. Four units of a float32.
TOLERANCE = 4 * 2.0**-23

# What only a hook reaches.
NO_SPEC_REACHES = ("embedding.word_embeddings", "output_layer")
LAYERS = 10  # four linears of each layer, embedding and output layer
NUM_STEPS, MICRO_BATCHES = 2, 2
SAVED_STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pretraining")
    example = load_example("prepare_text")
    # Real text that our own changes do not change, in enough documents to be split: the smallest files first.
    files = sorted(Path(asyncio.__file__).parent.glob("*.py"), key=lambda file: (file.stat().st_size, file.name))
    example.write_dataset(files, path / "text", max_bytes=200_000)
    for name, chunks in (("flag", 2), ("variable", 3), ("attribute", 4)):
        passes = "".join(f"  {p}: {{path: sliced, chunks_per_shard: {chunks}}}\n" for p in ("fprop", "dgrad"))
        (path / f"{name}.yaml").write_text(f"linear:\n{passes}")
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """By name, what the last rank saw: it is the one that logs."""
    variable = str(folder / "variable.yaml")
    wanted = {
        "stock": Run(flags=[*SAVE, f"--save={folder}/stock"]),
        "flag": Run(flags=["--commfuse", *SAVE, f"--save={folder}/flag"]),
        "flag_and_file": Run(flags=["--commfuse", f"--commfuse-config={folder}/flag.yaml"]),
        "callable": Run(flags=[*SPEC, "gpt_layer_spec"]),
        "ready_object": Run(flags=[*SPEC, "gpt_layer_spec_local"]),
        "flag_off": Run(flags=["--no-commfuse"]),
        "hybrid_flag_off": Run(flags=[*HYBRID_SPEC, "stock_stack_spec_local", "--no-commfuse"]),
        "unmodified_off": Run(flags=["--no-commfuse"], script="unmodified_script_that_refuses_the_last_flag"),
        "callable_off": Run(flags=[*SPEC, "gpt_layer_spec", "--no-commfuse"]),
        "ready_object_off": Run(flags=[*SPEC, "gpt_layer_spec_local", "--no-commfuse"], script="script_with_our_flags"),
        "variable": Run(flags=[*SPEC, "gpt_layer_spec"], variable=variable, script="unmodified_script"),
        "attributes": Run(flags=[*SPEC, "gpt_layer_spec"], variable=variable, script="script_that_sets_attributes"),
        "attribute_off": Run(flags=[*SPEC, "gpt_layer_spec_local"], script="script_that_switches_off"),
        "hybrid_stock": Run(flags=[*HYBRID_SPEC, "stock_stack_spec_local"]),
        "hybrid_flag": Run(flags=[*HYBRID, "--commfuse"]),
        "hybrid_callable": Run(flags=[*HYBRID_SPEC, "hybrid_stack_spec"]),
        "hybrid_ready_object": Run(
            flags=[*HYBRID_SPEC, "hybrid_stack_spec_local"], variable=variable, script="unmodified_script"
        ),
        "hybrid_off": Run(flags=[*HYBRID_SPEC, "hybrid_stack_spec_local", "--no-commfuse"]),
        "plugin_after_stock": Run(flags=["--commfuse", *SAVE, f"--load={folder}/stock", "--ckpt-step=2"]),
        "stock_after_plugin": Run(flags=[*SAVE, f"--load={folder}/flag", "--ckpt-step=2"]),
    }
    return run_spawned(2, run_all, str(folder), wanted)[-1]


def assert_same_steps(found: list[dict], expected: list[dict], first: int = 1) -> None:
    assert [step["step"] for step in found] == list(range(first, first + len(found)))
    assert len(found) >= NUM_STEPS
    for mine, stock in zip(found, expected[first - 1 :], strict=False):
        for name in ("lm loss", "grad-norm"):
            assert math.isfinite(stock[name])
            assert stock[name] > 0.1
            assert abs(mine[name] - stock[name]) <= TOLERANCE * stock[name], f"step {mine['step']}: {name}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stock_is_stock_and_trains(runs: dict) -> None:
    for name in ("stock", "hybrid_stock"):
        assert len(runs[name]["layers"]) == LAYERS
        assert {(layer["path"], layer["overlapped_calls"]) for layer in runs[name]["layers"]} == {("stock", 0)}
        losses = [step["lm loss"] for step in runs[name]["steps"]]
        assert all(4.5 < loss < 7.0 for loss in losses)
        assert len(set(losses)) == len(losses)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "chunks", "reaches_all"), [
    ("flag", 1, True), ("flag_and_file", 2, True), ("callable", 1, False), ("ready_object", 1, False),
    ("variable", 3, False), ("attributes", 4, False), ("hybrid_flag", 1, True), ("hybrid_callable", 1, False),
    ("hybrid_ready_object", 3, False),
])  # fmt: skip
def test_a_way_to_switch_on(runs: dict, name: str, chunks: int, reaches_all: bool) -> None:
    run = runs[name]
    calls = (SAVED_STEPS if name == "flag" else NUM_STEPS) * MICRO_BATCHES
    layers = {layer["name"]: layer for layer in run["layers"]}
    assert len(layers) == LAYERS
    beyond = [] if reaches_all else [layers.pop(name) for name in NO_SPEC_REACHES]
    assert {layer["path"] for layer in beyond} <= {"stock"}
    assert {(layer["path"], layer["overlapped_calls"]) for layer in layers.values()} == {("overlapped", calls)}
    # Attention was planned, and left to Megatron: nothing is measured on the CPU.
    planned = [op for op in run["ops"] if op["op"] == "query_split_attention"]
    assert {(op["path"], op["calls"]) for op in planned} == {("row_parallel", 0)}
    linears = [op for op in run["ops"] if op not in planned]
    assert {(op["path"], op["chunks_per_shard"]) for op in linears} == {("sliced", chunks)}
    assert sum(op["calls"] for op in run["ops"]) == 2 * calls * len(layers), "forward and backward"
    assert_same_steps(run["steps"], runs["hybrid_stock" if "hybrid" in name else "stock"]["steps"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "reason"), [
    ("flag_off", OFF), ("hybrid_flag_off", OFF), ("callable_off", OFF), ("ready_object_off", OFF),
    ("attribute_off", OFF), ("hybrid_off", OFF), ("unmodified_off", "Megatron's own class: it was neither"),
])  # fmt: skip
def test_a_way_to_switch_off(runs: dict, name: str, reason: str) -> None:
    """A script that refuses our flag is switched off by leaving `--spec` out."""
    run = runs[name]
    assert {layer["path"] for layer in run["layers"]} == {"stock"}
    assert [layer for layer in run["layers"] if reason not in layer["reasons"][0]] == []
    assert run["ops"] == ()
    expected = runs["hybrid_stock" if "hybrid" in name else "stock"]["steps"]
    numbers = [
        [(step["lm loss"], step["grad-norm"]) for step in steps[:NUM_STEPS]] for steps in (run["steps"], expected)
    ]
    assert numbers[0] == numbers[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "overlapped"), [("plugin_after_stock", LAYERS), ("stock_after_plugin", 0)])
def test_a_checkpoint_of_one_resumes_in_the_other(runs: dict, name: str, overlapped: int) -> None:
    assert sum(layer["path"] == "overlapped" for layer in runs[name]["layers"]) == overlapped
    assert_same_steps(runs[name]["steps"], runs["stock"]["steps"], first=3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_data_parallel_with_distributed_optimizer_and_overlaps(folder: Path) -> None:
    wanted = {"stock": Run(flags=DATA_PARALLEL), "plugin": Run(flags=["--commfuse", *DATA_PARALLEL])}
    runs = run_spawned(4, run_all, str(folder), wanted)[-1]
    assert {(layer["path"], layer["overlapped_calls"]) for layer in runs["plugin"]["layers"]} == {
        ("overlapped", NUM_STEPS * MICRO_BATCHES // 2)
    }
    assert {layer["path"] for layer in runs["stock"]["layers"]} == {"stock"}
    assert_same_steps(runs["plugin"]["steps"], runs["stock"]["steps"])
