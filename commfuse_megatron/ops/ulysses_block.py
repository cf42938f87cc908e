"""Attention over a split sequence between its two projections: exchanges hide under these, too.

Forward:    compute   [qkv of group 0][qkv of group 1]..[attention of all groups                ][projection]
            transfer                  [q, k, v of 0  ][q, k, v of 1]       [o of group 0][...   ]
Backward:   compute   [do of 1][do of 0][out wgrad][attention backward][qkv wgrad of 1       ][qkv of 0, dx]
            transfer           [do of 1][do of 0  ]      [dq, dk, dv of 1][dq, dk, dv of 0  ]

A group of heads passes through four nodes of autograd's graph: its columns of the qkv projection, what the caller does
to its heads, its departure, and the attention of all groups with the projection behind it. Autograd runs nodes in the
opposite order of their making, so what was made for the last group runs while the first one's gradients travel.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from commfuse_megatron.errors import ShapeError
from commfuse_megatron.ops.arguments import cast_for_autocast, require_context, with_unit_stride
from commfuse_megatron.ops.asked import gradients_asked_for
from commfuse_megatron.ops.attention_arguments import draw_dropout
from commfuse_megatron.ops.block_arguments import placeholders_of_heads
from commfuse_megatron.ops.qkv_gradient import GradProjected
from commfuse_megatron.ops.qkv_rows import QkvRows, check_heads, multiply_blocks
from commfuse_megatron.ops.split_attention import Heads
from commfuse_megatron.ops.ulysses_attention import UlyssesInputs, prepare_backward, prepare_exchange
from commfuse_megatron.ops.ulysses_parts import (
    BackwardAtOnce,
    BackwardInParts,
    BackwardOfGroups,
    ForwardAtOnce,
    ForwardInParts,
    ForwardOfGroups,
)
from commfuse_megatron.ops.ulysses_pass import UlyssesCall, problem_of
from commfuse_megatron.ops.ulysses_passes import Saved
from commfuse_megatron.ops.weight_grad import DeferredWeightGrad, WeightGrad, compute_weight_gradient
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.marks import without_marks
from commfuse_megatron.runtime.prepared import PreparedPass

_NAME = "ulysses_block"


class ProjectedHeads(NamedTuple):
    """What the qkv projection gives of one group of heads.

    projected: [S_r, B, features]; where groups have keys of their own, of every head of keys its heads of queries, its
    key and its value. q, k, v: the same as [S_r, B, heads, features]; k and v are None where another group has them.
    number: of the group, from 0.
    """

    projected: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    number: int


#: q, k and v of a group as they are to be attended; k and v None where the group has none.
ToHeads = Callable[[ProjectedHeads], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


@torch.compiler.disable
def ulysses_block(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    out_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    value_dim: int | None = None,
    to_heads: ToHeads | None = None,
    qkv_weight_grad: WeightGrad = None,
    out_weight_grad: WeightGrad = None,
    causal: bool = True,
    order: str = "contiguous",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    total_rows: int | None = None,
    context: OverlapContext,
) -> torch.Tensor:
    """Projection to heads, attention over the whole sequence, projection: `reference.ulysses_block` to rounding.

    Shapes:
        x           [S_r, B, K]          this rank's rows
        qkv_weight  [H_kv * (H / H_kv * D + D + D_v), K]
                                         of every head of keys its heads of queries, then its key, then its value
        qkv_bias    [rows of qkv_weight]
        out_weight  [N, H * D_v]
        result      [S_r, B, N]
    H is `heads`, H_kv `kv_heads`, D_v `value_dim`, None for D. Both weights are whole on every rank.

    The exchanges are those of `ulysses_attention`, the first one of each pass beside the projections. Heads go in
    groups, as many as were planned for the attention; where that is not overlapped, all are one group.
    A group of heads takes the same heads of every rank, so its queries, keys and values are in `to_heads` as if there
    were no others. Calls run step by step or from tapes, never as graphs.

    Gradients: x, the weights and the bias get those of this rank's rows, complete.

    Args:
        to_heads: what is done to every group between projection and attention: norms, rotary positions. Called once
            for each group, in order; must not use `context`, nor may hooks of the weights, which autograd runs while
            the call is under way. None: nothing.
        qkv_weight_grad, out_weight_grad: where the weights' gradients go; None: to autograd.
        causal, order, window, scale, dropout, total_rows: as in `ulysses_attention`.

    Raises:
        ShapeError: as `ulysses_attention`, before anything is sent; or what `to_heads` gives has other shapes, by
            which the context has failed.
        UnsupportedError: `to_heads` uses the context, or an earlier backward pass was given up half-way.
        ConfigError, TransportTimeoutError, TransportError, RuntimeError: as `ulysses_attention`.

    Example:
        y = ulysses_block(x, qkv_weight, out_weight, heads=32, kv_heads=8, order="zigzag", context=context,
                          to_heads=lambda part: (rotate(part.q), rotate(part.k), part.v))

    Source: CommFuse Alg. 5, arXiv 2604.24013, 2026.
    """
    require_context(_NAME, context)
    with context.guard(_NAME):
        operands = BlockOperands(x, qkv_weight, out_weight, qkv_bias, to_heads, qkv_weight_grad, out_weight_grad)
        operands = operands.cast(context)
        given = {**operands._asdict(), "heads": heads, "kv_heads": kv_heads, "value_dim": value_dim}
        placeholders = placeholders_of_heads(ulysses_block, given, context)
    inputs = UlyssesInputs(*placeholders, causal, order, window, scale, dropout, total_rows)
    return project_prepared(operands, *prepare_exchange(inputs, context), context)


class BlockOperands(NamedTuple):
    """Arguments of `ulysses_block`, by the same names."""

    x: torch.Tensor
    qkv_weight: torch.Tensor
    out_weight: torch.Tensor
    qkv_bias: torch.Tensor | None
    to_heads: ToHeads | None
    qkv_weight_grad: WeightGrad
    out_weight_grad: WeightGrad

    def cast(self, context: OverlapContext) -> "BlockOperands":
        """As autocast has them."""
        x, qkv_weight, out_weight, qkv_bias = cast_for_autocast(context.device.type, *self[:4])
        return self._replace(x=x, qkv_weight=qkv_weight, out_weight=out_weight, qkv_bias=qkv_bias)


def project_prepared(
    operands: BlockOperands, inputs: UlyssesInputs, forward: PreparedPass, context: OverlapContext
) -> torch.Tensor:
    """What `ulysses_block` gives of operands that fit.

    inputs, forward: of the attention, by `prepare_exchange`; its q, k and v are looked at no more.
    """
    with context.guard(_NAME):
        x, qkv_weight, out_weight, qkv_bias, to_heads, *weight_grads = operands.cast(context)
        number = inputs.q.size(-1) ** -0.5 if inputs.scale is None else float(inputs.scale)
        attention = UlyssesCall(forward, number, draw_dropout(inputs.dropout, context))
        call = _Call(attention, (weight_grads[0], weight_grads[1]), x)
        forward.begin(attention.numbers)
        started = _Start.apply(x, qkv_weight, qkv_bias, call)
        call.begin(x)
        departed = []
        for part in range(len(call.rows.groups)):
            projected = _Columns.apply(started[part], call, part, (x, qkv_weight, qkv_bias))
            brought = ProjectedHeads(projected, *call.rows.split(projected, part), part)
            q, k, v = (brought.q, brought.k, brought.v) if to_heads is None else to_heads(brought)
            call.check((q, k, v), part)
            departed.append(_Depart.apply(q, k, v, call, part))
    # Not under the guard: hooks of what is saved may raise, as checkpoints do on purpose.
    return _AttendAndProject.apply(out_weight, call, *departed)


class _Call:
    """One call, as all of its nodes know it: what is planned, and the passes under way.

    Holds no node, and no tensor of the graph beyond a pass.
    """

    def __init__(self, attention: UlyssesCall, weight_grads: tuple[WeightGrad, WeightGrad], x: torch.Tensor) -> None:
        self.attention = attention
        self.qkv_weight_grad, self.out_weight_grad = weight_grads
        p, self.problem = attention.forward, problem_of(attention.forward)
        self.context = p.context
        size, rows = self.problem.group_size, self.problem.rows
        #: Whether a call goes part by part: what nobody overlaps, or a graph is to have, goes in one.
        self.is_in_parts = (
            p.plan.is_scheduled and size > 1 and min(rows, self.problem.M) > 0 and not self.context.is_capturing
        )
        self.rows = p.remember(("qkv rows", self.is_in_parts), self._find_rows)
        self.shapes = [self.rows.shapes(number, x.size(0)) for number in range(len(self.rows.groups))]
        self.forward: ForwardOfGroups | None = None
        self.backward: BackwardOfGroups | None = None
        self.grad_projected: GradProjected | None = None

    def _find_rows(self) -> QkvRows:
        number = self.attention.forward.plan.chunks_per_shard if self.is_in_parts else 1
        return QkvRows(self.problem, self.problem.head_groups(number))

    def begin(self, x: torch.Tensor) -> None:
        """Begin the forward pass."""
        self.forward = ForwardInParts(self.attention, x) if self.is_in_parts else ForwardAtOnce(self.attention)

    def check(self, heads: tuple[torch.Tensor | None, ...], number: int) -> None:
        """Raise ShapeError where the caller's heads of a group are not what the projection's were."""
        complaint = check_heads(heads, self.shapes[number], self.like)
        if complaint is not None:
            rank = self.context.group_rank
            raise ShapeError(
                f"{_NAME}, group rank {rank}: of group {number}, to_heads must give q, k and v: {complaint}"
            )

    @functools.cached_property
    def like(self) -> torch.Tensor:
        """Of the dtype and device of all."""
        return torch.empty(0, dtype=self.attention.forward.dtype, device=self.context.device)

    def token(self) -> torch.Tensor:
        """What nodes hand on that have nothing to hand on but their order."""
        return self.like.new_empty(0)


# -- nodes ------------------------------------------------------------------------------------------------------------


class _Start(torch.autograd.Function):
    """The qkv projection as a whole: behind all groups in a backward pass. Gives a token for each group."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call
    ) -> tuple[torch.Tensor, ...]:
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        ctx.call, ctx.shape = call, x.shape
        ctx.save_for_backward(x if needs_weight else None, weight if needs_input else None)
        return tuple(call.token() for _ in call.rows.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        what = f"the backward pass of {_NAME}"
        x, weight = call.context.saved_tensors(ctx, what)
        found, call.grad_projected = call.grad_projected, None
        with call.context.guard(what), torch.autocast(call.like.device.type, enabled=False):
            needs_input, needs_weight, needs_bias = gradients_asked_for(ctx, 3)
            assert found is not None
            grad = found.complete()
            grad_weight = found.finish(with_unit_stride(x.flatten(0, -2))) if needs_weight else None
            grad_x = (grad @ weight).view(ctx.shape) if needs_input else None
            return grad_x, grad_weight, grad.sum(0) if needs_bias else None, None


class _Columns(torch.autograd.Function):
    """The qkv projection of one group."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        call: _Call,
        number: int,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> torch.Tensor:
        x, weight, bias = operands
        with torch.autocast(x.device.type, enabled=False):
            flat = with_unit_stride(x.flatten(0, -2))
            projected = multiply_blocks(flat, with_unit_stride(weight), bias, call.rows.blocks[number])
        assert call.forward is not None
        call.forward.submit()
        ctx.call, ctx.number = call, number
        # Before group 0 waits, all others' part of the weight's gradient covers what it waits for.
        ctx.covers = number == 1 and weight.requires_grad and not isinstance(call.qkv_weight_grad, DeferredWeightGrad)
        ctx.save_for_backward(flat if ctx.covers and ctx.needs_input_grad[0] else None)
        return projected.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        what = f"the backward pass of {_NAME}"
        (x,) = call.context.saved_tensors(ctx, what)
        with call.context.guard(what), torch.autocast(grad.device.type, enabled=False):
            if call.grad_projected is None:
                call.grad_projected = GradProjected(call.attention.forward, call.rows, call.qkv_weight_grad)
            call.grad_projected.put(ctx.number, without_marks(grad).flatten(0, -2))
            start = ctx.next_functions[0][0]
            if ctx.covers and x is not None and gradients_asked_for(start, 2)[1]:
                call.grad_projected.multiply(x)
                if call.backward is not None:
                    call.backward.submit()
        return call.token(), None, None, None


class _Depart(torch.autograd.Function):
    """The heads of one group leave; in a backward pass their gradients have come."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, call: _Call, number: int
    ) -> torch.Tensor:
        assert call.forward is not None
        heads = [None if each is None else without_marks(each.detach()) for each in (q, k, v)]
        call.forward.bring(number, Heads(*heads))  # type: ignore[arg-type]  # some groups have queries only
        ctx.call, ctx.number = call, number
        return call.token()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        with call.context.guard(f"the backward pass of {_NAME}"):
            assert call.backward is not None
            found = call.backward.take(ctx.number)
            if call.backward.is_taken:
                call.backward = None
            due = gradients_asked_for(ctx, 3)
            return *(each if is_due else None for each, is_due in zip(found, due, strict=True)), None, None


