"""Measures what the cost model needs of a context: GEMMs, memory, its own transfers, its group's collectives.

Collective over the group, some 50 ms once per context and dtype; the slowest rank's times count, on all ranks.
"""

import dataclasses
import json
from collections.abc import Callable

import torch
from torch import distributed as dist

from commfuse_megatron.plan.machine import Timings
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.runtime.prepared import PassContext, PreparedPass
from commfuse_megatron.runtime.stopwatch import Stopwatch

_CALLS, _ROUNDS = 8, 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """What is multiplied, copied and sent; small on the CPU, where only the tests ask."""

    gemm: int
    copy_bytes: int
    small_bytes: int
    large_bytes: int


_GPU_SIZES = _Sizes(4096, 64 << 20, 256 << 10, 16 << 20)
_CPU_SIZES = _Sizes(64, 64 << 10, 4 << 10, 64 << 10)


def calibrate(context: PassContext, dtype: torch.dtype, stopwatch: Stopwatch) -> Timings | str:
    """The times of the group's slowest rank, equal on all ranks; or why there are none."""
    sizes = _GPU_SIZES if context.device.type == "cuda" else _CPU_SIZES
    limit = context.config.transport.max_buffer_mib * (1 << 20) // (2 * context.group_size)
    large = max(4096, min(sizes.large_bytes, limit) // 4096 * 4096)
    small = min(sizes.small_bytes, large // 4)
    scratch = context.consensus.make_together(lambda: _Scratch(context, dtype, sizes, (small, large)), "scratch memory")
    if isinstance(scratch, str):
        return scratch
    with torch.no_grad(), context.unrecorded():
        times = [_shortest_us(stopwatch, scratch.multiply), _shortest_us(stopwatch, scratch.copy)]
        for elements in scratch.elements:
            times.append(_shortest_us(stopwatch, scratch.gather_over_link(elements), scratch.lead))
        for elements in scratch.elements:
            times.append(_shortest_us(stopwatch, scratch.gather_over_group(elements), scratch.lead))
    everyone = [json.loads(text) for text in context.consensus.exchange(json.dumps(times), topic="measured times")]
    gemm_us, copy_us, *channels = (max(each) for each in zip(*everyone, strict=True))
    others = context.group_size - 1
    return Timings(
        gemm_size=sizes.gemm,
        gemm_us=gemm_us,
        copy_bytes=sizes.copy_bytes,
        copy_us=copy_us,
        message_bytes=(small, large),
        link_us=(channels[0] / others, channels[1] / others),
        collective_bytes=(small * others, large * others),
        collective_us=(channels[2], channels[3]),
    )


def _shortest_us(stopwatch: Stopwatch, call: Callable[[], object], lead: Callable[[], object] | None = None) -> float:
    """The undisturbed time: a late rank or a slow host only ever add to it."""
    return min(stopwatch.burst_us(call, _CALLS, lead) for _ in range(_ROUNDS))


class _Scratch:
    """Operands, and calls on them."""

    def __init__(self, context: PassContext, dtype: torch.dtype, sizes: _Sizes, message_bytes: tuple[int, int]) -> None:
        self._context = context
        self._dtype = dtype
        generator = torch.Generator(context.device).manual_seed(0)
        n = sizes.gemm
        operands = torch.empty(2, n, n, dtype=dtype, device=context.device).normal_(generator=generator)
        self._a, self._b = operands
        self._out = torch.empty_like(self._a)
        self._source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=context.device)
        self._target = torch.empty_like(self._source)
        #: Of the messages, small and large.
        self.elements = tuple(size // dtype.itemsize for size in message_bytes)
        self._shard = torch.zeros(max(self.elements), dtype=dtype, device=context.device)
        self._gathered = torch.empty(context.group_size * max(self.elements), dtype=dtype, device=context.device)

    def multiply(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def copy(self) -> None:
        self._target.copy_(self._source)

    def lead(self) -> None:
        for _ in range(10):
            self.multiply()

    def gather_over_link(self, elements: int) -> Callable[[], None]:
        """An all-gather by the context's transport: every rank sends one message to each other one."""
        context = self._context
        problem = GemmProblem(
            op="all_gather_linear",
            pass_name="fprop",
            rows=context.group_size,
            batch=1,
            N=1,
            K=elements,
            dtype=str(self._dtype).removeprefix("torch."),
            group_size=context.group_size,
        )
        plan = PassPlan("sliced", "calibration")
        prepared: PreparedPass = context.make_pass(problem, plan)
        shard = self._shard[:elements].view(1, elements)

        def gather() -> None:
            with prepared:
                prepared.run_transfers(shard, "calibration")

        return gather

    def gather_over_group(self, elements: int) -> Callable[[], None]:
        """The same by the group's own collective."""
        shard, gathered = self._shard[:elements], self._gathered[: self._context.group_size * elements]
        group = self._context.group
        return lambda: dist.all_gather_into_tensor(gathered, shard, group=group)
