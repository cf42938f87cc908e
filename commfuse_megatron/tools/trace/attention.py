"""One attention block, traced: attention with its output projection, one way of it, some calls on all ranks of a group.

Calls are apart: before each the ranks meet, since a picture of one block should begin where the block does. The sources
are those of a linear (`tools/trace/linear.py`). Knows one context at a time; who compares ways asks once for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import distributed as dist

from commfuse_megatron import ops
from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.problem import shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.head_start import start_together
from commfuse_megatron.runtime.meter import COMPUTE, union_spans
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.runtime.recorder import Interval, Recorder
from commfuse_megatron.tools.trace.collectives import recorded_calls
from commfuse_megatron.tools.trace.kernels import HEAD_START_US, gather_profile, profile_calls, split_calls
from commfuse_megatron.tools.trace.session import Session, gather_recording, meet, require_path, require_work
from commfuse_megatron.tools.trace.summary import Summary, drop_nested, is_attention, is_gemm, summarize

__all__ = ["BlockToTrace", "BlockTrace", "attention_us", "trace_block"]

_OP = "query_split_attention"
#: Plans whose steps the context's recorder sees.
_SCHEDULED = ("sliced", "bulk", "local", "query_split")

Recording = dict[int, list[Interval]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockToTrace:
    """What is traced: causal attention of one rank's heads over `rows` positions, and its projection to N features.

    forces_projection: "row_parallel" must take the path that the configuration names for the linear of this pass. Else
    that may be meant for other linears, and the record of the projection says why another was taken.
    """

    pass_name: Literal["fprop", "backward"]
    rows: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    N: int
    dtype: torch.dtype
    calls: int = 5
    warm_up: int = 5
    is_profiled: bool = False
    forces_projection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """Every call's intervals by rank, on one clock, and what the context reports.

    In place of the operation an interval names what ran: attention, GEMM, something else, or a transfer. projection: of
    the linear that "row_parallel" makes of it, else None.
    """

    calls: tuple[Recording, ...]
    record: OpRecord
    projection: OpRecord | None

    @property
    def durations_us(self) -> list[float]:
        """Of every call: from the first start to the last end on any rank."""
        return [_duration_us(recording) for recording in self.calls]

    @property
    def typical(self) -> Recording:
        """The call of median duration; of an even number the shorter one."""
        ordered = sorted(self.calls, key=_duration_us)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def duration_us(self) -> float:
        """That of the typical call."""
        return _duration_us(self.typical)

    @property
    def summaries(self) -> dict[int, Summary]:
        """Every rank's numbers of the typical call."""
        return {rank: summarize(intervals, as_one_call=True) for rank, intervals in self.typical.items()}


def attention_us(intervals: Sequence[Interval]) -> float:
    """How long some attention ran on the rank of these intervals."""
    spans = union_spans(filter(is_attention, intervals), COMPUTE)
    return sum(end_us - start_us for start_us, end_us in spans)


def trace_block(
    wanted: BlockToTrace,
    config: OverlapConfig,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    on_call: Callable[[], object] = lambda: None,
) -> BlockTrace:
    """Trace `wanted` the way that `config.attention.path` names. Collective over `group`; all ranks get all intervals.

    Under the profiler calls of the copy engine are not launched as CUDA graphs: a stream tells its copies from others.

    Args:
        on_call: called after every recorded or warm-up call that was submitted.

    Raises:
        UnsupportedError: the context took another way than asked for, of the block or of a projection that is forced,
            or nothing was seen to run in a call; on all ranks.
    """
    config = dataclasses.replace(config, record=not wanted.is_profiled)
    if wanted.is_profiled:
        config = dataclasses.replace(config, transport=dataclasses.replace(config.transport, graph_memory_mib=0))
    with OverlapContext(group, config) as context:
        call = _prepared_call(wanted, context, device)

        def counted() -> None:
            call()
            on_call()

        for _ in range(wanted.warm_up):
            counted()
        record, projection = _records(context, wanted.pass_name)
        asked = _asked_path(config, wanted.pass_name)
        if record.path not in asked:
            raise UnsupportedError(
                f"attention.path {config.attention.path} was asked for and {record.path} taken: {record.reason}"
            )
        if wanted.forces_projection and projection is not None and config.attention.path == "row_parallel":
            require_path("the projection's path", config, projection)
        if wanted.is_profiled:
            recordings = _profiled(wanted, counted, group, device)
        else:
            is_watched = (projection or record).path not in _SCHEDULED
            recordings = _recorded(wanted, call, counted, context, is_watched=is_watched)
        require_work(f"a call of {record.path}", recordings)
        return BlockTrace(calls=tuple(map(_by_kind, recordings)), record=record, projection=projection)


