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
from functools import partial
from typing import Any, override

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import sum_partials
from commfuse_megatron.ops.all_gather_linear import gather_backward, gather_forward
from commfuse_megatron.ops.attention_passes import AttentionCall, attention_forward
from commfuse_megatron.ops.linear import LinearOperands
from commfuse_megatron.ops.linear_reduce_scatter import scatter_backward, scatter_forward
from commfuse_megatron.ops.split_attention import Heads
from commfuse_megatron.ops.ulysses_pass import UlyssesCall
from commfuse_megatron.ops.ulysses_passes import ulysses_forward
from commfuse_megatron.plan.cost_model import choose_details
from commfuse_megatron.plan.machine import Traits, assumed_machine
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import GemmProblem, Problem
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Issue, Program
from commfuse_megatron.tools.bench.attention import Pieces, heads_of, plain_attention, split_attention
from commfuse_megatron.tools.bench.bounds import CommOnly, compute, gathers_of
from commfuse_megatron.tools.bench.operands import Results, Work, ulysses_block
from commfuse_megatron.tools.bench.ulysses import compute as compute_block
from commfuse_megatron.tools.bench.ulysses import dealt_rows
from commfuse_megatron.tools.bench.variant import Ready, WithContext, in_turn
from commfuse_megatron.tools.common.cases import PASSES

#: A call of one rank of a larger group: y, or the gradients.
Run = Callable[[], Any]

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


def rank_played(group_size: int) -> int:
    """The rank of the larger group that every real one plays."""
    return group_size // 2


def expected(work: Work) -> Results:
    """What the program of one rank of a larger group gives, with the one peer in all other places: y [M or M_r, N], or
    the gradients."""
    case = work.case
    if work.group.size() != REAL_RANKS:
        raise UnsupportedError(f"larger groups are emulated on {REAL_RANKS} ranks, not on {work.group.size()}")
    if case.op == "ulysses_attention":
        with torch.no_grad():
            return work.named(ulysses_block(case, work.operands, partial(_attend_all, work=work)).flatten(0, -2))
    weight, x = work.operands.weight.detach(), work.operands.x.detach().flatten(0, -2)
    if work.pass_name == "backward":
        grad = work.operands.grad_y.flatten(0, -2)
        if case.gathers:
            return work.named((_scattered(work, grad @ weight), grad.t() @ _gathered(work, x)))
        grad = _gathered(work, grad)
        return work.named((grad @ weight, grad.t() @ x))
    if case.gathers:
        return work.named(_gathered(work, x) @ weight.t())
    multiplied = plain_attention(*heads_of(work)).reshape(case.M, -1) if case.heads else x
    return work.named(_scattered(work, multiplied @ weight.t()))


def _gathered(work: Work, rows: torch.Tensor) -> torch.Tensor:
    """[M_r, features] of this rank and, in all other places, of the one peer: [M, features]."""
    size, own = work.case.group_size, rank_played(work.case.group_size)
    theirs = _from_peer(work, rows)
    return torch.cat([rows if rank == own else theirs for rank in range(size)])


def _scattered(work: Work, partial: torch.Tensor) -> torch.Tensor:
    """The own rows of this rank's partial [M, features], and what the one peer sends from all other places, summed."""
    own, partials = rank_played(work.case.group_size), partial.chunk(work.case.group_size)
    arrived = _from_peer(work, torch.stack([each for owner, each in enumerate(partials) if owner != own]))
    return sum_partials(partials[own].contiguous(), arrived, out=torch.empty_like(partials[own]))


def _from_peer(work: Work, tensor: torch.Tensor) -> torch.Tensor:
    both = [torch.empty_like(tensor) for _ in range(REAL_RANKS)]
    dist.all_gather(both, tensor.contiguous(), group=work.group)
    return both[1 - work.group.rank()]


