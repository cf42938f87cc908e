"""Predicts what every plan for a problem takes, from a `MachineModel`: good enough to tell clear cases apart.

A prediction is the longer of two times: what the GPU needs (the program that would run is lowered and dry-run by
`schedule.simulate`) and what the host needs to issue it. Where predictions are close, `ops.trial` measures.
"""

import dataclasses

from commfuse_megatron.plan.machine import HostTimes, MachineModel
from commfuse_megatron.plan.pass_plan import PassPlan, parts_of
from commfuse_megatron.plan.passes import is_replayed, lower_plan
from commfuse_megatron.problem import DTYPE_BYTES, GemmProblem
from commfuse_megatron.schedule import Costs, Simulation, Work, simulate
from commfuse_megatron.schedule.pieces import doubling, soonest
from commfuse_megatron.schedule.program import Channel, Compute, Copy, Gemm, Issue, Program, Rows, Sum, WeightGrad

# How much of the shorter of a whole GEMM and a collective beside it is not hidden: a collective's kernel takes SMs that
# cuBLAS counts on, so they run one after the other in part. Megatron's backward passes of column-parallel linears, from
# M 4096: 0.06 to 0.75 in 22 of two ranks, 0.41 to 1.27 in 12 of four, here the medians (H200, November 2026).
_UNHIDDEN_OF_TWO, _UNHIDDEN_OF_MORE = 0.35, 0.8

# How much later than alone, one after the other, transfers of a pass may come, as far as sizes of pieces are concerned.
_LATE = (1.0, 1.25, 1.6)

# A look-up reads rows and writes them, then puts zeros where the id is another rank's.
_PASSES_OF_A_LOOK_UP = 4


def predict_us(problem: GemmProblem, plan: PassPlan, machine: MachineModel) -> float:
    """Time per call of `plan`, in a row of calls."""
    return max(predict_parts_us(problem, plan, machine))


def predict_parts_us(problem: GemmProblem, plan: PassPlan, machine: MachineModel) -> tuple[float, float]:
    """What the device takes for a call of `plan`, and what the host does."""
    if plan.is_scheduled:
        simulation, host_us = simulate_plan(problem, plan, machine)
        return simulation.total_us, host_us
    costs = PassCosts(problem, machine)
    return costs.collectives_us(plan), costs.host_us_of_collectives(plan)


def choose_details(problem: GemmProblem, plan: PassPlan, machine: MachineModel) -> PassPlan:
    """A candidate with what costs decide of it, and its predicted time: the sizes of pieces, and when sums are made.

    Where calls are replayed, as graphs in the end, the host's time decides nothing of that. Of equal ones the simpler.
    """
    if not plan.is_scheduled:
        return dataclasses.replace(plan, predicted_us=predict_us(problem, plan, machine))
    pieces = _pieces_worth_considering(problem, machine) if plan.path == "grouped" else [()]
    found = [
        dataclasses.replace(plan, pieces=sizes, sums_on_the_way=on_the_way)
        for on_the_way in ([False, True] if plan.sums_on_the_way else [False])
        for sizes in pieces
    ]
    times = [predict_parts_us(problem, each, machine) for each in found]
    deciding = [parts[0] if is_replayed(plan, machine.traits) else max(parts) for parts in times]
    best = deciding.index(min(deciding))
    return dataclasses.replace(found[best], predicted_us=max(times[best]))


def _pieces_worth_considering(problem: GemmProblem, machine: MachineModel) -> list[tuple[int, ...]]:
    """Sizes of pieces: by the times of shards, transfers being as fast as they can be or held up by others; doubling.

    Pieces of one are the path "sliced". What holds up which transfer, the simulation of each knows.
    """
    costs, rows, others = PassCosts(problem, machine), problem.M // problem.group_size, problem.group_size - 1
    transfer_us = costs.transfer_us(rows)
    found = [soonest(others, late * transfer_us, lambda size: costs.product_us(size * rows)) for late in _LATE]
    return list(dict.fromkeys([*(sizes for sizes in found if max(sizes) > 1), doubling(others)]))


