"""Which plans there are for attention over a split sequence, and what each is predicted to take.

As for attention with its projection, the prediction only ranks the candidates for a trial.
"""

import dataclasses

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.plan.attention import AttentionCosts
from commfuse_megatron.plan.machine import MachineModel
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.plan.passes import bind_exchange_plan, lower_pass, policy_of
from commfuse_megatron.problem import DTYPE_BYTES, RowRange, UlyssesProblem
from commfuse_megatron.schedule import Costs, Work, simulate
from commfuse_megatron.schedule.lower_attention import ATTEND
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lower_ulysses import ATTEND_GROUP
from commfuse_megatron.schedule.program import Channel, Compute, rows_read, rows_written

# Groups of heads worth considering: more of them begin earlier, and each attention kernel is smaller.
_GROUPS = (1, 2, 4)


def list_ulysses_plans(problem: UlyssesProblem, config: OverlapConfig) -> list[PassPlan]:
    """All plans that `config` leaves open, the simplest first, with an empty reason."""
    chosen = config.ulysses
    asked = _GROUPS if chosen.head_groups is None else (chosen.head_groups,)
    numbers = dict.fromkeys(len(problem.head_groups(number)) for number in asked)
    plans = [("sequential", 1), *(("overlapped", number) for number in numbers)]
    plans = [("stock", 1), *plans] if problem.beside else plans
    forced = [plan for plan in plans if plan[0] == chosen.path]
    return [PassPlan(path, chunks_per_shard=number) for path, number in forced or plans]


def ulysses_buffer_needs(problem: UlyssesProblem, plan: PassPlan) -> dict[str, int]:
    """Bytes that a plan needs of the context's buffers, forward and backward; see `buffer_needs`."""
    if plan.path != "overlapped":
        return {}
    unit_bytes = problem.unit * DTYPE_BYTES[problem.dtype]
    needs = {"gather": 0, "receive": 0}
    for pass_name in ("fprop", "backward") if problem.needs else ("fprop",):
        of_pass = dataclasses.replace(problem, pass_name=pass_name)
        arriving, leaving = (bind_exchange_plan(of_pass, plan, 0, goes_home=goes_home) for goes_home in (False, True))
        needs["gather"] = max(
            needs["gather"], arriving.exchange.num_tokens * sum(arriving.exchange.widths) * unit_bytes
        )
        needs["receive"] = max(needs["receive"], leaving.most_arrived_rows * unit_bytes)
    return needs


def num_ulysses_lanes(problem: UlyssesProblem) -> int:
    """How many groups of heads are attended at a time, where there are lanes: two, so that the end of one fills up with
    the next (S 32768, 16 heads in four groups: 7.47 ms one after the other, 7.09 over two lanes, 7.20 as one call; S
    8192: 0.756, 0.561 and 0.548; H200, November 2026). Where groups add to the same gradients, one."""
    return 1 if problem.pass_name == "backward" and problem.own_kv_heads == 1 else 2


def predict_ulysses_us(problem: UlyssesProblem, plan: PassPlan, machine: MachineModel) -> float:
    """Time per call, in a row of calls, with the backward pass if one follows. The device's alone."""
    passes = ("fprop", "backward") if problem.needs else ("fprop",)
    return sum(_predict_pass_us(dataclasses.replace(problem, pass_name=each), plan, machine) for each in passes)


def _predict_pass_us(problem: UlyssesProblem, plan: PassPlan, machine: MachineModel) -> float:
    is_backward, unit_bytes = problem.pass_name == "backward", problem.unit * DTYPE_BYTES[problem.dtype]
    if plan.path in ("sequential", "stock"):  # as little is hidden of what is the caller's
        exchanges = [bind_exchange_plan(problem, plan, 0, goes_home=goes_home) for goes_home in (False, True)]
        sent = [rows.exchange.own_tokens(0) * sum(rows.exchange.widths) * unit_bytes for rows in exchanges]
        others_us = sum(machine.collective.time_us((problem.group_size - 1) * size) for size in sent)
        passes_us = sum(4 * machine.gemm.pass_us(problem.group_size * size) for size in sent)
        return others_us + passes_us + AttentionCosts(problem.attention(), machine).at_once_us(is_backward=is_backward)
    groups = problem.head_groups(plan.chunks_per_shard)
    costs = [AttentionCosts(problem.attention(group), machine) for group in groups[:: -1 if is_backward else 1]]
    kept = [run for rank in range(problem.group_size) for run in problem.kept_rows(rank)]
    runs = len(kept) // problem.group_size

    def work_us(rank: int, op: Work, beside_us: float) -> tuple[float, float]:
        if isinstance(op, Compute) and op.kind == ATTEND_GROUP:
            return costs[op.chunk].attention_us(RowRange(0, problem.rows), is_backward=is_backward)
        if isinstance(op, Compute) and op.kind == ATTEND:
            owner, number = divmod(op.chunk, len(groups) * runs)
            return costs[number // runs].attention_us(kept[owner * runs + number % runs], is_backward=is_backward)
        # Packing and unpacking read and write what one of their sides names.
        sides = 2 if isinstance(op, Compute) else 1
        rows = sum(each.count for each in (*rows_read(op), *rows_written(op)))
        us = machine.gemm.launch_us + machine.gemm.pass_us(sides * rows * unit_bytes)
        return us, us

    def transfer_us(sender: int, receiver: int, channel: Channel, rows: int) -> float:
        return machine.link.time_us(rows * unit_bytes)

    policy = dataclasses.replace(policy_of(problem, plan, machine.traits), lanes=num_ulysses_lanes(problem))
    asked = Asked(is_backward=is_backward, keeps_gathered=bool(problem.needs) and not is_backward)
    programs = [lower_pass(problem, plan, policy, asked, rank) for rank in range(problem.group_size)]
    return simulate(programs, Costs(work_us, transfer_us, machine.traits.overlaps)).total_us
