"""Which class of ours takes the place of which of Megatron's: the one table that specs, conversion and report share.

Classes are compared by identity: a subclass of somebody else keeps its behaviour.
"""

from typing import Any

import torch

from commfuse_megatron.plugin import compat, te_linear
from commfuse_megatron.plugin.attention import (
    CommFuseFusedMLASelfAttention,
    CommFuseMLASelfAttention,
    CommFuseSelfAttention,
)
from commfuse_megatron.plugin.embedding import CommFuseVocabParallelEmbedding
from commfuse_megatron.plugin.linear import CommFuseColumnParallelLinear, CommFuseRowParallelLinear
from commfuse_megatron.plugin.norm_linear import CommFuseLayerNormColumnParallelLinear
from commfuse_megatron.plugin.stand_in import OURS
from commfuse_megatron.plugin.ulysses import CommFuseDotProductAttention, CommFuseTEDotProductAttention


def _by_stock(*ours: Any) -> dict[type, type[torch.nn.Module]]:
    """Our classes by Megatron's; those that need Transformer Engine are None without."""
    return {OURS[each]: each for each in ours if each is not None}


#: Megatron's wrappers of Transformer Engine's linears, where that is installed.
TRANSFORMER_ENGINE = _by_stock(
    te_linear.CommFuseTELayerNormColumnParallelLinear,
    te_linear.CommFuseTEColumnParallelLinear,
    te_linear.CommFuseTERowParallelLinear,
)

#: These, Megatron's local linears, and its embedding: a built layer can be given our class.
LINEARS_AND_EMBEDDING = (
    _by_stock(CommFuseColumnParallelLinear, CommFuseRowParallelLinear, CommFuseVocabParallelEmbedding)
    | TRANSFORMER_ENGINE
)

#: Attention, which is configured by its projection.
ATTENTIONS: dict[type, type[torch.nn.Module]] = {
    compat.SelfAttention: CommFuseSelfAttention,
    compat.MLASelfAttention: CommFuseMLASelfAttention,
    compat.FusedMLASelfAttention: CommFuseFusedMLASelfAttention,
}

#: What it calls; communicates under context parallelism only.
CORE_ATTENTIONS = _by_stock(CommFuseDotProductAttention, CommFuseTEDotProductAttention)

#: What a spec may name, and is told its configuration by it; no spec names the embedding.
CONFIGURED_BY_SPECS = (
    CommFuseColumnParallelLinear,
    CommFuseLayerNormColumnParallelLinear,
    CommFuseRowParallelLinear,
    *TRANSFORMER_ENGINE.values(),
    *CORE_ATTENTIONS.values(),
)

#: The parameters that ours compute with. Buffers none has.
_PARAMETERS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")


def is_ours(module: torch.nn.Module) -> bool:
    """Whether `module` is one of our linears, our embedding, or one of our core attentions."""
    return type(module) in OURS


def reason_to_keep(layer: torch.nn.Module, ours: type) -> str | None:
    """Why the built `layer` of Megatron's keeps its class instead of getting `ours`; else None."""
    if "forward" in vars(layer):
        return "the layer has a forward of its own in the instance, which would pass ours by"
    tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    unknown = [name for name, _ in tensors if name not in _PARAMETERS]
    if unknown:
        return f"the layer has parameters or buffers that {ours.__qualname__} does not know: {', '.join(unknown)}"
    if layer._modules:
        return f"something was built into the layer: it has submodules ({', '.join(layer._modules)})"
    return None
