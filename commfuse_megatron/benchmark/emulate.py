"""A group of V ranks on two: the program that a rank of the larger group runs, with the one peer for all others.

What is emulated: rank r of V holds weights cut V ways and shards of M / V rows. Its passes are those of the operations
themselves, lowered for V ranks; then every message goes to, and comes from, the one peer there is: as many messages, as
large, through one link as wide as a rank of a switched group has.

What is not: other ranks' delays, links that ranks share, and anything that many ranks do to each other. The collective
of `sequential` moves the same bytes per rank between two ranks, not through V. On GPUs the programs are replayed from
CUDA graphs (`graphs.as_graph`), so no host time is in them: with a real group it is in the way where it exceeds the
GPU's. So these are the costs of cutting work V ways; they are labelled as emulated everywhere.

Both ranks play the one in the middle of V, so that its share of a causal mask is neither the least nor the most.
Results are checked: every slice against the product of the rows that were really sent.
"""

import dataclasses
from collections.abc import Callable
from typing import override

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.benchmark.bounds import collective_name
from commfuse_megatron.benchmark.cases import LinearCase
from commfuse_megatron.benchmark.graphs import as_graph
from commfuse_megatron.benchmark.operands import Pool, Work, draw
from commfuse_megatron.benchmark.variant import Ready, Variant, require_own_link
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import sum_partials
from commfuse_megatron.ops.all_gather_linear import gather_forward
from commfuse_megatron.ops.linear_reduce_scatter import scatter_forward
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import GemmProblem, Problem
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Issue, Program

__all__ = [
    "REAL_RANKS",
    "EmulatedCollective",
    "EmulatedPass",
    "EmulatedSequential",
    "EmulatedSliced",
    "EmulatedTransfers",
    "OverTransport",
    "emulated_collective",
    "make_emulated_work",
    "sum_of_peers",
]

#: On how many ranks larger groups are emulated.
REAL_RANKS = 2


def make_emulated_work(case: LinearCase, group: dist.ProcessGroup, pool: Pool) -> Work:
    """Operands of one rank of `case.group_size`, and what its program gives with the one peer in all other places."""
    if group.size() != REAL_RANKS:
        raise UnsupportedError(f"larger groups are emulated on {REAL_RANKS} ranks, not on {group.size()}")
    work = Work(case, "fprop", group, pool, draw(case, pool), {})
    weight, x = work.operands.weight.detach(), work.operands.x.detach().flatten(0, -2)
    if case.gathers:
        peers = [torch.empty_like(x) for _ in range(REAL_RANKS)]
        dist.all_gather(peers, x.contiguous(), group=group)
        rows = [peers[1 - group.rank()]] * case.group_size
        rows[rank_played(case.group_size)] = x
        work.expected = {"y": torch.cat(rows) @ weight.t()}
    else:
        work.expected = {"y": sum_of_peers((x @ weight.t()).chunk(case.group_size), group)}
    return work


def rank_played(group_size: int) -> int:
    """The rank of the larger group that every real one plays."""
    return group_size // 2