def simulate_plan(problem: GemmProblem, plan: PassPlan, machine: MachineModel) -> tuple[Simulation, float]:
    """A dry-run of a plan that is scheduled, and what the host takes to issue it."""
    costs = PassCosts(problem, machine)
    # Where ranks have equal shards one stands for all; one in the middle has others before it and behind it.
    program = lower_plan(problem, plan, machine.traits, problem.group_size // 2)
    return simulate([program], costs.of_ops()), costs.host_us(program, plan)


def is_link_slow(problem: GemmProblem, machine: MachineModel) -> bool:
    """Whether the transfers of `problem` take longer than the GEMM that they may hide under."""
    costs = PassCosts(problem, machine)
    shard_rows = problem.M // problem.group_size
    return (problem.group_size - 1) * costs.transfer_us(shard_rows) > costs.product_us(problem.M)


class PassCosts:
    """What the parts of one pass take on a machine.

    The GEMM that is sliced is [tokens, N] = [tokens, K] @ ..., or the dgrad [tokens, K] = [tokens, N] @ .... What
    travels has `wire_features`, in either direction.
    """

    def __init__(self, problem: GemmProblem, machine: MachineModel) -> None:
        self.problem, self.machine = problem, machine
        self._itemsize = DTYPE_BYTES[problem.dtype]
        self._is_backward = problem.pass_name == "backward"
        self._is_look_up = problem.op == "embedding_reduce_scatter"
        self._features = (problem.K, problem.N) if self._is_backward else (problem.N, problem.K)
        self._row_bytes = problem.wire_features * self._itemsize

    def of_ops(self) -> Costs:
        """For `simulate`."""

        def work_us(rank: int, op: Work, beside_us: float) -> tuple[float, float]:
            us = self._work_us(op, beside_us)
            return us, us

        def transfer_us(sender: int, receiver: int, channel: Channel, rows: int) -> float:
            return self.transfer_us(rows)

        return Costs(work_us, transfer_us, self.machine.traits.overlaps)

    def _work_us(self, op: Work, beside_us: float) -> float:
        match op:
            case Gemm():
                return self.product_us(op.out.count, beside_us)
            case WeightGrad():
                return self.weight_gradient_us(beside_us)
            case Sum():
                return self.pass_us(sum(map(self._wire_rows, (op.own, *op.adds, op.out))))
            case Copy():
                return self.pass_us(2 * op.target.count)
            case Compute():
                return self.pass_us(_PASSES_OF_A_LOOK_UP * sum(rows.count for rows in op.writes))

    def product_us(self, tokens: int, beside_us: float | None = None) -> float:
        """The product of `tokens` rows: in a program, beside transfers of `beside_us`; None: between collectives."""
        if self._is_look_up:
            return self.pass_us(_PASSES_OF_A_LOOK_UP * tokens)
        return self._gemm_us(tokens, *self._features, beside_us)

    def weight_gradient_us(self, beside_us: float | None = None) -> float:
        """The weight's gradient, from all rows, likewise. Of an embedding it is no part of the pass."""
        problem = self.problem
        return 0.0 if self._is_look_up else self._gemm_us(problem.N, problem.K, problem.M, beside_us)

    def transfer_us(self, rows: int) -> float:
        """One message of so many rows."""
        return self.machine.link.time_us(rows * self._row_bytes)

    def _wire_rows(self, rows: Rows) -> float:
        """As how many of those that travel these count, by their bytes: running sums are kept in fp32 or wider."""
        return rows.count * (max(4, self._itemsize) / self._itemsize if rows.operand == "running" else 1)

    def pass_us(self, rows: float) -> float:
        """A kernel that reads and writes so many rows in all."""
        gemm = self.machine.gemm
        return gemm.launch_us + gemm.pass_us(rows * self._row_bytes) if rows else 0.0

    def _gemm_us(self, M: int, N: int, K: int, beside_us: float | None) -> float:
        """Transfers that take SMs have our kernel beside them, which gets them back where they are shorter."""
        gemm, traits = self.machine.gemm, self.machine.traits
        if beside_us is None or not (traits.transfer_sms and traits.overlaps):
            return gemm.time_us(M, N, K, self._itemsize)
        alone_us = gemm.time_us(M, N, K, self._itemsize, idle_sms=0)
        slowed_us = gemm.time_us(M, N, K, self._itemsize, idle_sms=traits.transfer_sms)
        if beside_us >= slowed_us or (beside_us and not traits.regains_sms):
            return slowed_us
        return beside_us + (1 - beside_us / slowed_us) * alone_us if slowed_us else 0.0

    # -- the group's own collectives ----------------------------------------------------------------------------------

    def collectives_us(self, plan: PassPlan) -> float:
        """Collectives before and after whole GEMMs ("sequential") or beside them ("async")."""
        problem = self.problem
        gathers, computes, scatters, has_weight = parts_of(problem, plan)
        collective_us = self.machine.collective.time_us((problem.group_size - 1) * problem.shard_bytes)
        product_us = self.product_us(problem.M) if computes else 0.0
        weight_us = self.weight_gradient_us() if has_weight else 0.0
        gather_us, scatter_us = gathers * collective_us, scatters * collective_us
        if plan.path == "sequential":
            return gather_us + product_us + scatter_us + weight_us
        unhidden = _UNHIDDEN_OF_TWO if problem.group_size == 2 else _UNHIDDEN_OF_MORE
        pairs = ((gather_us, product_us), (scatter_us, weight_us))
        if problem.all_reduces:  # both halves behind the product
            pairs = ((0.0, product_us), (gather_us + scatter_us, weight_us))
        return sum(max(pair) + unhidden * min(pair) for pair in pairs)

    # -- the host -----------------------------------------------------------------------------------------------------

    def host_us_of_collectives(self, plan: PassPlan) -> float:
        """What issuing one call takes."""
        gathers, computes, scatters, has_weight = parts_of(self.problem, plan)
        host = self.machine.host
        gemms_us, collectives_us = (computes + has_weight) * host.gemm_us, (gathers + scatters) * host.collective_us
        return self._host_us_of_call(host) + gemms_us + collectives_us

    def host_us(self, program: Program, plan: PassPlan) -> float:
        """The same of a program."""
        host = self.machine.replay if is_replayed(plan, self.machine.traits) else self.machine.host
        total_us = self._host_us_of_call(host)
        for op in program.ops:
            match op:
                case Issue():
                    total_us += host.transfer_us
                case Gemm() | WeightGrad() | Compute():
                    total_us += host.gemm_us
                case Sum() | Copy():
                    total_us += host.small_kernel_us
        return total_us

    def _host_us_of_call(self, host: HostTimes) -> float:
        return host.call_us + (host.autograd_us if self._is_backward else 0.0)
