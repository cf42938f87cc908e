"""Checks of what a user passes to an attention operation, and the problem it states.

As in `arguments`, a check that could fail on one rank alone ends in `context.consensus.refuse`. What is checked and
stated needs no context, so that a layer can ask beforehand.
"""

import math
import reprlib
from typing import NamedTuple

import torch

from commfuse_megatron.ops.arguments import complain_if_unusable, join_needs, unusable_reason
from commfuse_megatron.problem import DTYPE_BYTES, AttentionProblem

__all__ = ["AttentionInputs", "find_attention_complaint", "state_attention_problem"]

Window = tuple[int, int]


class AttentionInputs(NamedTuple):
    """The arguments of one call of `query_split_attention`, by the same names."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out_weight: torch.Tensor
    out_bias: torch.Tensor | None
    causal: bool
    window: Window | None
    mask: torch.Tensor | None
    scale: float | None
    dropout: float

    @property
    def needs(self) -> str:
        """Which gradients a backward pass will be asked for, as in `AttentionProblem.needs`."""
        if not torch.is_grad_enabled():
            return ""
        needs_input = any(tensor.requires_grad for tensor in (self.q, self.k, self.v))
        return join_needs(needs_input=needs_input, needs_weight=self.out_weight.requires_grad)

    @property
    def key(self) -> tuple:
        """All that the checks and the problem depend on; of numbers that vary from call to call, no more than that."""
        tensors = tuple(
            None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.layout)
            for tensor in (self.q, self.k, self.v, self.out_weight, self.out_bias, self.mask)
        )
        is_finite = None if self.scale is None else math.isfinite(self.scale)
        numbers = (type(self.scale), is_finite, type(self.dropout), self.dropout > 0, 0 <= self.dropout < 1)
        reason = unusable_reason(self.q, self.k, self.v, self.out_weight, self.out_bias)
        return ("query_split_attention", tensors, self.causal, self.window, numbers, self.needs, reason)


def state_attention_problem(inputs: AttentionInputs, group_size: int) -> AttentionProblem:
    """The forward pass of a call whose arguments fit together."""
    q, k, v, weight = inputs.q, inputs.k, inputs.v, inputs.out_weight
    # Farther than the sequence is long is no limit, and numbers that no kernel takes.
    left, right = (None if bound < 0 or bound >= q.size(0) else bound for bound in inputs.window or (-1, -1))
    if inputs.causal:
        right = 0
    has_mask = inputs.mask is not None
    return AttentionProblem(
        pass_name="fprop",
        rows=q.size(0),
        batch=q.size(1),
        heads=q.size(2),
        kv_heads=k.size(2),
        head_dim=q.size(3),
        value_dim=v.size(3),
        N=weight.size(0),
        dtype=str(q.dtype).removeprefix("torch."),
        group_size=group_size,
        left=None if has_mask else left,
        right=None if has_mask else right,
        has_mask=has_mask,
        has_dropout=inputs.dropout > 0,
        needs=inputs.needs,
    )


def find_attention_complaint(inputs: AttentionInputs, device: torch.device) -> str | None:
    """What does not fit together, in one sentence; None if everything does."""
    q, k, v, weight, bias = inputs.q, inputs.k, inputs.v, inputs.out_weight, inputs.out_bias
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            return f"{name} must be [S, B, heads, features], got shape {list(tensor.shape)}"
        if tensor.shape[:2] != q.shape[:2]:
            return f"q, k and v must share S and B, got {list(q.shape[:2])} for q, {list(tensor.shape[:2])} for {name}"
    if k.size(2) != v.size(2) or not k.size(2) or not q.size(2) or q.size(2) % k.size(2):
        heads = f"{q.size(2)}, {k.size(2)} and {v.size(2)}"
        return f"the heads of q must be a positive multiple of those of k and v, got {heads}"
    if q.size(3) != k.size(3):
        return f"q and k must have as many features per head, got {q.size(3)} and {k.size(3)}"
    if not q.size(3) or not v.size(3):
        return f"heads must have features, got {q.size(3)} for q and k, {v.size(3)} for v"
    features = q.size(2) * v.size(3)
    if weight.dim() != 2 or weight.size(1) != features:
        return f"out_weight must be [N, {features}] ({q.size(2)} heads of {v.size(3)}), got shape {list(weight.shape)}"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"out_bias must be [{weight.size(0)}], got shape {list(bias.shape)}"
    return _find_dtype_complaint(inputs, device) or _find_mask_complaint(inputs)


def _find_dtype_complaint(inputs: AttentionInputs, device: torch.device) -> str | None:
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out_weight": inputs.out_weight, "out_bias": inputs.out_bias}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    if len({tensor.dtype for tensor in given.values()}) > 1:
        dtypes = ", ".join(f"{name} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in given.items())
        return f"all tensors must have one dtype, got {dtypes}"
    if str(inputs.q.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        return f"dtype {inputs.q.dtype} is not supported; supported are {', '.join(DTYPE_BYTES)}"
    complaint = complain_if_unusable(given)
    if complaint is not None:
        return complaint
    if inputs.mask is not None:
        given["mask"] = inputs.mask
    for name, tensor in given.items():
        if tensor.device != device:
            return f"{name} is on {tensor.device}, but this context serves {device}"
    return None


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that is too large
        return False


def _find_mask_complaint(inputs: AttentionInputs) -> str | None:
    window = inputs.window
    if window is not None and (len(window) != 2 or any(not isinstance(n, int) or n < -1 for n in window)):
        return f"window must be (left, right), integers of -1 (unlimited) or more, got {window}"
    if inputs.scale is not None and not _is_finite(inputs.scale):
        return f"scale must be a finite number that fits into a float, got {reprlib.repr(inputs.scale)}"
    if not 0 <= inputs.dropout < 1:
        return f"dropout must be at least 0 and below 1, got {inputs.dropout}"
    mask = inputs.mask
    if mask is None:
        return None
    rows, batch, heads = inputs.q.shape[:3]
    if inputs.window is not None:
        return "window and mask exclude each other: put the window into the mask"
    if mask.dtype != torch.bool or mask.dim() != 4:
        return f"mask must be booleans [B, heads, S, S], got {mask.dtype} of shape {list(mask.shape)}"
    if mask.shape[2:] != (rows, rows) or mask.size(0) not in (1, batch) or mask.size(1) not in (1, heads):
        return f"mask must broadcast to [{batch}, {heads}, {rows}, {rows}], got shape {list(mask.shape)}"
    return None
