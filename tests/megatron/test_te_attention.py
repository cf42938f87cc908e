"""The spec of local linears beside another attention and norm: Transformer Engine's on GPUs, stand-ins here."""

import warnings
from typing import Any

import pytest
import torch

from tests.megatron.harness import run_megatron


class OtherAttention:
    """Stands for TEDotProductAttention."""


class OtherNorm:
    """Stands for TENorm."""


def stock_spec(group_size: int = 1) -> tuple[Any, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from commfuse_megatron.testing.gpt import SmallGPT, transformer_config

    config = transformer_config(SmallGPT(), group_size)
    return config, get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, pp_rank=0
    )


def with_attention_and_norm(spec: Any, attention: type, norm: type) -> Any:
    """A copy of the spec of a block of dense layers with other classes for core attention and for every norm."""
    from commfuse_megatron.plugin.spec import replace_in_spec

    layers = [layer.submodules for layer in spec.layer_specs]
    replacements = {layer.self_attention.submodules.core_attention: attention for layer in layers}
    norms = [spec.layer_norm, *(n for layer in layers for n in (layer.input_layernorm, layer.pre_mlp_layernorm))]
    return replace_in_spec(spec, {**replacements, **dict.fromkeys(norms, norm)})


def test_only_attention_and_norms_are_others() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from commfuse_megatron.plugin import apply_to_spec
    from commfuse_megatron.plugin.linear import CommFuseColumnParallelLinear, CommFuseRowParallelLinear

    _, stock = stock_spec()
    mixed = apply_to_spec(with_attention_and_norm(stock, OtherAttention, OtherNorm))
    assert mixed.layer_norm is OtherNorm
    assert len(mixed.layer_specs) == 2
    for layer in (spec.submodules for spec in mixed.layer_specs):
        attention, mlp = layer.self_attention.submodules, layer.mlp.keywords["submodules"]
        assert attention.core_attention is OtherAttention
        assert (layer.input_layernorm, layer.pre_mlp_layernorm) == (OtherNorm, OtherNorm)
        for linear in (attention.linear_qkv, mlp.linear_fc1):
            assert linear is CommFuseColumnParallelLinear
        for linear in (attention.linear_proj, mlp.linear_fc2):
            assert linear is CommFuseRowParallelLinear
    assert stock.layer_specs[0].submodules.self_attention.submodules.core_attention is DotProductAttention


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device may have Transformer Engine beside it")
def test_without_transformer_engine_the_reason_is_given() -> None:
    from commfuse_megatron.testing.gpt import missing_transformer_engine

    assert "Transformer Engine needs a CUDA device" in str(missing_transformer_engine())


def run_mixed(group_size: int) -> tuple[float, float, int]:
    """(loss of the usual model, loss of the one from a mixed spec, overlapped calls of that)."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from commfuse_megatron.plugin import model_report
    from commfuse_megatron.plugin.norm import CommFuseNorm
    from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of

    warnings.simplefilter("ignore")
    config, stock = stock_spec(group_size)
    spec = with_attention_and_norm(stock, DotProductAttention, CommFuseNorm)
    tokens = torch.arange(2 * 33).view(2, 33)
    usual = loss_of(build_gpt(SmallGPT(), config, overlap=True), tokens).item()
    mixed = build_gpt(SmallGPT(), config, overlap=True, spec=spec)
    return usual, loss_of(mixed, tokens, with_mask=False).item(), model_report(mixed).overlapped_calls


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_model_from_such_a_spec_runs_with_its_own_mask() -> None:
    for usual, mixed, overlapped_calls in run_megatron(2, run_mixed):
        assert mixed == usual
        assert overlapped_calls == 10
