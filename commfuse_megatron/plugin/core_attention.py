"""What a core attention of Megatron would compute in one call, in the words of `ops.query_split_attention` and
`ops.ulysses_attention`; or why that cannot be said.

Knows the two classes that Megatron's specs put there, by identity, and ours in their place. Whatever is not known to
mean the same is a reason, and as in `support` the answer looks at configuration, shapes and modes only.
"""

from typing import Any, NamedTuple

import torch

from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.stand_in import OURS


class CoreAttention(NamedTuple):
    """Keywords of the operations."""

    causal: bool
    window: tuple[int, int] | None
    mask: torch.Tensor | None
    scale: float
    dropout: float


#: Argument of a call -> why it stays the core attention's own where that is given.
_GIVEN = {
    "packed_seq_params": "sequences are packed (thd): only whole ones are overlapped",
    "attention_bias": "an attention bias is given: no kernel takes one",
}


def describe_core_attention(
    core: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attn_mask_type: Any = None,
    **others: Any,
) -> CoreAttention | str:
    """What `core` would compute of query [S, B, H, D], or why that stays its own.

    Under context parallelism of this rank's rows, which say nothing of what the others hold.
    """
    given = [name for name, argument in others.items() if argument is not None]
    if given:
        return _GIVEN.get(given[0], f"core attention is given {', '.join(given)}: not understood")
    if query.dim() != 4:
        return f"the queries have {query.dim()} dimensions: only [sequence, batch, heads, features] are overlapped"
    if query.shape[:2] != key.shape[:2]:
        return f"{query.size(0)} queries meet {key.size(0)} keys: only attention of a sequence to itself is overlapped"
    stock = OURS.get(type(core), type(core))
    is_local = stock is compat.DotProductAttention
    if not is_local and not _is_transformer_engines(stock):
        return f"core attention is a {type(core).__name__}: known are DotProductAttention and TEDotProductAttention"
    if getattr(core.config, "softmax_type", "vanilla") != "vanilla":
        return f"config.softmax_type is {core.config.softmax_type}: only the plain softmax is overlapped"
    if getattr(core.config, "qk_clip", False) or getattr(core.config, "log_max_attention_logit", False):
        return "config.qk_clip or log_max_attention_logit is on: core attention itself must see all scores"
    if is_local:
        return _describe_local(core, query, attention_mask)
    return _describe_transformer_engines(core, attn_mask_type)


def _describe_local(core: Any, query: torch.Tensor, attention_mask: torch.Tensor | None) -> CoreAttention | str:
    softmax = core.scale_mask_softmax
    rows, batch, heads = query.shape[:3]
    # With `apply_query_key_layer_scaling` the layer's number divides one scale and multiplies the other.
    scale = core.softmax_scale * (softmax.scale or 1.0)
    dropout = core.attention_dropout.p if core.training else 0.0
    is_causal = softmax.attn_mask_type == compat.AttnMaskType.causal
    if softmax.is_kernel_available(attention_mask, batch, heads, rows, rows):  # the fused softmax
        if softmax.window_size is not None:
            return "the fused softmax ignores config.window_size"
        if is_causal:  # and the mask with it
            return CoreAttention(True, None, None, scale, dropout)
    elif softmax.window_size is not None:
        left, right = softmax.window_size
        if left < 0 or right < 0:
            return f"config.window_size is {softmax.window_size}, which Megatron's local attention takes literally"
        return CoreAttention(False, (left, right), None, scale, dropout)
    elif is_causal and attention_mask is None:
        return CoreAttention(rows > 1, None, None, scale, dropout)
    if attention_mask is None:
        return CoreAttention(False, None, None, scale, dropout)
    if attention_mask.dtype != torch.bool or attention_mask.dim() != 4 or attention_mask.shape[2:] != (rows, rows):
        return f"the mask is {attention_mask.dtype} of shape {list(attention_mask.shape)}, not booleans [.., .., S, S]"
    return CoreAttention(False, None, attention_mask, scale, dropout)


def _is_transformer_engines(cls: type) -> bool:
    return cls.__name__ == "TEDotProductAttention" and cls.__module__.startswith("megatron.core.")


def _describe_transformer_engines(core: Any, attn_mask_type: Any) -> CoreAttention | str:
    if attn_mask_type is None or not getattr(core, "te_forward_mask_type", False):
        name = str(core.attn_mask_type)
    else:
        name = attn_mask_type.name
    if name not in ("causal", "causal_bottom_right", "no_mask"):
        return f"the mask is of type {name}: overlapped are causal and none"
    if core.qkv_format != "sbhd":
        return f"the layout is {core.qkv_format}: only sbhd is overlapped"
    if getattr(core, "num_splits", None) is not None:
        return "num_splits is set: it asks for a way of Transformer Engine's own"
    window = core.window_size
    if window is not None and tuple(window) in ((-1, -1), (-1, 0)):
        window = None  # how Transformer Engine says "no window" of the two types of mask
    dropout = float(core.attention_dropout) if core.training else 0.0
    return CoreAttention(
        name != "no_mask", None if window is None else tuple(window), None, float(core.softmax_scale), dropout
    )
