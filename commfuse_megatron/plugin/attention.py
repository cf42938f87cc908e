"""Megatron's self-attentions with core attention and output projection paired into one query-split operation.

Megatron's `forward` of self-attention, latent or not, is long and changes with every release, so it is not copied. It
calls core attention and, with nothing touching the data in between, the output projection. For one call both get
another `forward`:

    core attention   keeps query, key, value and mask, and returns a placeholder full of NaN
    projection       is given that placeholder, and runs `ops.query_split_attention` with its own weight

The modules themselves are called, so hooks run (those of the data-parallel wrapper wait for parameters). Beware: a
placeholder must go straight from one to the other. Where Megatron would put something in between, the call takes
Megatron's own attention, with a reason; if one gets lost nevertheless, that is an error.
"""

import dataclasses
import logging
from typing import Any, NamedTuple, Self

import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.ops.attention_arguments import AttentionInputs, find_attention_complaint, state_attention_problem
from commfuse_megatron.ops.problems import attention_problems
from commfuse_megatron.ops.query_split_attention import find_attention_kernel, plan_attention
from commfuse_megatron.plugin import capture
from commfuse_megatron.plugin.attention_calls import (
    ARGUMENTS,
    FLAGS,
    arguments_of,
    only_megatrons_pre_hooks,
    reason_in_hooks,
)
from commfuse_megatron.plugin.compat import (
    FusedMLASelfAttention,
    MLASelfAttention,
    SelfAttention,
    group_of,
    reason_in_core_attention,
)
from commfuse_megatron.plugin.core_attention import describe_core_attention
from commfuse_megatron.plugin.decision import (
    context_of,
    existing_context_of,
    label_of,
    overlap_context,
    run_with_own_bias,
    state_of,
)
from commfuse_megatron.plugin.stand_in import OURS
from commfuse_megatron.plugin.support import PLANNED, SWITCHED_OFF, judges, unsupported_reason
from commfuse_megatron.plugin.ulysses_block import find_block

logger = logging.getLogger(__name__)

# Compute capability.
_HOPPER = (9, 0)

#: Kernel -> what Megatron calls it in `attention_backend`.
_BACKENDS = {"cudnn": "fused", "flash": "flash"}


class _QuerySplit(torch.nn.Module):
    """Comes before a self-attention of Megatron in a class: the output's reduce-scatter hides under attention and
    projection, one owner's queries at a time.

    | pass  | computes, for one owner's queries after the other | communicates meanwhile       |
    |-------|---------------------------------------------------|------------------------------|
    | fprop | scores, softmax, values, projection               | reduce-scatter of y          |
    | dgrad | projection's dgrad, attention's backward          | all-gather of dy [S/R, B, N] |
    | wgrad | dweight [N, K/R] of the projection, un-split      | nothing is left              |

    The projection must be ours too. Which path a call takes the planner decides (`OverlapConfig.attention`), and what
    cannot be split takes Megatron's attention followed by the projection as a layer of its own.
    """

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's, which it calls."""
        stock = super().forward
        given = arguments_of(stock, args, kwargs)
        reason = attention_unsupported_reason(self, given)
        if reason is not None:
            block = find_block(self, stock, given)
            if not isinstance(block, str):
                _note_stock(self, reason)
                return block()
            _note_stock(self, f"{reason}; {block}" if block else reason)
            return stock(*args, **kwargs)
        with _Pairing(self):
            return stock(*args, **kwargs)


class CommFuseSelfAttention(_QuerySplit, SelfAttention):
    """`SelfAttention` with its output's reduce-scatter hidden under attention and projection: see `_QuerySplit`."""


class CommFuseMLASelfAttention(_QuerySplit, MLASelfAttention):
    """The same of multi-latent attention, whose values have a head size of their own."""


class CommFuseFusedMLASelfAttention(_QuerySplit, FusedMLASelfAttention):
    """The same with one down-projection for queries and keys."""


