"""What contexts ask of the machine that they run on, all in one place, so that tests can stand in for it.

monkeypatch.setattr(hardware, "current", StandIn())
context = OverlapContext(group)
"""

from commfuse_megatron.kernels.attention_choice import AttentionKernels
from commfuse_megatron.kernels.blas import BlasMatmul, blas_unavailable_reason
from commfuse_megatron.kernels.strided_copy import bind_copy
from commfuse_megatron.kernels.sum_partials import bind_sum
from commfuse_megatron.runtime.lanes import Lanes
from commfuse_megatron.transport import select
from commfuse_megatron.transport.stream_memory import CUDA, Driver


class Hardware:
    """This machine: its transports, its CUDA driver, its kernels on addresses (`matmul`, `sum`, `copy`)."""

    driver: Driver = CUDA
    choose_backend = staticmethod(select.choose_backend)
    device_of = staticmethod(select.device_of_backend)
    create_transport = staticmethod(select.create_transport)
    lanes = Lanes
    attention_kernels = AttentionKernels
    #: Why no GEMM on a device, of a dtype, can be put on a tape; None if it can.
    tapes_unavailable_reason = staticmethod(blas_unavailable_reason)
    matmul, sum, copy = BlasMatmul, staticmethod(bind_sum), staticmethod(bind_copy)


#: What contexts that are made from now on run on.
current = Hardware()
