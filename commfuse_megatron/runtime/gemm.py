"""The GEMM of a slice: the persistent kernel with an SM budget beside NCCL, the framework's elsewhere.

Why a budget: cuBLAS's Hopper kernels are persistent, one block per SM; a transfer kernel that holds a few SMs delays
exactly those blocks, so GEMM and transfer run one after the other (2 x H200, November 2026: cuBLAS slices beside NCCL
took 5.75 ms where GEMM and transfer add up to 5.33). A GEMM on fewer SMs leaves the rest to NCCL.

Where the transfer is shorter than the slice, its SMs would then lie idle. So a second launch of the same product waits
on a stream of its own for the transfer's end and takes tiles from the first:

    transfer  [20 SMs   ]
    compute   [112 SMs               ]
    regain              [20 SMs      ]    joined before the result is sent or summed
"""

import torch

from commfuse_megatron.config import KernelConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import TileShare, persistent_matmul, persistent_matmul_unavailable_reason, sum_partials
from commfuse_megatron.transport.base import Transfer

# Work below which a second launch costs more host time than the regained SMs can win: about 0.1 ms on 132 SMs of an
# H100 at 700 TFLOP/s, of which a transfer's SMs are a seventh. Not measured.
_REGAIN_FLOPS = 7e10

# Pairs of launches that may be in flight before one is joined: far more than chunks of one operation that nobody joins.
_NUM_COUNTERS = 1024
_INTS_PER_COUNTER = 8  # a sector each, so that pairs do not share one


class SliceGemm:
    """Multiplies slices of one dtype on one device. Operands are 2-D with one unit stride each.

    own_dtype: the dtype in which this rank's own partial is kept until the sum: fp32 where the kernel can give it.
    adds_in_epilogue: whether `multiply` can add several [M, N] addends in fp32 in its epilogue.
    """

    def __init__(
        self,
        config: KernelConfig,
        transport: str,
        channels: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        regains_sms: bool = False,
    ) -> None:
        unavailable = persistent_matmul_unavailable_reason(device, dtype)
        if config.gemm == "persistent" and unavailable is not None:
            raise UnsupportedError(f'kernel.gemm is "persistent", but {unavailable}')
        self.is_persistent = unavailable is None and (
            config.gemm == "persistent" or (config.gemm == "auto" and transport == "nccl")
        )
        self.adds_in_epilogue = unavailable is None and config.gemm != "torch"
        self.own_dtype = torch.float32 if self.is_persistent else dtype
        self.name = "persistent" if self.is_persistent else "torch"
        self._regain: _Regain | None = None
        if unavailable is None:
            all_sms = torch.cuda.get_device_properties(device).multi_processor_count
            reserved = channels if config.reserved_sms is None else config.reserved_sms
            self._all_sms = all_sms
            self._budget_sms = max(1, all_sms - reserved) if transport == "nccl" else all_sms
            if self.is_persistent and regains_sms and self._budget_sms < all_sms:
                self._regain = _Regain(device, self._budget_sms, all_sms - self._budget_sms)

    def multiply(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        addend: torch.Tensor | None = None,
        beside: Transfer | None = None,
    ) -> None:
        """out [M, N] = a [M, K] @ b [K, N] (+ addend [M, N] or [N]; if it adds in its epilogue, all of [P, M, N]).

        Rounded once, and complete after `join`. beside: the last transfer that may be in flight, which is left its SMs.
        """
        if addend is not None and addend.dim() == 3:
            if out.numel():
                self._multiply_persistent(a, b, out, addend, beside)
        elif self.is_persistent and out.numel() and a.size(1):
            if addend is not None and addend.dim() == 1:
                addend = addend.expand(out.shape)
            self._multiply_persistent(a, b, out, addend, beside)
        elif addend is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(addend, a, b, out=out)

    def accumulate(self, a: torch.Tensor, b: torch.Tensor, total: torch.Tensor, beside: Transfer | None = None) -> None:
        """Add a [M, K] @ b [K, N] to `total` [M, N], which may be wider than the operands (fp32 main gradients)."""
        # Into a wider tensor the framework multiplies wide copies, many times slower: the own GEMM wherever it runs.
        is_own = self.is_persistent or (self.adds_in_epilogue and total.dtype != a.dtype)
        if is_own and total.dtype in (a.dtype, torch.float32) and total.numel() and a.size(1):
            self._multiply_persistent(a, b, total, total, beside)
        elif total.dtype == a.dtype:
            total.addmm_(a, b)
        else:
            total.addmm_(a.to(total.dtype), b.to(total.dtype))

    def join(self) -> None:
        """Order what follows on the current stream after all products begun."""
        if self._regain is not None:
            self._regain.join()

    @staticmethod
    def sum_arrived(own: torch.Tensor, arrived: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """out [M, N] = own [M, N] + arrived [P, M, N] in that order (+ bias [N]), in fp32 or wider, rounded once."""
        if out.numel():
            sum_partials(own, arrived, bias=bias, out=out)

    def _multiply_persistent(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, addend: torch.Tensor | None, beside: Transfer | None
    ) -> None:
        if beside is None:
            persistent_matmul(a, b, out=out, addend=addend, num_sms=self._all_sms)
        elif self._regain is not None and 2.0 * out.numel() * a.size(1) >= _REGAIN_FLOPS:
            self._regain.multiply(a, b, out, addend, beside)
        else:
            persistent_matmul(a, b, out=out, addend=addend, num_sms=self._budget_sms)


class _Regain:
    """Pairs of launches: the first beside a transfer, the second on a side stream behind it."""

    def __init__(self, device: torch.device, first_sms: int, second_sms: int) -> None:
        self._device = device
        counters = torch.zeros(_NUM_COUNTERS, _INTS_PER_COUNTER, dtype=torch.int32, device=device)
        self._counters = counters  # the addresses below point into it
        step = _INTS_PER_COUNTER * counters.element_size()
        self._shares = [
            tuple(
                TileShare(counters.data_ptr() + step * pair, first_sms, second_sms, is_second)
                for is_second in (False, True)
            )
            for pair in range(_NUM_COUNTERS)
        ]
        self._next_pair = 0
        # Low priority: what the second launch takes must not be taken from the next transfer.
        self._stream = torch.cuda.Stream(device, priority=0)
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._is_pending = False

    def multiply(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, addend: torch.Tensor | None, beside: Transfer
    ) -> None:
        first, second = self._shares[self._next_pair]
        self._next_pair = (self._next_pair + 1) % _NUM_COUNTERS
        compute_stream = torch.cuda.current_stream(self._device)
        self._begun.record(compute_stream)
        persistent_matmul(a, b, out=out, addend=addend, share=first)
        torch.cuda.set_stream(self._stream)
        try:
            self._stream.wait_event(self._begun)
            beside.wait()
            persistent_matmul(a, b, out=out, addend=addend, share=second)
            self._done.record(self._stream)
        finally:
            torch.cuda.set_stream(compute_stream)
        self._is_pending = True

    def join(self) -> None:
        if self._is_pending:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._is_pending = False
