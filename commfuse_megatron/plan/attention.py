"""Which plans there are for attention with its output projection, and what each is predicted to take.

As in `candidates`, the list depends on what all ranks share only. The prediction ranks the candidates for a trial, and
decides nothing alone: of two ranks' blocks it is right to 2 to 5 %, of which plans differ by as much.
"""

import dataclasses

from commfuse_megatron.config import AttentionConfig, OverlapConfig
from commfuse_megatron.plan.cost_model import PassCosts, predict_parts_us
from commfuse_megatron.plan.machine import MachineModel
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.plan.passes import lower_pass, policy_of
from commfuse_megatron.problem import DTYPE_BYTES, AttentionProblem, GemmProblem, RowRange, chunk_ranges
from commfuse_megatron.schedule import Work, simulate
from commfuse_megatron.schedule.lower_attention import ADD_GRADIENTS, ATTEND, ATTEND_BACKWARD
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.program import Compute

# Splits of one owner's queries worth considering: each is one more attention kernel, and a smaller one.
_SPLITS = (1, 2, 4)

# Attention runs at about this fraction of a GEMM's rate, forward; its backward pass takes about so many times as long.
# cuDNN, heads of 128, causal, H200, November 2026 (`attention_pieces_h200_202611.json`): 463 to 646 TFLOP/s of 780 from
# S 4096 with 16 heads to 16384; 2.8 to 3.2 times.
_ATTENTION_RATE = 0.75
_BACKWARD_WORK = 2.9

# Attention kernels give a block, which takes an SM, to every 128 queries of a head.
_QUERIES_PER_BLOCK = 128

# Splits of a forward pass that run at a time; see `runtime/lanes.py`.
_FEWEST_AT_A_TIME, _MOST_AT_A_TIME = 2, 4