def sum_of_peers(partials: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> torch.Tensor:
    """The own rows of a reduce-scatter in which the peer sends its partials for all other ranks.

    partials: of this rank, by owner.
    """
    own = rank_played(len(partials))
    sent = torch.stack([partial for owner, partial in enumerate(partials) if owner != own])
    peers = [torch.empty_like(sent) for _ in range(REAL_RANKS)]
    dist.all_gather(peers, sent, group=group)
    return sum_partials(partials[own].contiguous(), peers[1 - group.rank()], out=torch.empty_like(partials[own]))


def emulate(program: Program, peer: int) -> Program:
    """The program with one peer for all others, who runs the same: what is sent arrives where that step's is expected.

    Messages are numbered by steps: chunks of one owner come from many ranks, but here from one.
    """

    def redirect(op: Issue) -> Issue:
        if op.send is None or op.receive is None:
            raise UnsupportedError("a rank of an emulated group sends and receives in every step: rows must be even")
        at_row = op.receive.at_row
        return dataclasses.replace(
            op,
            send=op.send._replace(peer=peer, chunk=op.step, at_row=at_row),
            receive=op.receive._replace(peer=peer, chunk=op.step),
        )

    ops = tuple(redirect(op) if isinstance(op, Issue) else op for op in program.ops)
    return dataclasses.replace(program, ops=ops)


class EmulatedPass(PreparedPass):
    """A pass of the rank of a larger group that this one plays."""

    def __init__(self, context: OverlapContext, problem: Problem, plan: PassPlan) -> None:
        super().__init__(context, problem, plan, context.slice_gemm(getattr(torch, problem.dtype)))
        self.group_rank = rank_played(problem.group_size)
        self._peer = 1 - context.group_rank

    @override
    def lower(self, policy: Policy, asked: Asked) -> Program:
        return emulate(super().lower(policy, asked), self._peer)


class OverTransport(Variant):
    """What needs a context of the real group over one transport."""

    is_basic = True

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._context: OverlapContext | None = None

    def prepare(self, work: Work, problem: Problem, plan: PassPlan | None = None) -> EmulatedPass:
        """The pass of a problem of the larger group; by default sliced, with one chunk per shard."""
        if self._context is None:
            require_own_link(work.pool.device, self._backend)
            settings = {"transport": {"backend": self._backend}}
            self._context = OverlapContext(work.group, OverlapConfig.from_dict(settings))
        plan = plan or PassPlan("sliced", "emulated", Algorithm.DIRECT, 1, keep_gathered_input=False)
        return EmulatedPass(self._context, problem, plan)

    @override
    def close(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None


def problem_of(work: Work) -> GemmProblem:
    """The forward pass of the linear of a work."""
    case = work.case
    op = "all_gather_linear" if case.gathers else "linear_reduce_scatter"
    rows = case.M // case.batch
    return GemmProblem(op, "fprop", rows, case.batch, case.N, case.K, work.dtype_name, case.group_size)


class EmulatedTransfers(OverTransport):
    """The V - 1 messages alone."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.name = f"comm_only {backend}"

    @override
    def build(self, work: Work) -> Ready:
        rows, features = work.case.M // work.case.batch, work.case.shard_shape[1]
        problem = GemmProblem(
            "all_gather_linear", "fprop", rows, work.case.batch, 1, features, work.dtype_name, work.case.group_size
        )
        prepared = self.prepare(work, problem)

        def call() -> None:
            with prepared:
                prepared.run_transfers(work.operands.wire_shard, "transfers alone")

        replay = as_graph(call, work.pool.device)
        return Ready(call=replay, path="transfers", transport=prepared.context.transport_name, is_op=False)


class EmulatedSliced(OverTransport):
    """The direct schedule of V ranks: V slices, V - 1 messages."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.name = f"sliced m=1 {backend}"

    @override
    def build(self, work: Work) -> Ready:
        prepared = self.prepare(work, problem_of(work))
        x, weight = work.operands.x.detach(), work.operands.weight.detach()

        def run() -> torch.Tensor:
            if work.case.gathers:
                return gather_forward(prepared, x, weight, None, returns_gathered=False)[0].flatten(0, -2)
            return scatter_forward(prepared, x, weight, None).flatten(0, -2)

        call = as_graph(run, work.pool.device)
        return Ready(
            call=call,
            results=lambda: {"y": call()},
            path="sliced",
            transport=prepared.context.transport_name,
            algorithm="direct",
            chunks_per_shard=1,
        )


class EmulatedCollective(Variant):
    """A collective of the real group that moves, per rank, the bytes of V - 1 shards each way."""

    name = "comm_only collective"
    is_basic = True

    @override
    def build(self, work: Work) -> Ready:
        move = emulated_collective(work)
        call = as_graph(lambda: move().wait(), work.pool.device)
        return Ready(call=call, path="transfers", transport=collective_name(work.pool.device), is_op=False)


class EmulatedSequential(Variant):
    """That collective before, or after, the GEMM of V ranks."""

    name = "sequential"
    is_basic = True

    @override
    def build(self, work: Work) -> Ready:
        move, case, b = emulated_collective(work), work.case, work.operands.weight.detach().t()
        x_full = work.operands.x_full.detach()
        y = work.pool.tensor("y", case.M, case.N)

        def call() -> None:
            if case.gathers:
                move().wait()
            torch.mm(x_full, b, out=y)
            if not case.gathers:
                move().wait()

        replay = as_graph(call, work.pool.device)
        return Ready(call=replay, path="sequential", transport=collective_name(work.pool.device))


def emulated_collective(work: Work, parts: int = 1) -> Callable[[], dist.Work]:
    """What starts one of `parts` equal parts of the collective, and returns it to be waited for."""
    rows, features = work.case.shard_shape
    moved = (work.case.group_size - 1) * rows // parts
    shard = work.pool.tensor("moved_shard", moved, features)
    full = work.pool.tensor("moved_full", REAL_RANKS * moved, features)
    group = work.group

    def gather() -> dist.Work:
        return dist.all_gather_into_tensor(full, shard, group=group, async_op=True)

    def scatter() -> dist.Work:
        return dist.reduce_scatter_tensor(shard, full, group=group, async_op=True)

    return gather if work.case.gathers else scatter
