"""Attention over a sequence that is split over ranks: both all-to-alls hide under it, for groups of heads.

Forward:    transfer  [k, v, q of group 0][of group 1 ...]        [o of group 0 ...  ][o of owner 1]
            compute                       [attention of group 0][group 1: rows of owner 1][.. own rows]
Backward:   transfer  [do of group 1][do of group 0]          [dq, dk, dv of group 1][of group 0]
            compute                  [attention bwd of group 1][of group 0          ]

Each rank attends its own heads over the whole sequence, and holds its own rows of all heads before and after.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable

from commfuse_megatron.kernels.attention import Dropout
from commfuse_megatron.ops.arguments import (
    Operation,
    cast_for_autocast,
    complain_if_unusable,
    key_of_values,
    require_context,
    require_fitting,
    unusable_reason,
)
from commfuse_megatron.ops.asked import gradients_asked_for
from commfuse_megatron.ops.attention_arguments import (
    Window,
    draw_dropout,
    find_heads_complaint,
    find_number_complaint,
    find_tensor_complaint,
    key_of_numbers,
    prepare_attention,
    visible_band,
)
from commfuse_megatron.ops.split_attention import Heads
from commfuse_megatron.ops.trial import Scratch, engine_of
from commfuse_megatron.ops.ulysses_passes import Saved, UlyssesCall, ulysses_backward, ulysses_forward
from commfuse_megatron.problem import UlyssesProblem, shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.marks import without_marks
from commfuse_megatron.runtime.prepared import PassContext, PreparedPass

_ORDERS = ("contiguous", "zigzag")


@torch.compiler.disable
def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    order: str = "contiguous",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    total_rows: int | None = None,
    context: OverlapContext,
) -> torch.Tensor:
    """This rank's rows of attention of all heads over the whole sequence: `reference.ulysses_attention` to rounding.

    Shapes:
        q       [S_r, B, H, D]        this rank's rows of all heads; H is a multiple of the number of ranks
        k       [S_r, B, H_kv, D]     H is a multiple of H_kv, and either of H_kv and the ranks of the other
        v       [S_r, B, H_kv, D_v]
        result  [S_r, B, H * D_v]     fresh and contiguous
    total_rows is S; None means that every rank brings equally many rows.

    Which path is taken `context.config.ulysses` says, by default what a trial found to be the fastest.

    Rounding: that of one attention over the whole sequence. With fewer heads of keys and values than ranks, several
    ranks attend with the same one: each rounds its gradients to the dtype of k once, and they are summed in fp32 (fp64
    for fp64) in the order of ranks.

    Gradients: q, k and v get those of this rank's rows, complete.

    Args:
        causal: a query sees no later key.
        order: "contiguous": rank r holds rows as `torch.tensor_split` deals them; "zigzag": of 2 R equal chunks of the
            sequence numbers r and 2 R - 1 - r, as Megatron's context parallelism does.
        window: (left, right): a query sees no key farther than that before or after it; -1 is unlimited.
        scale: of scores; None is 1 / sqrt(D). Equal on all ranks, to the last bit.
        dropout: as in `query_split_attention`, but equal on all ranks.

    Raises:
        ConfigError: `context` is none.
        ShapeError: an argument is of a wrong kind, the tensors do not fit together, or the ranks bring different
            problems, scales or dropout; on all ranks that compare this call. Nothing was sent.
        UnsupportedError: `attention.kernel` asks for a kernel that cannot do this. Nothing was sent.
        TransportTimeoutError, TransportError: a peer did not come, here or in an earlier call of a failed context.
        RuntimeError: on the path "sequential" a peer did not come within the timeout of the group, whose own
            collective raises it. The context has failed by it.

    Under torch.compile the call stays eager, between two graphs.

    Source: DeepSpeed Ulysses, arXiv 2309.14509, 2023; hidden as in CommFuse Alg. 5, arXiv 2604.24013, 2026.
    """
    require_context("ulysses_attention", context)
    if isinstance(window, list):  # of a file, say: no key
        window = cast(tuple[int, int], tuple(window))
    inputs = UlyssesInputs(q, k, v, causal, order, window, scale, dropout, total_rows)
    return attend_prepared(*prepare_exchange(inputs, context), context)


class Stock(NamedTuple):
    """What the caller has for the same attention: a plan like any other, timed beside ours.

    name: what it is, as the problem says it: all that its time depends on but the problem. attend: q, k and v to this
    rank's rows of the result, differentiable; all ranks call it together. trains: gradients are asked for, if not of
    this very call then of one like it, which recomputes it. apart: a context in which it changes no random state.
    """

    name: str
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    trains: bool
    apart: Callable[[], AbstractContextManager[None]]


class UlyssesInputs(NamedTuple):
    """The arguments of one call of `ulysses_attention`, by the same names."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    order: str
    window: Window | None
    scale: float | None
    dropout: float
    total_rows: int | None

    @property
    def needs(self) -> str:
        """Which gradients a backward pass will be asked for, as in `UlyssesProblem.needs`."""
        is_asked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (self.q, self.k, self.v))
        return "input" if is_asked else ""

    @property
    def key(self) -> tuple:
        """All that the checks and the problem depend on."""
        tensors = tuple((each.shape, each.dtype, each.device, each.layout) for each in (self.q, self.k, self.v))
        numbers = key_of_numbers(self.scale, self.dropout)
        others = key_of_values(self.causal, self.order, self.total_rows, self.window, *(self.window or ()))
        return ("ulysses_attention", tensors, others, numbers, self.needs, unusable_reason(self.q, self.k, self.v))


