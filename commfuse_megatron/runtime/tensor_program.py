"""Runs programs on tensors: over gloo, NCCL, or the copy engine where cuBLASLt does not serve.

A program becomes a list of closures once per pass. A call cuts its tensors into the rows that the program names, and
goes through the list. On GPUs the waits are put into streams; on the CPU they block.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from commfuse_megatron.runtime.buffers import PassBuffers, buffers_of
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.lanes import Lanes
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.schedule.actions import Algorithm
from commfuse_megatron.schedule.binding import BoundSchedule
from commfuse_megatron.schedule.program import (
    GATHER,
    SCATTER,
    After,
    Batch,
    Channel,
    Compute,
    Copy,
    Finish,
    Fork,
    Gemm,
    Issue,
    Join,
    Message,
    On,
    Program,
    Rows,
    Sum,
    Wait,
    WeightGrad,
)
from commfuse_megatron.transport import base
from commfuse_megatron.transport.base import Place, Transfer

__all__ = ["Kernel", "TensorProgram"]

#: Computes what a `Compute` op says: (chunk, what it reads, what it writes).
Kernel = Callable[[int, list[torch.Tensor], list[torch.Tensor]], None]


class _Frame:
    """One call under way."""

    __slots__ = ("kernels", "tags", "tensors", "transfers", "views")

    views: list[torch.Tensor]
    tensors: Mapping[str, torch.Tensor]
    kernels: Mapping[str, Kernel]
    transfers: dict[Batch, Transfer]
    tags: dict[Channel, int]


_Step = Callable[[_Frame], None]


@dataclass(slots=True)
class _Run:
    """One collective of a program, as far as messages need it."""

    label: str
    bound: BoundSchedule


class TensorProgram:
    """A program bound to the buffers of a pass; valid until one of them grows.

    brings: the names of operands that calls bring. A buffer's name among them: the call has another one.
    """

    def __init__(
        self,
        program: Program,
        buffers: PassBuffers,
        link: Link,
        gemm: SliceGemm,
        lanes: Lanes,
        brings: frozenset[str],
    ) -> None:
        self._link, self._gemm, self._lanes = link, gemm, lanes
        labels = {GATHER: program.gather_label, SCATTER: "reduce-scatter"}
        self._runs = {channel: _Run(labels[channel], bound) for channel, bound in program.schedules.items()}
        self._buffers = buffers
        self._brings = brings
        self._open: dict[Batch, None] = {}  # while steps are made: issued and not waited for
        self._index: dict[tuple[Rows, ...], int] = {}
        self._static: list[torch.Tensor | None] = []
        self._cuts: list[tuple[int, str, int, int]] = []
        scatter = program.scatter
        self._is_stacked = scatter is not None and scatter.schedule.algorithm is Algorithm.DIRECT
        self._bounds = buffers_of(program, brings)
        buffers.reserve(self._bounds)
        self.generation = buffers.generation
        self._uses_lanes = any(isinstance(op, Fork) for op in program.ops)
        self._steps = tuple(step for op in program.ops if (step := self._step(op)) is not None)
        self._names = frozenset(name for _, name, _, _ in self._cuts)
        buffers.note_views(self)

    def drop_views(self) -> None:
        """Let go of all views of buffers: what is void is not run."""
        self._static.clear()

    def run(self, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]) -> None:
        """Run one call: inside the pass's with-block.

        tensors: operands by name, [..., features] with contiguous rows, and "weight", "bias" and "grad_weight" where
        the program uses them. kernels: by the kind of `Compute`.
        """
        frame = _Frame()
        flat = {}
        for name in self._names:
            tensor = tensors[name]
            flat[name] = tensor if tensor.dim() == 2 else tensor.flatten(0, -2)
        views = self._static.copy()
        for index, name, start, stop in self._cuts:
            rows = flat[name]
            views[index] = rows if start == 0 and stop == rows.size(0) else rows[start:stop]
        frame.views = views  # type: ignore[assignment]  # all are there now
        frame.tensors, frame.kernels = tensors, kernels
        frame.transfers = {}
        frame.tags = {channel: self._link.next_tags(len(run.bound.chunk_rows)) for channel, run in self._runs.items()}
        if self._uses_lanes:
            with self._lanes.in_use():
                for step in self._steps:
                    step(frame)
            return
        for step in self._steps:
            step(frame)

    # -- views ------------------------------------------------------------------------------------------------------

    def _view(self, *rows: Rows) -> int:
        """The number of the view of these rows: several are one stack [P, rows, features], at equal distances."""
        found = self._index.get(rows)
        if found is not None:
            return found
        found = self._index[rows] = len(self._static)
        operand, start, count = rows[0].operand, rows[0].start, rows[0].count
        if operand in self._brings:
            assert len(rows) == 1
            self._static.append(None)
            self._cuts.append((found, operand, start, start + count))
        elif len(rows) == 1:
            self._static.append(self._buffer(operand)[start : start + count])
        else:
            whole, distance = self._buffer(operand), rows[1].start - start
            features = whole.size(1)
            assert all(b.start - a.start == distance for a, b in itertools.pairwise(rows))
            shape, strides = (len(rows), count, features), (distance * features, features, 1)
            self._static.append(whole.as_strided(shape, strides, whole.storage_offset() + start * features))
        return found

    def _buffer(self, name: str) -> torch.Tensor:
        return self._buffers.tensor(name, self._bounds[name])

    # -- ops --------------------------------------------------------------------------------------------------------

    def _step(self, op: object) -> _Step | None:
        match op:
            case Gemm():
                return self._gemm_step(op)
            case Issue():
                return self._issue_step(op)
            case Wait():
                return self._wait_step(op)
            case Sum():
                return self._sum_step(op)
            case WeightGrad():
                return self._weight_grad_step(op)
            case Compute():
                return self._compute_step(op)
            case Copy():
                target, source = self._view(op.target), self._view(op.source)
                return lambda frame: _copy(frame.views[target], frame.views[source])
            case Finish():
                return self._finish_step()
            case Fork() | On() | After() | Join():
                return self._lane_step(op)
        raise AssertionError(op)

    def _gemm_step(self, op: Gemm) -> _Step:
        link, gemm = self._link, self._gemm
        a, out, name, beside = self._view(op.a), self._view(op.out), f"multiply {op.chunk}", self._latest_open()
        if op.chunk < 0:
            name = "multiply"
        is_forward, is_stack = op.is_forward, bool(op.adds) and op.adds[0].operand == "arrived" and self._is_stacked
        assert not (op.adds and op.has_bias)
        added = self._view(*op.adds) if op.adds else -1
        is_single = is_stack and len(op.adds) == 1
        has_bias = op.has_bias

        def step(frame: _Frame) -> None:
            views, weight = frame.views, frame.tensors["weight"]
            mark = link.mark()
            addend = frame.tensors["bias"] if has_bias else views[added] if added >= 0 else None
            if is_single and addend is not None:
                addend = addend.unsqueeze(0)
            gemm.multiply(
                views[a], weight.t() if is_forward else weight, views[out], addend, _get(frame.transfers, beside)
            )
            link.note_compute(name, mark, None)

        return step

    def _issue_step(self, op: Issue) -> _Step:
        link, run, join, channel = self._link, self._runs[op.channel], self._gemm.join, op.channel
        send, receive, step_number, batch = op.send, op.receive, op.step, (op.channel, op.step)
        sent = -1 if send is None else self._view(send.rows)
        received = -1 if receive is None else self._view(receive.rows)
        send_place = None if send is None else self._place(channel, send)
        receive_place = None if receive is None else self._place(channel, receive)
        self._open[batch] = None

        def step(frame: _Frame) -> None:
            first = frame.tags[channel]
            outgoing = incoming = None
            if send is not None:
                join()  # what is sent must be complete
                outgoing = base.Message(frame.views[sent], send.peer, first + send.chunk, send_place)
            if receive is not None:
                incoming = base.Message(frame.views[received], receive.peer, first + receive.chunk, receive_place)
            frame.transfers[batch] = link.start(run, step_number, outgoing, incoming)

        return step

    def _place(self, channel: Channel, message: Message) -> Place | None:
        return self._buffers.place(channel, message) if self._link.transport.is_one_sided else None

    def _wait_step(self, op: Wait) -> _Step | None:
        link = self._link
        first = [batch for batch in op.batches if batch in self._open]
        for batch in first:
            del self._open[batch]
        again = [batch for batch in op.batches if batch[0] in self._runs and batch not in first]
        if not first and not again:  # copies of this stream
            return None
        due = [(batch, self._runs[batch[0]]) for batch in first]

        def step(frame: _Frame) -> None:
            transfers = frame.transfers
            for batch, run in due:
                link.finish(run, batch[1], transfers[batch])
            for batch in again:  # another lane has waited
                transfers[batch].wait()

        return step

    def _finish_step(self) -> _Step:
        link, join, due = self._link, self._gemm.join, [(batch, self._runs[batch[0]]) for batch in self._open]

        def step(frame: _Frame) -> None:
            join()
            for batch, run in due:
                link.finish(run, batch[1], frame.transfers[batch])

        return step

    def _sum_step(self, op: Sum) -> _Step:
        link, gemm = self._link, self._gemm
        out, own, has_bias = self._view(op.out), self._view(op.own), op.has_bias
        added = self._view(*op.adds) if op.adds else -1
        is_single = len(op.adds) == 1

        def step(frame: _Frame) -> None:
            gemm.join()
            mark = link.mark()
            views, bias = frame.views, frame.tensors["bias"] if has_bias else None
            adds = views[added] if added >= 0 else views[own].new_empty(0, *views[own].shape)
            gemm.sum_arrived(views[own], adds.unsqueeze(0) if is_single else adds, views[out], bias)
            link.note_compute("sum", mark, None)

        return step

    def _weight_grad_step(self, op: WeightGrad) -> _Step:
        link, gemm, accumulates = self._link, self._gemm, op.accumulates
        grad, x, beside = self._view(op.grad), self._view(op.x), self._latest_open()

        def step(frame: _Frame) -> None:
            views, out = frame.views, frame.tensors["grad_weight"]
            mark = link.mark()
            if accumulates:
                gemm.accumulate(views[grad].t(), views[x], out, _get(frame.transfers, beside))
            else:
                gemm.multiply(views[grad].t(), views[x], out, beside=_get(frame.transfers, beside))
            gemm.join()
            link.note_compute("wgrad", mark, None)

        return step

    def _compute_step(self, op: Compute) -> _Step:
        link, kind, chunk, name = self._link, op.kind, op.chunk, f"{op.kind} {op.chunk}" if op.chunk >= 0 else op.kind
        reads, writes = [self._view(rows) for rows in op.reads], [self._view(rows) for rows in op.writes]

        def step(frame: _Frame) -> None:
            mark = link.mark()
            views = frame.views
            frame.kernels[kind](chunk, [views[index] for index in reads], [views[index] for index in writes])
            link.note_compute(name, mark, None)

        return step

    def _lane_step(self, op: Fork | On | After | Join) -> _Step:
        lanes = self._lanes
        match op:
            case Fork():
                return lambda frame: lanes.fork(op.lanes)
            case On():
                return lambda frame: lanes.on(op.lane)
            case After():
                return lambda frame: lanes.after(op.lane)
            case Join():
                return lambda frame: lanes.join(op.lanes)

    def _latest_open(self) -> Batch | None:
        """The batch that may run beside what comes next, which gets SMs then: the scatter's before the gather's."""
        of_scatter = [batch for batch in self._open if batch[0] == SCATTER]
        return next(reversed(of_scatter or list(self._open)), None)


def _get(transfers: Mapping[Batch, Transfer], batch: Batch | None) -> Transfer | None:
    return None if batch is None else transfers.get(batch)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