def _attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work) -> torch.Tensor:
    """Attention over a split sequence. Of distance d, what lies in the place of rank own - d is what the peer has for
    rank own + d."""
    size, own = work.case.group_size, rank_played(work.case.group_size)

    def by_rank(ours: torch.Tensor, theirs: torch.Tensor) -> list[torch.Tensor]:
        """[R, ...] by whom each is for -> by whose place each comes to."""
        return [(ours if rank == own else theirs)[(2 * own - rank) % size] for rank in range(size)]

    gathered = []
    for each in (q, k, v):
        for_ranks = each.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4)  # [R, S_r, B, heads of a rank, D]
        gathered.append(torch.cat(by_rank(for_ranks, _from_peer(work, for_ranks))))
    dealt = dealt_rows(work.case.rows, size, q.device)
    order = torch.argsort(dealt)
    attended = plain_attention(*(each[order] for each in gathered))
    for_owners = attended[dealt].unflatten(0, (size, -1))
    home = torch.stack(by_rank(for_owners, _from_peer(work, for_owners)))
    return home.permute(1, 2, 0, 3, 4).flatten(2)


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
    """A pass of the rank of a larger group that this one plays, by the direct schedule.

    Sizes of groups, and when sums are made, are settled from assumed numbers: nobody knows what it would measure.
    """

    def __init__(self, context: OverlapContext, problem: Problem, path: str = "sliced", chunks: int = 1) -> None:
        plan = PassPlan(path, "emulated", Algorithm.DIRECT, chunks, keep_gathered_input=False)
        if isinstance(problem, GemmProblem):
            transport = context.transport_name
            machine = assumed_machine(Traits(transport=transport, replays=transport == "copy_engine"), problem.dtype)
            plan = choose_details(problem, dataclasses.replace(plan, sums_on_the_way=True), machine)
        super().__init__(context, problem, plan, context.slice_gemm(getattr(torch, problem.dtype)))
        self.group_rank = rank_played(problem.group_size)
        self._peer = 1 - context.group_rank

    @override
    def lower(self, policy: Policy, asked: Asked | str) -> Program:
        return emulate(super().lower(policy, asked), self._peer)


class Transfers(CommOnly):
    """The V - 1 messages alone."""

    @override
    def prepare(self, context: OverlapContext, problem: GemmProblem) -> PreparedPass:
        return EmulatedPass(context, problem)

    @override
    def build(self, work: Work) -> Ready:
        ready = super().build(work)
        ready.call = as_graph(ready.call, work.pool.device)
        return ready


class EmulatedPath(WithContext):
    """The direct schedule of V ranks, over one transport: V slices and V - 1 messages.

    path: "sliced", "grouped" or, backward, "bulk" of linears; "row_parallel", attention at once and then a sliced
    projection; "query_split", with so many splits of every shard's queries; or "overlapped" over a split sequence,
    with so many groups of heads, or as many as there are.
    """

    is_basic = True

    def __init__(self, path: str, backend: str, splits: int = 1) -> None:
        super().__init__(OverlapConfig.from_dict({"transport": {"backend": backend}}), backend)
        self._path, self._splits = path, splits
        if path in ("sliced", "grouped", "bulk"):
            self.passes = ("backward",) if path == "bulk" else PASSES
        else:
            self.passes = ("fprop",)
        self.name = (
            f"{path} {backend}" if path in ("grouped", "bulk", "row_parallel") else f"{path} m={splits} {backend}"
        )

    @override
    def build(self, work: Work) -> Ready:
        shard_rows = work.case.rows // work.case.group_size
        if self._path != "overlapped" and shard_rows % self._splits:
            raise UnsupportedError(f"{shard_rows} rows of a shard cannot be cut into {self._splits}")
        run = _RUNS[self._path](work, self.context_for(work), self._splits)
        return Ready(
            call=as_graph(run, work.pool.device),
            read=lambda found: {name: each.flatten(0, -2) for name, each in work.named(found).items()},
            path=self._path,
            transport=self.context_for(work).transport_name,
            algorithm="direct",
            chunks_per_shard=self._splits,
        )


def _run_linear(work: Work, context: OverlapContext, _: int, path: str = "sliced") -> Run:
    prepared = EmulatedPass(context, work.case.problem(work.pass_name, work.dtype_name), path)
    x, weight = work.operands.x.detach(), work.operands.weight.detach()
    if work.pass_name == "backward":
        backward = gather_backward if work.case.gathers else scatter_backward
        operands = LinearOperands(work.operands.grad_y.flatten(0, -2), x, weight, x.shape)
        return lambda: backward(prepared, operands, None)
    if work.case.gathers:
        return lambda: gather_forward(prepared, x, weight, None, returns_gathered=False)[0]
    return lambda: scatter_forward(prepared, x, weight, None)


def _run_at_once(work: Work, context: OverlapContext, _: int) -> Run:
    heads, weight, attention = heads_of(work), work.operands.weight.detach(), split_attention(work, None)
    prepared = EmulatedPass(context, work.case.attention(work.dtype_name).projection)
    attended = torch.empty_like(heads.q)

    def run() -> torch.Tensor:
        attention.forward(0, heads, attended)
        return scatter_forward(prepared, attended.flatten(2), weight, None)

    return run


