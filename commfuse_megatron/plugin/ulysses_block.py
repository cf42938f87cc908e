"""Megatron's self-attention under context parallelism, with the exchanges hidden under its projections, too.

`ops.ulysses_block` wants the heads of one group after the other. What comes between projection and attention (norms of
queries and keys, rotary positions) is Megatron's `forward` of self-attention, which is not copied: for every group it
is run on a shallow copy of the module, which has the group's heads, and three modules of ours in the place of others:

    linear_qkv       gives what the operation has projected for this group
    core attention   keeps query, key and value, and returns a placeholder full of NaN
    linear_proj      is given that placeholder, and does nothing

The real projections are called once, before, so that hooks which wait for gathered parameters run; a norm that is fused
with the first one is computed there. Whatever does not fit takes the exchange of core attention by itself.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from commfuse_megatron import ops
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.ops.ulysses_attention import UlyssesInputs
from commfuse_megatron.ops.ulysses_block import BlockOperands, project_prepared
from commfuse_megatron.ops.ulysses_pass import problem_of
from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.attention_calls import FLAGS, only_megatrons_pre_hooks, reason_in_hooks
from commfuse_megatron.plugin.decision import (
    biases_of,
    context_unless,
    count_call,
    dtype_of_operation,
    label_of,
    state_of,
    weight_grad_of,
)
from commfuse_megatron.plugin.stand_in import OURS
from commfuse_megatron.plugin.support import reason_in_projection
from commfuse_megatron.plugin.ulysses import exchange_unsupported_reason, judge_exchange
from commfuse_megatron.runtime.prepared import PreparedPass

#: Begins what the report says of an attention whose exchanges hide under core attention alone.
NOT_UNDER_PROJECTIONS = "exchanges do not hide under the projections"

#: Arguments of a call that the copies are given like the module itself, or that are not looked at.
_PLAIN = ("hidden_states", "attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")


def find_block(attention: Any, stock: Callable[..., Any], given: dict[str, Any]) -> Callable[[], Any] | str:
    """What runs this call of `attention` with its exchanges under its projections; or why it does not, in words for the
    report; "" where core attention exchanges nothing, or has its own reason.

    stock: Megatron's bound `forward`. given: the arguments, by name. The answer is of this rank alone: what is sent is
    the same either way.
    """
    core = attention.core_attention
    if type(core) not in OURS or exchange_unsupported_reason(core) is not None:
        return ""
    found = _judge(attention, stock, given)
    if isinstance(found, str):
        return found and f"{NOT_UNDER_PROJECTIONS}: {found}"
    return lambda: _run(attention, stock, given, found)


#: The attention of a call, whose queries are a placeholder, and its forward pass.
_Planned = tuple[UlyssesInputs, PreparedPass]


def _judge(attention: Any, stock: Callable[..., Any], given: dict[str, Any]) -> _Planned | str:
    core, config = attention.core_attention, attention.config
    if state_of(core).config(core.config).ulysses.with_projections == "off":
        return "ulysses.with_projections is off"
    reason = _reason_in_attention(attention, stock) or _reason_in_call(given)
    if reason is not None:
        return reason
    hidden = given["hidden_states"]
    for name in ("linear_qkv", "linear_proj"):
        linear = getattr(attention, name)
        if type(linear) not in OURS:
            return f"{name} is a {type(linear).__name__}: it must be our linear itself"
        reason = reason_in_projection(linear, hidden)
        if reason is not None:
            return f"{name}: {reason}"
    query, key, value = _placeholders(attention, hidden)
    others = {name: given.get(name) for name in ("attention_bias", "packed_seq_params")}
    mask_type = attention.attn_mask_type
    found = judge_exchange(core, query, key, value, given.get("attention_mask"), attn_mask_type=mask_type, **others)
    if isinstance(found, str):  # core attention will say so itself
        return ""
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return f"config.cuda_graph_impl is {config.cuda_graph_impl}: what runs part by part is not captured"
    return _reason_in_plan(found[1]) or found


def _reason_in_plan(p: PreparedPass) -> str | None:
    problem, plan = problem_of(p), p.plan
    if not plan.is_scheduled:
        return f"planned as {plan.path}: {plan.reason}"
    if problem.own_kv_heads == 1:
        return "a context-parallel rank attends with one head of keys, which all groups of heads share"
    if len(problem.head_groups(plan.chunks_per_shard)) == 1:
        return "all heads are planned to go in one group"
    return None


def _reason_in_attention(attention: Any, stock: Callable[..., Any]) -> str | None:
    """What is around the attention, or in it, that the copies would not do."""
    cls, found = compat.SelfAttention, type(attention)
    is_megatrons = getattr(stock, "__func__", None) is cls.forward
    names = ("get_query_key_value_tensors", "_run_core_attention")
    if not is_megatrons or any(name in vars(attention) or getattr(found, name, None) is not getattr(cls, name, None)
                               for name in names):  # fmt: skip
        return f"the attention is a {found.__qualname__}: only SelfAttention itself is cut into groups of heads"
    norms = {name: getattr(attention, name, None) for name in ("q_layernorm", "k_layernorm")}
    modules = {"core attention": attention.core_attention, "linear_qkv": attention.linear_qkv}
    modules |= {"linear_proj": attention.linear_proj} | {name: norm for name, norm in norms.items() if norm is not None}
    reason = reason_in_hooks(modules)
    if reason is not None:
        return reason
    for what, module in modules.items():
        if not only_megatrons_pre_hooks(module):
            return f"{what} has forward pre-hooks"
    if getattr(attention.config, "attention_output_gate", False):
        return "config.attention_output_gate is on: the gate comes between attention and projection"
    reasons = [reason for name, reason in FLAGS.items() if getattr(attention, name, None)]
    if getattr(attention, "offload_qkv_linear", False):
        reasons.append("the activations of linear_qkv are offloaded (offload_modules has qkv_linear)")
    if getattr(attention.linear_qkv, "return_layernorm_output", False):
        reasons.append("linear_qkv returns its norm's output (return_layernorm_output)")
    return reasons[0] if reasons else None


def _reason_in_call(given: dict[str, Any]) -> str | None:
    unknown = [name for name, value in given.items() if value is not None and name not in _PLAIN]
    return f"the attention is given {', '.join(unknown)}" if unknown else None


def _placeholders(attention: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors of the sizes of query, key and value, without memory."""
    with torch.no_grad():
        one = hidden.new_empty(1, dtype=dtype_of_operation(hidden))
    heads, kv_heads = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
    key_size, value_size = attention.key_hidden_size, attention.val_hidden_size
    sizes = ((heads, key_size), (kv_heads, key_size), (kv_heads, value_size))
    found = [one.expand(*hidden.shape[:2], *size) for size in sizes]
    if torch.is_grad_enabled():
        found[0].requires_grad_()
    return found[0], found[1], found[2]


