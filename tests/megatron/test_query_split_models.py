"""Query-split attention in whole models, in float64 on the CPU: against stock Megatron at the same group size."""

from importlib import metadata
from typing import Any

import pytest

from tests.megatron import attention_checks, attention_latent_checks, attention_wrap_checks
from tests.megatron.harness import names_of_checks, run_checks, run_megatron

BODIES = "tests.megatron.attention_bodies"
ALL = [
    "causal", "mask_given", "splits_of_a_shard", "layer_norm_and_bias", "one_query_group", "tied_embeddings",
    "qk_layernorm", "window", "softmax_scale", "recompute_full", "recompute_selective", "hybrid", "prediction_heads",
    "latent", "latent_yarn", "latent_plain_queries", "latent_recompute_full",
]  # fmt: skip
# Before 0.19 Megatron's fused down-projection does not gather what a column-parallel linear gives.
ALL += ["latent_fused"] if tuple(map(int, metadata.version("megatron-core").split(".")[:2])) >= (0, 19) else []
RUNS = {2: ALL, 4: ["causal", "layer_norm_and_bias", "one_query_group", "hybrid", "latent_yarn"]}
CASES = [(group_size, name) for group_size, names in RUNS.items() for name in names]
MODULES = (attention_checks, attention_wrap_checks, attention_latent_checks)
CHECKS = [(module.__name__, name) for module in MODULES for name in names_of_checks(module)]

# Two right programs differ by the order of sums, a few units of 2.2e-16 times the cancellation in a gradient.
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Any]]]:
    from tests.megatron import attention_bodies

    return {
        group_size: run_megatron(group_size, attention_bodies.compare_with_stock, names)
        for group_size, names in RUNS.items()
    }


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_checks(2, CHECKS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("group_size", "name"), CASES)
def test_equals_stock_and_is_query_split(results: dict, group_size: int, name: str) -> None:
    for rank, result in enumerate(results[group_size]):
        found = result[name]
        stock_loss, our_loss = found["losses"]
        assert abs(our_loss - stock_loss) <= TOLERANCE * abs(stock_loss), f"rank {rank}: {found['losses']}"
        assert found["names_differ"] == []
        assert len(found["gradient_errors"]) >= 13
        worst = max(found["gradient_errors"].items(), key=lambda item: item[1])
        assert worst[1] <= TOLERANCE, f"rank {rank}: gradient of {worst[0]} differs by {worst[1]:.1e}"
        # Without this, a model that always fell back would pass every comparison.
        calls = 2 if name.endswith("recompute_full") else 1
        assert len(found["attentions"]) == (3 if name == "prediction_heads" else 2)
        heads = [each for layer, each in found["attentions"].items() if "mtp" in layer]
        layers = [each for layer, each in found["attentions"].items() if "mtp" not in layer]
        assert layers == [("overlapped", calls, ())] * 2
        assert heads == [("overlapped", 1, ())] * len(heads)
        assert found["projections"] == {"overlapped"}
        assert found["op_paths"] == {"query_split"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for _, name in CHECKS])
def test_attention(outcomes: dict[str, str | None], name: str) -> None:
    assert outcomes[name] is None, outcomes[name]
