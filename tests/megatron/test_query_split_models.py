"""Query-split attention in whole models, in float64 on the CPU, against stock Megatron at the same group size."""

import functools
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import (
    CommFuseNorm,
    apply_to_spec,
    convert_model,
    model_report,
)
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from commfuse_megatron.testing.training import Training
from tests.megatron import layers
from tests.megatron.harness import make_cpu_test
from tests.megatron.models import build_latent, fuse_gradients, perturb

Llama = functools.partial(SmallGPT, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """options: Megatron's. attention: ours. model: what is built."""

    gpt: SmallGPT = field(default_factory=Llama)
    options: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    model: str = "gpt"
    with_mask: bool = False
    fuses_gradients: bool = False


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]}
#: Their softmax scale is not 1 / sqrt(head size).
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
BIASED = SmallGPT.layer_norm_and_bias(dtype=torch.float64)
VARIANTS = {
    "causal": Variant(), "mask_given": Variant(with_mask=True),
    "splits_of_a_shard": Variant(attention={"splits_per_shard": 2}),
    "layer_norm_and_bias": Variant(gpt=BIASED, fuses_gradients=True),
    "one_query_group": Variant(gpt=Llama(num_query_groups=1)),
    "tied_embeddings": Variant(gpt=Llama(has_tied_embeddings=True)),
    "qk_layernorm": Variant(options={"qk_layernorm": True}), "window": Variant(options={"window_size": (5, 0)}),
    "softmax_scale": Variant(options={"softmax_scale": 0.3}),
    # The shim for the mask that Megatron would make does not reach autograd's thread.
    "recompute_full": Variant(options=FULL, with_mask=True), "recompute_selective": Variant(options=SELECTIVE),
    "hybrid": Variant(model="hybrid"), "latent": Variant(model="latent"),
    "latent_yarn": Variant(model="latent", options=YARN, with_mask=True),
    "latent_plain_queries": Variant(model="latent", options={"q_lora_rank": None, "v_head_dim": 24}),
    "latent_recompute_full": Variant(model="latent", options=FULL, with_mask=True),
    "latent_fused": Variant(model="latent_fused"),
    "prediction_heads": Variant(model="mtp", options={"mtp_num_layers": 1}),
}  # fmt: skip


def is_query_split_as_stock(group_size: int, name: str) -> None:
    """Two right programs differ by the order of sums, a few units of 2.2e-16 times the cancellation in a gradient."""
    variant = VARIANTS[name]
    overlap = OverlapConfig.from_dict({"attention": {"path": "query_split", **variant.attention}})
    stock, ours = (_build(variant, group_size, each) for each in (None, overlap))
    perturb(stock)
    ours.load_state_dict(stock.state_dict())
    if variant.fuses_gradients:
        fuse_gradients(ours)
    losses, gradients = [], []
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(12))
    for model in (stock, ours):
        training = Training(model)
        training.wrapped.zero_grad_buffer()
        losses.append(loss_of(training.wrapped, tokens, with_mask=variant.with_mask))
        losses[-1].backward()
        finalize_model_grads([training.wrapped])
        gradients.append({name: p.main_grad for name, p in model.named_parameters()})
    assert abs(losses[1] - losses[0]) <= 1e-12 * abs(losses[0])
    assert len(gradients[0]) >= 13
    layers.assert_equal(*gradients, tolerance=1e-12)
    # Without this, a model that always fell back would pass every comparison.
    report = model_report(ours)
    calls = {each.name: (each.path, each.overlapped_calls, each.reasons) for each in report.attentions}
    heads = [each for layer, each in calls.items() if "mtp" in layer]
    assert heads == [("overlapped", 1, ())] * (name == "prediction_heads")
    is_repeated = name.endswith("recompute_full")
    assert [each for layer, each in calls.items() if "mtp" not in layer] == [("overlapped", 1 + is_repeated, ())] * 2
    assert {each.path for each in report.layers if each.name.endswith("linear_proj")} == {"overlapped"}
    assert {record.path for record in report.ops if record.op == "query_split_attention"} == {"query_split"}


def _build(variant: Variant, group_size: int, overlap: OverlapConfig | None) -> Any:
    if variant.model.startswith("latent"):
        return build_latent(group_size, overlap, is_fused=variant.model == "latent_fused", **variant.options)
    config = transformer_config(variant.gpt, group_size, **variant.options)
    if variant.model == "hybrid":
        return _build_hybrid(variant.gpt, group_size, overlap)
    if variant.model == "mtp":
        return _build_with_prediction_heads(variant.gpt, config, overlap)
    return build_gpt(variant.gpt, config, overlap=overlap or False, spec=_spec(config))


def _spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from commfuse_megatron.plugin.spec import block_spec, replace_in_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    spec = replace_in_spec(spec, {spec.submodules.input_layernorm: CommFuseNorm})
    return block_spec(spec, config, with_torch_norm=True)


def _build_with_prediction_heads(gpt: SmallGPT, config: Any, overlap: OverlapConfig | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from commfuse_megatron.plugin.spec import local_layer_spec, replace_in_spec

    layer = local_layer_spec()
    heads = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    heads = replace_in_spec(heads, {heads.layer_specs[0].submodules.enorm: CommFuseNorm})
    specs = [_spec(config), heads]
    if overlap is not None:
        specs = [apply_to_spec(spec, overlap) for spec in specs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = GPTModel(
            config=config,
            transformer_layer_spec=specs[0],
            mtp_block_spec=specs[1],
            vocab_size=gpt.vocab_size,
            max_sequence_length=gpt.max_sequence_length,
            position_embedding_type="rope",
        )
    return model if overlap is None else convert_model(model, overlap)


def _build_hybrid(gpt: SmallGPT, group_size: int, overlap: OverlapConfig | None) -> Any:
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    pattern = "*-*-"
    config = transformer_config(gpt, group_size, num_layers=len(pattern), is_hybrid_model=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_block, "TENorm", CommFuseNorm)  # the stack's last norm, whatever the spec says
        model = HybridModel(
            config=config,
            hybrid_stack_spec=_hybrid_spec(),
            vocab_size=gpt.vocab_size,
            max_sequence_length=gpt.max_sequence_length,
            hybrid_layer_pattern=pattern,
            position_embedding_type="rope",
        )
    return model if overlap is None else convert_model(model, overlap)


def _hybrid_spec() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    layer = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=CommFuseNorm, self_attention=layer.self_attention, self_attn_bda=layer.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=CommFuseNorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


# Before 0.19 Megatron's fused down-projection does not gather what a column-parallel linear gives.
HAS_FUSED = tuple(map(int, metadata.version("megatron-core").split(".")[:2])) >= (0, 19)


def _checks(group_size: int, *names: str) -> dict[str, Any]:
    return {name: (group_size, __name__, is_query_split_as_stock.__name__, (name,)) for name in names}


test_two_ranks = make_cpu_test(2, _checks(2, *(name for name in VARIANTS if HAS_FUSED or name != "latent_fused")))
test_four_ranks = make_cpu_test(
    4, _checks(4, "causal", "layer_norm_and_bias", "one_query_group", "hybrid", "latent_yarn")
)
