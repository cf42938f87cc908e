"""Small models of every kind that the plugin serves, stock and overlapped, from Megatron's own builders and specs.

Megatron's local layers lack some parts that its Transformer Engine layers have, and without them there is no stock
model to compare with. Both models get the same stand-ins: CommFuseNorm for norms that refuse sequence parallelism,
`_PackedCoreAttention` for a core attention that takes no packed sequences. `_LatentCoreAttention`, for one that knows
no head sizes of its own, only the stock model needs.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.plugin import CommFuseLayerNormColumnParallelLinear, CommFuseNorm, apply_to_spec, convert_model
from commfuse_megatron.plugin.compat import ColumnParallelLinear
from commfuse_megatron.plugin.hybrid_spec import stock_stack_spec_local
from commfuse_megatron.plugin.spec import block_spec, replace_in_spec
from commfuse_megatron.testing.gpt import SmallGPT, transformer_config
from commfuse_megatron.testing.pretraining import PRETRAINING_SHIMS

Way = Literal["spec", "convert"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model: sizes, further Megatron options, and for a HybridModel the pattern of its layers.

    "*" is attention, "-" an MLP, "E" a mixture of experts. Options decide the rest: `num_moe_experts`,
    `mtp_num_layers`, `multi_latent_attention`, as in Megatron. is_packed: inputs are packed sequences. is_fused: norms
    are in one module with the linear after them (qkv, dense fc1) as in Transformer Engine's layers; only our class does
    that here.
    """

    gpt: SmallGPT = field(default_factory=lambda: SmallGPT(dtype=torch.float64))
    options: dict[str, Any] = field(default_factory=dict)
    hybrid_pattern: str | None = None
    virtual_stages: int | None = None
    is_packed: bool = False
    is_fused: bool = False


def make_config(recipe: Recipe, group_size: int) -> Any:
    """The TransformerConfig (MLATransformerConfig for latent attention) of a recipe."""
    options = dict(recipe.options)
    if recipe.hybrid_pattern is not None:
        options |= {"num_layers": len(recipe.hybrid_pattern), "is_hybrid_model": True}
    if recipe.virtual_stages is not None:
        options["virtual_pipeline_model_parallel_size"] = recipe.virtual_stages
    return transformer_config(recipe.gpt, group_size, **options)


def build_chunks(
    recipe: Recipe, config: Any, *, overlap: OverlapConfig | None = None, way: Way = "spec", seed: int = 7
) -> list[Any]:
    """This pipeline rank's model chunks with weights drawn from `seed`: stock, or overlapped under `overlap`.

    Args:
        way: "spec" maps specs first and converts what they don't reach; "convert" converts the stock model.
    """
    make = _build_gpt if recipe.hybrid_pattern is None else _build_hybrid
    mapped = overlap if way == "spec" else None
    stages = [None] if recipe.virtual_stages is None else range(recipe.virtual_stages)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chunks = [make(recipe, config, stage, mapped) for stage in stages]
    return convert_model(chunks, overlap) if overlap is not None else chunks


def _build_gpt(recipe: Recipe, config: Any, vp_stage: int | None, overlap: OverlapConfig | None) -> Any:
    spec = _gpt_spec(config, vp_stage, is_stock=overlap is None)
    if recipe.is_packed:
        spec = replace_in_spec(spec, {DotProductAttention: _PackedCoreAttention})
    if recipe.is_fused:
        spec = copy.copy(spec)
        spec.layer_specs = [_with_fused_norms(layer) for layer in spec.layer_specs]
    mtp_spec = None
    if config.mtp_num_layers:
        mtp_spec = _with_norms(get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage))
    if overlap is not None:
        spec, mtp_spec = apply_to_spec(spec, overlap), apply_to_spec(mtp_spec, overlap)
    return GPTModel(transformer_layer_spec=spec, mtp_block_spec=mtp_spec, **_common(recipe, config, vp_stage))


def _build_hybrid(recipe: Recipe, config: Any, vp_stage: int | None, overlap: OverlapConfig | None) -> Any:
    spec = stock_stack_spec_local
    if recipe.is_fused:
        spec = copy.copy(spec)
        stack = spec.submodules = copy.copy(spec.submodules)
        for layer in ("attention_layer", "mlp_layer", "moe_layer"):
            setattr(stack, layer, _with_fused_norms(getattr(stack, layer)))
    if overlap is not None:
        spec = apply_to_spec(spec, overlap)
    options = {"hybrid_stack_spec": spec, "hybrid_layer_pattern": recipe.hybrid_pattern}
    with PRETRAINING_SHIMS["hybrid_final_norm"]():
        return HybridModel(**options, **_common(recipe, config, vp_stage))