def attention_blocks(queries: int, heads: int) -> int:
    """Blocks that the kernel of a split gives to the device, forward. heads: of one rank, of the whole batch."""
    return max(1, heads * -(-queries // _QUERIES_PER_BLOCK))


def choose_num_lanes(queries: int, heads: int, num_sms: int) -> int:
    """How many splits are to run at a time: enough to fill the device, and one that fills up its end.

    Not more: the first split is done, and its transfer begins, the later the more run beside it. queries: of one split.
    heads: of one rank, of the whole batch.
    """
    return min(_MOST_AT_A_TIME, max(_FEWEST_AT_A_TIME, 1 + -(-num_sms // attention_blocks(queries, heads))))


def list_attention_plans(problem: AttentionProblem, config: OverlapConfig) -> list[PassPlan]:
    """All plans that `config` leaves open, the simplest first, with an empty reason."""
    chosen = config.attention
    paths = ("sequential", "row_parallel", "query_split") if chosen.path == "auto" else (chosen.path,)
    plans = [PassPlan(path) for path in paths if path != "query_split"]
    if "query_split" in paths:
        splits = [m for m in _SPLITS if m == 1 or m <= problem.rows // problem.group_size]
        for m in splits if chosen.splits_per_shard is None else [chosen.splits_per_shard]:
            for backward_path in _backward_paths(problem, chosen):
                plans.append(PassPlan("query_split", chunks_per_shard=m, backward_path=backward_path))
    return plans


def _backward_paths(problem: AttentionProblem, chosen: AttentionConfig) -> tuple[str | None, ...]:
    """What may follow a forward pass with split queries; None: splits, too."""
    if "input" not in problem.needs or problem.has_dropout or chosen.backward == "query_split":
        return (None,)
    return ("row_parallel",) if chosen.backward == "row_parallel" else (None, "row_parallel")


def predict_attention_us(problem: AttentionProblem, plan: PassPlan, machine: MachineModel) -> float:
    """Time per call, in a row of calls, with the backward pass if one follows. The device's alone: host times are not
    known for the kernels of attention."""
    costs = AttentionCosts(problem, machine)
    total_us = costs.forward_us(plan)
    return total_us + costs.backward_us(plan.for_backward) if problem.needs else total_us


class AttentionCosts:
    """What the parts of attention with its projection take on a machine."""

    def __init__(self, problem: AttentionProblem, machine: MachineModel) -> None:
        self.problem, self.machine = problem, machine
        self._itemsize = DTYPE_BYTES[problem.dtype]
        self._linear = PassCosts(problem.projection, machine)

    def at_once_us(self, *, is_backward: bool) -> float:
        """Attention of all queries in one piece."""
        return self.attention_us(RowRange(0, self.problem.rows), is_backward=is_backward)[0]

    def attention_us(self, queries: RowRange, *, is_backward: bool) -> tuple[float, float]:
        """Scores and values of `queries`: alone, and on the whole device."""
        problem, gemm = self.problem, self.machine.gemm
        if not queries.size:
            return 0.0, 0.0
        work = _BACKWARD_WORK if is_backward else 1.0
        scores = problem.count_scores(queries) * problem.heads * problem.batch
        flops = 2.0 * scores * (problem.head_dim + problem.value_dim) * work
        device_us = flops / (_ATTENTION_RATE * gemm.tflops * 1e6)
        blocks = attention_blocks(queries.size, problem.heads * problem.batch)
        return gemm.launch_us + device_us * max(1.0, gemm.num_sms / blocks), gemm.launch_us + device_us

    def forward_us(self, plan: PassPlan) -> float:
        """Attention, projection and reduce-scatter."""
        if plan.path == "query_split":
            return self._simulate(plan, Asked())
        return self.at_once_us(is_backward=False) + self._linear_us(self.problem.projection, plan)

    def backward_us(self, plan: PassPlan) -> float:
        """All-gather, dgrad, backward of attention, wgrad."""
        problem = self.problem
        if plan.path == "query_split" and "input" in problem.needs:
            asked = Asked(is_backward=True, weight_grad="now" if "weight" in problem.needs else "none")
            return self._simulate(plan, asked)
        attention_us = self.at_once_us(is_backward=True) if "input" in problem.needs else 0.0
        projection = dataclasses.replace(problem.projection, pass_name="backward", needs=problem.needs)
        return attention_us + self._linear_us(projection, plan)

    def _linear_us(self, projection: GemmProblem, plan: PassPlan) -> float:
        """The projection as a linear of its own."""
        paths = ("sequential",) if plan.path == "sequential" else ("sequential", "sliced")
        return min(predict_parts_us(projection, PassPlan(each), self.machine)[0] for each in paths)

    # -- split queries ------------------------------------------------------------------------------------------------

    def _simulate(self, plan: PassPlan, asked: Asked) -> float:
        """All ranks: under a causal mask they take splits of other costs at other times."""
        problem = self.problem
        chunks = [
            chunk for owner in chunk_ranges(problem.rows, problem.group_size, plan.chunks_per_shard) for chunk in owner
        ]
        lanes = choose_num_lanes(
            max(chunk.size for chunk in chunks), problem.heads * problem.batch, self.machine.gemm.num_sms
        )
        policy = dataclasses.replace(policy_of(problem, plan, self.machine.traits), lanes=lanes)
        linear = self._linear.of_ops()

        def work_us(rank: int, op: Work, beside_us: float) -> tuple[float, float]:
            if not isinstance(op, Compute):
                return linear.work_us(rank, op, beside_us)
            if op.kind in (ATTEND, ATTEND_BACKWARD):
                return self.attention_us(chunks[op.chunk], is_backward=asked.is_backward)
            added = chunks[op.chunk : op.chunk + 1] if op.kind == ADD_GRADIENTS else chunks
            us = sum(map(self._add_us, added))
            return us, us

        costs = linear._replace(work_us=work_us)
        programs = [lower_pass(problem, plan, policy, asked, rank) for rank in range(problem.group_size)]
        return simulate(programs, costs).total_us

    def _add_us(self, queries: RowRange) -> float:
        """Adding a split's gradients of keys and values to the sums in fp32."""
        problem = self.problem
        keys = problem.visible_keys(queries).keys.size
        elements = keys * problem.batch * problem.kv_heads * (problem.head_dim + problem.value_dim)
        return self.machine.gemm.pass_us(elements * (8 + self._itemsize))
