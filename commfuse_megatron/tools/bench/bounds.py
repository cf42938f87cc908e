"""What every timing stands beside: computation alone, communication alone, one after the other.

compute_only                 un-split GEMMs: `torch.mm`
compute_only persistent      the same by our kernel; the row's compute_only_ms is the best of both
comm_only collective         the group's own collectives for what the pass moves
comm_only <transport>        the same bytes as our transports move them, nothing computed
sequential                   plain collective and one GEMM, as `ops.reference` does it
slices_only m=C <gemm>       the GEMMs of a sliced pass one after the other, nothing moved
"""

from typing import Literal, override

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, ops
from commfuse_megatron.config import KernelConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import persistent_matmul, persistent_matmul_unavailable_reason
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.variant import Ready, Variant, WithContext, collective_name, differentiable


def exchanges(work: Work) -> list[str]:
    """What a pass moves: a column's backward gathers x again and scatters dx, a row's gathers dy."""
    if work.pass_name == "fprop":
        return ["gather" if work.case.gathers else "scatter"]
    return ["gather", "scatter"] if work.case.gathers else ["gather"]


class ComputeOnly(Variant):
    """The GEMMs of the pass, un-split, on complete operands."""

    is_basic = True

    def __init__(self, gemm: str = "torch") -> None:
        self.name = "compute_only" if gemm == "torch" else f"compute_only {gemm}"
        self._gemm = gemm

    @override
    def build(self, work: Work) -> Ready:
        o, case, device = work.operands, work.case, work.pool.device
        if self._gemm == "persistent":
            reason = persistent_matmul_unavailable_reason(device, work.pool.dtype)
            if reason is not None:
                raise UnsupportedError(reason)
        weight = o.weight.detach()

        def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            if self._gemm == "persistent":
                persistent_matmul(a, b, out=out)
            else:
                torch.mm(a, b, out=out)

        x_full = o.x_full.detach()
        if work.pass_name == "fprop":
            y = work.pool.tensor("y", case.M, case.N)

            def call() -> None:
                multiply(x_full, weight.t(), y)

        else:
            grad_x = work.pool.tensor("grad_x", case.M, case.K)
            grad_weight = work.pool.tensor("grad_weight", case.N, case.K)

            def call() -> None:
                multiply(o.grad_full, weight, grad_x)
                multiply(o.grad_full.t(), x_full, grad_weight)

        return Ready(call=call, path="compute", transport="none", is_op=False)


class CommOnlyCollective(Variant):
    """The group's collectives, one after the other."""

    name = "comm_only collective"
    is_basic = True

    @override
    def build(self, work: Work) -> Ready:
        shard, full, group = work.operands.wire_shard, work.operands.wire_full, work.group
        gathered = [kind == "gather" for kind in exchanges(work)]

        def call() -> None:
            for is_gather in gathered:
                if is_gather:
                    dist.all_gather_into_tensor(full, shard, group=group)
                else:
                    dist.reduce_scatter_tensor(shard, full, group=group)

        return Ready(call=call, path="transfers", transport=collective_name(work.pool.device), is_op=False)


def transfers_problem(work: Work) -> GemmProblem:
    """Whose all-gather moves what a pass does: only M and the features that travel count."""
    case = work.case
    rows, features = case.M // case.batch, case.shard_shape[1]
    return GemmProblem("all_gather_linear", "fprop", rows, case.batch, 1, features, work.dtype_name, case.group_size)


class CommOnly(WithContext):
    """One transport's transfers of the pass: to every other rank a shard, from every other rank a shard."""

    is_basic = True

    def __init__(self, backend: str) -> None:
        forced = {"path": "sliced", "algorithm": "direct", "chunks_per_shard": 1}
        super().__init__(
            OverlapConfig.from_dict({"linear": {"fprop": forced}, "transport": {"backend": backend}}), backend
        )
        self.name = f"comm_only {backend}"

    @override
    def build(self, work: Work) -> Ready:
        context = self.context_for(work)
        prepared = context.prepare(transfers_problem(work))
        if prepared.plan.path != "sliced":
            raise UnsupportedError(prepared.plan.reason)
        repeats = len(exchanges(work))

        def call() -> None:
            for _ in range(repeats):
                with prepared:
                    prepared.run_transfers(work.operands.wire_shard, "transfers alone")

        return Ready(call=call, path="transfers", transport=context.transport_name, is_op=False)


class Sequential(Variant):
    """Plain collective, then GEMM; or GEMM, then plain collective."""

    name = "sequential"
    is_basic = True

    @override
    def build(self, work: Work) -> Ready:
        reference, o = getattr(ops.reference, work.case.op), work.operands
        ready = differentiable(work, lambda: reference(o.x, o.weight, group=work.group))
        ready.transport = collective_name(work.pool.device)
        return ready


class SlicesOnly(Variant):
    """The GEMMs of a sliced pass, nothing moved: with its compute_only, what splitting costs.

    fprop: a GEMM per chunk. backward: dgrad so, wgrad un-split, as our sliced backward passes do.
    """

    def __init__(self, chunks_per_shard: int, gemm: Literal["torch", "persistent"]) -> None:
        self.name = f"slices_only m={chunks_per_shard} {gemm}"
        self._chunks_per_shard = chunks_per_shard
        self._gemm_name: Literal["torch", "persistent"] = gemm

    @override
    def build(self, work: Work) -> Ready:
        o, case, pool = work.operands, work.case, work.pool
        # Without a transport there is no SM budget: what is measured is the split, not the room left to transfers.
        gemm = SliceGemm(KernelConfig(gemm=self._gemm_name), "none", 0, pool.device, pool.dtype)
        weight = o.weight.detach()
        slices = case.group_size * self._chunks_per_shard
        is_fprop = work.pass_name == "fprop"
        a, b = (o.x_full.detach(), weight.t()) if is_fprop else (o.grad_full, weight)
        out = pool.tensor("y", case.M, case.N) if is_fprop else pool.tensor("grad_x", case.M, case.K)
        pairs = list(zip(a.tensor_split(slices), out.tensor_split(slices), strict=True))
        grad_weight = None if is_fprop else pool.tensor("grad_weight", case.N, case.K)
        x_full = o.x_full.detach()

        def call() -> None:
            for rows, target in pairs:
                gemm.multiply(rows, b, target)
            if grad_weight is not None:
                gemm.multiply(o.grad_full.t(), x_full, grad_weight)
            gemm.join()

        return Ready(call=call, path="slices", transport="none", chunks_per_shard=self._chunks_per_shard, is_op=False)
