"""A group of V ranks on two: the program that a rank of the larger group would run, with the one peer for all others.

What is emulated: rank r of V holds weights cut V ways and shards of M / V rows. It multiplies V slices, sends V - 1
shards and receives V - 1, in the order of the direct schedule with one chunk per shard. Here every one of those
messages goes to, and comes from, the one peer there is: the same number of messages of the same size, through one link
of the same width as a rank of a switched group has.

What is not: other ranks' delays, links that ranks share, and anything that many ranks do to each other. The collective
of `sequential` moves the same bytes per rank between two ranks, not through V. On GPUs the programs are replayed from
CUDA graphs (`graphs.as_graph`), so no host time is in them: with a real group it is in the way where it exceeds the
GPU's. So these are the costs of cutting work V ways; they are labelled as emulated everywhere.

Results are checked: every slice against the product of the rows that were really sent.
"""

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
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.runtime.executor import AllGatherRun
from commfuse_megatron.runtime.prepared import PreparedPass

__all__ = [
    "REAL_RANKS",
    "EmulatedCollective",
    "EmulatedSequential",
    "EmulatedSliced",
    "EmulatedTransfers",
    "OverTransport",
    "emulated_collective",
    "make_emulated_work",
]

#: On how many ranks larger groups are emulated.
REAL_RANKS = 2


def make_emulated_work(case: LinearCase, group: dist.ProcessGroup, pool: Pool) -> Work:
    """Operands of one rank of `case.group_size`, and what its program gives with the one peer in all other places."""
    if group.size() != REAL_RANKS:
        raise UnsupportedError(f"larger groups are emulated on {REAL_RANKS} ranks, not on {group.size()}")
    work = Work(case, "fprop", group, pool, draw(case, pool), {})
    v, rows = case.group_size, case.M // case.group_size
    weight = work.operands.weight.detach()
    own, others = _cut(work)
    peers = [torch.empty_like(others) for _ in range(REAL_RANKS)]
    if case.gathers:
        # The messages to the peer are all that this rank's shard is to it: V - 1 different ones, to tell them apart.
        dist.all_gather(peers, others.contiguous(), group=group)
        arrived = peers[1 - group.rank()]
        y = torch.cat([own @ weight.t(), arrived @ weight.t()])
    else:
        partials = (others @ weight.t()).contiguous()
        peers = [torch.empty_like(partials) for _ in range(REAL_RANKS)]
        dist.all_gather(peers, partials, group=group)
        arrived = peers[1 - group.rank()].view(v - 1, rows, case.N)
        y = sum_partials(own @ weight.t(), arrived, out=weight.new_empty(rows, case.N))
    work.expected = {"y": y}
    return work


def _cut(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """(own rows [M/V, K], the others' [(V-1) M/V, K]): what to multiply, or (all-gather) to send."""
    case = work.case
    rows = case.M // case.group_size
    if case.gathers:
        # V - 1 different messages; a rank of V would send its one shard as often.
        return work.operands.x.detach().flatten(0, -2), work.operands.x_full.detach()[rows:]
    x = work.operands.x.detach().flatten(0, -2)
    return x[:rows], x[rows:]


class OverTransport(Variant):
    """What needs a context of the real group whose all-gather carries V - 1 messages to the peer and back."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._contexts: dict[int, OverlapContext] = {}

    def prepare(self, work: Work, chunks_per_shard: int = 1) -> PreparedPass:
        """The pass whose all-gather carries the messages of `work`, each shard in so many."""
        messages = (work.case.group_size - 1) * chunks_per_shard
        if messages not in self._contexts:
            forced = {"path": "sliced", "algorithm": "direct", "chunks_per_shard": messages}
            require_own_link(work.pool.device, self._backend)
            settings = {"linear": {"fprop": forced}, "transport": {"backend": self._backend}}
            self._contexts[messages] = OverlapContext(work.group, OverlapConfig.from_dict(settings))
        rows, features = work.case.shard_shape
        sent_rows = REAL_RANKS * (work.case.group_size - 1) * rows
        problem = GemmProblem("all_gather_linear", "fprop", sent_rows, 1, 1, features, work.dtype_name, REAL_RANKS)
        return self._contexts[messages].prepare(problem)

    @override
    def close(self) -> None:
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()


class EmulatedTransfers(OverTransport):
    """The V - 1 messages alone."""

    is_basic = True

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.name = f"comm_only {backend}"

    @override
    def build(self, work: Work) -> Ready:
        prepared, messages = self.prepare(work), work.case.group_size - 1
        sent = work.operands.wire_full[: messages * work.case.shard_shape[0]]

        def call() -> None:
            with prepared as link:
                run = AllGatherRun(link, prepared.gather, sent, label="transfers alone")
                for index in range(messages):
                    run.issue(index)
                run.finish()

        replay = as_graph(call, work.pool.device)
        return Ready(call=replay, path="transfers", transport=prepared.context.transport_name, is_op=False)


class EmulatedSliced(OverTransport):
    """The direct schedule of V ranks: V slices, V - 1 messages."""

    is_basic = True

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.name = f"sliced m=1 {backend}"

    @override
    def build(self, work: Work) -> Ready:
        prepared = self.prepare(work)
        run = self._gather if work.case.gathers else self._scatter

        call = as_graph(lambda: run(work, prepared), work.pool.device)
        return Ready(
            call=call,
            results=lambda: {"y": call()},
            path="sliced",
            transport=prepared.context.transport_name,
            algorithm="direct",
            chunks_per_shard=1,
        )

    @staticmethod
    def _gather(work: Work, prepared: PreparedPass) -> torch.Tensor:
        """Own slice first; slice j once message j - 1 has arrived, while message j travels."""
        own, sent = _cut(work)
        messages, gemm, b = work.case.group_size - 1, prepared.gemm, work.operands.weight.detach().t()
        y = own.new_empty(work.case.M, work.case.N)
        outs = y.view(work.case.group_size, -1, work.case.N)
        with prepared as link:
            run = AllGatherRun(link, prepared.gather, sent)
            run.issue(0)
            gemm.multiply(own, b, outs[0], None, run.in_flight)
            for message in range(messages):
                if message + 1 < messages:
                    run.issue(message + 1)
                arrived = run.chunk(messages + message)  # the peer's chunks follow this rank's own in the program
                assert arrived is not None
                gemm.multiply(arrived[1], b, outs[message + 1], None, arrived[2])
            gemm.join()
            run.finish()
        return y

    @staticmethod
    def _scatter(work: Work, prepared: PreparedPass) -> torch.Tensor:
        """Others' partials first, each sent while the next is computed; own last, then one sum of all that arrived."""
        own, others = _cut(work)
        case, gemm, b = work.case, prepared.gemm, work.operands.weight.detach().t()
        messages, rows = case.group_size - 1, own.size(0)
        partials = work.pool.tensor("partials", messages * rows, case.N)
        y_own = own.new_empty(rows, case.N, dtype=gemm.own_dtype)
        y = own.new_empty(rows, case.N)
        with prepared as link:
            run = AllGatherRun(link, prepared.gather, partials)
            for message in range(messages):
                part = slice(message * rows, (message + 1) * rows)
                gemm.multiply(others[part], b, partials[part], None, run.in_flight)
                gemm.join()
                run.issue(message)
            gemm.multiply(own, b, y_own, None, run.in_flight)
            gemm.join()
            run.finish()
            start = (1 - work.group.rank()) * messages * rows
            arrived = prepared.gather.gathered()[start : start + messages * rows].view(messages, rows, case.N)
            sum_partials(y_own, arrived, out=y)
        return y


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
