"""Which ways there are to run attention with its output projection, and what each is predicted to take.

As in `candidates`, the list depends on what all ranks share only. The prediction ranks the candidates for a trial; it
was not checked against measurements, so nothing is decided by it alone.
"""

from commfuse_megatron.config import AttentionConfig, OverlapConfig
from commfuse_megatron.plan.linear_plan import LinearPlan
from commfuse_megatron.plan.machine import MachineModel
from commfuse_megatron.problem import DTYPE_BYTES, AttentionProblem, RowRange, chunk_ranges
from commfuse_megatron.schedule import (
    Algorithm,
    Chunk,
    build_all_gather,
    build_reduce_scatter,
    simulate,
)

__all__ = [
    "MOST_AT_A_TIME",
    "attention_blocks",
    "attention_buffer_needs",
    "list_attention_plans",
    "predict_attention_us",
]

# Splits of one owner's queries worth considering: each is one more attention kernel, and a smaller one.
_SPLITS = (1, 2, 4)

# Attention runs at about this fraction of a GEMM's rate, forward; its backward pass computes 2.5 times as much at about
# the same. cuDNN, 16 heads of 128, S 8192, causal: 0.484 ms or 568 TFLOP/s of 790 (H200, November 2026).
_ATTENTION_RATE = 0.7
_BACKWARD_WORK = 2.5

# Attention kernels give a block, which takes an SM, to every 128 queries of a head.
_QUERIES_PER_BLOCK = 128

#: Splits of a forward pass that run at a time; see `runtime/lanes.py`.
MOST_AT_A_TIME = 4


