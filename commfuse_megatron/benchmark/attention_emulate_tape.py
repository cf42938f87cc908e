"""The programs of `attention_emulate` over the copy engine: on tapes and in graphs, as the operation's own.

A tape here has the pieces, lanes, copies and waits of `ops.attention_recordings` (query splits) or `ops.recordings`
(row-parallel); only its V - 1 messages all go to the one peer, as chunks of an all-gather. Owners come in the order
that the planner would take.
"""

from typing import override

import torch

from commfuse_megatron.benchmark.attention import attention_case_of, heads_of
from commfuse_megatron.benchmark.attention_cases import AttentionCase
from commfuse_megatron.benchmark.emulate import OverTransport
from commfuse_megatron.benchmark.operands import Work
from commfuse_megatron.benchmark.variant import Ready
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels.attention_choice import AttentionKernels
from commfuse_megatron.kernels.sum_partials import bind_sum
from commfuse_megatron.ops.attention_recordings import bind_attention, new_states, state_starts
from commfuse_megatron.ops.piece_lanes import PieceLanes
from commfuse_megatron.ops.recordings import Gather, matrix_of, sum_step
from commfuse_megatron.ops.replay import MORE, OUT, SECOND, WEIGHT, Build, TapeCall, Unservable, replay
from commfuse_megatron.plan.attention import with_owner_orders
from commfuse_megatron.plan.linear_plan import LinearPlan
from commfuse_megatron.plan.machine import Traits, assumed_machine
from commfuse_megatron.problem import RowRange, chunk_ranges
from commfuse_megatron.runtime.lanes import choose_num_lanes
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.transport.copy_tape import Ref, Step

__all__ = ["ReplayedAttention", "order_by_cost"]

_PARTIALS = MORE + 3


def order_by_cost(case: AttentionCase, dtype: str, splits_per_shard: int = 1) -> tuple[list[int], int]:
    """Whose queries come when on the rank in the middle, as planned for the machine of our measurements: the others'
    in their order, then its own."""
    own = case.group_size // 2
    plan = LinearPlan("query_split", "", Algorithm.DIRECT, splits_per_shard, keep_gathered_input=False)
    machine = assumed_machine(Traits(transport="copy_engine", replays=True), dtype)
    order = with_owner_orders(case.attention(dtype), plan, machine).scatter_order
    if order is not None:
        return list(order[own]), own
    return [(own + step) % case.group_size for step in range(1, case.group_size)], own


class ReplayedAttention(OverTransport):
    """The direct reduce-scatter of V ranks: under the projection alone (splits None), or with so many splits of every
    shard's queries."""

    is_basic = True

    def __init__(self, splits: int | None) -> None:
        super().__init__("copy_engine")
        self._splits = splits
        self.name = "row_parallel copy_engine" if splits is None else f"query_split m={splits} copy_engine"

    @override
    def build(self, work: Work) -> Ready:
        case = attention_case_of(work)
        shard_rows, chunks = case.rows // case.group_size, self._splits or 1
        if shard_rows % chunks:
            raise UnsupportedError(f"{shard_rows} rows of a shard cannot be cut into {chunks} equal splits")
        prepared = self.prepare(work, chunks)
        if not prepared.can_replay:
            raise UnsupportedError("calls are not replayed here: cuBLASLt or the copy engine is missing")
        program = _Program(work, prepared, self._splits)
        return Ready(
            call=program.run,
            results=lambda: {"y": program.run()},
            path="row_parallel" if self._splits is None else "query_split",
            transport=prepared.context.transport_name,
            algorithm="direct",
            chunks_per_shard=chunks,
        )


