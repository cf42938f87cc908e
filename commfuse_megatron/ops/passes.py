"""The two overlapped passes that every linear is made of, and the weight gradient.

    gather_matmul    all-gather under GEMM     all_gather_linear fprop, linear_reduce_scatter dgrad
    matmul_scatter   GEMM over reduce-scatter  linear_reduce_scatter fprop, all_gather_linear dgrad

So the backward of one operation is the other's schedule with other operands. All tensors here are 2-D: [tokens,
features].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from commfuse_megatron.ops.weight_grad import WeightGradTarget
from commfuse_megatron.plan.choose import LinearPlan
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.runtime.binding import BoundSchedule, bind
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.executor import AllGatherRun, ReduceScatterRun
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.schedule import Collective

__all__ = ["Pass", "gather_matmul", "matmul_scatter", "start_gather", "weight_gradient"]


class Pass(NamedTuple):
    """What one pass of one call works with."""

    context: OverlapContext
    problem: GemmProblem
    plan: LinearPlan
    gemm: SliceGemm

    @classmethod
    def begin(cls, context: OverlapContext, problem: GemmProblem) -> "Pass":
        """Agree on the problem with the other ranks and count the call."""
        return cls(context, problem, *context.begin(problem))

    def bind(self, collective: Collective) -> BoundSchedule:
        """This rank's schedule over this problem's rows."""
        context, plan, problem = self.context, self.plan, self.problem
        return bind(
            collective,
            plan.algorithm,
            context.group_size,
            context.group_rank,
            plan.chunks_per_shard,
            problem.rows,
            problem.batch,
        )


def start_gather(p: Pass, link: Link, shard: torch.Tensor, gathered: torch.Tensor, label: str) -> AllGatherRun:
    """An all-gather of `shard` into `gathered`, own rows included, whose batches the caller issues step by step."""
    bound = p.bind(Collective.ALL_GATHER)
    gathered[bound.own_start : bound.own_start + bound.own_rows].copy_(shard)
    return AllGatherRun(link, bound, shard, gathered, label)


def gather_matmul(
    p: Pass,
    link: Link,
    shard: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gathered: torch.Tensor | None = None,
) -> None:
    """out [M, N] = all-gather(shard) [M, K] @ b [K, N] (+ bias): every shard is multiplied while the next one travels.

    gathered: [M, K], filled with all shards if given; without it the own shard is not copied anywhere.
    """
    bound = p.bind(Collective.ALL_GATHER)
    if gathered is not None:
        run = start_gather(p, link, shard, gathered, "all-gather")
    else:
        run = AllGatherRun(link, bound, shard, link.carve("gather", (p.problem.M, shard.size(1)), shard.dtype))
    outs = out.split(bound.chunk_rows)
    for index in range(run.num_steps):
        run.issue(index)
        arrived = run.chunk(index)
        if arrived is not None:
            chunk, rows, is_beside_transfer = arrived
            mark = link.mark()
            p.gemm.multiply(rows, b, outs[chunk], addend=bias, is_beside_transfer=is_beside_transfer)
            link.note_compute(f"multiply {chunk}", mark, index)
    run.finish()


def matmul_scatter(
    p: Pass,
    link: Link,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    before_step: Callable[[int], None] | None = None,
    beside_last_transfer: Callable[[], None] | None = None,
) -> None:
    """out [M/R, N] = reduce-scatter(a [M, K] @ b [K, N]) (+ bias): every partial travels while the next is computed.

    before_step: called before each step, to issue other transfers. beside_last_transfer: called after the own partial
    and before the sum, to compute something else while the last partial travels.
    """
    bound = p.bind(Collective.REDUCE_SCATTER)
    operands = a.split(bound.chunk_rows)

    def produce(chunk: int, target: torch.Tensor, addend: torch.Tensor | None, is_beside_transfer: bool) -> None:
        mark = link.mark()
        p.gemm.multiply(operands[chunk], b, target, addend=addend, is_beside_transfer=is_beside_transfer)
        link.note_compute(f"multiply {chunk}", mark, None)

    run = ReduceScatterRun(link, bound, produce, out, gemm=p.gemm, bias=bias)
    for index in range(run.num_steps):
        if before_step is not None:
            before_step(index)
        run.step(index)
    if beside_last_transfer is not None:
        beside_last_transfer()
    run.finish()


def weight_gradient(
    p: Pass, link: Link, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, target: WeightGradTarget | None
) -> torch.Tensor | None:
    """grad [M, N] and x [M, K] -> their product [N, K] for autograd, or added where `target` says."""
    mark = link.mark()
    if target is not None:
        p.gemm.accumulate(grad.t(), x, target.accumulate)
        result = target.result()
    else:
        result = torch.empty_like(weight, memory_format=torch.contiguous_format)
        p.gemm.multiply(grad.t(), x, result)
    link.note_compute("wgrad", mark, None)
    return result