class _AttendAndProject(torch.autograd.Function):
    """The attention of all groups, and the projection behind it."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, call: _Call, *tokens: torch.Tensor) -> torch.Tensor:
        context = call.context
        with context.guard(call.problem), torch.autocast(weight.device.type, enabled=False):
            forward, call.forward = call.forward, None
            assert forward is not None
            attended, saved = forward.finish()
            y = attended @ weight.t()
        needs_weight, needs_heads = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        ctx.call, ctx.num_heads, ctx.state_sizes = call, len(saved.heads), [len(state) for state in saved.states]
        of_heads = (weight, saved.attended, *saved.heads, *(each for state in saved.states for each in state))
        ctx.save_for_backward(attended if needs_weight else None, *(of_heads if needs_heads else ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        context, what = call.context, f"the backward pass of {_NAME}"
        attended, *of_heads = context.saved_tensors(ctx, what)
        call.grad_projected = call.backward = None
        with context.guard(what), torch.autocast(grad_y.device.type, enabled=False):
            needs_weight, *due = gradients_asked_for(ctx, 1 + len(call.shapes))
            grad, found = without_marks(grad_y).contiguous().flatten(0, -2), list[torch.Tensor | None]()

            def compute_weight_grad() -> None:
                if needs_weight:
                    factor = attended.flatten(0, -2)
                    found.append(compute_weight_gradient(call.attention.forward, grad, factor, call.out_weight_grad))

            if any(due):
                weight, saved = of_heads[0], _saved(ctx, of_heads[1:])
                p = prepare_backward(call.attention.forward)
                p.begin()
                if call.is_in_parts:
                    call.backward = BackwardInParts(p, call.attention, saved, call.shapes)
                else:
                    call.backward = BackwardAtOnce(p, call.attention, saved, call.shapes[0])
                call.backward.begin(grad, weight, compute_weight_grad, due)
            else:
                compute_weight_grad()
            tokens = (call.token() if is_due else None for is_due in due)
            return found[0] if found else None, None, *tokens


def _saved(ctx: Any, tensors: list[torch.Tensor]) -> Saved:
    attended, *others = tensors
    heads, states = tuple(others[: ctx.num_heads]), iter(others[ctx.num_heads :])
    return Saved(heads, attended, [tuple(next(states) for _ in range(size)) for size in ctx.state_sizes])