def _run_query_split(work: Work, context: OverlapContext, splits: int) -> Run:
    heads, weight, problem = heads_of(work), work.operands.weight.detach(), work.case.attention(work.dtype_name)
    prepared = EmulatedPass(context, problem, "query_split", splits)
    prepared.attention = context.attention_kernels.choose(problem, "auto")
    call = AttentionCall(prepared, None, work.case.head_dim**-0.5, None, None)
    return lambda: attention_forward(call, heads, weight, None)[0]


def _run_overlapped(work: Work, context: OverlapContext, groups: int) -> Run:
    case, problem = work.case, work.case.exchange(work.dtype_name)
    prepared = EmulatedPass(context, problem, "overlapped", len(problem.head_groups(groups)))
    prepared.attention = context.attention_kernels.choose(problem.attention(), "auto")
    call = UlyssesCall(prepared, case.head_dim**-0.5, None)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return ulysses_block(case, work.operands, lambda *heads: ulysses_forward(call, Heads(*heads))[0])

    return run


_RUNS: dict[str, Callable[[Work, OverlapContext, int], Run]] = {
    "sliced": _run_linear,
    "grouped": partial(_run_linear, path="grouped"),
    "bulk": partial(_run_linear, path="bulk"),
    "row_parallel": _run_at_once,
    "query_split": _run_query_split,
    "overlapped": _run_overlapped,
}


def all_to_alls(work: Work) -> list[Callable[[], object]]:
    """The real group's, towards the heads and home: per rank, the bytes of V - 1 of V parts of its rows each way."""
    case, tokens = work.case, work.case.M // work.case.group_size
    found: list[Callable[[], object]] = []
    for name, features in (("there", case.qkv_features), ("home", case.K)):
        moved = tokens * features * (case.group_size - 1) // case.group_size
        source, target = (work.pool.tensor(f"{name} {end}", REAL_RANKS, moved) for end in ("source", "target"))
        found.append(partial(dist.all_to_all_single, target, source, group=work.group))
    return found


def exchanges_alone(work: Work) -> Callable[[], object]:
    """Both, nothing computed."""
    return as_graph(in_turn(*all_to_alls(work)), work.pool.device)


def exchanged(work: Work) -> Callable[[], object]:
    """Both, and between them the block of one rank."""
    there, home = all_to_alls(work)
    return as_graph(in_turn(there, compute_block(work), home), work.pool.device)


def _collective(work: Work, is_gather: bool, parts: int = 1) -> Callable[[], dist.Work]:
    """What starts one of `parts` equal parts of a collective of the real group, and returns it to be waited for.

    It moves, per rank, the bytes of V - 1 shards each way.
    """
    rows, features = work.case.shard_shape
    moved = (work.case.group_size - 1) * rows // parts
    shard = work.pool.tensor("moved_shard", moved, features)
    full = work.pool.tensor("moved_full", REAL_RANKS * moved, features)
    if is_gather:
        return lambda: dist.all_gather_into_tensor(full, shard, group=work.group, async_op=True)
    return lambda: dist.reduce_scatter_tensor(shard, full, group=work.group, async_op=True)


def collective_alone(work: Work) -> Callable[[], object]:
    """The collectives of the pass alone."""
    before, after = _moves(work)
    return as_graph(in_turn(*before, *after), work.pool.device)


def _moves(work: Work) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """The collectives of the pass, complete: those before its GEMMs, and those behind them."""
    found: dict[bool, list[Callable[[], object]]] = {True: [], False: []}
    for is_gather in gathers_of(work):
        found[is_gather].append(partial(_complete, _collective(work, is_gather)))
    return found[True], found[False]


def _complete(start: Callable[[], dist.Work]) -> object:
    return start().wait()


def sequential(work: Work) -> Callable[[], object]:
    """Those collectives before, or after, the GEMMs of V ranks."""
    before, after = _moves(work)
    return as_graph(in_turn(*before, compute(work), *after), work.pool.device)


def sliced(work: Work, num_pieces: int = 1) -> Callable[[], object]:
    """Pieces of a block with attention, each followed by a collective; one piece: the sequential program.

    The collectives move as much as those of V, but not what was computed: nothing is compared. Owners come in the order
    that the planner would take for the machine of our measurements.
    """
    pieces, move = Pieces(work, num_pieces), _collective(work, work.case.gathers, num_pieces)

    def call() -> None:
        arriving = []
        for piece in range(num_pieces):
            pieces.partial(piece)
            arriving.append(move())
        for done in arriving:
            done.wait()

    return as_graph(call, work.pool.device)