# -- the call ---------------------------------------------------------------------------------------------------------


def _run(attention: Any, stock: Callable[..., Any], given: dict[str, Any], found: _Planned) -> Any:
    core, qkv, projection = attention.core_attention, attention.linear_qkv, attention.linear_proj
    inputs, forward = found
    context = context_unless(core, inputs.q, None)
    assert context is not None
    x = _called(qkv, given["hidden_states"], getattr(qkv, "norm_output", lambda hidden: hidden))
    _called(projection, x, lambda hidden: hidden)
    bias, _ = biases_of(qkv, x)
    added, returned = biases_of(projection, x)
    operands = BlockOperands(
        x,
        qkv.weight,
        projection.weight,
        bias,
        _HeadsOfGroup(attention, stock, given),
        weight_grad_of(qkv, qkv.weight),
        weight_grad_of(projection, projection.weight),
    )
    output = project_prepared(operands, inputs, forward, context)
    count_call(core, context)
    for layer in (qkv, projection):
        state_of(layer).overlapped_calls += 1
    return output if added is None else output + added, returned


def _called(module: Any, given: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What a module gives that is called with another `forward`, for its hooks."""
    vars(module)["forward"] = forward
    try:
        found: torch.Tensor = module(given)
    finally:
        del vars(module)["forward"]
    return found


class _HeadsOfGroup:
    """Megatron's `forward` of a self-attention for one group of heads, up to core attention."""

    def __init__(self, attention: Any, stock: Callable[..., Any], given: dict[str, Any]) -> None:
        self._attention, self._given = attention, given
        self._forward: Callable[..., Any] = stock.__func__  # type: ignore[attr-defined]

    def __call__(self, part: ops.ProjectedHeads) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        assert part.k is not None
        core, projection = _Core(), _Projection()
        copied = copy.copy(self._attention)
        copied.__dict__["_modules"] = self._attention._modules | {
            "linear_qkv": _Projected(part.projected), "core_attention": core, "linear_proj": projection,
        }  # fmt: skip
        copied.num_attention_heads_per_partition = part.q.size(2)
        copied.num_query_groups_per_partition = part.k.size(2)
        self._forward(copied, **self._given)
        if core.heads is None or projection.given is not core.placeholder:
            raise UnsupportedError(
                f"{label_of(self._attention)}: core attention gave a placeholder for its output, and the projection was"
                " called with something else. Something comes between that is not known to; set"
                " ulysses.with_projections: off."
            )
        return core.heads


class _Projected(torch.nn.Module):
    """Gives what has been projected."""

    def __init__(self, projected: torch.Tensor) -> None:
        super().__init__()
        self._projected = projected

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As a linear without a bias of its own."""
        return self._projected, None


class _Core(torch.nn.Module):
    """Keeps query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.placeholder: torch.Tensor | None = None

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """As a core attention; not a number, so that whoever computes with it notices."""
        self.heads = query, key, value
        shape = (*query.shape[:2], query.size(2) * value.size(3))
        self.placeholder = query.new_full((1,), float("nan")).expand(shape)
        return self.placeholder


class _Projection(torch.nn.Module):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: torch.Tensor | None = None

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As a linear without a bias of its own."""
        self.given = given
        return given, None
