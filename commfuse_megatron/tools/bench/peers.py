"""What a user has without us: Megatron-Core's own linears, and PyTorch's asynchronous tensor parallelism."""

import importlib.util
import warnings
from contextlib import ExitStack
from typing import override

import torch
from torch import distributed as dist

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.variant import (
    Ready,
    Results,
    Variant,
    collective_name,
    differentiable,
    require_own_link,
)


class Megatron(Variant):
    """The stock linear, as ColumnParallelLinear and RowParallelLinear call it with sequence parallelism.

    Forward: plain collectives. Backward of a column: asynchronous all-gather of x beside dgrad, asynchronous
    reduce-scatter of dx beside wgrad, ordered by CUDA_DEVICE_MAX_CONNECTIONS=1 (recorded in the rows). Gradient
    accumulation fusion is off.
    """

    name = "megatron"
    is_foreign = True
    is_basic = True

    def __init__(self) -> None:
        self._entered: ExitStack | None = None

    @override
    def build(self, work: Work) -> Ready:
        if importlib.util.find_spec("megatron") is None:
            raise UnsupportedError("Megatron-Core is not installed: pip install megatron-core")
        if self._entered is None:
            self._entered = _enter_megatron(work.pool.device)
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
        from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region

        o, group, gathers = work.operands, work.group, work.case.gathers

        def forward() -> torch.Tensor:
            y = linear_with_grad_accumulation_and_async_allreduce(
                input=o.x,
                weight=o.weight,
                bias=None,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=False,
                sequence_parallel=gathers,
                tp_group=group,
            )
            return y if gathers else reduce_scatter_to_sequence_parallel_region(y, group=group)

        with warnings.catch_warnings():  # it recommends CUDA_DEVICE_MAX_CONNECTIONS=1, once
            warnings.simplefilter("ignore")
            ready = differentiable(work, forward)
            forward()
        ready.path, ready.transport = "megatron", collective_name(work.pool.device)
        return ready

    @override
    def close(self) -> None:
        if self._entered is not None:
            self._entered.close()
            self._entered = None


def _enter_megatron(device: torch.device) -> ExitStack:
    stack = ExitStack()
    with warnings.catch_warnings():  # it lists on import what it goes without
        warnings.simplefilter("ignore")
        if device.type == "cpu":
            from commfuse_megatron.testing.cpu import cpu_megatron

            stack.enter_context(cpu_megatron())
        from megatron.core import parallel_state, tensor_parallel  # noqa: F401
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
        stack.callback(parallel_state.destroy_global_memory_buffer)
    return stack


class AsyncTP(Variant):
    """The fused operations on symmetric memory: `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`."""

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