class _Program:
    """One rank's part of a group of V, for one case."""

    def __init__(self, work: Work, prepared: PreparedPass, splits: int | None) -> None:
        case = attention_case_of(work)
        self._case, self._prepared, self._device = case, prepared, work.pool.device
        self._splits_queries, self._m = splits is not None, splits or 1
        self._problem = case.attention(work.dtype_name)
        self._kernel = AttentionKernels(work.pool.device).choose(self._problem, "auto")
        others, own = order_by_cost(case, work.dtype_name, self._m)
        # Pieces by number, owner-major.
        self._others = [owner * self._m + part for owner in others for part in range(self._m)]
        self._own = [own * self._m + part for part in range(self._m)]
        self._rows = case.M // (case.group_size * self._m)
        shards = chunk_ranges(case.rows, case.group_size, self._m)
        pieces = [piece for shard in shards for piece in shard]
        self._splits = pieces if self._splits_queries else [RowRange(0, case.rows)]
        # The peer's messages follow this rank's, or come before them.
        self._arrived_row = (1 - work.group.rank()) * len(self._others) * self._rows
        q, k, v = heads_of(work)
        states = new_states(q, self._problem, self._splits)
        partials = work.pool.tensor("partials", len(self._others) * self._rows, case.N)
        self._call = TapeCall(
            q,
            torch.empty_like(q),
            work.operands.weight.detach(),
            work.pool.tensor("y", self._m * self._rows, case.N),
            None,
            more=(k, v, states, partials),
            key=case,
        )

    def run(self) -> torch.Tensor:
        """The rows of this rank; overwritten by the next call."""
        with self._prepared as link:
            if not replay(self._prepared, link, self._record, self._call):
                raise UnsupportedError(f"{self._kernel.name} attention of these sizes cannot be replayed")
        return self._call.out

    def _record(self, build: Build, call: TapeCall) -> None:
        gather = Gather(build, Ref(_PARTIALS, 0), self._case.N)
        if self._splits_queries:
            self._record_splits(build, call, gather)
        else:
            self._record_row_parallel(build, call, gather)
        build.tape.wait(*gather.remaining())

    def _record_splits(self, build: Build, call: TapeCall, gather: Gather) -> None:
        case, tape = self._case, build.tape
        lanes = PieceLanes(build, choose_num_lanes(self._splits[0].size, case.batch * case.heads, self._device))
        begin_piece = lanes.attend_ahead([self._attend(call, piece) for piece in (*self._others, *self._own)])
        lanes.begin()
        for message, piece in enumerate(self._others):
            begin_piece()
            self._multiply(build, call, piece, self._partial(build, message))
            tape.order()
            gather.issue(message)
        for part, piece in enumerate(self._own):
            begin_piece()
            with lanes.beside():
                gather.wait(range(part, len(self._others), self._m))
                arrived = self._arrived(gather, part)
                rest = arrived.plus(self._m * self._rows * gather.row_bytes)
                self._add(build, (arrived, rest, arrived), self._case.group_size - 2)
                is_here = tape.mark()
            tape.follow(is_here)
            target = Ref(OUT, part * self._rows * gather.row_bytes)
            self._multiply(build, call, piece, target, addend=arrived)
        lanes.join()

    def _record_row_parallel(self, build: Build, call: TapeCall, gather: Gather) -> None:
        build.tape.compute(self._attend(call, 0))
        for message, piece in enumerate(self._others):
            self._multiply(build, call, piece, self._partial(build, message))
            build.tape.order()
            gather.issue(message)
        y = Ref(OUT, 0)
        self._multiply(build, call, self._own[0], y)
        gather.complete()
        self._add(build, (y, self._arrived(gather, 0), y), self._case.group_size - 1)

    def _attend(self, call: TapeCall, split: int) -> Step:
        k, v, states, _ = call.more
        assert call.second is not None
        start = states.element_size() * state_starts(self._problem, self._splits)[split]
        operands, scale = (call.first, k, v, call.second), self._case.head_dim**-0.5
        step = bind_attention(self._problem, self._kernel, operands, self._splits[split], start, scale)
        assert step is not None
        return step

    def _multiply(self, build: Build, call: TapeCall, piece: int, target: Ref, addend: Ref | None = None) -> None:
        case = self._case
        shapes = (
            build.rows(self._rows, case.K),
            matrix_of(call.weight, transposed=True),
            build.rows(self._rows, case.N),
        )
        rows = Ref(SECOND, piece * self._rows * case.K * build.itemsize)
        build.matmul(shapes, (rows, Ref(WEIGHT, 0), target), addend=addend)

    def _partial(self, build: Build, message: int) -> Ref:
        return Ref(_PARTIALS, message * self._rows * self._case.N * build.itemsize)

    def _arrived(self, gather: Gather, part: int) -> Ref:
        """The first partial of that part of the own rows; the next lies a shard further."""
        return gather.window.plus((self._arrived_row + part * self._rows) * gather.row_bytes)

    def _add(self, build: Build, refs: tuple[Ref, Ref, Ref], num_partials: int) -> None:
        """refs: own, partials, out."""
        if not num_partials:
            return
        own = torch.empty(self._rows, self._case.N, dtype=build.dtype, device="meta")
        partials = torch.empty(num_partials, self._m, *own.shape, dtype=build.dtype, device="meta")[:, 0]
        add = bind_sum(own, partials, bias=None, out=own, device=self._device)
        if add is None:
            raise Unservable
        build.tape.compute(sum_step(add, refs))
