"""Every reason for Megatron's own path, one at a time, on layers that were never built."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseRowParallelLinear,
    CommFuseVocabParallelEmbedding,
    capture,
    unsupported_reason,
)

GROUP_SIZE = 2


def make_layer(cls: type, **attributes: Any) -> Any:
    """A layer for which everything is in favour of overlapping."""
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    defaults: dict[str, Any] = {
        "config": SimpleNamespace(), "weight": torch.nn.Parameter(torch.zeros(4, 4)),
        "tp_group": SimpleNamespace(size=lambda: GROUP_SIZE), "sequence_parallel": True, "is_expert": False,
        "explicit_expert_comm": False, "gtp_remat_size": 1, "gradient_accumulation_fusion": False,
        "disable_grad_reduce": False, "input_is_parallel": True,
    }  # fmt: skip
    for name, value in {**defaults, **attributes}.items():
        setattr(layer, name, value)
    return layer


BOTH = pytest.mark.parametrize("cls", [CommFuseColumnParallelLinear, CommFuseRowParallelLinear])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_supported(cls: type, dtype: torch.dtype) -> None:
    layer = make_layer(cls, weight=torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype)))
    assert unsupported_reason(layer) is None
    assert unsupported_reason(layer, torch.zeros(4, 1, 4, dtype=dtype)) is None


@BOTH
@pytest.mark.parametrize(("name", "value", "words"), [
    ("commfuse", False, "config.commfuse is False"), ("fp8", "hybrid", "config.fp8"), ("fp4", "e2m1", "config.fp4"),
    ("tp_comm_overlap", True, "userbuffers"), ("batch_invariant_mode", True, "batch_invariant_mode"),
    ("symmetric_ar_type", "one_shot", "symmetric_ar_type"), ("cpu_offloading", True, "cpu_offloading"),
])  # fmt: skip
def test_configuration(cls: type, name: str, value: Any, words: str) -> None:
    reason = unsupported_reason(make_layer(cls, config=SimpleNamespace(**{name: value})))
    assert reason is not None
    assert words in reason


@BOTH
def test_flag_that_is_absent_or_on(cls: type) -> None:
    assert unsupported_reason(make_layer(cls, config=SimpleNamespace(commfuse=True, fp8=None))) is None
    assert unsupported_reason(make_layer(cls, config=SimpleNamespace(commfuse=None))) is None


@BOTH
@pytest.mark.parametrize(("attributes", "words"), [
    ({"is_expert": True}, "belongs to an expert"), ({"explicit_expert_comm": True}, "explicit_expert_comm"),
    ({"tp_group": SimpleNamespace(size=lambda: 1)}, "one rank"),
    ({"sequence_parallel": False}, "sequence_parallel is off"), ({"gtp_remat_size": 2}, "gtp_remat_size"),
])  # fmt: skip
def test_layer(cls: type, attributes: dict, words: str) -> None:
    reason = unsupported_reason(make_layer(cls, **attributes))
    assert reason is not None
    assert words in reason


def test_only_one_kind() -> None:
    column = make_layer(CommFuseColumnParallelLinear, disable_grad_reduce=True)
    assert "disable_grad_reduce" in (unsupported_reason(column) or "")
    row = make_layer(CommFuseRowParallelLinear, input_is_parallel=False)
    assert "input_is_parallel" in (unsupported_reason(row) or "")


@BOTH
@pytest.mark.parametrize(("input_", "words"), [
    (torch.zeros(4, 4), "2 dimensions"), (torch.zeros(0, 1, 4), "empty"),
    (torch.zeros(4, 1, 4, dtype=torch.int32), "torch.int32"),
    (torch.zeros(4, 1, 4, dtype=torch.float64), "Megatron itself raises"),
])  # fmt: skip
def test_input(cls: type, input_: torch.Tensor, words: str) -> None:
    reason = unsupported_reason(make_layer(cls), input_)
    assert reason is not None
    assert words in reason


def test_length_matters_to_the_row_linear_only() -> None:
    odd = torch.zeros(3, 1, 4)
    assert unsupported_reason(make_layer(CommFuseColumnParallelLinear), odd) is None
    assert "3 is not divisible by the 2 ranks" in (unsupported_reason(make_layer(CommFuseRowParallelLinear), odd) or "")


def test_deferred_embedding_gradient() -> None:
    layer = make_layer(CommFuseColumnParallelLinear)
    assert "defer_embedding_wgrad_compute" in (unsupported_reason(layer, grad_output_buffer=[]) or "")


def fused(cls: type, **attributes: Any) -> Any:
    layer = make_layer(cls, gradient_accumulation_fusion=True)
    for name, value in attributes.items():
        setattr(layer.weight, name, value)
    return layer


@BOTH
def test_gradient_accumulation_fusion(cls: type) -> None:
    x = torch.zeros(4, 1, 4)
    assert unsupported_reason(fused(cls, main_grad=torch.zeros(4, 4)), x) is None
    assert "has no main_grad" in (unsupported_reason(fused(cls), x) or "")
    assert "has no main_grad" in (unsupported_reason(fused(cls, main_grad=None), x) or "")
    half = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert "main_grad is torch.bfloat16" in (unsupported_reason(fused(cls, main_grad=half), x) or "")
    sharded = fused(cls, main_grad=torch.zeros(4, 4), __fsdp_param__=True)
    assert "FSDP" in (unsupported_reason(sharded, x) or "")
    frozen = fused(cls)
    frozen.weight.requires_grad_(False)
    assert unsupported_reason(frozen, x) is None
    with torch.no_grad():
        assert unsupported_reason(fused(cls), x) is None


@BOTH
def test_external_weight_is_the_one_judged(cls: type) -> None:
    class Quantized(torch.Tensor):
        pass

    layer = make_layer(cls)
    x = torch.zeros(4, 1, 4)
    assert "Quantized" in (unsupported_reason(layer, x, weight=torch.zeros(4, 4).as_subclass(Quantized)) or "")
    assert unsupported_reason(make_layer(cls, weight=None), x, weight=torch.zeros(4, 4)) is None


@BOTH
def test_autocast_may_mix_dtypes(cls: type) -> None:
    layer = make_layer(cls)
    half = torch.zeros(4, 1, 4, dtype=torch.bfloat16)
    assert unsupported_reason(layer, half) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert unsupported_reason(layer, half) is None


def make_embedding(**attributes: Any) -> Any:
    """An embedding for which everything is in favour of overlapping."""
    defaults = {"reduce_scatter_embeddings": True, "use_inference_optimized_reduce_scatter": False}
    return make_layer(CommFuseVocabParallelEmbedding, **{**defaults, **attributes})


def test_embedding() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert unsupported_reason(make_embedding()) is None
    assert unsupported_reason(make_embedding(), ids) is None
    quantised = make_embedding(config=SimpleNamespace(fp8="hybrid"))
    assert unsupported_reason(quantised, ids) is None, "embeddings are not quantised"


@pytest.mark.parametrize(("attributes", "ids", "words"), [
    ({"config": SimpleNamespace(commfuse=False)}, None, "config.commfuse is False"),
    ({"tp_group": SimpleNamespace(size=lambda: 1)}, None, "one rank"),
    ({"reduce_scatter_embeddings": False}, None, "the embedding all-reduces"),
    ({"gtp_remat_size": 2}, None, "gtp_remat_size"),
    ({}, torch.zeros(2, 3, dtype=torch.int64), "3 is not divisible by the 2 ranks"),
    ({}, torch.zeros(4, dtype=torch.int64), "1 dimensions"), ({}, torch.zeros(2, 4), "torch.float32"),
    ({}, torch.zeros(0, 4, dtype=torch.int64), "empty"),
])  # fmt: skip
def test_embedding_that_stays_stock(attributes: dict, ids: torch.Tensor | None, words: str) -> None:
    assert words in (unsupported_reason(make_embedding(**attributes), ids) or "")


def test_embedding_with_a_reduce_scatter_of_its_own() -> None:
    layer = make_embedding(use_inference_optimized_reduce_scatter=True)
    assert unsupported_reason(layer) is None, "in training it is not used"
    assert "inference_optimized" in (unsupported_reason(layer.eval()) or "")


def test_layers_over_nccl_are_not_captured():
    context = SimpleNamespace(transport_name="nccl", has_run=lambda problem: True)
    assert capture.reason_not_to_capture(context, ()) == capture.OVER_NCCL
    context.transport_name = "copy_engine"
    assert capture.reason_not_to_capture(context, ()) is None
