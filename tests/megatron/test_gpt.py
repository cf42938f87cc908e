"""A whole GPT in float64 on the CPU: the overlapped model against stock Megatron at the same tensor-parallel size."""

from typing import Any

import pytest

from tests.megatron import gpt_bodies
from tests.megatron.harness import run_megatron

RUNS = {
    2: ["swiglu", "layer_norm_and_bias", "tied_embeddings", "ring_in_chunks", "recompute_full", "recompute_selective"],
    4: ["swiglu", "layer_norm_and_bias", "fewer_groups_than_ranks", "data_parallel"],
}
CASES = [(group_size, name) for group_size, names in RUNS.items() for name in names]

# Two right programs differ in the order of sums: by a few units of 2.2e-16, times the cancellation in a gradient.
GRADIENT_TOLERANCE = 1e-13
PARAMETER_TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Any]]]:
    return {
        group_size: run_megatron(group_size, gpt_bodies.compare_with_stock, names) for group_size, names in RUNS.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("group_size", "name"), CASES)
def test_equals_stock(results: dict, group_size: int, name: str) -> None:
    for rank, result in enumerate(results[group_size]):
        found = result[name]
        stock_loss, our_loss = found["loss"]
        assert abs(our_loss - stock_loss) <= GRADIENT_TOLERANCE * abs(stock_loss), f"rank {rank}: {found['loss']}"
        assert len(found["gradient_errors"]) >= 13
        worst = max(found["gradient_errors"].items(), key=lambda item: item[1])
        assert worst[1] <= GRADIENT_TOLERANCE, f"rank {rank}: gradient of {worst[0]} differs by {worst[1]:.1e}"
        worst = max(found["parameter_errors"].items(), key=lambda item: item[1])
        assert worst[1] <= PARAMETER_TOLERANCE, f"rank {rank}: {worst[0]} after 3 steps differs by {worst[1]:.1e}"
        assert found["replicas_differ"] == [], f"rank {rank}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("group_size", "name"), CASES)
def test_overlapped_path_ran(results: dict, group_size: int, name: str) -> None:
    # Without this, a model that always fell back would pass every comparison.
    passes = 1 + gpt_bodies.NUM_STEPS
    for result in results[group_size]:
        layers = result[name]["layers"]
        assert len(layers) == 9, "four linears in each of two layers, and the output layer"
        for layer, (path, overlapped_calls, stock_calls) in layers.items():
            recomputed = name == "recompute_full" and layer != "output_layer"
            recomputed |= name == "recompute_selective" and ".mlp." in layer
            assert (path, stock_calls) == ("overlapped", 0), layer
            assert overlapped_calls == passes * (2 if recomputed else 1), layer
        assert {path for _, _, path in result[name]["op_paths"]} == {"sliced"}
        assert len(result[name]["op_paths"]) == 4, "two operations, forward and backward"
        assert result[name]["stock_classes_unchanged"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("group_size", "name"), CASES)
def test_parameters_and_checkpoints_are_stocks(results: dict, group_size: int, name: str) -> None:
    for result in results[group_size]:
        assert result[name]["attributes_differ"] == []
        assert result[name]["checkpoint_differs"] == []
