"""One overlapped linear, traced: warm-up, then n recorded calls, on all ranks of a group.

Two sources: the recorder of the context, anywhere, or the profiler, on GPUs, which sees kernels instead of what the
runtime asked for. Paths that call plain collectives are recorded from outside, since they have no schedule to record.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed as dist

from commfuse_megatron import ops
from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.problem import shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.head_start import start_together
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.runtime.recorder import Interval, Recorder
from commfuse_megatron.tools.trace.collectives import recorded_calls
from commfuse_megatron.tools.trace.kernels import HEAD_START_US, gather_profile, profile_calls, split_calls
from commfuse_megatron.tools.trace.session import Session, gather_recording, meet, require_path, require_work
from commfuse_megatron.tools.trace.summary import Summary, drop_nested, summarize

__all__ = ["LinearToTrace", "LinearTrace", "trace_linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearToTrace:
    """What is traced. M: tokens of the full sequence; N, K: output and input features of one rank's weight."""

    op: Literal["all_gather_linear", "linear_reduce_scatter"]
    pass_name: Literal["fprop", "backward"]
    M: int
    N: int
    K: int
    dtype: torch.dtype
    config: OverlapConfig
    calls: int = 5
    warm_up: int = 3
    is_profiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTrace:
    """The intervals of every rank (calls numbered from 1, equal times on one clock) and what the context reports."""

    recording: dict[int, list[Interval]]
    record: OpRecord

    @property
    def summaries(self) -> dict[int, Summary]:
        """Every rank's numbers, per call."""
        return {rank: summarize(intervals) for rank, intervals in self.recording.items()}


def trace_linear(
    wanted: LinearToTrace,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    on_call: Callable[[], object] = lambda: None,
) -> LinearTrace:
    """Trace `wanted` on this rank; collective over `group`, equal results on all ranks.

    Args:
        on_call: called after every recorded or warm-up call that was submitted.

    Raises UnsupportedError, on all ranks, where another path was taken than asked for, or nothing was seen to run on
    one: the recorder does not see kernels that PyTorch does not know of, beside a plain collective or none.
    """
    config = dataclasses.replace(wanted.config, record=not wanted.is_profiled)
    with OverlapContext(group, config) as context:
        call = _prepared_call(wanted, context, device)

        def counted() -> None:
            call()
            on_call()

        for _ in range(wanted.warm_up):
            counted()
        (record,) = [r for r in context.report() if r.pass_name == wanted.pass_name]
        require_path("path", config, record)
        if wanted.is_profiled:
            recording = _profiled(wanted, call, counted, group, device)
            require_work(f"a call of {record.path}", split_calls(recording, wanted.calls))
        else:
            has_schedule = record.path in ("sliced", "bulk", "local")
            own = _recorded(wanted, call, counted, context, has_schedule=has_schedule)
            recording = gather_recording(own, group)
            require_work(f"the calls of {record.path}", [recording])
        return LinearTrace(recording=recording, record=record)


def _prepared_call(wanted: LinearToTrace, context: OverlapContext, device: torch.device) -> Callable[[], object]:
    own_rows = shard_range(wanted.M, context.group_size, context.group_rank).size
    gathers = wanted.op == "all_gather_linear"
    generator = torch.Generator(device).manual_seed(context.group_rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=wanted.dtype, generator=generator)

    x = draw(own_rows if gathers else wanted.M, 1, wanted.K)
    weight = draw(wanted.N, wanted.K)
    op: Callable[..., torch.Tensor] = getattr(ops, wanted.op)
    options: dict[str, Any] = {"total_rows": wanted.M} if gathers else {}
    if wanted.pass_name == "fprop":

        def forward() -> None:
            with torch.no_grad():
                op(x, weight, context=context, **options)

        return forward
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = op(*leaves, context=context, **options)
    grad_y = draw(*y.shape)
    return lambda: torch.autograd.grad(y, leaves, grad_y, retain_graph=True)


def _recorded(
    wanted: LinearToTrace,
    call: Callable[[], object],
    counted: Callable[[], object],
    context: OverlapContext,
    *,
    has_schedule: bool,
) -> list[Interval]:
    """This rank's intervals from the context's recorder and, without a schedule, from watching the collectives."""
    own, outside = context.recorder, Recorder(context.device)
    assert own is not None
    session = Session(lambda: [own, outside])
    with contextlib.ExitStack() as stack:
        if not has_schedule:
            stack.enter_context(recorded_calls(outside))
            call()  # watching, too, is slow the first time
        session.start(context.group, context.device)
        for _ in range(wanted.calls):
            outside.begin_call(f"{wanted.op}.{wanted.pass_name}")
            counted()
    scheduled, watched = session.finish()
    # The context counts all its calls; here the recorded ones are numbered from 1.
    numbers = {number: index for index, number in enumerate(sorted({i.call for i in scheduled}), 1)}
    scheduled = [dataclasses.replace(i, call=numbers[i.call]) for i in scheduled]
    return sorted(scheduled + drop_nested(watched, scheduled), key=lambda i: i.start_us)


def _profiled(
    wanted: LinearToTrace,
    call: Callable[[], object],
    counted: Callable[[], object],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[int, list[Interval]]:
    def prepare(number: int) -> None:
        if number == 1:
            call()
            meet(group, device)
            start_together(group, device, HEAD_START_US)

    own = profile_calls([counted] * wanted.calls, prepare=prepare)
    return gather_profile(own, group)
