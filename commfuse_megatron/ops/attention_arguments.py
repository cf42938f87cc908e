"""Checks of what a user passes to an attention operation, and the problem it states.

As in `arguments`, a check that could fail on one rank alone ends in `context.consensus.refuse`. What is checked and
stated needs no context, so that a layer can ask beforehand.
"""

import math
import reprlib
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels.attention import Dropout
from commfuse_megatron.ops.arguments import (
    Operation,
    complain_if_unusable,
    join_needs,
    key_of_values,
    remember,
    unusable_reason,
)
from commfuse_megatron.problem import DTYPE_BYTES, AttentionProblem, UlyssesProblem
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.prepared import PreparedPass

Window = tuple[int, int]

# More than there are ranks; odd, so that the seed shows in the last 32 bits, which some generators take alone.
_RANKS_APART = 1_000_003


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
        others = key_of_values(self.causal, self.window, *(self.window or ()))
        numbers = key_of_numbers(self.scale, self.dropout)
        reason = unusable_reason(self.q, self.k, self.v, self.out_weight, self.out_bias)
        return ("query_split_attention", tensors, others, numbers, self.needs, reason)


def key_of_numbers(scale: float | None, dropout: float) -> tuple:
    """All of these numbers that the checks and the problem depend on."""
    is_finite = None if scale is None else math.isfinite(scale)
    return (type(scale), is_finite, type(dropout), dropout > 0, 0 <= dropout < 1)


def state_attention_problem(inputs: AttentionInputs, group_size: int) -> AttentionProblem:
    """The forward pass of a call whose arguments fit together."""
    q, k, v, weight = inputs.q, inputs.k, inputs.v, inputs.out_weight
    left, right = visible_band(q.size(0), inputs.window, is_causal=inputs.causal)
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


