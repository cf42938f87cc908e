"""Attention blocks of a group of V on two ranks, forward: see `emulate` for what that shows and what not.

Slicing and the sequential program move the bytes of V by the collective of two. Owners come in the order that the
planner would take for the machine of our measurements.
"""

from collections.abc import Callable
from typing import override

import torch
from torch import distributed as dist

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.ops.attention_passes import AttentionCall, attention_forward
from commfuse_megatron.ops.linear_reduce_scatter import scatter_forward
from commfuse_megatron.plan.linear_plan import LinearPlan
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools.bench.attention import (
    AttentionComputeOnly,
    Pieces,
    attention_case_of,
    draw_attention,
    exact_attention,
    heads_of,
    split_attention,
)
from commfuse_megatron.tools.bench.bounds import collective_name
from commfuse_megatron.tools.bench.emulate import (
    REAL_RANKS,
    EmulatedCollective,
    EmulatedTransfers,
    OverTransport,
    emulated_collective,
    sum_of_peers,
)
from commfuse_megatron.tools.bench.graphs import as_graph
from commfuse_megatron.tools.bench.operands import Pool, Work
from commfuse_megatron.tools.bench.variant import Ready, Variant
from commfuse_megatron.tools.common.attention_cases import AttentionCase

_PIECES = (2, 4)


def emulated_attention_work(case: AttentionCase, group: dist.ProcessGroup, pool: Pool) -> Work:
    """Operands of one rank of `case.group_size`, and what its program gives with the one peer in all other places."""
    if group.size() != REAL_RANKS:
        raise UnsupportedError(f"larger groups are emulated on {REAL_RANKS} ranks, not on {group.size()}")
    work = Work(case, "fprop", group, pool, draw_attention(case, pool), {})
    partials = exact_attention(work)[0].flatten(0, 1) @ work.operands.weight.detach().t()
    work.expected = {"y": sum_of_peers(partials.chunk(case.group_size), group)}
    return work


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
        plan = LinearPlan("query_split", "emulated", Algorithm.DIRECT, splits, keep_gathered_input=False)
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
            EmulatedAttention(backend, count)
            for backend in backends
            for count in (None, *(splits if backend == "copy_engine" else (1,)))
        ),
    ]
