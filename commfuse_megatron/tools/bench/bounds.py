"""What every timing stands beside: computation alone, communication alone, one after the other.

compute_only                 un-split GEMMs: `torch.mm`
compute_only persistent      the same by our kernel; the row's compute_only_ms is the best of both
comm_only collective         the group's own collectives for what the pass moves
comm_only <transport>        the same bytes as our transports move them, nothing computed
sequential                   plain collective and one GEMM, as `ops.reference` does it
slices_only m=C <gemm>       the GEMMs of a sliced pass one after the other, nothing moved
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, override

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import KernelConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import persistent_matmul, persistent_matmul_unavailable_reason
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.variant import Ready, WithContext, differentiable, in_turn

Gemm = Literal["torch", "persistent"]


def products(work: Work, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The GEMMs of a pass on complete operands as (a, b, where a @ b goes): one forward, else dgrad and wgrad.

    x: [M, K].
    """
    case, pool, grad, weight = work.case, work.pool, work.operands.grad_full, work.operands.weight.detach()
    if work.pass_name == "fprop":
        return [(x, weight.t(), pool.tensor("y", case.M, case.N))]
    grad_x, grad_weight = pool.tensor("grad_x", case.M, case.K), pool.tensor("grad_weight", case.N, case.K)
    return [(grad, weight, grad_x), (grad.t(), x, grad_weight)]


def compute(work: Work, gemm: Gemm = "torch") -> Callable[[], None]:
    """The GEMMs of the pass, un-split."""
    if gemm == "persistent":
        reason = persistent_matmul_unavailable_reason(work.pool.device, work.pool.dtype)
        if reason is not None:
            raise UnsupportedError(reason)
    multiply: Callable[..., object] = persistent_matmul if gemm == "persistent" else torch.mm
    gemms = products(work, work.operands.x_full.detach())
    return in_turn(*(partial(multiply, a, b, out=out) for a, b, out in gemms))


def slices(work: Work, gemm: Gemm, chunks_per_shard: int) -> Callable[[], None]:
    """The GEMMs of a sliced pass, nothing moved: with its compute_only, what splitting costs.

    fprop: a GEMM per chunk. backward: dgrad so, wgrad un-split, as our sliced backward passes do.
    """
    # Without a transport there is no SM budget: what is measured is the split, not the room left to transfers.
    slice_gemm = SliceGemm(KernelConfig(gemm=gemm), "none", 0, work.pool.device, work.pool.dtype)
    (a, b, out), *whole = products(work, work.operands.x_full.detach())
    count = work.case.group_size * chunks_per_shard
    pairs = zip(a.tensor_split(count), out.tensor_split(count), strict=True)
    gemms = [*((rows, b, target) for rows, target in pairs), *whole]
    return in_turn(*(partial(slice_gemm.multiply, *operands) for operands in gemms), slice_gemm.join)


def _gathers(work: Work) -> list[bool]:
    """What a pass moves, True for a gather: a column's backward gathers x again and scatters dx, a row's gathers dy."""
    if work.pass_name == "fprop":
        return [work.case.gathers]
    return [True, False] if work.case.gathers else [True]


def collectives(work: Work) -> Callable[[], None]:
    """The group's own for what the pass moves, one after the other."""
    shard, full, group = work.operands.wire_shard, work.operands.wire_full, work.group
    gather = partial(dist.all_gather_into_tensor, full, shard, group=group)
    scatter = partial(dist.reduce_scatter_tensor, shard, full, group=group)
    return in_turn(*(gather if is_gather else scatter for is_gather in _gathers(work)))


class CommOnly(WithContext):
    """One transport's transfers of the pass: to every other rank a shard, from every other rank a shard."""

    is_basic = True

    def __init__(self, backend: str) -> None:
        forced = {"path": "sliced", "algorithm": "direct", "chunks_per_shard": 1}
        config = OverlapConfig.from_dict({"linear": {"fprop": forced}, "transport": {"backend": backend}})
        super().__init__(config, backend)
        self.name = f"comm_only {backend}"

    def prepare(self, context: OverlapContext, problem: GemmProblem) -> PreparedPass:
        """The pass whose transfers are run."""
        prepared = context.prepare(problem)
        if prepared.plan.path != "sliced":
            raise UnsupportedError(prepared.plan.reason)
        return prepared

    @override
    def build(self, work: Work) -> Ready:
        case, context = work.case, self.context_for(work)
        # An all-gather that moves what the pass does: only M and the features that travel count.
        sizes = (case.rows, case.batch, 1, case.shard_shape[1], work.dtype_name, case.group_size)
        prepared = self.prepare(context, GemmProblem("all_gather_linear", "fprop", *sizes))

        def once() -> None:
            with prepared:
                prepared.run_transfers(work.operands.wire_shard, "transfers alone")

        call = in_turn(*(once for _ in _gathers(work)))
        return Ready(call=call, path="transfers", transport=context.transport_name)


def sequential(work: Work) -> Ready:
    """Plain collective, then GEMM; or GEMM, then plain collective. Its results are what every variant must give."""
    reference, o = getattr(ops.reference, work.case.op), work.operands
    return differentiable(work, lambda: reference(o.x, o.weight, group=work.group))
