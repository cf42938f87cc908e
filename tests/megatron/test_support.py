"""Every reason for Megatron's own path, one at a time, on layers that were never built."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseRowParallelLinear,
    CommFuseVocabParallelEmbedding,
    capture,
    unsupported_reason,
)
from commfuse_megatron.plugin.decision import asks_for_all_reduce, state_of

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


def says(words: str | None, *layer_and_input: Any, **options: Any) -> None:
    """The reason holds these words; None: there is none."""
    reason = unsupported_reason(*layer_and_input, **options)
    assert (reason is None) == (words is None), reason
    assert words is None or words in reason


BOTH = pytest.mark.parametrize("cls", [CommFuseColumnParallelLinear, CommFuseRowParallelLinear])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_supported(cls: type, dtype: torch.dtype) -> None:
    layer = make_layer(cls, weight=torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype)))
    says(None, layer)
    says(None, layer, torch.zeros(4, 1, 4, dtype=dtype))


@BOTH
@pytest.mark.parametrize(("options", "words"), [
    ({"commfuse": False}, "config.commfuse is False"), ({"fp8": "hybrid"}, "config.fp8"),
    ({"fp4": "e2m1"}, "config.fp4"), ({"tp_comm_overlap": True}, "userbuffers"),
    ({"batch_invariant_mode": True}, "batch_invariant_mode"), ({"symmetric_ar_type": "one_shot"}, "symmetric_ar_type"),
    ({"cpu_offloading": True}, "cpu_offloading"), ({"commfuse": True, "fp8": None}, None), ({"commfuse": None}, None),
])  # fmt: skip
def test_configuration(cls: type, options: dict, words: str | None) -> None:
    says(words, make_layer(cls, config=SimpleNamespace(**options)))


@BOTH
@pytest.mark.parametrize(("attributes", "words"), [
    ({"is_expert": True}, "belongs to an expert"), ({"explicit_expert_comm": True}, "explicit_expert_comm"),
    ({"tp_group": SimpleNamespace(size=lambda: 1)}, "one rank"),
    ({"gtp_remat_size": 2}, "gtp_remat_size"),
])  # fmt: skip
def test_layer(cls: type, attributes: dict, words: str) -> None:
    says(words, make_layer(cls, **attributes))


@BOTH
@pytest.mark.parametrize(("input_", "words"), [
    (torch.zeros(4, 4), "2 dimensions"), (torch.zeros(0, 1, 4), "empty"),
    (torch.zeros(4, 1, 4, dtype=torch.int32), "torch.int32"),
    (torch.zeros(4, 1, 4, dtype=torch.float64), "Megatron itself raises"),
])  # fmt: skip
def test_input(cls: type, input_: torch.Tensor, words: str) -> None:
    says(words, make_layer(cls), input_)


@BOTH
def test_without_sequence_parallelism(cls: type) -> None:
    layer = make_layer(cls, sequence_parallel=False, allreduce_dgrad=True)
    for rows in (1, 3, 127, 128):  # any number is cut
        says(None, layer, torch.zeros(rows, 2, 4))
        with torch.no_grad():
            says(None, layer, torch.zeros(rows, 2, 4))  # before it is recomputed
            says(None if rows == 128 else "as decoding does", layer.eval(), torch.zeros(rows, 2, 4))
        says(None, layer, torch.zeros(rows, 2, 4))
        layer.train()
    layer.allreduce_dgrad = False  # of a row-parallel one it means nothing
    says("allreduce_dgrad are off" if cls is CommFuseColumnParallelLinear else None, layer)


@BOTH
def test_gpus_are_asked_to_all_reduce(cls: type) -> None:
    alone = make_layer(cls, sequence_parallel=False, allreduce_dgrad=True)
    shared = make_layer(cls)
    for config, is_asked in (({}, False), ({"fprop": {"path": "sliced"}}, True), ({"dgrad": {"path": "sliced"}}, True)):
        for layer in (alone, shared):
            state_of(layer).overlap_config = OverlapConfig.from_dict({"linear": config})
        assert asks_for_all_reduce(alone, is_cuda=True) == is_asked
        assert asks_for_all_reduce(alone, is_cuda=False)
        assert asks_for_all_reduce(shared, is_cuda=True)


def test_only_one_kind() -> None:
    column, row = make_layer(CommFuseColumnParallelLinear), make_layer(CommFuseRowParallelLinear)
    says("defer_embedding_wgrad_compute", column, grad_output_buffer=[])
    odd = torch.zeros(3, 1, 4)
    says(None, column, odd)
    says("3 is not divisible by the 2 ranks", row, odd)
    says("disable_grad_reduce", make_layer(CommFuseColumnParallelLinear, disable_grad_reduce=True))
    says("input_is_parallel", make_layer(CommFuseRowParallelLinear, input_is_parallel=False))


def fused(cls: type, **attributes: Any) -> Any:
    layer = make_layer(cls, gradient_accumulation_fusion=True)
    for name, value in attributes.items():
        setattr(layer.weight, name, value)
    return layer


@BOTH
def test_gradient_accumulation_fusion(cls: type) -> None:
    x = torch.zeros(4, 1, 4)
    says(None, fused(cls, main_grad=torch.zeros(4, 4)), x)
    says("has no main_grad", fused(cls), x)
    says("has no main_grad", fused(cls, main_grad=None), x)
    says("main_grad is torch.bfloat16", fused(cls, main_grad=torch.zeros(4, 4, dtype=torch.bfloat16)), x)
    says("FSDP", fused(cls, main_grad=torch.zeros(4, 4), __fsdp_param__=True), x)
    frozen = fused(cls)
    frozen.weight.requires_grad_(False)
    says(None, frozen, x)
    with torch.no_grad():
        says(None, fused(cls), x)


@BOTH
def test_external_weight_is_the_one_judged(cls: type) -> None:
    class Quantized(torch.Tensor):
        pass

    x = torch.zeros(4, 1, 4)
    says("Quantized", make_layer(cls), x, weight=torch.zeros(4, 4).as_subclass(Quantized))
    says(None, make_layer(cls, weight=None), x, weight=torch.zeros(4, 4))


@BOTH
def test_autocast_may_mix_dtypes(cls: type) -> None:
    layer, half = make_layer(cls), torch.zeros(4, 1, 4, dtype=torch.bfloat16)
    says("torch.bfloat16", layer, half)
    with torch.autocast("cpu", torch.bfloat16):
        says(None, layer, half)


def make_embedding(**attributes: Any) -> Any:
    """An embedding for which everything is in favour of overlapping."""
    defaults = {"reduce_scatter_embeddings": True, "use_inference_optimized_reduce_scatter": False}
    return make_layer(CommFuseVocabParallelEmbedding, **{**defaults, **attributes})


IDS = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(("attributes", "ids", "words"), [
    ({}, None, None), ({}, IDS, None), ({"config": SimpleNamespace(fp8="hybrid")}, IDS, None),  # it is not quantised
    ({"config": SimpleNamespace(commfuse=False)}, None, "config.commfuse is False"),
    ({"tp_group": SimpleNamespace(size=lambda: 1)}, None, "one rank"),
    ({"reduce_scatter_embeddings": False}, None, "the embedding all-reduces"),
    ({"gtp_remat_size": 2}, None, "gtp_remat_size"), ({}, IDS[:, :3], "3 is not divisible by the 2 ranks"),
    ({}, IDS[0], "1 dimensions"), ({}, torch.zeros(2, 4), "torch.float32"), ({}, IDS[:0], "empty"),
])  # fmt: skip
def test_embedding(attributes: dict, ids: torch.Tensor | None, words: str | None) -> None:
    says(words, make_embedding(**attributes), ids)


def test_embedding_with_a_reduce_scatter_of_its_own() -> None:
    layer = make_embedding(use_inference_optimized_reduce_scatter=True)
    says(None, layer)  # in training it is not used
    says("inference_optimized", layer.eval())


def test_layers_over_nccl_are_not_captured():
    context = SimpleNamespace(transport_name="nccl", has_run=lambda problem: True)
    assert capture.reason_not_to_capture(context, ()) == capture.OVER_NCCL
    context.transport_name = "copy_engine"
    assert capture.reason_not_to_capture(context, ()) is None