@judges(SelfAttention, MLASelfAttention, FusedMLASelfAttention)
def attention_unsupported_reason(attention: Any, arguments: dict[str, Any] | None = None) -> str | None:
    """Why calls of `attention` are not query-split, as far as that is known before core attention is called.

    arguments: those of a call, by name; without it, only what the layer and its configuration say is judged.
    """
    reason = reason_in_core_attention()
    if reason is not None:
        return reason
    projection = attention.linear_proj
    if type(projection) not in OURS:
        return (
            f"linear_proj is a {type(projection).__name__}: splitting attention by queries needs our linear itself"
            " there; overlapping the linears does not, see their own lines"
        )
    reason = unsupported_reason(projection)
    if reason != SWITCHED_OFF and getattr(attention.config, "context_parallel_size", 1) > 1:
        reason = "context parallelism is on: it has split the sequence already, see core attention's own line"
    if reason is None and not projection.sequence_parallel:
        reason = "sequence_parallel is off: the projection all-reduces, and query splits end in a reduce-scatter"
    if reason is not None:
        return reason
    path = state_of(projection).config(projection.config).attention.path
    if path in ("row_parallel", "sequential"):
        return (
            f"attention.path is {path}: Megatron's own attention, then the projection as a layer of its own;"
            " query_split or auto ask for query splits"
        )
    reason = reason_in_hooks({"core attention": attention.core_attention, "linear_proj": projection})
    if reason is not None:
        return reason
    if not only_megatrons_pre_hooks(projection):
        return "linear_proj has forward pre-hooks"
    if getattr(attention.config, "attention_output_gate", False):
        return "config.attention_output_gate is on: the gate comes between attention and projection"
    reasons = [reason for name, reason in FLAGS.items() if getattr(attention, name, None)]
    reasons += [reason for name, reason in ARGUMENTS.items() if (arguments or {}).get(name) is not None]
    return reasons[0] if reasons else None


class _Job(NamedTuple):
    """What core attention was called with, until the projection is."""

    inputs: AttentionInputs
    placeholder: torch.Tensor


