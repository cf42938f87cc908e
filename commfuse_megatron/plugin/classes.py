"""Which class of ours takes the place of which of Megatron's: the one table that specs, conversion and report share.

Classes are compared by identity: a subclass of somebody else keeps its behaviour.
"""

import torch

from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.attention import (
    CommFuseFusedMLASelfAttention,
    CommFuseMLASelfAttention,
    CommFuseSelfAttention,
)
from commfuse_megatron.plugin.embedding import CommFuseVocabParallelEmbedding
from commfuse_megatron.plugin.linear import CommFuseColumnParallelLinear, CommFuseRowParallelLinear
from commfuse_megatron.plugin.norm_linear import CommFuseLayerNormColumnParallelLinear

__all__ = [
    "ATTENTIONS",
    "LOCAL",
    "OUR_LINEARS",
    "TRANSFORMER_ENGINE",
    "is_ours",
    "reason_in_tensors",
    "reason_to_keep_local",
]

#: Megatron's local linears, and its embedding; a built one can be given our class.
LOCAL: dict[type, type[torch.nn.Module]] = {
    compat.ColumnParallelLinear: CommFuseColumnParallelLinear,
    compat.RowParallelLinear: CommFuseRowParallelLinear,
    compat.VocabParallelEmbedding: CommFuseVocabParallelEmbedding,
}


def _installed(*, find, names: dict[str, type[torch.nn.Module]]) -> dict[type, type[torch.nn.Module]]:
    return {stock: ours for name, ours in names.items() if (stock := find(name)) is not None}


#: Transformer Engine's linears and Megatron's subclasses of them for inference; a built one is replaced by one of ours.
#: Empty where Transformer Engine is not installed.
TRANSFORMER_ENGINE: dict[type, type[torch.nn.Module]] = {
    **_installed(
        find=compat.transformer_engine_class,
        names={
            "TELayerNormColumnParallelLinear": CommFuseLayerNormColumnParallelLinear,
            "TEColumnParallelLinear": CommFuseColumnParallelLinear,
            "TERowParallelLinear": CommFuseRowParallelLinear,
        },
    ),
    **_installed(
        find=compat.inference_class,
        names={
            "InferenceLayerNormColumnParallelLinear": CommFuseLayerNormColumnParallelLinear,
            "InferenceColumnParallelLinear": CommFuseColumnParallelLinear,
            "InferenceRowParallelLinear": CommFuseRowParallelLinear,
        },
    ),
}

#: Attention, which is configured by its projection.
ATTENTIONS: dict[type, type[torch.nn.Module]] = {
    compat.SelfAttention: CommFuseSelfAttention,
    compat.MLASelfAttention: CommFuseMLASelfAttention,
    compat.FusedMLASelfAttention: CommFuseFusedMLASelfAttention,
}

#: What a spec may name; no spec names the embedding.
OUR_LINEARS = (CommFuseColumnParallelLinear, CommFuseLayerNormColumnParallelLinear, CommFuseRowParallelLinear)

#: The parameters that each computes with. Buffers none has.
_PARAMETERS: dict[type, tuple[str, ...]] = {
    CommFuseColumnParallelLinear: ("weight", "bias"),
    CommFuseLayerNormColumnParallelLinear: ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    CommFuseRowParallelLinear: ("weight", "bias"),
    CommFuseVocabParallelEmbedding: ("weight",),
}


def is_ours(module: torch.nn.Module) -> bool:
    """Whether `module` is one of our linears, or our embedding."""
    return type(module) in (*OUR_LINEARS, CommFuseVocabParallelEmbedding)


def reason_to_keep_local(layer: torch.nn.Module, ours: type) -> str | None:
    """Why the built `layer` of Megatron's keeps its class instead of getting `ours`; else None."""
    if "forward" in vars(layer):
        return "the layer has a forward of its own in the instance, which would pass ours by"
    return reason_in_tensors(layer, ours)


def reason_in_tensors(layer: torch.nn.Module, ours: type) -> str | None:
    """Why `ours` cannot take the place of the built `layer`: parameters or buffers of an adapter, say; else None."""
    tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    unknown = [name for name, _ in tensors if name not in _PARAMETERS[ours]]
    if not unknown:
        return None
    return f"the layer has parameters or buffers that {ours.__name__} does not know: {', '.join(unknown)}"
