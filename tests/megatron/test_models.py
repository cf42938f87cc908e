"""Models of every kind against stock Megatron at the same layout, float64 on the CPU: loss, every gradient, every call.

One group of 2 and one of 4 processes run what `commfuse verify --megatron` runs in a group of their size.
"""

from typing import Any
from unittest import mock

import pytest
from torch import distributed as dist

from commfuse_megatron import ops
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.ops.weight_grad import DueWeightGrad
from commfuse_megatron.plugin import linear
from commfuse_megatron.testing import gpt
from commfuse_megatron.tools.verify.megatron_cases import (
    CONFIGURATIONS,
    Configuration,
    choose_configurations,
)
from commfuse_megatron.tools.verify.megatron_models import ModelResult, verify_models
from tests.megatron.harness import make_cpu_test, tensor_parallel

#: On 4 ranks, what needs them, and what sums more than two terms.
NAMES = {
    2: [configuration.name for configuration in choose_configurations(2)],
    4: ["dense", "layer_norm_and_bias", "one_query_group", "mla", "hybrid_moe", "moe_expert_parallel", "pipeline",
        "pipeline_interleaved", "pipeline_variable_lengths", "distributed_optimizer", "tensor_and_context_parallel"],
}  # fmt: skip


def configuration_of(name: str) -> Configuration:
    return next(each for each in CONFIGURATIONS if each.name == name)


def verified(configuration: Configuration) -> ModelResult:
    """In groups that stay for the next one."""
    with mock.patch.object(gpt, "tensor_parallel", tensor_parallel):
        (result,) = verify_models([configuration])
    return result


def assert_passed(result: ModelResult, largest_loss_error: float = 1e-13) -> None:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, result)
    assert all(each == result for each in everyones), "all ranks come to the same verdict"
    assert result.passed, "\n".join(result.complaints)
    assert result.loss_error <= largest_loss_error
    assert result.gradient_error <= 1e-13


def equals_stock(ranks: int, name: str) -> None:
    configuration = configuration_of(name)
    result = verified(configuration)
    # Megatron's cross-entropies are fp32, and means over parts of them are rounded where ranks share sequences.
    assert_passed(result, 2.0**-22 if configuration.context > 1 else 1e-13)
    assert result.overlapped
    assert bool(result.stock) == bool(configuration.stock)


def finds_a_fault(ranks: int, fault: str, words: tuple[str, ...], not_words: str) -> None:
    finish, scatter = DueWeightGrad.finish, ops.linear_reduce_scatter

    def scaled(due: DueWeightGrad, *operands: Any) -> Any:
        result = finish(due, *operands)
        return result if result is None else result * (1 + 1e-11)

    with {
        "a gradient is off by 1e-11": mock.patch.object(DueWeightGrad, "finish", scaled),
        "an operation never runs": mock.patch.object(linear, "overlap_context", return_value=None),
        "shards are exchanged": mock.patch.object(
            ops, "linear_reduce_scatter", lambda *args, **kwargs: scatter(*args, **kwargs).flip(0)
        ),
    }[fault]:
        result = verified(configuration_of("dense"))
    complaints = "\n".join(result.complaints)
    assert all(each in complaints for each in words), complaints
    assert not_words not in complaints


FAULTS = {
    "a gradient is off by 1e-11": (("gradient of",), "losses"),
    "an operation never runs": (("0 forward passes were overlapped",), "losses"),
    "shards are exchanged": (("losses differ", "gradient of"), "forward passes were"),
}
test_two_ranks = make_cpu_test(
    2,
    {name: (0, __name__, equals_stock.__name__, (name,)) for name in NAMES[2]}
    | {fault: (0, __name__, finds_a_fault.__name__, (fault, *expected)) for fault, expected in FAULTS.items()},
)
test_four_ranks = make_cpu_test(4, {name: (0, __name__, equals_stock.__name__, (name,)) for name in NAMES[4]})


def test_every_configuration_is_run_somewhere() -> None:
    assert {name for names in NAMES.values() for name in names} == {each.name for each in CONFIGURATIONS}


@pytest.mark.parametrize(("ranks", "names", "words"), [
    (3, None, "2 or 4 ranks, not for 3"), (2, ["dense", "sparse"], "no configuration is called sparse"),
    (2, ["dense", "pipeline"], "pipeline: needs 4 ranks, there are 2"),
])  # fmt: skip
def test_wrong_choices(ranks: int, names: list[str] | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_configurations(ranks, names)


def test_layouts_are_described() -> None:
    assert configuration_of("dense").describe_layout(4) == "TP4"
    assert configuration_of("pipeline").describe_layout(4) == "TP2 x PP2"
    assert configuration_of("distributed_optimizer").describe_layout(4) == "TP2 x DP2"
    assert configuration_of("moe_expert_parallel").describe_layout(2) == "TP2 x EP2"
