"""The two overlapped passes that every operation is made of, and the weight gradient.

    gather_matmul    all-gather under GEMM     all_gather_linear fprop, linear_reduce_scatter dgrad
    matmul_scatter   GEMM over reduce-scatter  linear_reduce_scatter fprop, all_gather_linear dgrad

So the backward of one operation is the other's schedule with other operands. `gather_chunks` and `scatter_chunks` are
the same with any computation in place of the GEMM. All tensors here are 2-D: [tokens, features].
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from commfuse_megatron.errors import CommFuseError
from commfuse_megatron.ops.weight_grad import DeferredWeightGrad, WeightGrad, WeightGradTarget
from commfuse_megatron.runtime.executor import AllGatherRun, Produce, ReduceScatterRun
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.runtime.program import split_rows
from commfuse_megatron.transport.base import Transfer

__all__ = [
    "TapeWeightGrad",
    "gather_buffer",
    "gather_chunks",
    "gather_matmul",
    "gather_rows_alone",
    "kept_rows",
    "matmul_scatter",
    "scatter_chunks",
    "start_gather",
    "weight_gradient",
]

#: Takes what one step of a gather brought, and notes what it computes: (step, flat chunk, its rows, the last transfer
#: in flight).
Consume = Callable[[int, int, torch.Tensor, Transfer | None], None]


def start_gather(p: PreparedPass, link: Link, shard: torch.Tensor, gathered: torch.Tensor, label: str) -> AllGatherRun:
    """An all-gather of `shard` into `gathered`, own rows included, whose batches the caller issues step by step."""
    bound = p.gather.bound
    gathered[bound.own_start : bound.own_start + bound.own_rows].copy_(shard)
    return AllGatherRun(link, p.gather, shard, gathered, label)


def gather_buffer(p: PreparedPass, link: Link, like: torch.Tensor, *, is_kept: bool) -> torch.Tensor:
    """Where a gather [M, features] may go; `kept_rows` takes what is to outlive the call out of it."""
    if not is_kept or link.transport.is_one_sided:  # peers can write nowhere else
        return p.gather.gathered()
    return like.new_empty(p.gather.bound.total_rows, like.size(-1))


def kept_rows(link: Link, gathered: torch.Tensor, *, is_kept: bool) -> torch.Tensor:
    """What a gather into `gather_buffer` brought, valid for this call, or the caller's own."""
    return gathered.clone() if is_kept and link.transport.is_one_sided else gathered


def gather_rows_alone(p: PreparedPass, link: Link, shard: torch.Tensor, label: str, *, is_kept: bool) -> torch.Tensor:
    """[M_r, features] of every rank -> [M, features], with nothing to compute meanwhile."""
    gathered = gather_buffer(p, link, shard, is_kept=is_kept)
    run = start_gather(p, link, shard, gathered, label)
    for index in range(run.num_steps):
        run.issue(index)
    run.finish()
    return kept_rows(link, gathered, is_kept=is_kept)


