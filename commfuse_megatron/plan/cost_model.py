"""Predicts what every way of running a problem takes, from a `MachineModel`: good enough to tell clear cases apart.

A prediction is the longer of two times: what the GPU needs (schedules are dry-run by `schedule.simulate`) and what the
host needs to issue it. Where predictions are close, `ops.trial` measures.
"""

from commfuse_megatron.plan.linear_plan import LinearPlan
from commfuse_megatron.plan.machine import MachineModel
from commfuse_megatron.problem import DTYPE_BYTES, GemmProblem, chunk_ranges
from commfuse_megatron.schedule import (
    Activity,
    Algorithm,
    Chunk,
    Simulation,
    build_all_gather,
    build_reduce_scatter,
    simulate,
)

__all__ = ["is_link_slow", "predict_us"]

# How much of the shorter of a whole GEMM and a collective beside it is not hidden: a collective's kernel takes SMs that
# cuBLAS counts on, so they run one after the other in part. Not measured.
_UNHIDDEN_BESIDE_COLLECTIVE = 0.5


def predict_us(problem: GemmProblem, plan: LinearPlan, machine: MachineModel) -> float:
    """Time per call of `plan`, in a row of calls."""
    costs = _Costs(problem, plan, machine)
    if not plan.is_scheduled:
        device_us = costs.collective_pass_us()
    elif plan.path == "bulk":
        device_us = costs.bulk_scatter_us() if costs.scatters else costs.bulk_gather_us()
    elif not costs.computes_output:
        device_us = costs.wgrad_only_us()
    else:
        device_us = costs.sliced_scatter_us() if costs.scatters else costs.sliced_gather_us()
    return max(device_us, costs.host_us())


def is_link_slow(problem: GemmProblem, machine: MachineModel) -> bool:
    """Whether the transfers of `problem` take longer than the GEMM that they may hide under."""
    plan = LinearPlan("sliced", "", Algorithm.DIRECT, 1, keep_gathered_input=True)
    costs = _Costs(problem, plan, machine)
    return costs.transfers_us() > costs.gemm_us(problem.M)


