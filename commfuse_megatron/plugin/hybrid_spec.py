"""Specs of hybrid models (Megatron's HybridModel: attention, MLP, expert and Mamba layers in any order).

    --spec commfuse_megatron.plugin.hybrid_spec hybrid_stack_spec          # a callable, by --transformer-impl
    --spec commfuse_megatron.plugin.hybrid_spec hybrid_stack_spec_te       # ready objects
    --spec commfuse_megatron.plugin.hybrid_spec hybrid_stack_spec_local

Megatron's own builder of hybrid models takes objects; `plugin.pretraining.pretrain` calls callables too. Megatron has
no local classes for Mamba and gated delta layers: under the local spec a pattern may have attention (*), MLP (-) and
experts (E).
"""

import functools
import warnings
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayerSubmodules

from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.norm import CommFuseNorm
from commfuse_megatron.plugin.spec import apply_to_spec, require_buildable

with warnings.catch_warnings():
    # Without Transformer Engine, Megatron says here that experts will be local ones; its spec cannot be built then.
    warnings.filterwarnings("ignore", message="Only transformer-engine")
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as _stock_te


def hybrid_stack_spec(config: Any) -> Any:
    """The hybrid stack that `config.transformer.transformer_impl` asks for, with our layers.

    Args:
        config: a HybridModelConfig, with the TransformerConfig in `.transformer`.

    Flags given on the command line (`add_arguments`) are copied to the TransformerConfig.

    Raises, before any layer is built: UnsupportedError for Transformer Engine layers where that is not installed;
    ConfigError for a configuration file with mistakes.
    """
    require_buildable(config.transformer)
    return hybrid_stack_spec_local if config.transformer.transformer_impl == "local" else hybrid_stack_spec_te


def local_stack_spec() -> Any:
    """Megatron's local classes in the order of its Transformer Engine stack; linears are Megatron's own."""
    attention = compat.ModuleSpec(
        module=compat.SelfAttention,
        params={"attn_mask_type": compat.AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=compat.ColumnParallelLinear,
            core_attention=compat.DotProductAttention,
            linear_proj=compat.RowParallelLinear,
        ),
    )
    mlp = functools.partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(linear_fc1=compat.ColumnParallelLinear, linear_fc2=compat.RowParallelLinear),
    )
    # Megatron's stack asks for any number of experts here; the configuration has the right one.
    experts = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    norm, add = CommFuseNorm, get_bias_dropout_add

    def layer(module: type, **parts: Any) -> Any:
        return compat.ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))

    return compat.ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=layer(
                compat.TransformerLayer, input_layernorm=norm, self_attention=attention, self_attn_bda=add
            ),
            mlp_layer=layer(MLPLayer, pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add),
            moe_layer=layer(MoETransformerLayer, pre_mlp_layernorm=norm, mlp=experts, mlp_bda=add),
        ),
    )


#: Megatron's stack of Transformer Engine layers with our linears.
hybrid_stack_spec_te = apply_to_spec(_stock_te)

#: The stack of local classes as Megatron would have it, to compare with.
stock_stack_spec_local = local_stack_spec()

#: The same with our linears.
hybrid_stack_spec_local = apply_to_spec(stock_stack_spec_local)