def attention_blocks(queries: int, heads: int) -> int:
    """Blocks that the kernel of a split gives to the device, forward. heads: of one rank, of the whole batch."""
    return max(1, heads * -(-queries // _QUERIES_PER_BLOCK))


def list_attention_plans(problem: AttentionProblem, config: OverlapConfig) -> list[LinearPlan]:
    """All plans that `config` leaves open, the simplest first, with an empty reason."""
    chosen = config.attention
    paths = ("sequential", "row_parallel", "query_split") if chosen.path == "auto" else (chosen.path,)
    plans = []
    for path in paths:
        splits: tuple[int, ...] = (1,)
        if path == "query_split" and chosen.splits_per_shard is not None:
            splits = (chosen.splits_per_shard,)
        elif path == "query_split":
            splits = tuple(m for m in _SPLITS if m == 1 or m <= problem.rows // problem.group_size)
        backward_paths = _backward_paths(problem, chosen) if path == "query_split" else (None,)
        plans += [
            LinearPlan(path, "", Algorithm.DIRECT, m, keep_gathered_input=False, backward_path=backward_path)
            for m in splits
            for backward_path in backward_paths
        ]
    return plans


def _backward_paths(problem: AttentionProblem, chosen: AttentionConfig) -> tuple[str | None, ...]:
    """What may follow a forward pass with split queries; None: splits, too."""
    if "input" not in problem.needs or problem.has_dropout or chosen.backward == "query_split":
        return (None,)
    return ("row_parallel",) if chosen.backward == "row_parallel" else (None, "row_parallel")


def attention_buffer_needs(problem: AttentionProblem, plan: LinearPlan) -> dict[str, int]:
    """Bytes that a query-split plan needs of the context's buffers, forward and backward; see `buffer_needs`.

    The other paths need what the projection's own plans do.
    """
    if plan.path != "query_split":
        return {}
    others, itemsize = problem.group_size - 1, DTYPE_BYTES[problem.dtype]
    shard_rows = -(-problem.rows // problem.group_size)
    chunk_rows = -(-shard_rows // plan.chunks_per_shard)
    row_bytes = problem.batch * problem.N * itemsize
    needs = {
        "receive": others * plan.chunks_per_shard * chunk_rows * row_bytes,
        "send": min(problem.rows, others * shard_rows) * row_bytes,
        "own": shard_rows * row_bytes // itemsize * max(4, itemsize),
    }
    if problem.needs and plan.backward_path is None:
        needs["gather"] = problem.rows * row_bytes
    return needs


def predict_attention_us(problem: AttentionProblem, plan: LinearPlan, machine: MachineModel) -> float:
    """Time per call, in a row of calls, with the backward pass if one follows."""
    costs = _Costs(problem, plan, machine)
    total_us = costs.forward_us()
    return total_us + costs.backward_us() if problem.needs else total_us


class _Costs:
    """The parts of one plan's time. The device's alone: host times are not known for the kernels of attention."""

    def __init__(self, problem: AttentionProblem, plan: LinearPlan, machine: MachineModel) -> None:
        self.problem, self.plan, self.machine = problem, plan, machine
        self.itemsize = DTYPE_BYTES[problem.dtype]
        m = plan.chunks_per_shard if plan.path == "query_split" else 1
        self.chunks = chunk_ranges(problem.rows, problem.group_size, m)
        self.all_rows = RowRange(0, problem.rows)

    def attention_us(self, queries: RowRange, work: float = 1.0) -> float:
        """Scores and values of `queries`, forward (`work` 1) or backward."""
        problem, gemm = self.problem, self.machine.gemm
        if not queries.size:
            return 0.0
        scores = problem.count_scores(queries) * problem.heads * problem.batch
        flops = 2.0 * scores * (problem.head_dim + problem.value_dim) * work
        return gemm.launch_us + flops / (_ATTENTION_RATE * gemm.tflops * 1e6)

    def projection_us(self, queries: RowRange) -> float:
        """The GEMM of `queries`, forward or dgrad."""
        problem = self.problem
        return self.machine.gemm.time_us(queries.size * problem.batch, problem.N, problem.K, self.itemsize)

    def forward_us(self) -> float:
        """Attention, projection and reduce-scatter."""
        if self.plan.path != "query_split":
            return self.attention_us(self.all_rows) + self._linear_us()
        plan = self.plan
        schedule = build_reduce_scatter(self.problem.group_size, Algorithm.DIRECT, plan.chunks_per_shard)
        run = simulate(
            schedule,
            compute_us_per_chunk=lambda rank, chunk: self._split_us(chunk, 1.0),
            transfer_us_per_chunk=lambda sender, receiver, chunk: self._transfer_us(chunk),
            adds_in_epilogue=False,
        )
        # Replayed, the last GEMM adds what arrived; more than one partial is added up beside the last attention.
        return run.total_us + (0.0 if self.machine.traits.replays else self._sum_us())

    def backward_us(self) -> float:
        """All-gather, dgrad, backward of attention, wgrad."""
        problem = self.problem
        wgrad_us = 0.0
        if "weight" in problem.needs:
            wgrad_us = self.machine.gemm.time_us(problem.N, problem.K, problem.M, self.itemsize)
        if "input" not in problem.needs:
            return self._collective_us() + wgrad_us
        if self.plan.for_backward.path != "query_split":
            return self.attention_us(self.all_rows, _BACKWARD_WORK) + self._linear_us() + wgrad_us
        plan = self.plan
        schedule = build_all_gather(problem.group_size, Algorithm.DIRECT, plan.chunks_per_shard)
        run = simulate(
            schedule,
            compute_us_per_chunk=lambda rank, chunk: self._split_us(chunk, _BACKWARD_WORK) + self._add_us(chunk),
            transfer_us_per_chunk=lambda sender, receiver, chunk: self._transfer_us(chunk),
        )
        return run.total_us + wgrad_us

    def _rows(self, chunk: Chunk) -> RowRange:
        return self.chunks[chunk.owner_rank][chunk.index]

    def _split_us(self, chunk: Chunk, work: float) -> float:
        queries = self._rows(chunk)
        return self.attention_us(queries, work) + self.projection_us(queries)

    def _transfer_us(self, chunk: Chunk) -> float:
        problem = self.problem
        return self.machine.link.time_us(self._rows(chunk).size * problem.batch * problem.N * self.itemsize)

    def _add_us(self, chunk: Chunk) -> float:
        """Adding a split's gradients of keys and values to the sums in fp32."""
        problem = self.problem
        keys = problem.visible_keys(self._rows(chunk)).keys.size
        elements = keys * problem.batch * problem.kv_heads * (problem.head_dim + problem.value_dim)
        return self.machine.gemm.pass_us(elements * (8 + self.itemsize))

    def _sum_us(self) -> float:
        shards = self.problem.group_size + 1
        return self.machine.gemm.launch_us + self.machine.gemm.pass_us(shards * self.problem.shard_bytes)

    def _collective_us(self) -> float:
        return self.machine.collective.time_us((self.problem.group_size - 1) * self.problem.shard_bytes)

    def _linear_us(self) -> float:
        """The projection alone with its collective: one after the other, or the longer one plus one slice."""
        gemm_us, collective_us = self.projection_us(self.all_rows), self._collective_us()
        if self.plan.path == "sequential":
            return gemm_us + collective_us
        return min(gemm_us + collective_us, max(gemm_us, collective_us) + gemm_us / self.problem.group_size)