def state_ulysses_problem(inputs: UlyssesInputs, group_size: int) -> UlyssesProblem:
    """The forward pass of a call whose arguments fit together."""
    q, k, v = inputs.q, inputs.k, inputs.v
    rows = q.size(0) * group_size if inputs.total_rows is None else inputs.total_rows
    left, right = visible_band(rows, inputs.window, is_causal=inputs.causal)
    return UlyssesProblem(
        pass_name="fprop",
        rows=rows,
        batch=q.size(1),
        heads=q.size(2),
        kv_heads=k.size(2),
        head_dim=q.size(3),
        value_dim=v.size(3),
        dtype=str(q.dtype).removeprefix("torch."),
        group_size=group_size,
        order=inputs.order,
        left=left,
        right=right,
        has_dropout=inputs.dropout > 0,
        needs=inputs.needs,
    )


def prepare_exchange(
    inputs: UlyssesInputs, context: OverlapContext, stock: Stock | None = None
) -> tuple[UlyssesInputs, PreparedPass]:
    """The arguments of a call as autocast has them, and its forward pass, checked and planned, for `attend_prepared`.

    All ranks must ask. With `stock` the plan may be that ("stock"), which the caller then runs instead. Raises as
    `ulysses_attention` does.
    """
    with context.guard("ulysses_attention"):
        q, k, v = cast_for_autocast(context.device.type, inputs.q, inputs.k, inputs.v)
        inputs = inputs._replace(q=q, k=k, v=v)
    with context.guard("ulysses_attention"), torch.autocast(context.device.type, enabled=False):
        return inputs, _prepare(inputs, context, stock)


def attend_prepared(inputs: UlyssesInputs, forward: PreparedPass, context: OverlapContext) -> torch.Tensor:
    """What `ulysses_attention` gives."""
    with context.guard("ulysses_attention"), torch.autocast(context.device.type, enabled=False):
        number = inputs.q.size(-1) ** -0.5 if inputs.scale is None else float(inputs.scale)
        call = UlyssesCall(forward, number, draw_dropout(inputs.dropout, context))
        if not forward.problem.needs:
            forward.begin(call.numbers)
            return ulysses_forward(call, Heads(*inputs[:3]))[0]
    with torch.autocast(context.device.type, enabled=False):
        return _UlyssesAttention.apply(*inputs[:3], call)


class _UlyssesAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: UlyssesCall) -> torch.Tensor:
        with call.forward.context.guard(call.forward.problem):
            call.forward.begin(call.numbers)
            y, saved = ulysses_forward(call, Heads(q, k, v))
        ctx.call = call
        ctx.like = Heads(*(torch.empty_like(each, device="meta") for each in (q, k, v)))
        ctx.num_heads, ctx.state_sizes = len(saved.heads), [len(state) for state in saved.states]
        ctx.save_for_backward(saved.attended, *saved.heads, *(each for state in saved.states for each in state))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: UlyssesCall = ctx.call
        context, what = call.forward.context, "the backward pass of ulysses_attention"
        attended, *others = context.saved_tensors(ctx, what)
        with context.guard(what), torch.autocast(grad_y.device.type, enabled=False):
            due = gradients_asked_for(ctx, 3)
            if not any(due):
                return None, None, None, None
            heads, states = tuple(others[: ctx.num_heads]), iter(others[ctx.num_heads :])
            by_group = [tuple(next(states) for _ in range(size)) for size in ctx.state_sizes]
            p = prepare_backward(call.forward)
            p.begin()
            grad = without_marks(grad_y).contiguous()
            found = ulysses_backward(p, call, Saved(heads, attended, by_group), grad, ctx.like)
            return *(each if is_due else None for each, is_due in zip(found, due, strict=True)), None


# -- preparation ------------------------------------------------------------------------------------------------------


def _prepare(inputs: UlyssesInputs, context: OverlapContext, stock: Stock | None) -> PreparedPass:
    """The forward pass of a call, checked; not yet agreed on."""
    key = prepared = None
    try:
        key = inputs.key if stock is None else (inputs.key, stock.name, stock.trains)
        prepared = context.known_calls.get(key)
    except Exception:  # of a wrong kind: the checks say which
        prepared = None
    if prepared is None:
        require_fitting(_OPERATION, inputs._asdict(), functools.partial(_find_complaint, inputs, context), context)
        problem, operation = state_ulysses_problem(inputs, context.group_size), _OPERATION
        if stock is not None:
            problem = dataclasses.replace(problem, beside=stock.name)
            operation = _OPERATION._replace(rehearse=functools.partial(_rehearse, stock=stock))
        with_all_gradients = dataclasses.replace(problem, needs="input")
        is_recomputed = stock is not None and stock.trains
        with nullcontext() if stock is None else stock.apart():
            prepared = prepare_attention(
                operation, key, problem, with_all_gradients, context, is_recomputed=is_recomputed
            )
    return prepared