def _common(recipe: Recipe, config: Any, vp_stage: int | None) -> dict[str, Any]:
    return {
        "config": config,
        "position_embedding_type": "rope",
        "vp_stage": vp_stage,
        "vocab_size": recipe.gpt.vocab_size,
        "max_sequence_length": recipe.gpt.max_sequence_length,
        "share_embeddings_and_output_weights": recipe.gpt.has_tied_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    }


def _gpt_spec(config: Any, vp_stage: int | None, *, is_stock: bool) -> Any:
    if config.multi_latent_attention:
        layer = get_gpt_layer_local_spec(
            multi_latent_attention=True, normalization=config.normalization, qk_layernorm=config.qk_layernorm
        )
        if is_stock:  # ours, which `apply_to_spec` puts there, takes the sizes of its heads itself
            layer = replace_in_spec(layer, {DotProductAttention: _LatentCoreAttention})
        return _with_norms(block_spec(layer, config, vp_stage, with_torch_norm=True))
    options = {"normalization": config.normalization, "vp_stage": vp_stage}
    return _with_norms(get_gpt_decoder_block_spec(config, use_transformer_engine=False, **options))


def _with_norms(spec: Any) -> Any:
    """The same with norms that work under sequence parallelism, also where Apex would offer LayerNorm only."""
    norms = {WrappedTorchNorm, getattr(spec, "layer_norm", WrappedTorchNorm)}
    return replace_in_spec(spec, {norm: CommFuseNorm for norm in norms if isinstance(norm, type)})


#: A linear -> the norm that its fused form takes in, as parts of the names of parameters.
_FUSED_NORMS = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}


def name_with_separate_norm(name: str) -> str:
    """The name that a parameter of a model with fused norms has in the model with separate ones."""
    for linear, norm in _FUSED_NORMS.items():
        name = name.replace(f"{linear}.layer_norm_", f"{norm}.")
    return name


def _with_fused_norms(layer: Any) -> Any:
    """A copy of the spec of a layer, laid out like Transformer Engine's. Norms before experts stay separate there."""
    layer = copy.copy(layer)
    parts = layer.submodules = copy.copy(layer.submodules)
    parts.sharded_state_dict_keys_map = {}  # which gives separate norms the names of fused ones
    fused: dict[type, type] = {ColumnParallelLinear: CommFuseLayerNormColumnParallelLinear}
    # Of latent attention, Megatron takes fused up-projections from Transformer Engine only.
    if hasattr(getattr(parts.self_attention, "submodules", None), "linear_qkv"):
        parts.self_attention = replace_in_spec(parts.self_attention, fused)
        parts.input_layernorm = IdentityOp
    if isinstance(getattr(parts.mlp, "keywords", {}).get("submodules"), MLPSubmodules):
        parts.mlp = replace_in_spec(parts.mlp, fused)
        parts.pre_mlp_layernorm = IdentityOp
    return layer


class _LatentCoreAttention:
    """Builds Megatron's local core attention for latent attention: the class takes no head sizes of its own, but what
    it computes needs to know the one of values only. What is built is exactly that class, as plugins look at it."""

    def __new__(
        cls, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> DotProductAttention:
        core = DotProductAttention(*args, **kwargs)
        if v_channels is not None:
            core.hidden_size_per_partition = v_channels * core.num_attention_heads_per_partition
        return core


class _PackedCoreAttention(DotProductAttention):
    """The same for packed sequences [tokens, heads, size]: each token sees those before it in its own sequence."""

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> torch.Tensor:
        """Context of every token [tokens, 1, heads * size]."""
        starts = kwargs.pop("packed_seq_params").cu_seqlens_q
        tokens = torch.arange(query.size(0), device=query.device)
        sequence = torch.searchsorted(starts, tokens, right=True)
        is_hidden = (sequence[:, None] != sequence) | (tokens > tokens[:, None])
        return super().forward(
            query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), is_hidden[None, None], **kwargs
        )
