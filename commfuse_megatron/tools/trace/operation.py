"""Operations traced on all ranks of a group: one linear, calls in a row, or one attention block, calls apart.

Two sources: the recorder of the context, anywhere, or the profiler, on GPUs, which sees kernels instead of what the
runtime asked for. Paths that call plain collectives are watched from outside, since they have no schedule to record.
Before each call of a block the ranks meet, since a picture of one block should begin where the block does. Knows one
context at a time; who compares paths asks once for each.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import distributed as dist

from commfuse_megatron import ops
from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.problem import shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.head_start import start_together
from commfuse_megatron.runtime.meter import COMPUTE
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.runtime.recorder import Interval, Recorder
from commfuse_megatron.tools.common.turns import meet
from commfuse_megatron.tools.trace.collectives import recorded_calls
from commfuse_megatron.tools.trace.kernels import HEAD_START_US, gather_profile, profile_calls, split_calls
from commfuse_megatron.tools.trace.session import Session, gather_recording, require_path, require_work
from commfuse_megatron.tools.trace.summary import Summary, busy_us, drop_nested, is_attention, is_gemm, summarize

_BLOCK = "query_split_attention"
#: Plans whose steps the context's recorder sees.
_SCHEDULED = ("sliced", "grouped", "bulk", "local", "query_split")

Recording = dict[int, list[Interval]]
OnCall = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToTrace:
    pass_name: Literal["fprop", "backward"]
    dtype: torch.dtype
    calls: int = 5
    warm_up: int = 5
    is_profiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearToTrace(_ToTrace):
    """What is traced. M: tokens of the full sequence; N, K: output and input features of one rank's weight."""

    op: Literal["all_gather_linear", "linear_reduce_scatter"]
    M: int
    N: int
    K: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockToTrace(_ToTrace):
    """What is traced: causal attention of one rank's heads over `rows` positions, and its projection to N features.

    forces_projection: "row_parallel" must take the path that the configuration names for the linear of this pass. Else
    that may be meant for other linears, and the record of the projection says why another was taken.
    """

    rows: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    N: int
    forces_projection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTrace:
    """The intervals of every rank (calls numbered from 1, equal times on one clock) and what the context reports."""

    recording: Recording
    record: OpRecord

    @property
    def summaries(self) -> dict[int, Summary]:
        """Every rank's numbers, per call."""
        return {rank: summarize(intervals) for rank, intervals in self.recording.items()}


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
    return busy_us(filter(is_attention, intervals))


def trace_linear(
    wanted: LinearToTrace, config: OverlapConfig, group: dist.ProcessGroup, on_call: OnCall = lambda: None
) -> LinearTrace:
    """Trace `wanted` on this rank; collective over `group`, equal results on all ranks.

    Args:
        on_call: called after every recorded or warm-up call that was submitted.

    Raises UnsupportedError, on all ranks, where another path was taken than asked for, or nothing was seen to run on
    one: the recorder does not see kernels that PyTorch does not know of, beside a plain collective or none.
    """
    op, gathers = getattr(ops, wanted.op), wanted.op == "all_gather_linear"
    with OverlapContext(group, dataclasses.replace(config, record=not wanted.is_profiled)) as context:
        own_rows = shard_range(wanted.M, context.group_size, context.group_rank).size
        shapes = [(own_rows if gathers else wanted.M, 1, wanted.K), (wanted.N, wanted.K)]
        calls = _Calls(wanted, partial(op, total_rows=wanted.M) if gathers else op, shapes, context, on_call)
        (record,) = [r for r in context.report() if r.pass_name == wanted.pass_name]
        require_path("path", config, record)
        (recording,) = calls.seen(f"{wanted.op}.{wanted.pass_name}", is_watched=record.path not in _SCHEDULED)
        if wanted.is_profiled:
            require_work(f"a call of {record.path}", split_calls(recording, wanted.calls))
        else:
            require_work(f"the calls of {record.path}", [recording])
        return LinearTrace(recording=recording, record=record)


def trace_block(
    wanted: BlockToTrace, config: OverlapConfig, group: dist.ProcessGroup, on_call: OnCall = lambda: None
) -> BlockTrace:
    """Trace `wanted` on the path that `config.attention.path` names. Collective; all ranks get all intervals.

    Under the profiler calls of the copy engine are not launched as CUDA graphs: a stream tells its copies from others.

    Args:
        on_call: called after every recorded or warm-up call that was submitted.

    Raises:
        UnsupportedError: the context took another path than asked for, of the block or of a projection that is forced,
            or nothing was seen to run in a call; on all ranks.
    """
    config = dataclasses.replace(config, record=not wanted.is_profiled)
    if wanted.is_profiled:
        config = dataclasses.replace(config, transport=dataclasses.replace(config.transport, graph_memory_mib=0))
    rows, batch, head_dim = wanted.rows, wanted.batch, wanted.head_dim
    keys = (rows, batch, wanted.kv_heads, head_dim)
    shapes = [(rows, batch, wanted.heads, head_dim), keys, keys, (wanted.N, wanted.heads * head_dim)]
    with OverlapContext(group, config) as context:
        calls = _Calls(wanted, ops.query_split_attention, shapes, context, on_call)
        records = {r.op: r for r in context.report() if r.pass_name == wanted.pass_name}
        record, projection = records[_BLOCK], records.get("linear_reduce_scatter")
        if record.path != "row_parallel":
            projection = None
        if record.path not in _asked_paths(config, wanted.pass_name):
            raise UnsupportedError(
                f"attention.path {config.attention.path} was asked for and {record.path} taken: {record.reason}"
            )
        if wanted.forces_projection and projection is not None and config.attention.path == "row_parallel":
            require_path("the projection's path", config, projection)
        is_watched = (projection or record).path not in _SCHEDULED
        recordings = calls.seen(_BLOCK, is_watched=is_watched, are_apart=True)
        require_work(f"a call of {record.path}", recordings)
        return BlockTrace(calls=tuple(map(_by_kind, recordings)), record=record, projection=projection)


