"""Attention blocks of a group of V on two ranks, forward: see `emulate` for what that shows and what not.

Both ranks play the one in the middle of V, so that its share of a causal mask is neither the least nor the most.
Slicing and the sequential program move the bytes of V by the collective of two. What is here is issued step by step,
with one split per shard, and captured; the copy engine's programs are tapes, in `attention_emulate_tape`.
"""

import contextlib
from typing import override

import torch
from torch import distributed as dist

from commfuse_megatron.benchmark.attention import (
    AttentionComputeOnly,
    Pieces,
    attention_case_of,
    draw_attention,
    exact_attention,
    heads_of,
    split_attention,
)
from commfuse_megatron.benchmark.attention_cases import AttentionCase
from commfuse_megatron.benchmark.attention_emulate_tape import ReplayedAttention, order_by_cost
from commfuse_megatron.benchmark.bounds import collective_name
from commfuse_megatron.benchmark.emulate import (
    REAL_RANKS,
    EmulatedCollective,
    EmulatedTransfers,
    OverTransport,
    emulated_collective,
)
from commfuse_megatron.benchmark.graphs import as_graph
from commfuse_megatron.benchmark.operands import Pool, Work
from commfuse_megatron.benchmark.variant import Ready, Variant
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import sum_partials
from commfuse_megatron.runtime.executor import AllGatherRun
from commfuse_megatron.runtime.lanes import choose_num_lanes

__all__ = ["emulated_attention_variants", "emulated_attention_work"]

_PIECES = (2, 4)


def emulated_attention_work(case: AttentionCase, group: dist.ProcessGroup, pool: Pool) -> Work:
    """Operands of one rank of `case.group_size`, and what its program gives with the one peer in all other places."""
    if group.size() != REAL_RANKS:
        raise UnsupportedError(f"larger groups are emulated on {REAL_RANKS} ranks, not on {group.size()}")
    work = Work(case, "fprop", group, pool, draw_attention(case, pool), {})
    weight = work.operands.weight.detach()
    partials = (exact_attention(work)[0].flatten(0, 1) @ weight.t()).chunk(case.group_size)
    others, own = order_by_cost(case, work.dtype_name)
    sent = torch.stack([partials[owner] for owner in others])
    peers = [torch.empty_like(sent) for _ in range(REAL_RANKS)]
    dist.all_gather(peers, sent, group=group)
    y = sum_partials(partials[own].contiguous(), peers[1 - group.rank()], out=torch.empty_like(partials[own]))
    work.expected = {"y": y}
    return work


class EmulatedAttention(OverTransport):
    """The direct reduce-scatter of V ranks, V - 1 messages: under the projection alone, or with attention split too."""

    is_basic = True

    def __init__(self, backend: str, *, splits_queries: bool) -> None:
        super().__init__(backend)
        self._splits_queries = splits_queries
        self.name = f"query_split m=1 {backend}" if splits_queries else f"row_parallel {backend}"

    @override
    def build(self, work: Work) -> Ready:
        prepared = self.prepare(work)
        case, heads, gemm = attention_case_of(work), heads_of(work), prepared.gemm
        attention = split_attention(work, 1 if self._splits_queries else None)
        others, own = order_by_cost(case, work.dtype_name)
        attended, b = torch.empty_like(heads.q), work.operands.weight.detach().t()
        rows_of = attended.view(case.M, case.K).chunk(case.group_size)
        messages, shard_rows = case.group_size - 1, case.M // case.group_size
        partials = work.pool.tensor("partials", messages * shard_rows, case.N)
        start = (1 - work.group.rank()) * messages * shard_rows
        lanes = prepared.context.lanes
        num_lanes = choose_num_lanes(case.rows // case.group_size, case.batch * case.heads, work.pool.device)

        def multiply(owner: int, target: torch.Tensor, run: AllGatherRun) -> None:
            gemm.multiply(rows_of[owner], b, target, None, run.in_flight)
            gemm.join()

        def arrived(run: AllGatherRun) -> torch.Tensor:
            run.finish()
            return prepared.gather.gathered()[start : start + messages * shard_rows].view(messages, shard_rows, case.N)

        def call() -> torch.Tensor:
            y = attended.new_empty(shard_rows, case.N)
            if not self._splits_queries:
                attention.forward(0, heads, attended)
            with prepared as link:
                run = AllGatherRun(link, prepared.gather, partials)
                lanes.begin(num_lanes)
                for message, owner in enumerate(others):
                    with lanes.turn() if self._splits_queries else contextlib.nullcontext():
                        if self._splits_queries:
                            attention.forward(owner, heads, attended)
                        multiply(owner, partials[message * shard_rows : (message + 1) * shard_rows], run)
                    run.issue(message)
                y_own = attended.new_empty(shard_rows, case.N, dtype=gemm.own_dtype)
                with lanes.turn() if self._splits_queries else contextlib.nullcontext():
                    if self._splits_queries:
                        attention.forward(own, heads, attended)
                    multiply(own, y_own, run)
                return sum_partials(y_own, arrived(run), out=y)

        replay = as_graph(call, work.pool.device)
        return Ready(
            call=replay,
            results=lambda: {"y": replay()},
            path="query_split" if self._splits_queries else "row_parallel",
            transport=prepared.context.transport_name,
            algorithm="direct",
            chunks_per_shard=1,
        )


class EmulatedAttentionSlicing(Variant):
    """Pieces of the block, each followed by a collective; one piece: the sequential program.

    The collectives move as much as those of V, but not what was computed: nothing is compared.
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
    backends = ("nccl", "copy_engine") if device.type == "cuda" else ("gloo",)
    return [
        AttentionComputeOnly(),
        EmulatedCollective(),
        *(EmulatedTransfers(backend) for backend in backends),
        *(EmulatedAttentionSlicing(pieces) for pieces in (1, *_PIECES)),
        *(
            EmulatedAttention(backend, splits_queries=splits_queries)
            for backend in backends
            if backend != "copy_engine"
            for splits_queries in (False, True)
        ),
        *(ReplayedAttention(count) for count in (None, *splits) if "copy_engine" in backends),
    ]
