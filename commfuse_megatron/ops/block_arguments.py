"""The checks of what a user passes to `ulysses_block` beyond the attention's own, and what stands for its heads."""

from collections.abc import Callable
from typing import Any

import torch

from commfuse_megatron.errors import ShapeError
from commfuse_megatron.ops.arguments import complain_if_unusable, find_target_complaint
from commfuse_megatron.ops.kinds import find_kind_complaint
from commfuse_megatron.runtime.context import OverlapContext


def placeholders_of_heads(
    function: Callable[..., object], given: dict[str, Any], context: OverlapContext
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors of the sizes of q, k and v of all heads, without memory.

    function: whose arguments are given, by name. Raises ShapeError on all ranks that look, where they do not fit.
    """
    try:
        complaint = find_kind_complaint(function, given) or _find_complaint(given, context)
    except Exception as error:
        complaint = f"the arguments cannot be judged: {type(error).__name__}: {error}"
    if complaint is not None:
        refusal = ShapeError(f"{function.__name__}, group rank {context.group_rank}: {complaint}")
        context.consensus.refuse(refusal, topic="ulysses_attention fprop")
    x, heads, kv_heads = given["x"], given["heads"], given["kv_heads"]
    head_dim, value_dim = _head_dims(given)
    with torch.no_grad():
        one = x.new_empty(1)
    sizes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    found = [one.expand(*x.shape[:2], *size) for size in sizes]
    # What to_heads does may need gradients where nothing else does.
    if torch.is_grad_enabled():
        found[0].requires_grad_()
    return found[0], found[1], found[2]


def _head_dims(given: dict[str, Any]) -> tuple[int, int]:
    """D and D_v, as the rows of the weight say."""
    per_kv_head = given["qkv_weight"].size(0) // given["kv_heads"]
    shared_by, value_dim = given["heads"] // given["kv_heads"], given["value_dim"]
    if value_dim is None:
        value_dim = per_kv_head // (shared_by + 2)
    return (per_kv_head - value_dim) // (shared_by + 1), value_dim


def _find_complaint(given: dict[str, Any], context: OverlapContext) -> str | None:
    """What does not fit together of the block's own arguments, in one sentence; None if everything does."""
    x, qkv_weight, out_weight, qkv_bias = (given[name] for name in ("x", "qkv_weight", "out_weight", "qkv_bias"))
    heads, kv_heads = given["heads"], given["kv_heads"]
    if x.dim() != 3:
        return f"x must be [S_r, B, K], got shape {list(x.shape)}"
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        return f"heads must be a positive multiple of kv_heads, got {heads} and {kv_heads}"
    if qkv_weight.dim() != 2 or qkv_weight.size(1) != x.size(2):
        return f"qkv_weight must be [rows, {x.size(2)}], got shape {list(qkv_weight.shape)}"
    head_dim, value_dim = _head_dims(given)
    rows = kv_heads * ((heads // kv_heads + 1) * head_dim + value_dim)
    if min(head_dim, value_dim) < 1 or qkv_weight.size(0) != rows:
        asked = "D" if given["value_dim"] is None else f"{given['value_dim']}"
        return (
            f"qkv_weight must have {kv_heads} * ({heads // kv_heads} * D + D + {asked}) rows for {heads} heads of"
            f" queries and {kv_heads} of keys, got {qkv_weight.size(0)}"
        )
    if out_weight.dim() != 2 or out_weight.size(1) != heads * value_dim:
        return f"out_weight must be [N, {heads * value_dim}], got shape {list(out_weight.shape)}"
    if qkv_bias is not None and qkv_bias.shape != qkv_weight.shape[:1]:
        return f"qkv_bias must be [{qkv_weight.size(0)}], got shape {list(qkv_bias.shape)}"
    named = {"x": x, "qkv_weight": qkv_weight, "out_weight": out_weight} | (
        {} if qkv_bias is None else {"qkv_bias": qkv_bias}
    )
    if len({tensor.dtype for tensor in named.values()}) > 1:
        dtypes = ", ".join(f"{name} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in named.items())
        return f"all tensors must have one dtype, got {dtypes}"
    for name, tensor in named.items():
        if tensor.device != context.device:
            return f"{name} is on {tensor.device}, but this context serves {context.device}"
    return (
        complain_if_unusable(named)
        or find_target_complaint(given["qkv_weight_grad"], qkv_weight)
        or find_target_complaint(given["out_weight_grad"], out_weight)
    )