class _Calls:
    """A pass of `op` on random operands, called often enough to be planned. on_call: called after each counted call."""

    def __init__(
        self,
        wanted: _ToTrace,
        op: Callable[..., torch.Tensor],
        shapes: Sequence[tuple[int, ...]],
        context: OverlapContext,
        on_call: OnCall,
    ) -> None:
        self._wanted, self._context, self._device, self._on_call = wanted, context, context.device, on_call
        generator = torch.Generator(self._device).manual_seed(context.group_rank)

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, device=self._device, dtype=wanted.dtype, generator=generator)

        leaves = [draw(shape).requires_grad_(wanted.pass_name == "backward") for shape in shapes]
        self._call: Callable[[], object] = torch.no_grad()(lambda: op(*leaves, context=context))
        if wanted.pass_name == "backward":
            y = op(*leaves, context=context)
            grad_y = draw(y.shape)
            self._call = lambda: torch.autograd.grad(y, leaves, grad_y, retain_graph=True)
        for _ in range(wanted.warm_up):
            self._counted()

    def _counted(self) -> None:
        self._call()
        self._on_call()

    def seen(self, name: str, *, is_watched: bool, are_apart: bool = False) -> list[Recording]:
        """What all ranks were seen to run: a recording of each call where they are apart, else one of all. Collective.

        By the profiler; or by the context's recorder and, where a collective is plain, from watching it.
        """
        group, num_calls = self._context.group, self._wanted.calls
        if self._wanted.is_profiled:

            def prepare(number: int) -> None:
                if not are_apart and number == 1:
                    self._call()
                if are_apart or number == 1:
                    meet(group, self._device)
                    start_together(group, self._device, HEAD_START_US)

            own = profile_calls([self._counted] * num_calls, prepare=prepare, are_apart=are_apart)
            recording = gather_profile(own, group)
            return split_calls(recording, num_calls) if are_apart else [recording]
        recorder, outside = self._context.recorder, Recorder(self._device)
        assert recorder is not None
        session = Session(lambda: [recorder, outside])
        mine: list[list[Interval]] = []
        with contextlib.ExitStack() as stack:
            if is_watched:
                stack.enter_context(recorded_calls(outside))
                self._call()  # watching, too, is slow the first time
            for count in [1] * num_calls if are_apart else [num_calls]:
                session.start(group, self._device)
                for _ in range(count):
                    outside.begin_call(name)
                    self._counted()
                scheduled, watched = session.finish()
                # The context counts all its calls; here the recorded ones are numbered from 1.
                numbers = {number: index for index, number in enumerate(sorted({i.call for i in scheduled}), 1)}
                scheduled = [dataclasses.replace(i, call=numbers[i.call]) for i in scheduled]
                mine.append(sorted(scheduled + drop_nested(watched, scheduled), key=lambda i: i.start_us))
        return [gather_recording(intervals, group) for intervals in mine]


# --- blocks -----------------------------------------------------------------------------------------------------------


def _asked_paths(config: OverlapConfig, pass_name: str) -> tuple[str, ...]:
    chosen = config.attention
    if chosen.path == "auto":
        return ("sequential", "row_parallel", "query_split")
    if chosen.path == "query_split" and pass_name == "backward":
        return ("row_parallel", "query_split") if chosen.backward == "auto" else (chosen.backward,)
    return (chosen.path,)


def _by_kind(recording: Recording) -> Recording:
    """The same, all of one call, with the kind of work in the place of the operation: equal for both sources."""

    def kind(interval: Interval) -> str:
        if interval.track != COMPUTE:
            return "transfers"
        if is_attention(interval):
            return "attention"
        return "GEMMs" if is_gemm(interval) else "sums and other kernels"

    return {rank: [dataclasses.replace(i, op=kind(i), call=1) for i in own] for rank, own in recording.items()}


def _duration_us(recording: Recording) -> float:
    everything = [i for intervals in recording.values() for i in intervals]
    return max((i.end_us for i in everything), default=0.0) - min((i.start_us for i in everything), default=0.0)