def _prepared_call(wanted: BlockToTrace, context: OverlapContext, device: torch.device) -> Callable[[], object]:
    own_rows = shard_range(wanted.rows, context.group_size, context.group_rank).size
    generator = torch.Generator(device).manual_seed(context.group_rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=wanted.dtype, generator=generator)

    rows, batch, head_dim = wanted.rows, wanted.batch, wanted.head_dim
    q = draw(rows, batch, wanted.heads, head_dim)
    k, v = (draw(rows, batch, wanted.kv_heads, head_dim) for _ in range(2))
    leaves = [q, k, v, draw(wanted.N, wanted.heads * head_dim)]
    if wanted.pass_name == "fprop":

        def forward() -> None:
            with torch.no_grad():
                ops.query_split_attention(*leaves, context=context)

        return forward
    for leaf in leaves:
        leaf.requires_grad_()
    y = ops.query_split_attention(*leaves, context=context)
    grad_y = draw(own_rows, batch, wanted.N)
    return lambda: torch.autograd.grad(y, leaves, grad_y, retain_graph=True)


def _asked_path(config: OverlapConfig, pass_name: str) -> tuple[str, ...]:
    """The paths that a pass may take."""
    chosen = config.attention
    if chosen.path == "auto":
        return ("sequential", "row_parallel", "query_split")
    if chosen.path == "query_split" and pass_name == "backward":
        return ("row_parallel", "query_split") if chosen.backward == "auto" else (chosen.backward,)
    return (chosen.path,)


def _records(context: OverlapContext, pass_name: str) -> tuple[OpRecord, OpRecord | None]:
    """(of the block, of the linear that its projection is, if it is one)."""
    met = [record for record in context.report() if record.pass_name == pass_name]
    (block,) = [record for record in met if record.op == _OP]
    if block.path != "row_parallel":
        return block, None
    return block, next((record for record in met if record.op == "linear_reduce_scatter"), None)


def _recorded(
    wanted: BlockToTrace,
    call: Callable[[], object],
    counted: Callable[[], object],
    context: OverlapContext,
    *,
    is_watched: bool,
) -> list[Recording]:
    """From the context's recorder and, where a collective is plain, from watching it."""
    own, outside = context.recorder, Recorder(context.device)
    assert own is not None
    session = Session(lambda: [own, outside])
    mine: list[list[Interval]] = []
    with contextlib.ExitStack() as stack:
        if is_watched:
            stack.enter_context(recorded_calls(outside))
            call()  # watching, too, is slow the first time
        for _ in range(wanted.calls):
            session.start(context.group, context.device)
            counted()
            scheduled, watched = session.finish()
            mine.append(sorted(scheduled + drop_nested(watched, scheduled), key=lambda i: i.start_us))
    return [gather_recording(intervals, context.group) for intervals in mine]


def _profiled(
    wanted: BlockToTrace, counted: Callable[[], object], group: dist.ProcessGroup, device: torch.device
) -> list[Recording]:
    def prepare(_: int) -> None:
        meet(group, device)
        start_together(group, device, HEAD_START_US)

    own = profile_calls([counted] * wanted.calls, prepare=prepare, are_apart=True)
    return split_calls(gather_profile(own, group), wanted.calls)


def _by_kind(recording: Mapping[int, Sequence[Interval]]) -> Recording:
    """The same, all of one call, with the kind of work in the place of the operation: equal for both sources."""
    return {
        rank: [dataclasses.replace(i, op=_kind(i), call=1) for i in intervals] for rank, intervals in recording.items()
    }


def _kind(interval: Interval) -> str:
    if interval.track != COMPUTE:
        return "transfers"
    if is_attention(interval):
        return "attention"
    return "GEMMs" if is_gemm(interval) else "sums and other kernels"


def _duration_us(recording: Mapping[int, Sequence[Interval]]) -> float:
    everything = [i for intervals in recording.values() for i in intervals]
    return max((i.end_us for i in everything), default=0.0) - min((i.start_us for i in everything), default=0.0)
