"""PyTorch's asynchronous tensor parallelism: the fused operations on symmetric memory. Forward only."""

from typing import override

import torch
from torch import distributed as dist

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.variant import Ready, Results, Variant, require_own_link


class AsyncTP(Variant):
    """`torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter`."""

    name = "async_tp"
    passes = ("fprop",)
    is_foreign = True

    @override
    def build(self, work: Work) -> Ready:
        if work.pool.device.type != "cuda":
            raise UnsupportedError("symmetric memory needs CUDA devices")
        require_own_link(work.pool.device, "symmetric memory")
        if not dist.is_initialized():
            raise UnsupportedError("symmetric memory needs a group that torch.distributed knows by name")
        from torch.distributed import _symmetric_memory  # noqa: F401  # registers the operations

        o, name = work.operands, work.group.group_name
        x, b = o.x.detach().flatten(0, -2), o.weight.detach().t()
        shape = (-1, work.case.batch, work.case.N)

        def gather_matmul() -> torch.Tensor:
            _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [b], 0, name, return_A=False)
            return y

        def matmul_scatter() -> torch.Tensor:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, b, "sum", 0, name)

        call = gather_matmul if work.case.gathers else matmul_scatter

        def results() -> Results:
            return {"y": call().view(shape)}

        return Ready(call=call, results=results, path="async_tp", transport="symmetric memory")
