"""The GEMM of a slice: the persistent kernel with an SM budget beside NCCL, the framework's elsewhere.

Why a budget: cuBLAS's Hopper kernels are persistent, one block per SM; a transfer kernel that holds a few SMs delays
exactly those blocks, so GEMM and transfer run one after the other (2 x H200, November 2026: cuBLAS slices beside NCCL
took 5.75 ms where GEMM and transfer add up to 5.33). A GEMM on fewer SMs leaves the rest to NCCL.
"""

import torch

from commfuse_megatron.config import KernelConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels.persistent_matmul import persistent_matmul
from commfuse_megatron.kernels.sum_partials import sum_partials
from commfuse_megatron.kernels.support import persistent_matmul_unavailable_reason

__all__ = ["SliceGemm"]


class SliceGemm:
    """Multiplies slices of one dtype on one device. Operands are 2-D with one unit stride each.

    own_dtype: the dtype in which this rank's own partial is kept until the sum: fp32 where the kernel can give it.
    """

    def __init__(self, config: KernelConfig, transport: str, channels: int, device: torch.device, dtype: torch.dtype):
        unavailable = persistent_matmul_unavailable_reason(device, dtype)
        if config.gemm == "persistent" and unavailable is not None:
            raise UnsupportedError(f'kernel.gemm is "persistent", but {unavailable}')
        self.is_persistent = unavailable is None and (
            config.gemm == "persistent" or (config.gemm == "auto" and transport == "nccl")
        )
        self.own_dtype = torch.float32 if self.is_persistent else dtype
        self.name = "persistent" if self.is_persistent else "torch"
        self._tile_order = config.tile_order
        self._all_sms = self._budget_sms = 0
        if self.is_persistent:
            self._all_sms = torch.cuda.get_device_properties(device).multi_processor_count
            reserved = channels if config.reserved_sms is None else config.reserved_sms
            self._budget_sms = max(1, self._all_sms - reserved) if transport == "nccl" else self._all_sms

    def multiply(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        addend: torch.Tensor | None = None,
        is_beside_transfer: bool = True,
    ) -> None:
        """out [M, N] = a [M, K] @ b [K, N] (+ addend [M, N] or [N]), rounded once.

        is_beside_transfer: a transfer may be in flight, so leave it its SMs.
        """
        if self.is_persistent and out.numel() and a.size(1):
            if addend is not None and addend.dim() == 1:
                addend = addend.expand(out.shape)
            num_sms = self._budget_sms if is_beside_transfer else self._all_sms
            persistent_matmul(a, b, out=out, addend=addend, num_sms=num_sms, tile_order=self._tile_order)
        elif addend is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(addend, a, b, out=out)

    def accumulate(self, a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> None:
        """Add a [M, K] @ b [K, N] to `total` [M, N], which may be wider than the operands (fp32 main gradients)."""
        if self.is_persistent and total.dtype in (a.dtype, torch.float32) and total.numel() and a.size(1):
            persistent_matmul(a, b, out=total, addend=total, num_sms=self._budget_sms, tile_order=self._tile_order)
        elif total.dtype == a.dtype:
            total.addmm_(a, b)
        else:
            total.addmm_(a.to(total.dtype), b.to(total.dtype))

    @staticmethod
    def sum_arrived(own: torch.Tensor, arrived: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """out [M, N] = own [M, N] + arrived [P, M, N] in that order (+ bias [N]), in fp32 or wider, rounded once."""
        if out.numel():
            sum_partials(own, arrived, bias=bias, out=out)