def prepare_backward(forward: PreparedPass) -> PreparedPass:
    """The backward pass of a call whose forward pass this was."""
    problem = dataclasses.replace(forward.problem, pass_name="backward", needs="input")
    p = forward.context.prepare_like(problem, forward.plan, "as the forward pass")
    p.attention, p.attention_reason = forward.attention, forward.attention_reason
    return p


def _find_complaint(inputs: UlyssesInputs, context: OverlapContext) -> str | None:
    """What does not fit together, in one sentence; None if everything does."""
    q, k, v, size = inputs.q, inputs.k, inputs.v, context.group_size
    if inputs.order not in _ORDERS:
        return f"order must be one of {', '.join(_ORDERS)}, got {inputs.order!r}"
    complaint = find_heads_complaint(q, k, v)
    if complaint is not None:
        return complaint
    if q.size(2) % size:
        return f"the heads of q must be a multiple of the {size} ranks, got {q.size(2)}"
    if k.size(2) % size and size % k.size(2):
        return f"the heads of k and v must be a multiple of the {size} ranks, or a divisor of them, got {k.size(2)}"
    return (
        _find_row_complaint(inputs, context)
        or find_tensor_complaint({"q": q, "k": k, "v": v}, context.device)
        or find_number_complaint(inputs.window, inputs.scale, inputs.dropout)
        or complain_if_unusable({"q": q, "k": k, "v": v})
    )


def _find_row_complaint(inputs: UlyssesInputs, context: OverlapContext) -> str | None:
    size, rows = context.group_size, inputs.q.size(0)
    total = rows * size if inputs.total_rows is None else inputs.total_rows
    if total < 0:
        return f"total_rows must not be negative, got {total}"
    if inputs.order == "zigzag":
        if total % (2 * size):
            return f"zigzag order takes a sequence of a multiple of {2 * size} rows, twice the ranks, got {total}"
        expected, how = total // size, "zigzag order"
    else:
        expected, how = shard_range(total, size, context.group_rank).size, "torch.tensor_split"
    if rows != expected:
        who = f"group rank {context.group_rank} of {size}"
        return f"of total_rows={total}, {who} must bring {expected} rows ({how}), q has {rows}"
    return None


def _rehearse(
    problem: UlyssesProblem, context: PassContext, stock: Stock | None = None
) -> Callable[[PreparedPass], object]:
    """Scratch operands of `problem`, and what runs a forward pass on them, with its backward pass if one is due.

    Backward passes are run by autograd's engine, as those of `stock` are.
    """
    scratch, batch = Scratch(problem, context.device), problem.batch
    rows = sum(run.size for run in problem.kept_rows(context.group_rank))
    with torch.inference_mode(mode=False):  # a call that trains may come after this one
        heads = Heads(
            scratch.draw(rows, batch, problem.heads, problem.head_dim),
            scratch.draw(rows, batch, problem.kv_heads, problem.head_dim),
            scratch.draw(rows, batch, problem.kv_heads, problem.value_dim),
        )
        grad = scratch.draw(rows, batch, problem.N)
    dropout = Dropout(0.1, 0) if problem.has_dropout else None
    kernel = context.attention_kernels.choose(problem.attention(), context.config.attention.kernel)
    backward_problem = dataclasses.replace(problem, pass_name="backward")
    backward: dict[str, PreparedPass] = {}
    engine = engine_of(context.device)

    def run(p: PreparedPass) -> None:
        if p.plan.path == "stock":
            assert stock is not None
            return _run_stock(stock, heads, grad if problem.needs else None)
        p.attention = kernel
        call = UlyssesCall(p, problem.head_dim**-0.5, dropout)
        _, saved = ulysses_forward(call, heads)
        if problem.needs:
            if p.plan.name not in backward:
                backward[p.plan.name] = context.make_pass(backward_problem, p.plan)
                backward[p.plan.name].attention = kernel
            engine(lambda: ulysses_backward(backward[p.plan.name], call, saved, grad, heads))

    return run


def _run_stock(stock: Stock, heads: Heads, grad: torch.Tensor | None) -> None:
    """A forward pass, and the backward pass if there is a gradient; nothing that is saved meets a program's hooks."""
    if grad is None:
        stock.attend(*heads)
        return
    plain = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(mode=False), torch.enable_grad(), plain:
        leaves = [each.detach().requires_grad_() for each in heads]
        torch.autograd.grad(stock.attend(*leaves), leaves, grad)


_OPERATION = Operation("ulysses_attention", _rehearse, ulysses_attention)
