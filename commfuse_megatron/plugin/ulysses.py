"""Megatron's core attentions under context parallelism, with the exchanges of Ulysses hidden under attention.

Each context-parallel rank has some rows of every sequence. `cp_comm_type` "a2a" exchanges them for whole sequences of
some heads, attends, and exchanges back; here `ops.ulysses_attention` does that. What surrounds it (projections, norms
of queries and keys, rotary positions, recompute) works on the rank's own rows and stays Megatron's. Rows are dealt as
Megatron's `get_batch_on_this_cp_rank` does: of 2R chunks rank r holds r and 2R-1-r.

Transformer Engine's class has a path of its own for what is not overlapped. Megatron's local one has none: it refuses
context parallelism when it is built, so ours is built as if there were none, and what it cannot do is an error.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.ops.ulysses_attention import (
    Stock,
    UlyssesInputs,
    attend_prepared,
    prepare_exchange,
    state_ulysses_problem,
)
from commfuse_megatron.plugin import arguments, capture, compat
from commfuse_megatron.plugin.core_attention import describe_core_attention
from commfuse_megatron.plugin.decision import context_of, context_unless, count_call, state_of
from commfuse_megatron.plugin.linear import remember
from commfuse_megatron.plugin.stand_in import reason_in_class, stands_for
from commfuse_megatron.plugin.support import PLANNED, SWITCHED_OFF, judges, reason_in_tensors
from commfuse_megatron.runtime.prepared import PreparedPass

_ADVICE = (
    "Megatron's local core attention has no context parallelism of its own to fall back to: change that, or take"
    " Transformer Engine's layers (transformer_impl transformer_engine)."
)

__all__ = ["CommFuseDotProductAttention", "CommFuseTEDotProductAttention", "exchange_unsupported_reason"]


# The trial has not run on GPUs yet, and "auto" must never be slower, nor fail.
NOT_TIMED = (
    "ulysses.path is auto: on GPUs Transformer Engine's own exchange is kept; plan.measure: always times ours beside"
    " it, ulysses.path: overlapped asks for ours"
)


@stands_for(compat.DotProductAttention)
class CommFuseDotProductAttention(compat.DotProductAttention):
    """`DotProductAttention` that context parallelism works with, for `cp_comm_type` "a2a".

    | pass  | computes, for this rank's heads          | communicates meanwhile                                |
    |-------|------------------------------------------|-------------------------------------------------------|
    | fprop | attention of whole sequences             | q, k, v [S/R, B, heads, D] there, output back         |
    | dgrad | the gradients of q, k, v                 | the output's gradient there, those of q, k, v back    |

    Args (beyond Megatron's):
        k_channels, v_channels: features of a head of keys and of values, which latent attention names; None: those of
            the configuration.
        overlap_config: the OverlapConfig of this layer; None reads the flags.

    Raises ConfigError for a configuration file with mistakes, unless switched off. A call raises UnsupportedError where
    context parallelism is on and the exchange is not overlapped.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        overlap_config: OverlapConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("pg_collection") is None:
            kwargs["pg_collection"] = compat.attention_groups()
        if k_channels is not None and kwargs.get("softmax_scale") is None:
            kwargs["softmax_scale"] = k_channels**-0.5
        super().__init__(_without_context_parallelism(config), *args, **kwargs)
        self.config = config
        self.cp_comm_type = kwargs.get("cp_comm_type")
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        remember(self, config, overlap_config, {"name": "core_attention"})

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attention of this rank's rows [S/R, B, H, D] over whole sequences: [S/R, B, H * D]."""
        if compat.context_parallel_group(self) is None:
            return super().forward(*args, **kwargs)
        return _attend(self, None, *args, **kwargs)


def _without_context_parallelism(config: Any) -> Any:
    if config.context_parallel_size == 1:
        return config
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    return alone


_TransformerEngines: Any = compat.transformer_engine_class("TEDotProductAttention")

if _TransformerEngines is not None:

    @stands_for(_TransformerEngines)
    class CommFuseTEDotProductAttention(_TransformerEngines):
        """`TEDotProductAttention` whose "a2a" is hidden under attention: see CommFuseDotProductAttention.

        Args (beyond Megatron's):
            overlap_config: the OverlapConfig of this layer; None reads the flags.
        """

        def __init__(self, config: Any, *args: Any, overlap_config: OverlapConfig | None = None, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            remember(self, config, overlap_config, {"name": "core_attention"})

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            """Attention of this rank's rows [S/R, B, H, D] over whole sequences: [S/R, B, H * D]."""
            if compat.context_parallel_group(self) is None:
                return super().forward(*args, **kwargs)
            return _attend(self, super().forward, *args, **kwargs)

else:
    CommFuseTEDotProductAttention = None  # type: ignore[assignment,misc]


@torch.compiler.disable  # what is decided and counted per call is Python, not a graph
def _attend(
    core: Any,
    stock: Callable[..., torch.Tensor] | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attn_mask_type: Any = None,
    **others: Any,
) -> torch.Tensor:
    call = _Call(core, stock, query, key, value, attention_mask, {"attn_mask_type": attn_mask_type, **others})
    found = _judge(call)
    reason = found if isinstance(found, str) else None
    context = context_unless(core, query, reason, without_stock="" if stock is not None else _ADVICE)
    if context is None or isinstance(found, str):
        return call.run_stock(query, key, value)
    attended = attend_prepared(*found, context)
    count_call(core, context)
    return attended


class _Call(NamedTuple):
    """A call of a core attention, which `stock` is what Megatron has for."""

    core: Any
    stock: Callable[..., torch.Tensor] | None
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attention_mask: torch.Tensor | None
    others: dict[str, Any]

    @property
    def is_local(self) -> bool:
        return isinstance(self.core, compat.DotProductAttention)

    def run_stock(self, *heads: torch.Tensor) -> torch.Tensor:
        """What Megatron has, of queries, keys and values like those of the call."""
        assert self.stock is not None
        return self.stock(*heads, self.attention_mask, **self.others)


@judges(*compat.CORE_ATTENTIONS)
def exchange_unsupported_reason(core: Any) -> str | None:
    """Why the exchanges of a core attention are Megatron's own, as far as that is known before it is called."""
    config = core.config
    if compat.context_parallel_group(core) is None:
        return "context parallelism is off, or its group has one rank: there is nothing to exchange"
    if not arguments.is_switched_on(config):
        return SWITCHED_OFF
    reason = reason_in_class(core)
    if reason is not None:
        return reason
    if state_of(core).config(config).ulysses.path == "stock":
        return "ulysses.path is stock: Megatron's own exchange was asked for"
    comm_type = _comm_type(core)
    if comm_type != "a2a":
        return f"cp_comm_type is {comm_type}: only the exchange of a2a is overlapped"
    if getattr(config, "fp8", None) and (config.fp8_dot_product_attention or config.fp8_multi_head_attention):
        return "config.fp8_dot_product_attention or fp8_multi_head_attention is on: attention in fp8 is Megatron's own"
    if getattr(config, "cpu_offloading", False):
        return "config.cpu_offloading is on: offloading tags activations inside Megatron's own forward"
    if getattr(config, "fine_grained_activation_offloading", False) and "core_attn" in config.offload_modules:
        return "core attention's activations are offloaded (offload_modules has core_attn)"
    return compat.reason_in_attention_precision()


def _comm_type(core: Any) -> str:
    """Of this layer: what it was built with, else what the configuration says now. Megatron's default is p2p."""
    found = vars(core).get("cp_comm_type") or core.config.cp_comm_type
    return (found[core.layer_number - 1] if isinstance(found, list) else found) or "p2p"


def judge_exchange(
    core: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **others: Any,
) -> tuple[UlyssesInputs, PreparedPass] | str:
    """What a call of a core attention of ours is to compute, planned; or why it is left to Megatron; the same on all
    ranks. Of query, key and value only sizes and kinds are looked at."""
    is_local = isinstance(core, compat.DotProductAttention)
    stock = None if is_local else super(CommFuseTEDotProductAttention, core).forward
    return _judge(_Call(core, stock, query, key, value, attention_mask, others))


def _judge(call: _Call) -> tuple[UlyssesInputs, PreparedPass] | str:
    """What the operation is to compute, planned; or why this call is left to Megatron; the same on all ranks."""
    core, query, key, value = call.core, call.query, call.key, call.value
    reason = exchange_unsupported_reason(core) or reason_in_tensors(query=query, key=key, value=value)
    if reason is not None:
        return reason
    if capture.is_capturing(query):
        return "a CUDA graph is being captured: the exchange of context parallelism is not captured"
    if call.is_local and call.attention_mask is not None:
        return (
            f"a mask is given as a tensor, of shape {list(call.attention_mask.shape)}: pass none, and core attention"
            f" makes its own, which is {core.attn_mask_type.name} (--no-create-attention-mask-in-dataloader)"
        )
    # Transformer Engine's looks at no mask of the types that are understood.
    found = describe_core_attention(core, query, key, None, **call.others)
    if isinstance(found, str):
        return found
    if found.dropout and getattr(core.config, "cuda_graph_impl", "none") != "none":
        return capture.REPEATED_DROPOUT
    reason = _reason_in_sizes(query, key, value, compat.group_of(core).size())
    if reason is not None:
        return reason
    context = context_of(core)
    reason = _reason_in_hosts(context)
    inputs = UlyssesInputs(query, key, value, found.causal, "zigzag", found.window, found.scale, found.dropout, None)
    if reason is None and query.is_cuda and not call.is_local:
        reason = _reason_in_kernel(context, inputs)
    if reason is None and query.is_cuda and not call.is_local and not _may_time(context):
        reason = NOT_TIMED
    if reason is not None:
        return reason
    planned = prepare_exchange(inputs, context, _stock_beside(call, context))
    plan = planned[1].plan
    return f"{PLANNED}{plan.path}, Transformer Engine's own: {plan.reason}" if plan.path == "stock" else planned


def _may_time(context: OverlapContext) -> bool:
    return context.config.ulysses.path != "auto" or context.config.plan.measure == "always"


def _stock_beside(call: _Call, context: OverlapContext) -> Stock | None:
    """What "auto" has timed beside ours; None where ours is taken without."""
    core = call.core
    if call.is_local or context.config.ulysses.path != "auto":
        return None
    if not call.query.is_cuda and context.planner.default_reason is not None:  # nothing is timed on the CPU
        return None
    if call.key.size(2) % context.group_size:  # an error in Transformer Engine
        return None
    backend = getattr(getattr(core.config, "attention_backend", None), "name", "auto")
    apart = functools.partial(compat.unchanged_random_states, call.query.device)
    return Stock(compat.transformer_engines_attention(backend), call.run_stock, core.training, apart)


def _reason_in_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranks: int) -> str | None:
    if len({tensor.dtype for tensor in (query, key, value)}) > 1:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}: only one dtype is overlapped"
    heads, kv_heads = query.size(2), key.size(2)
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return (
            f"{heads} heads of queries and {kv_heads} of keys are left to a tensor-parallel rank, which {ranks}"
            " context-parallel ranks cannot share equally"
        )
    if query.size(0) % 2:
        return f"a context-parallel rank has {query.size(0)} rows, an odd number: they are no two chunks of a sequence"
    return None


def _reason_in_kernel(context: OverlapContext, inputs: UlyssesInputs) -> str | None:
    """Why Transformer Engine's own kernels are kept; the same on all ranks, which may not have the same installed."""
    problem = state_ulysses_problem(inputs, context.group_size).attention()
    reason = None
    if context.attention_kernels.choose(problem, context.config.attention.kernel).name == "math":
        reason = "only the plain kernel can compute this attention, which keeps the scores of all pairs of rows"
    return context.consensus.first_reason(("exchanged attention's kernel", problem), reason)


def _reason_in_hosts(context: OverlapContext) -> str | None:
    if context.num_hosts == 1:
        return None
    return f"the context-parallel group spans {context.num_hosts} hosts: tested is one"
