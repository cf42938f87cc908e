"""Models of every kind against stock Megatron at the same layout, float64 on the CPU: loss, every gradient, every call.

One group of 2 and one of 4 processes run all configurations of their size.
"""

from typing import Any

import pytest

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.verify.megatron_cases import CONFIGURATIONS, choose_configurations
from commfuse_megatron.tools.verify.megatron_models import ModelResult
from tests.harness import run_spawned
from tests.megatron import model_bodies

#: On 4 ranks, what needs them, and what sums more than two terms.
NAMES = {
    2: [configuration.name for configuration in choose_configurations(2)],
    4: [
        "dense",
        "layer_norm_and_bias",
        "one_query_group",
        "mla",
        "hybrid_moe",
        "moe_expert_parallel",
        "pipeline",
        "pipeline_interleaved",
        "pipeline_variable_lengths",
        "distributed_optimizer",
    ],
}
CASES = [(ranks, name) for ranks, names in NAMES.items() for name in names]


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[Any]]:
    return {ranks: run_spawned(ranks, model_bodies.verify_all, names) for ranks, names in NAMES.items()}


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_equals_stock(outcomes: dict, ranks: int, name: str) -> None:
    everyones: list[ModelResult] = [
        result for results, _ in outcomes[ranks] for result in results if result.name == name
    ]
    assert len(everyones) == ranks
    assert all(each == everyones[0] for each in everyones), "all ranks come to the same verdict"
    result = everyones[0]
    assert result.passed, "\n".join(result.complaints)
    assert result.loss_error <= 1e-13
    assert result.gradient_error <= 1e-13
    configuration = next(each for each in CONFIGURATIONS if each.name == name)
    assert bool(result.overlapped) != configuration.is_all_stock
    assert bool(result.stock) == bool(configuration.stock)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_faults_are_found(outcomes: dict) -> None:
    for _, found in outcomes[2]:
        wrong = "\n".join(found["a gradient that is off by 1e-11"])
        assert "gradient of" in wrong
        assert "losses" not in wrong
        assert "0 forward passes were overlapped" in "\n".join(found["an operation that never ran"])
        wrong = "\n".join(found["a shard of another rank"])
        assert "losses differ" in wrong
        assert "gradient of" in wrong


def test_every_configuration_is_run_somewhere() -> None:
    assert {name for names in NAMES.values() for name in names} == {each.name for each in CONFIGURATIONS}


@pytest.mark.parametrize(
    ("ranks", "names", "words"),
    [
        (3, None, "2 or 4 ranks, not for 3"),
        (2, ["dense", "sparse"], "no configuration is called sparse"),
        (2, ["dense", "pipeline"], "pipeline: needs 4 ranks, there are 2"),
    ],
)
def test_wrong_choices(ranks: int, names: list[str] | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_configurations(ranks, names)


def test_layouts_are_described() -> None:
    by_name = {each.name: each for each in CONFIGURATIONS}
    assert by_name["dense"].describe_layout(4) == "TP4"
    assert by_name["pipeline"].describe_layout(4) == "TP2 x PP2"
    assert by_name["distributed_optimizer"].describe_layout(4) == "TP2 x DP2"
    assert by_name["moe_expert_parallel"].describe_layout(2) == "TP2 x EP2"
