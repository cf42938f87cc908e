"""What a user has without us: linears of Megatron-Core and Transformer Engine, and PyTorch's asynchronous ones."""

import importlib.util
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, override

import torch
from torch import distributed as dist

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.variant import Ready, Variant, collective_name, differentiable, require_own_link
from commfuse_megatron.tools.common.userbuffers import close_userbuffers, missing_userbuffers, open_userbuffers


class Megatron(Variant):
    """The stock linear, as ColumnParallelLinear and RowParallelLinear call it with sequence parallelism, or without.

    Forward: plain collectives. Backward of a column: asynchronous all-gather of x beside dgrad, asynchronous
    reduce-scatter of dx (or all-reduce) beside wgrad, ordered by CUDA_DEVICE_MAX_CONNECTIONS=1 (recorded in the rows).
    Gradient accumulation fusion is off.
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
        from megatron.core.tensor_parallel import mappings
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        o, group, gathers = work.operands, work.group, work.case.gathers
        behind: dict[str, Callable[..., torch.Tensor]] = {
            "linear_reduce_scatter": mappings.reduce_scatter_to_sequence_parallel_region,
            "linear_all_reduce": mappings.reduce_from_tensor_model_parallel_region,
        }
        finish = behind.get(work.case.op)

        def forward() -> torch.Tensor:
            y = linear_with_grad_accumulation_and_async_allreduce(
                input=o.x,
                weight=o.weight,
                bias=None,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=work.case.op == "linear_grad_all_reduce",
                sequence_parallel=gathers,
                tp_group=group,
            )
            return y if finish is None else finish(y, group=group)

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

        path, transport = "async_tp", "symmetric memory"
        return Ready(call=call, read=lambda y: {"y": y.view(shape)}, path=path, transport=transport)


class Userbuffers(Variant):
    """Transformer Engine's linear over userbuffers, with the overlaps that Megatron's `--tp-comm-overlap` turns on.

    Column: ring-exchange all-gather in fprop, bulk all-gather and reduce-scatter in backward. Row: pipelined
    reduce-scatter in fprop, ring-exchange all-gather in backward. Its buffers have one shape, [M, hidden], so they are
    made anew when that changes. A layer's backward pass frees what it needs, so one forward pass per timed backward
    runs before the clock does.
    """

    name = "userbuffers"
    is_foreign = True

    def __init__(self) -> None:
        self._shape: tuple[int, int] | None = None

    @override
    def build(self, work: Work) -> Ready:
        reason = missing_userbuffers(work.pool.device)
        if reason is not None:
            raise UnsupportedError(reason)
        require_own_link(work.pool.device, "userbuffers")
        shape = (work.case.M, work.case.shard_shape[1])
        if shape != self._shape:
            self.close()
            open_userbuffers(shape, work.case.group_size, work.pool.dtype)
            self._shape = shape
        x, layer = work.operands.x, _make_layer(work)
        leaves = {"x": x, "weight": layer.weight}
        ready = differentiable(work, lambda: layer(x), leaves, keeps_tensors=False)
        ready.path = ready.transport = "userbuffers"
        return ready

    @override
    def close(self) -> None:
        if self._shape is not None:
            close_userbuffers()
            self._shape = None


def _make_layer(work: Work) -> Any:
    from transformer_engine import pytorch as te

    case, is_column = work.case, work.case.gathers
    layer = te.Linear(
        in_features=case.K if is_column else case.K * case.group_size,
        out_features=case.N * case.group_size if is_column else case.N,
        sequence_parallel=True,
        tp_group=work.group,
        tp_size=case.group_size,
        bias=False,
        params_dtype=work.pool.dtype,
        parallel_mode="column" if is_column else "row",
        device="meta",
        ub_overlap_ag=True,
        ub_overlap_rs=not is_column,
        ub_bulk_dgrad=is_column,
        ub_bulk_wgrad=is_column,
        ub_name=case.name.split(".")[1],
    )
    # The same weight as everyone else's, not a copy; on "meta" nothing was allocated for its own.
    layer.weight = torch.nn.Parameter(work.operands.weight.detach())
    return layer