def visible_band(rows: int, window: Window | None, *, is_causal: bool) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees in a sequence of so many rows; None: all."""
    # Farther than the sequence is long is no limit, and numbers that no kernel takes.
    left, right = (None if bound < 0 or bound >= rows else bound for bound in window or (-1, -1))
    return left, 0 if is_causal else right


def find_attention_complaint(inputs: AttentionInputs, device: torch.device) -> str | None:
    """What does not fit together, in one sentence; None if everything does."""
    q, k, v, weight, bias = inputs.q, inputs.k, inputs.v, inputs.out_weight, inputs.out_bias
    complaint = find_heads_complaint(q, k, v)
    if complaint is not None:
        return complaint
    features = q.size(2) * v.size(3)
    if weight.dim() != 2 or weight.size(1) != features:
        return f"out_weight must be [N, {features}] ({q.size(2)} heads of {v.size(3)}), got shape {list(weight.shape)}"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"out_bias must be [{weight.size(0)}], got shape {list(bias.shape)}"
    named = {"q": q, "k": k, "v": v, "out_weight": weight, "out_bias": bias}
    complaint = find_tensor_complaint({name: each for name, each in named.items() if each is not None}, device)
    return complaint or _find_mask_complaint(inputs, device)


def find_heads_complaint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """What does not fit together of queries, keys and values, in one sentence; None if everything does."""
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
    return None


def find_tensor_complaint(given: Mapping[str, torch.Tensor], device: torch.device) -> str | None:
    """The same of dtypes and devices of operands, by name, the first of which is q."""
    if len({tensor.dtype for tensor in given.values()}) > 1:
        dtypes = ", ".join(f"{name} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in given.items())
        return f"all tensors must have one dtype, got {dtypes}"
    dtype = next(iter(given.values())).dtype
    if str(dtype).removeprefix("torch.") not in DTYPE_BYTES:
        return f"dtype {dtype} is not supported; supported are {', '.join(DTYPE_BYTES)}"
    complaint = complain_if_unusable(given)
    if complaint is not None:
        return complaint
    return _find_device_complaint(given, device)


def _find_device_complaint(given: Mapping[str, torch.Tensor], device: torch.device) -> str | None:
    for name, tensor in given.items():
        if tensor.device != device:
            return f"{name} is on {tensor.device}, but this context serves {device}"
    return None


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that is too large
        return False


def find_number_complaint(window: Window | None, scale: float | None, dropout: float) -> str | None:
    """The same of window, scale and dropout."""
    if window is not None and (len(window) != 2 or any(not isinstance(n, int) or n < -1 for n in window)):
        return f"window must be (left, right), integers of -1 (unlimited) or more, got {window}"
    if scale is not None and not _is_finite(scale):
        return f"scale must be a finite number that fits into a float, got {reprlib.repr(scale)}"
    if not 0 <= dropout < 1:
        return f"dropout must be at least 0 and below 1, got {dropout}"
    return None


def _find_mask_complaint(inputs: AttentionInputs, device: torch.device) -> str | None:
    mask = inputs.mask
    complaint = None if mask is None else _find_device_complaint({"mask": mask}, device)
    complaint = complaint or find_number_complaint(inputs.window, inputs.scale, inputs.dropout)
    if mask is None or complaint is not None:
        return complaint
    rows, batch, heads = inputs.q.shape[:3]
    if inputs.window is not None:
        return "window and mask exclude each other: put the window into the mask"
    if mask.dtype != torch.bool or mask.dim() != 4:
        return f"mask must be booleans [B, heads, S, S], got {mask.dtype} of shape {list(mask.shape)}"
    if mask.shape[2:] != (rows, rows) or mask.size(0) not in (1, batch) or mask.size(1) not in (1, heads):
        return f"mask must broadcast to [{batch}, {heads}, {rows}, {rows}], got shape {list(mask.shape)}"
    return None


def prepare_attention[P: AttentionProblem | UlyssesProblem](
    operation: Operation,
    key: Hashable,
    problem: P,
    with_all_gradients: P,
    context: OverlapContext,
    *,
    is_recomputed: bool = False,
) -> PreparedPass:
    """The forward pass of a call whose arguments fit together, found again under `key`; not yet agreed on.

    with_all_gradients: the same problem when everything has a gradient: with dropout, whose masks are those of parts
    of a call, what is recomputed with gradients must be cut as it was without. is_recomputed: it is to run as it does
    with gradients in any case.

    Raises UnsupportedError, on this rank and at the others' next comparison, where no kernel that may can compute it.
    """
    attention = problem if isinstance(problem, AttentionProblem) else problem.attention()
    wanted = context.config.attention.kernel
    try:
        kernel = context.attention_kernels.choose(attention, wanted)
    except UnsupportedError as error:
        context.consensus.refuse(error, topic=problem.call)
    if problem.has_dropout or is_recomputed:
        model = remember(context, (key, "plan"), with_all_gradients, operation)
        reason = f"as with all gradients: {model.plan.reason}"
        prepared = context.known_calls[key] = context.prepare_like(problem, model.plan, reason)
    else:
        prepared = remember(context, key, problem, operation)
    if prepared.plan.path == "stock":  # computed by the caller
        return prepared
    prepared.attention = kernel
    prepared.attention_reason = context.attention_kernels.passed_over_reason(attention, wanted)
    return prepared


def draw_dropout(dropout: float, context: OverlapContext) -> Dropout | None:
    """Dropout of this rank's heads in one call. Raises UnsupportedError while a CUDA graph is captured."""
    if not dropout:
        return None
    if context.is_capturing:
        sentence = "a CUDA graph would repeat one dropout mask; capture without dropout"
        raise context.link.mark_raised_on_all_ranks(UnsupportedError(f"attention: {sentence}"))
    # The CPU's generator is usually in the same state on all ranks, but their heads must not drop alike: neither those
    # of this group, nor those of tensor-parallel ranks that share sequences with other groups.
    seed = int(torch.randint(1 << 40, (), dtype=torch.int64, device="cpu").item())
    return Dropout(dropout, seed * _RANKS_APART + context.global_rank)
