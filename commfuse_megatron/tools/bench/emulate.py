"""A group of V ranks on two: the program that a rank of the larger group runs, with the one peer for all others.

What is emulated: rank r of V holds weights cut V ways and shards of M / V rows. Its passes are those of the operations
themselves, lowered for V ranks; then every message goes to, and comes from, the one peer there is: as many messages, as
large, through one link as wide as a rank of a switched group has.

What is not: other ranks' delays, links that ranks share, and anything that many ranks do to each other. The collective
of `sequential` moves the same bytes per rank between two ranks, not through V. On GPUs the programs are replayed from
CUDA graphs (`as_graph`), so no host time is in them: with a real group it is in the way where it exceeds the
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
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import sum_partials
from commfuse_megatron.ops.all_gather_linear import gather_forward
from commfuse_megatron.ops.attention_passes import AttentionCall, attention_forward
from commfuse_megatron.ops.linear_reduce_scatter import scatter_forward
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import Problem
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Issue, Program
from commfuse_megatron.tools.bench.attention import (
    PIECES,
    AttentionComputeOnly,
    Pieces,
    attention_case_of,
    exact_attention,
    heads_of,
    split_attention,
)
from commfuse_megatron.tools.bench.bounds import transfers_problem
from commfuse_megatron.tools.bench.operands import Pool, Work, draw
from commfuse_megatron.tools.bench.variant import Ready, Variant, WithContext, backends_of, collective_name
from commfuse_megatron.tools.common.cases import AttentionCase, LinearCase

#: On how many ranks larger groups are emulated.
REAL_RANKS = 2
_WARM_UPS = 3


def as_graph[T](call: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """`call` captured as a CUDA graph, without the host time of its Python; every replay overwrites its results.

    On the CPU `call` itself. Collective where `call` is.
    """
    if device.type != "cuda":
        return call
    current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            call()
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):  # libraries keep a handle for each stream, made at its first call
        result = call()

    def replay() -> T:
        graph.replay()
        return result

    return replay


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
        if isinstance(case, AttentionCase):
            x = exact_attention(work)[0].flatten(0, 1)
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
    def lower(self, policy: Policy, asked: Asked | str) -> Program:
        return emulate(super().lower(policy, asked), self._peer)


class OverTransport(WithContext):
    """What needs a context of the real group over one transport."""

    is_basic = True

    def __init__(self, backend: str) -> None:
        super().__init__(OverlapConfig.from_dict({"transport": {"backend": backend}}), backend)

    def prepare(self, work: Work, problem: Problem, plan: PassPlan | None = None) -> EmulatedPass:
        """The pass of a problem of the larger group; by default sliced, with one chunk per shard."""
        plan = plan or PassPlan("sliced", "emulated", Algorithm.DIRECT, 1, keep_gathered_input=False)
        return EmulatedPass(self.context_for(work), problem, plan)


class EmulatedTransfers(OverTransport):
    """The V - 1 messages alone."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.name = f"comm_only {backend}"

    @override
    def build(self, work: Work) -> Ready:
        prepared = self.prepare(work, transfers_problem(work))

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
        prepared = self.prepare(work, work.case.problem("fprop", work.dtype_name))
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


# --- attention --------------------------------------------------------------------------------------------------------


class EmulatedAttention(OverTransport):
    """The direct reduce-scatter of V ranks: under the projection alone (splits None), or with so many splits of every
    shard's queries."""

    def __init__(self, backend: str, splits: int | None) -> None:
        super().__init__(backend)
        self._splits = splits
        self.name = f"row_parallel {backend}" if splits is None else f"query_split m={splits} {backend}"

    @override
    def build(self, work: Work) -> Ready:
        case, splits = attention_case_of(work), self._splits
        if (case.rows // case.group_size) % (splits or 1):
            raise UnsupportedError(f"{case.rows // case.group_size} rows of a shard cannot be cut into {splits}")
        run = self._split_queries(work, splits) if splits is not None else self._at_once(work)
        replay = as_graph(run, work.pool.device)
        return Ready(
            call=replay,
            results=lambda: {"y": replay()},
            path="row_parallel" if splits is None else "query_split",
            transport=self._backend,
            algorithm="direct",
            chunks_per_shard=splits or 1,
        )

    def _split_queries(self, work: Work, splits: int) -> Callable[[], torch.Tensor]:
        case, heads, weight = attention_case_of(work), heads_of(work), work.operands.weight.detach()
        problem = case.attention(work.dtype_name)
        plan = PassPlan("query_split", "emulated", Algorithm.DIRECT, splits, keep_gathered_input=False)
        prepared = self.prepare(work, problem, plan)
        prepared.attention = prepared.context.attention_kernels.choose(problem, "auto")
        call = AttentionCall(prepared, None, case.head_dim**-0.5, None, None)
        return lambda: attention_forward(call, heads, weight, None)[0].flatten(0, -2)

    def _at_once(self, work: Work) -> Callable[[], torch.Tensor]:
        case, heads, weight = attention_case_of(work), heads_of(work), work.operands.weight.detach()
        attention, projection = split_attention(work, None), case.attention(work.dtype_name).projection
        prepared: PreparedPass = self.prepare(work, projection)
        attended = torch.empty_like(heads.q)

        def run() -> torch.Tensor:
            attention.forward(0, heads, attended)
            return scatter_forward(prepared, attended.flatten(2), weight, None).flatten(0, -2)

        return run


class EmulatedAttentionSlicing(Variant):
    """Pieces of the block, each followed by a collective; one piece: the sequential program.

    The collectives move as much as those of V, but not what was computed: nothing is compared. Owners come in the order
    that the planner would take for the machine of our measurements.
    """

    is_basic = True

    def __init__(self, num_pieces: int) -> None:
        self.name = "sequential" if num_pieces == 1 else f"slicing C={num_pieces}"
        self._num_pieces = num_pieces

    @override
    def build(self, work: Work) -> Ready:
        pieces, move = Pieces(work, self._num_pieces), emulated_collective(work, self._num_pieces)

        def call() -> None:
            arriving = []
            for piece in range(self._num_pieces):
                pieces.partial(piece)
                arriving.append(move())
            for done in arriving:
                done.wait()

        path = "sequential" if self._num_pieces == 1 else "slicing"
        return Ready(call=as_graph(call, work.pool.device), path=path, transport=collective_name(work.pool.device))


def emulated_attention_variants(device: torch.device, splits: tuple[int, ...]) -> list[Variant]:
    """Everything that is emulated. splits: of one shard's queries, for query_split over the copy engine."""
    backends = backends_of(device)
    return [
        AttentionComputeOnly(),
        EmulatedCollective(),
        *(EmulatedTransfers(backend) for backend in backends),
        *(EmulatedAttentionSlicing(pieces) for pieces in (1, *PIECES)),
        *(
            EmulatedAttention(backend, count)
            for backend in backends
            for count in (None, *(splits if backend == "copy_engine" else (1,)))
        ),
    ]
