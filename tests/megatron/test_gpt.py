"""A whole GPT in float64 on the CPU over several steps: parameters, replicas, attributes, checkpoints as stock's.

What one step gives in every kind of model is compared in test_models.py.
"""

from typing import Any

import pytest

from tests.megatron import gpt_bodies
from tests.megatron.harness import run_megatron

RUNS = {
    2: ["swiglu", "tied_embeddings", "ring_in_chunks"],
    4: ["layer_norm_and_bias", "data_parallel"],
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
        assert len(layers) == 10, "embedding, four linears in each of two layers, output layer"
        for layer, (path, overlapped_calls, stock_calls) in layers.items():
            assert (path, stock_calls) == ("overlapped", 0), layer
            assert overlapped_calls == passes, layer
        assert {path for _, _, path in result[name]["op_paths"]} == {"sliced"}
        assert len(result[name]["op_paths"]) == 6, "three operations, forward and backward"
        assert result[name]["stock_classes_unchanged"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("group_size", "name"), CASES)
def test_parameters_and_checkpoints_are_stocks(results: dict, group_size: int, name: str) -> None:
    for result in results[group_size]:
        assert result[name]["attributes_differ"] == []
        assert result[name]["checkpoint_differs"] == []