class _Costs:
    """The parts of one plan's time.

    The GEMM that is sliced is [tokens, N] = [tokens, K] @ ..., or the dgrad [tokens, K] = [tokens, N] @ .... What
    travels are rows of x for an all-gather linear, of y for a reduce-scatter linear, in either direction.
    """

    def __init__(self, problem: GemmProblem, plan: LinearPlan, machine: MachineModel) -> None:
        self.problem, self.plan, self.machine = problem, plan, machine
        self.itemsize = DTYPE_BYTES[problem.dtype]
        is_backward = problem.pass_name == "backward"
        gathers_forward = problem.op == "all_gather_linear"
        self.computes_output = not is_backward or "input" in problem.needs
        self.computes_wgrad = is_backward and "weight" in problem.needs
        self.scatters = gathers_forward == is_backward
        self.gathers_again = self.scatters and self.computes_wgrad and not plan.keep_gathered_input
        self.features = (problem.K, problem.N) if is_backward else (problem.N, problem.K)
        self.row_bytes = problem.batch * (problem.K if gathers_forward else problem.N) * self.itemsize
        self.chunks = chunk_ranges(problem.rows, problem.group_size, plan.chunks_per_shard)
        self.largest_shard = -(-problem.rows // problem.group_size)

    # -- parts --------------------------------------------------------------------------------------------------------

    def gemm_us(self, tokens: int, beside_us: float = 0.0) -> float:
        """The product of `tokens` rows beside transfers of `beside_us`."""
        N, K = self.features
        return self._beside_transfer_us(tokens, N, K, beside_us)

    def wgrad_us(self, beside_us: float = 0.0) -> float:
        """The weight gradient, if it is due."""
        if not self.computes_wgrad:
            return 0.0
        return self._beside_transfer_us(self.problem.N, self.problem.K, self.problem.M, beside_us)

    def transfers_us(self) -> float:
        """All transfers of one collective's worth, alone."""
        shards = self.problem.group_size - 1
        return shards * sum(self._link_us(chunk.size) for chunk in self.chunks[0])

    def host_us(self) -> float:
        """What issuing one call takes."""
        host, ranks, m = self.machine.host, self.problem.group_size, self.plan.chunks_per_shard
        if self.machine.traits.replays and self.plan.is_scheduled and self.plan.algorithm is Algorithm.DIRECT:
            host = self.machine.replay
        gathers = int(self.gathers_again or not self.scatters)
        exchanges = gathers + int(self.scatters and self.computes_output)
        gemms = int(self.computes_wgrad)
        transfers = collectives = small = 0
        if not self.plan.is_scheduled:
            gemms += int(self.computes_output)
            collectives = exchanges
        else:
            transfers = exchanges * (ranks - 1) * m
            if self.computes_output:
                gemms += min(ranks, 3) if self.plan.path == "bulk" else ranks * m
            small = int(self.scatters and not self._folds) + int(self.computes_wgrad)
        return (
            host.call_us
            + (host.autograd_us if self.problem.pass_name == "backward" else 0.0)
            + gemms * host.gemm_us
            + transfers * host.transfer_us
            + collectives * host.collective_us
            + small * host.small_kernel_us
        )

    # -- ways ---------------------------------------------------------------------------------------------------------

    def collective_pass_us(self) -> float:
        """The group's own collectives, before and after whole GEMMs ("sequential") or beside them ("async")."""
        others_bytes = (self.problem.group_size - 1) * self.largest_shard * self.row_bytes
        collective_us = self.machine.collective.time_us(others_bytes)
        gemm_us = self.gemm_us(self.problem.M) if self.computes_output else 0.0
        gather_us = collective_us if self.gathers_again or not self.scatters else 0.0
        scatter_us = collective_us if self.scatters and self.computes_output else 0.0
        if self.plan.path == "sequential":
            return gather_us + gemm_us + scatter_us + self.wgrad_us()
        return _beside_collective(gather_us, gemm_us) + _beside_collective(scatter_us, self.wgrad_us())

    def wgrad_only_us(self) -> float:
        """What the weight gradient needs is gathered, then it is computed: nothing is sliced."""
        is_gathered = self.gathers_again or not self.scatters
        return (self.transfers_us() if is_gathered else 0.0) + self.wgrad_us()

    def sliced_gather_us(self) -> float:
        """All-gather under slices; then the weight gradient, un-split."""
        problem, plan = self.problem, self.plan
        copied_rows = self.largest_shard if self.computes_wgrad else 0
        if not self.computes_wgrad and plan.keep_gathered_input and problem.op == "all_gather_linear":
            copied_rows = problem.rows
        copy_us = self._pass_us(2 * copied_rows * self.row_bytes) if copied_rows else 0.0
        if not self.machine.traits.overlaps:
            return copy_us + self._slices_us() + self.transfers_us() + self.wgrad_us()
        run = self._simulate(transfers_per_step=1)
        return copy_us + run.total_us + self.wgrad_us()

    def sliced_scatter_us(self) -> float:
        """Slices over reduce-scatter, with the re-gather of the input beside them; wgrad beside the last transfer."""
        exchanges = 1 + self.gathers_again
        if not self.machine.traits.overlaps:
            return self._slices_us() + exchanges * self.transfers_us() + self.wgrad_us() + self._sum_us()
        run = self._simulate(transfers_per_step=exchanges)
        last_arrival_us = max(
            (i.end_us for line in run.timelines for i in line.intervals if i.activity is Activity.RECEIVE), default=0.0
        )
        compute_end_us = max(line.end_us - line.tail_us for line in run.timelines)
        largest_chunk = max(chunk.size for shard in self.chunks for chunk in shard)
        last_link_us = exchanges * self._link_us(largest_chunk)
        end_us = compute_end_us + self.wgrad_us(last_link_us)
        if self._folds:  # the last own chunk waits for what it adds, and nothing is left to run beside
            own_us = self.gemm_us(largest_chunk * self.problem.batch)
            return max(compute_end_us, last_arrival_us + own_us) + self.wgrad_us()
        return max(end_us, last_arrival_us) + self._sum_us()

    def bulk_scatter_us(self) -> float:
        """Partials for others in at most two GEMMs, then wgrad, then the own rows with what arrived.

        link      [x again         ][partials          ]
        compute   [dgrad for others][wgrad             ][dgrad of the own rows, + arrived]
        """
        transfers_us = self.transfers_us()
        regather_us = transfers_us if self.gathers_again else 0.0
        others_us = self._others_us(regather_us)
        arrival_us = max(others_us, regather_us) + transfers_us
        if not self.machine.traits.overlaps:
            others_us += regather_us
            arrival_us = others_us + transfers_us
        wgrad_end_us = max(others_us, regather_us) + self.wgrad_us(transfers_us)
        if not self.machine.traits.overlaps:
            wgrad_end_us += transfers_us
        own_us = self.gemm_us(self.largest_shard * self.problem.batch)
        copy_us = self._pass_us(2 * self.largest_shard * self.row_bytes) if self.gathers_again else 0.0
        if self._folds:
            return copy_us + max(wgrad_end_us, arrival_us) + own_us
        return copy_us + max(wgrad_end_us + own_us, arrival_us) + self._sum_us()

    def bulk_gather_us(self) -> float:
        """The own rows, then the others' in at most two GEMMs, then wgrad."""
        transfers_us = self.transfers_us()
        own_us = self.gemm_us(self.largest_shard * self.problem.batch, transfers_us)
        copy_us = self._pass_us(2 * self.largest_shard * self.row_bytes)
        if not self.machine.traits.overlaps:
            return copy_us + own_us + transfers_us + self._others_us(0.0) + self.wgrad_us()
        # The second block starts when all has arrived; a middle rank has half of the others in it.
        halves = 2 if self.problem.group_size > 2 else 1
        last_block_us = self._others_us(0.0) / halves
        rest_us = max(own_us + self._others_us(0.0) - last_block_us, transfers_us)
        return copy_us + rest_us + last_block_us + self.wgrad_us()

    # -- details ------------------------------------------------------------------------------------------------------

    @property
    def _folds(self) -> bool:
        plan = self.plan
        has_cover = (plan.path == "bulk" and self.computes_wgrad) or plan.chunks_per_shard > 1  # as in `lower_linear`
        return self.machine.traits.folds_arrivals and plan.algorithm is Algorithm.DIRECT and has_cover

    def _simulate(self, *, transfers_per_step: int) -> Simulation:
        problem, plan = self.problem, self.plan
        build = build_reduce_scatter if self.scatters else build_all_gather
        schedule = build(problem.group_size, plan.algorithm, plan.chunks_per_shard)
        sizes = {size for shard in self.chunks for size in (chunk.size for chunk in shard)}
        transfer_us = {size: transfers_per_step * self._link_us(size) for size in sizes}
        compute_us = {size: self._slice_us(size, transfer_us[size]) for size in sizes}

        def rows(chunk: Chunk) -> int:
            return self.chunks[chunk.owner_rank][chunk.index].size

        return simulate(
            schedule,
            compute_us_per_chunk=lambda rank, chunk: compute_us[rows(chunk)],
            transfer_us_per_chunk=lambda sender, receiver, chunk: transfer_us[rows(chunk)],
            adds_in_epilogue=self.scatters and plan.algorithm is Algorithm.RING and plan.chunks_per_shard > 1,
        )

    def _slice_us(self, rows: int, beside_us: float) -> float:
        slice_us = self.gemm_us(rows * self.problem.batch, beside_us)
        if self.scatters and self.plan.algorithm is Algorithm.RING and self.plan.chunks_per_shard == 1:
            slice_us += self._pass_us(3 * rows * self.row_bytes)  # the running sum is added after the GEMM
        return slice_us

    def _slices_us(self) -> float:
        return sum(self._slice_us(chunk.size, 0.0) for shard in self.chunks for chunk in shard)

    def _others_us(self, beside_us: float) -> float:
        """The rows of all other ranks, in two GEMMs where a rank has others before and after it."""
        problem = self.problem
        others = (problem.rows - min(self.largest_shard, problem.rows)) * problem.batch
        if problem.group_size == 2:
            return self.gemm_us(others, beside_us)
        return self.gemm_us(others - others // 2, beside_us) + self.gemm_us(others // 2)

    def _sum_us(self) -> float:
        """The pass over the output that adds what arrived, unless GEMMs did so."""
        if self._folds or self.plan.algorithm is Algorithm.RING:
            return 0.0
        shards = self.problem.group_size + 1  # the own one, the others', the result
        return self._pass_us(shards * self.largest_shard * self.row_bytes)

    def _pass_us(self, size_bytes: float) -> float:
        gemm = self.machine.gemm
        return gemm.launch_us + gemm.pass_us(size_bytes)

    def _link_us(self, rows: int) -> float:
        return self.machine.link.time_us(rows * self.row_bytes)

    def _beside_transfer_us(self, M: int, N: int, K: int, transfer_us: float) -> float:
        """A GEMM beside a transfer that holds SMs for `transfer_us`, and gives them back where it is shorter."""
        gemm, traits = self.machine.gemm, self.machine.traits
        alone_us = gemm.time_us(M, N, K, self.itemsize)
        if not (transfer_us and traits.transfer_sms and traits.overlaps):
            return alone_us
        beside_us = gemm.time_us(M, N, K, self.itemsize, idle_sms=traits.transfer_sms)
        if not traits.regains_sms or transfer_us >= beside_us:
            return beside_us
        return transfer_us + (1 - transfer_us / beside_us) * alone_us


def _beside_collective(collective_us: float, gemm_us: float) -> float:
    return max(collective_us, gemm_us) + _UNHIDDEN_BESIDE_COLLECTIVE * min(collective_us, gemm_us)