def gather_matmul(
    p: PreparedPass,
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
    if gathered is not None and link.transport.is_one_sided and gathered is not p.gather.gathered():
        # Peers cannot write there: gather where they can, and keep a copy.
        gather_matmul(p, link, shard, b, out, bias=bias, gathered=p.gather.gathered())
        gathered.copy_(p.gather.gathered())
        return
    if gathered is not None:
        run = start_gather(p, link, shard, gathered, "all-gather")
    else:
        run = AllGatherRun(link, p.gather, shard)
    if p.is_bulk:
        _gather_in_bulk(p, link, run, gathered, b, out)
        run.finish()
        return
    outs = split_rows(out, run.bound.chunk_rows)
    multiply = p.gemm.multiply

    def consume(step: int, chunk: int, rows: torch.Tensor, in_flight: Transfer | None) -> None:
        mark = link.mark()
        multiply(rows, b, outs[chunk], bias, in_flight)
        link.note_compute(f"multiply {chunk}", mark, step)

    gather_chunks(p, run, consume)


def gather_chunks(
    p: PreparedPass,
    run: AllGatherRun,
    consume: Consume,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run an all-gather; every chunk is consumed while the next one travels.

    around: entered for every chunk, its arrival included: another stream may be current inside.
    """
    for index in range(run.num_steps):
        run.issue(index)
        with around():
            arrived = run.chunk(index)
            if arrived is not None:
                consume(index, *arrived)
    p.gemm.join()
    run.finish()


def _gather_in_bulk(
    p: PreparedPass, link: Link, run: AllGatherRun, gathered: torch.Tensor | None, b: torch.Tensor, out: torch.Tensor
) -> None:
    """The own rows, then the others' in at most two GEMMs, each once all of its rows are here.

    transfer  [from earlier owners][from later owners]
    compute   [own rows           ][earlier owners'  ][later owners' rows]
    """
    bound = run.bound
    for index in range(run.num_steps):
        run.issue(index)
    source = p.gather.gathered() if gathered is None else gathered
    own_stop = bound.own_start + bound.own_rows
    own = run.chunk(0)
    blocks = [
        (slice(bound.own_start, own_stop), None if own is None else own[1], range(0)),
        (slice(0, bound.own_start), source[: bound.own_start], range(bound.group_rank)),
        (slice(own_stop, bound.total_rows), source[own_stop:], range(bound.group_rank, bound.schedule.group_size - 1)),
    ]
    for target, rows, batches in blocks:
        for index in batches:
            run.arrive(index)
        if rows is not None and rows.size(0):
            mark = link.mark()
            p.gemm.multiply(rows, b, out[target], None, run.in_flight)
            link.note_compute("multiply", mark, None)
    p.gemm.join()


def matmul_scatter(
    p: PreparedPass,
    link: Link,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    beside: AllGatherRun | None = None,
    beside_last_transfer: Callable[[Transfer | None], None] | None = None,
) -> None:
    """out [M/R, N] = reduce-scatter(a [M, K] @ b [K, N] (+ addend)) (+ bias): every partial travels while the next is
    computed.

    addend: [M, N], this rank's part of the sum besides the product. beside: another gather, whose batches are issued
    along with these. beside_last_transfer: called with that transfer, after the own partial and before the sum, to
    compute something else while the last partial travels.
    """
    program, multiply = p.scatter, p.gemm.multiply
    operands = split_rows(a, program.bound.chunk_rows)
    addends = None if addend is None else split_rows(addend, program.bound.chunk_rows)

    def produce(chunk: int, target: torch.Tensor, arrived: torch.Tensor | None, in_flight: Transfer | None) -> None:
        mark = link.mark()
        if in_flight is None and beside is not None:
            in_flight = beside.in_flight
        if addends is not None and arrived is None:
            multiply(operands[chunk], b, target, addends[chunk], in_flight)
        else:
            multiply(operands[chunk], b, target, arrived, in_flight)
            if addends is not None:
                p.gemm.join()
                target.add_(addends[chunk])
        link.note_compute(f"multiply {chunk}", mark, None)

    run = ReduceScatterRun(link, program, produce, out, p.gemm, bias)
    if p.is_bulk:
        _scatter_in_bulk(p, link, run, (a, b, addend), beside, beside_last_transfer)
        run.finish()
        return
    for index in range(run.num_steps):
        if beside is not None:
            beside.issue(index)
        run.step(index)
    if beside_last_transfer is not None:
        beside_last_transfer(run.in_flight)
    run.finish()


def scatter_chunks(
    p: PreparedPass, link: Link, produce: Produce, out: torch.Tensor, *, bias: torch.Tensor | None = None
) -> None:
    """out [M/R, N] = reduce-scatter of what `produce` computes (+ bias): every partial travels beside the next one."""
    run = ReduceScatterRun(link, p.scatter, produce, out, p.gemm, bias)
    for index in range(run.num_steps):
        run.step(index)
    run.finish()


def _scatter_in_bulk(
    p: PreparedPass,
    link: Link,
    run: ReduceScatterRun,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    beside: AllGatherRun | None,
    beside_last_transfer: Callable[[Transfer | None], None] | None,
) -> None:
    """All partials for others in at most two GEMMs, then what covers their transfers, then the own rows.

    compute   [later owners' rows][earlier owners' rows][wgrad            ][own rows + arrived]
    transfer                      [to later owners     ][to earlier owners]
    """
    (a, b, addend), program, bound = operands, p.scatter, run.bound
    sent = program.sent
    assert sent is not None
    own_stop = bound.own_start + bound.own_rows
    later_owners = bound.schedule.group_size - 1 - bound.group_rank
    if beside is not None:
        for index in range(beside.num_steps):
            beside.issue(index)
    blocks = (
        (slice(own_stop, None), sent[bound.own_start :], range(1, 1 + later_owners)),
        (slice(bound.own_start), sent[: bound.own_start], range(1 + later_owners, bound.schedule.group_size)),
    )
    for rows, partials, batches in blocks:
        if partials.size(0):
            mark = link.mark()
            added = None if addend is None else addend[rows]
            p.gemm.multiply(a[rows], b, partials, added, None if beside is None else beside.in_flight)
            link.note_compute("multiply for others", mark, None)
        for index in batches:
            run.issue(index)
    if beside_last_transfer is not None:
        beside_last_transfer(run.in_flight)
    run.compute(run.first_own_step)


def weight_gradient(
    p: PreparedPass,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight_grad: WeightGrad,
    in_flight: Transfer | None = None,
) -> torch.Tensor | None:
    """grad [M, N] and x [M, K] -> their product [N, K] for autograd, or added or computed where `weight_grad` says.

    in_flight: a transfer that may run beside it.
    """
    if isinstance(weight_grad, DeferredWeightGrad):
        _defer_weight_gradient(p, grad, x, weight_grad)
        return None
    link = p.context.link
    mark = link.mark()
    result = _multiply_weight_gradient(p.gemm, grad, x, weight_grad, in_flight)
    link.note_compute("wgrad", mark, None)
    return result


class TapeWeightGrad:
    """The weight gradient that a call owes, or what it is made of later, from a tape.

    memory: what the tape leaves it in: [N, K], or where it is added; [M, features] of what was gathered, if deferred.
    """

    def __init__(self, p: PreparedPass, like: torch.Tensor, weight_grad: WeightGrad) -> None:
        problem = p.problem
        self._p, self._weight_grad = p, weight_grad
        self.is_deferred = isinstance(weight_grad, DeferredWeightGrad)
        self.accumulates = isinstance(weight_grad, WeightGradTarget)
        if isinstance(weight_grad, WeightGradTarget):
            self.memory = weight_grad.accumulate
        else:
            shape = (problem.M, p.wire_features) if self.is_deferred else (problem.N, problem.K)
            self.memory = like.new_empty(shape)

    def finish(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """What autograd is given after the tape. grad [M, N] and x [M, K]: the operands, one of them `memory`, of a
        gradient that is deferred."""
        if isinstance(self._weight_grad, DeferredWeightGrad):
            _defer_weight_gradient(self._p, grad, x, self._weight_grad)
            return None
        return self.memory if self._weight_grad is None else self._weight_grad.result()


def _defer_weight_gradient(p: PreparedPass, grad: torch.Tensor, x: torch.Tensor, deferred: DeferredWeightGrad) -> None:
    """Leave the product to the queue. Both operands must be memory that no other call uses."""
    grad, x = grad.detach(), x.detach()  # what they were made by need not live until then
    gemm, target, versions = p.gemm, deferred.target, (grad._version, x._version)

    @torch.no_grad()
    def compute() -> torch.Tensor | None:
        if (grad._version, x._version) != versions:  # autograd no longer looks
            which = "the output's gradient" if grad._version != versions[0] else "the input"
            raise CommFuseError(
                f"a deferred weight gradient: {which} was changed in place after the backward pass; "
                "change it once the gradient has been taken from the queue"
            )
        return _multiply_weight_gradient(gemm, grad, x, target, None)

    deferred.queue.put(compute)


def _multiply_weight_gradient(
    gemm: SliceGemm, grad: torch.Tensor, x: torch.Tensor, target: WeightGradTarget | None, in_flight: Transfer | None
) -> torch.Tensor | None:
    if target is not None:
        gemm.accumulate(grad.t(), x, target.accumulate, in_flight)
        result = target.result()
    else:
        result = grad.new_empty(grad.size(1), x.size(1))
        gemm.multiply(grad.t(), x, result, beside=in_flight)
    gemm.join()
    return result