class _Pairing:
    """For the length of one call of an attention: the other `forward` of its core attention and its projection."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._core, self._projection = attention.core_attention, attention.linear_proj
        self._core_forward, self._project = self._core.forward, self._projection.forward
        self._job: _Job | None = None
        self._undo: list[tuple[torch.nn.Module, Any]] = []

    def __enter__(self) -> Self:
        for module, forward in ((self._core, self._attend), (self._projection, self._attend_and_project)):
            # An attribute of the instance, as somebody else may have set one already.
            self._undo.append((module, module.__dict__.get("forward")))
            module.__dict__["forward"] = forward
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        for module, before in self._undo:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before
        if exc_type is None and self._job is not None:
            raise self._lost("the projection was not called with it")

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        found = self._judge(query, key, value, attention_mask, *args, **kwargs)
        if isinstance(found, str):
            _note_stock(self._attention, found)
            return self._core_forward(query, key, value, attention_mask, *args, **kwargs)
        self._job = found
        return found.placeholder

    def _judge(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **others: Any,
    ) -> _Job | str:
        if args:
            return "core attention is given positional arguments: not understood"
        core = describe_core_attention(self._core, query, key, attention_mask, **others)
        if isinstance(core, str):
            return core
        # No elements behind it; and not a number, so that whoever computes with it notices.
        shape = (*query.shape[:2], query.size(2) * value.size(3))
        placeholder = query.new_full((1,), float("nan")).expand(shape)
        projection = self._projection
        reason = unsupported_reason(projection, placeholder, weight=projection.weight)
        if reason is not None:
            return reason
        inputs = AttentionInputs(query, key, value, projection.weight, None, *core)
        is_capturing = capture.is_capturing(query)
        # What is to be captured stays Megatron's own before, too, so that its projection has run by then.
        if core.dropout and (is_capturing or getattr(self._attention.config, "cuda_graph_impl", "none") != "none"):
            return capture.REPEATED_DROPOUT
        context = existing_context_of(projection) if is_capturing else context_of(projection)
        if context is None:
            return capture.NO_CONTEXT
        problems = attention_problems(inputs, context) if is_capturing else ()
        if problems and context.known_plan(problems[0]) is None:
            return capture.reason_not_to_capture(context, problems) or ""
        known = context.known_calls.get(inputs.key)  # the like of it was found fit, and planned
        if known is None:
            reason = find_attention_complaint(inputs, context.device)  # of mixed dtypes under autocast, say
            reason = reason or self._judge_kernel(inputs, context)
            if reason is not None:
                return reason
        plan = plan_attention(inputs, context) if known is None else known.plan
        if plan.path != "query_split":
            return f"{PLANNED}{plan.path}: {plan.reason}"
        reason = capture.reason_not_to_capture(context, problems) if is_capturing else None
        return reason or _Job(inputs, placeholder)

    def _judge_kernel(self, inputs: AttentionInputs, context: OverlapContext) -> str | None:
        """Why no rank splits these queries, or should, for want of a kernel; the same on all of them.

        What is installed may differ between ranks, and one that went its own way would keep the others waiting.
        """
        problem = dataclasses.replace(state_attention_problem(inputs, context.group_size), needs="")
        kernel = find_attention_kernel(inputs, context)
        reason = kernel if isinstance(kernel, str) else None
        if not isinstance(kernel, str) and inputs.q.is_cuda and context.config.attention.path == "auto":
            capability = torch.cuda.get_device_capability(inputs.q.device)
            passed_over = context.attention_kernels.passed_over_reason(problem, context.config.attention.kernel)
            reason = reason_to_keep_megatrons(kernel.name, passed_over, capability, self._attention.config)
        return context.consensus.first_reason(("attention kernel", problem), reason)

    def _attend_and_project(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        job, projection = self._job, self._projection
        if job is None:
            return self._project(input_)
        if input_ is not job.placeholder:
            raise self._lost(f"the projection was called with something else, of shape {list(input_.shape)}")
        inputs = job.inputs
        context = overlap_context(
            projection, input_, projection.weight, lambda context: attention_problems(inputs, context)
        )
        if context is None:
            raise self._lost("the projection changed its mind")
        self._job = None
        found = run_with_own_bias(
            projection,
            ops.query_split_attention,
            (inputs.q, inputs.k, inputs.v),
            projection.weight,
            context,
            causal=inputs.causal,
            window=inputs.window,
            mask=inputs.mask,
            scale=inputs.scale,
            dropout=inputs.dropout,
        )
        state_of(self._attention).overlapped_calls += 1
        return found

    def _lost(self, how: str) -> UnsupportedError:
        return UnsupportedError(
            f"{label_of(self._attention)}: core attention gave a placeholder for its output, and {how}. Something "
            "comes between attention and projection that is not known to; set attention.path: row_parallel."
        )


def reason_to_keep_megatrons(kernel: str, passed_over: str, capability: tuple[int, int], config: Any) -> str | None:
    """Why path "auto" leaves an attention that `kernel` could compute on a GPU to Megatron; None if it need not.

    The trial times our kernel both ways; Megatron's own may be another one. passed_over: why no better one was taken.
    """
    if kernel == "math":
        return "only the plain kernel can compute it, and Megatron's own attention may be faster"
    if kernel == "flash" and capability >= _HOPPER:
        why = f" ({passed_over})" if passed_over else ""
        return (
            "PyTorch's flash attention has about half of cuDNN's speed on this GPU, and Megatron's own attention may be"
            f" faster{why}"
        )
    backend = getattr(getattr(config, "attention_backend", None), "name", "auto")
    if backend not in ("auto", _BACKENDS.get(kernel)):
        return f"config.attention_backend asks for {backend}, and ours would run {kernel}"
    return None


def _note_stock(attention: Any, reason: str) -> None:
    """Count and log a call that takes Megatron's own attention; raise instead where the configuration insists."""
    state, projection = state_of(attention), attention.linear_proj
    is_planned = reason.startswith(PLANNED)
    if reason != SWITCHED_OFF and not is_planned and type(projection) in OURS:
        config = state_of(projection).config(projection.config)
        if config.fallback.unsupported == "raise" and config.attention.path == "query_split":
            raise UnsupportedError(f"{label_of(attention)}: {reason}")
    group = group_of(projection) if type(projection) in OURS else None  # a wrapper around the projection has none
    if reason not in state.stock_calls and (group is None or group.rank() == 0):
        # The projection after it may be overlapped all the same.
        logger.info("%s takes Megatron's own attention: %s", label_of(attention), reason)
    state.stock_calls[reason] += 1
