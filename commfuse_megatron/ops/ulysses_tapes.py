"""Attention over a split sequence on tapes: what `lower_ulysses` computes by name, over addresses.

Operands by name: packed, a, gathered and arrived as in `schedule.exchange`. Of a forward pass q, k, v and out, of a
backward pass grad, grad_q, grad_k, grad_v, and heads and attended, which the forward pass left; "states n", what it
left of the softmax of group n: fp32 [B, heads, S, 1].
"""

from collections.abc import Callable, Sequence

import torch

from commfuse_megatron.ops.split_attention import Heads, SplitAttention
from commfuse_megatron.ops.ulysses_pieces import CopyPair, HeadPieces
from commfuse_megatron.problem import RowRange
from commfuse_megatron.runtime.tape_program import TapeBinder, TapeKernel, Unservable
from commfuse_megatron.schedule.exchange import group_and_run
from commfuse_megatron.schedule.lower_attention import ATTEND
from commfuse_megatron.schedule.lower_ulysses import ATTEND_GROUP
from commfuse_megatron.schedule.program import Compute, Rows

__all__ = ["FindCopies", "copy_kernel", "ulysses_backward_kernel", "ulysses_forward_kernels"]

_FLOATS_PER_LOAD = 4

#: Which copies a "pack" or an "unpack" is: (group or turn, what it reads, what it writes).
FindCopies = Callable[[int, Sequence[torch.Tensor], Sequence[torch.Tensor]], list[CopyPair]]


def copy_kernel(find: FindCopies) -> TapeKernel:
    """The kernel of "pack" or "unpack"."""

    def copy(binder: TapeBinder, op: Compute) -> None:
        for target, source, names in find(op.chunk, _views(binder, op.reads), _views(binder, op.writes)):
            binder.copy(target, source, names)

    return copy


def ulysses_forward_kernels(
    pieces: HeadPieces, attention: Sequence[SplitAttention], attended: Sequence[torch.Tensor], runs: Sequence[RowRange]
) -> dict[str, TapeKernel]:
    """The kernels of attention forward. attended: of every group, views into "a"; runs: see `ulysses_passes`."""

    def attend(binder: TapeBinder, group: int, index: int, first: int) -> None:
        heads = pieces.heads(binder.operand("gathered"))[group]
        # The states of runs are rows of what one call for all queries would leave, where kernels can load them.
        state_rows = pieces.problem.rows if index else None
        if first % _FLOATS_PER_LOAD:
            raise Unservable
        (q, k, v, out), bound = attention[group].bind_forward(index, heads, attended[group], state_rows)
        if bound is None:
            raise Unservable
        refs = [binder.ref("gathered", view) for view in (q, k, v)]
        refs += [binder.ref("a", out), binder.at(f"states {group}", torch.float32.itemsize * first)]
        binder.compute(bound, refs)

    def attend_run(binder: TapeBinder, op: Compute) -> None:
        group, run = group_and_run(op.chunk, len(pieces.groups), len(runs) // pieces.problem.group_size)
        attend(binder, group, 1 + run, runs[run].start)

    return {ATTEND_GROUP: lambda binder, op: attend(binder, op.chunk, 0, 0), ATTEND: attend_run}


def ulysses_backward_kernel(
    pieces: HeadPieces,
    attention: Sequence[SplitAttention],
    heads: Sequence[Heads],
    attended: Sequence[torch.Tensor],
) -> dict[str, TapeKernel]:
    """The kernel of attention backward, which leaves gradients where they are sent from. heads, attended: of every
    group, views into the operands of these names."""

    def attend(binder: TapeBinder, op: Compute) -> None:
        group = len(heads) - 1 - op.chunk
        (grad,), (tokens,) = _views(binder, op.reads), _views(binder, op.writes)
        grad = grad.view(attended[group].shape)
        problem = pieces.problem
        targets = pieces.in_tokens(pieces.groups[group], tokens.view(problem.rows, problem.batch, -1), None)
        bound = attention[group].bind_backward(heads[group], attended[group], grad, targets)
        if bound is None:
            raise Unservable
        refs = [binder.ref("heads", view) for view in heads[group]]
        refs += [binder.ref("attended", attended[group]), binder.at(f"states {group}"), binder.ref("gathered", grad)]
        binder.compute(bound, [*refs, *(binder.ref("a", view) for view in targets)])

    return {ATTEND_GROUP: attend}


def _views(binder: TapeBinder, ranges: Sequence[Rows]) -> list[torch.Tensor]:
    return [binder.operand(rows.operand)[rows.start : rows.start + rows.count] for rows in ranges]
