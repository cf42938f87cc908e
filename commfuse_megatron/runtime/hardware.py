"""What contexts ask of the machine that they run on, all in one place, so that tests can stand in for it.

monkeypatch.setattr(hardware, "current", StandIn())
context = OverlapContext(group)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.config import TransportConfig
from commfuse_megatron.kernels.attention_choice import AttentionKernels
from commfuse_megatron.kernels.blas import BlasMatmul, Matrix, blas_unavailable_reason
from commfuse_megatron.kernels.strided_copy import bind_copy
from commfuse_megatron.kernels.sum_partials import bind_sum
from commfuse_megatron.runtime.lanes import Lanes
from commfuse_megatron.transport import select
from commfuse_megatron.transport.base import Transport
from commfuse_megatron.transport.driver import CUDA, Driver

__all__ = ["Hardware", "current"]

Exchange = Callable[[str], list[str]]


class Hardware:
    """This machine: its transports, its CUDA driver, its kernels on addresses."""

    driver: Driver = CUDA

    def choose_backend(self, group: dist.ProcessGroup, config: TransportConfig, exchange: Exchange) -> str:
        """The transport for `group`, by name: see `transport.select`."""
        return select.choose_backend(group, config, exchange)

    def device_of(self, backend: str) -> torch.device:
        """The device whose tensors that transport carries for this process."""
        return select.device_of_backend(backend)

    def create_transport(
        self,
        backend: str,
        group: dist.ProcessGroup,
        store: dist.Store,
        config: TransportConfig,
        nccl: select.NcclSettings,
        exchange: Exchange,
    ) -> Transport:
        """That transport, built collectively over `group`."""
        return select.create_transport(backend, group, store, config, nccl, exchange)

    def lanes(self, device: torch.device) -> Lanes:
        """Side streams for a context."""
        return Lanes(device)

    def attention_kernels(self, device: torch.device) -> AttentionKernels:
        """What computes attention for a context."""
        return AttentionKernels(device)

    def tapes_unavailable_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why no GEMM of that dtype can be put on a tape, None if it can."""
        return blas_unavailable_reason(device, dtype)

    def matmul(self, a: Matrix, b: Matrix, out: Matrix, *, has_addend: bool, has_bias: bool) -> BlasMatmul:
        """out = a @ b (+ addend) (+ bias) on addresses."""
        return BlasMatmul(a, b, out, has_addend=has_addend, has_bias=has_bias)

    def sum(
        self,
        own: torch.Tensor,
        partials: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        device: torch.device,
    ) -> Callable[..., Any] | None:
        """out = own + partials (+ bias) on addresses, for operands like these; None where no kernel of ours adds."""
        return bind_sum(own, partials, bias=bias, out=out, device=device)

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, *, device: torch.device, is_aligned: bool
    ) -> Callable[..., Any] | None:
        """target = source on addresses, for views like these; None where no kernel of ours copies."""
        return bind_copy(target, source, device=device, is_aligned=is_aligned)


#: What contexts that are made from now on run on.
current = Hardware()
