"""Runs programs on tensors: over gloo and NCCL whole ones, over the copy engine the kernels of some (`tape_program`).

A program becomes a list of closures once per pass. A call cuts its tensors into the rows that the program names, and
goes through the list. On GPUs the waits are put into streams; on the CPU they block.
"""

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch

from commfuse_megatron.runtime.buffers import PassBuffers, buffers_of
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.hardware import Hardware
from commfuse_megatron.runtime.lanes import Lanes
from commfuse_megatron.runtime.link import Link, Watched
from commfuse_megatron.schedule import program as prog
from commfuse_megatron.schedule.actions import Algorithm
from commfuse_megatron.transport import base
from commfuse_megatron.transport.base import Transfer

#: Computes what a `Compute` op says: (chunk, what it reads, what it writes).
Kernel = Callable[[int, list[torch.Tensor], list[torch.Tensor]], None]


class Means(NamedTuple):
    """What the programs of one pass are bound to."""

    buffers: PassBuffers
    link: Link
    gemm: SliceGemm
    lanes: Lanes
    hardware: Hardware


class Frame:
    """One call under way."""

    __slots__ = ("kernels", "tags", "tensors", "transfers", "views")

    views: list[torch.Tensor]
    tensors: Mapping[str, torch.Tensor]
    kernels: Mapping[str, Kernel]
    transfers: dict[prog.Batch, Transfer]
    tags: dict[prog.Channel, int]


FrameStep = Callable[[Frame], object]


def name_of(op: prog.Computation) -> str:
    """What the recorder calls a computation."""
    match op:
        case prog.Gemm():
            return f"multiply {op.chunk}" if op.chunk >= 0 else "multiply"
        case prog.Sum():
            return "sum"
        case prog.WeightGrad():
            return "wgrad"
    return f"{op.kind} {op.chunk}" if op.chunk >= 0 else op.kind


class TensorKernels:
    """The computations of a program, bound to the buffers of a pass; valid until one of them grows.

    brings: the names of operands that calls bring. A buffer's name among them: the call has another one.
    """

    def __init__(self, program: prog.Program, means: Means, brings: frozenset[str]) -> None:
        buffers = self._buffers = means.buffers
        self._link, self._multiplier, self._brings = means.link, means.gemm, brings
        self._index: dict[tuple[prog.Rows, ...], int] = {}
        self._static: list[torch.Tensor | None] = []
        self._cuts: list[tuple[int, str, int, int]] = []
        scatter = program.scatter
        self._is_stacked = scatter is not None and scatter.schedule.algorithm is Algorithm.DIRECT
        self._bounds = buffers_of(program, brings)
        buffers.reserve(self._bounds)
        self.generation = buffers.generation
        buffers.slots.note_views(self)

    def drop_views(self) -> None:
        """Let go of all views of buffers: what is void is not run."""
        self._static.clear()

    def frame(self, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]) -> Frame:
        """A call: operands by name, [..., features] with contiguous rows, and "weight", "bias" and "grad_weight" where
        the program uses them. kernels: by the kind of `Compute`."""
        frame = Frame()
        flat: dict[str, torch.Tensor] = {}
        views = self._static.copy()
        for index, name, start, stop in self._cuts:
            rows = flat.get(name)
            if rows is None:
                tensor = tensors[name]
                rows = flat[name] = tensor if tensor.dim() == 2 else tensor.flatten(0, -2)
            views[index] = rows if start == 0 and stop == rows.size(0) else rows[start:stop]
        frame.views = views  # type: ignore[assignment]  # all are there now
        frame.tensors, frame.kernels = tensors, kernels
        frame.transfers = {}
        return frame

    def step(self, op: prog.Computation, beside: prog.Batch | None = None) -> FrameStep:
        """What runs a computation. beside: the transfer that may run meanwhile, whose SMs it leaves alone."""
        match op:
            case prog.Gemm():
                return self._gemm(op, beside)
            case prog.Sum():
                return self._sum(op)
            case prog.WeightGrad():
                return self._weight_grad(op, beside)
        return self._compute(op)

    # -- views ------------------------------------------------------------------------------------------------------

    def view(self, *rows: prog.Rows) -> int:
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

    # -- computations -----------------------------------------------------------------------------------------------

    def _gemm(self, op: prog.Gemm, beside: prog.Batch | None) -> FrameStep:
        link, gemm, name = self._link, self._multiplier, name_of(op)
        a, out = self.view(op.a), self.view(op.out)
        is_forward, is_stack = op.is_forward, bool(op.adds) and op.adds[0].operand == "arrived" and self._is_stacked
        assert not (op.adds and op.has_bias)
        added = self.view(*op.adds) if op.adds else -1
        is_single = is_stack and len(op.adds) == 1
        has_bias = op.has_bias

        def step(frame: Frame) -> None:
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

    def _sum(self, op: prog.Sum) -> FrameStep:
        link, gemm = self._link, self._multiplier
        out, own, has_bias = self.view(op.out), self.view(op.own), op.has_bias
        added = self.view(*op.adds) if op.adds else -1
        is_single = len(op.adds) == 1

        def step(frame: Frame) -> None:
            gemm.join()
            mark = link.mark()
            views, bias = frame.views, frame.tensors["bias"] if has_bias else None
            adds = views[added] if added >= 0 else views[own].new_empty(0, *views[own].shape)
            gemm.sum_arrived(views[own], adds.unsqueeze(0) if is_single else adds, views[out], bias)
            link.note_compute("sum", mark, None)

        return step

    def _weight_grad(self, op: prog.WeightGrad, beside: prog.Batch | None) -> FrameStep:
        link, gemm, accumulates = self._link, self._multiplier, op.accumulates
        grad, x = self.view(op.grad), self.view(op.x)

        def step(frame: Frame) -> None:
            views, out = frame.views, frame.tensors["grad_weight"]
            mark = link.mark()
            if accumulates:
                gemm.accumulate(views[grad].t(), views[x], out, _get(frame.transfers, beside))
            else:
                gemm.multiply(views[grad].t(), views[x], out, beside=_get(frame.transfers, beside))
            gemm.join()
            link.note_compute("wgrad", mark, None)

        return step

    def _compute(self, op: prog.Compute) -> FrameStep:
        link, kind, chunk, name = self._link, op.kind, op.chunk, name_of(op)
        reads, writes = [self.view(rows) for rows in op.reads], [self.view(rows) for rows in op.writes]

        def step(frame: Frame) -> None:
            mark = link.mark()
            views = frame.views
            frame.kernels[kind](chunk, [views[index] for index in reads], [views[index] for index in writes])
            link.note_compute(name, mark, None)

        return step


class TensorProgram:
    """A program over a transport with two sides; valid until a buffer of its pass grows."""

    def __init__(self, program: prog.Program, means: Means, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: operands like those of the calls, by name."""
        self._link, self._gemm, self._lanes = means.link, means.gemm, means.lanes
        self._kernels = TensorKernels(program, means, frozenset(tensors))
        self.generation = self._kernels.generation
        self._program = program
        self._tags = {channel: len(bound.chunk_rows) for channel, bound in program.schedules.items()}
        self._open: dict[prog.Batch, Watched] = {}  # while steps are made: issued and not waited for
        self._uses_lanes = any(isinstance(op, prog.Fork) for op in program.ops)
        parts: list[list[FrameStep]] = [[]]
        for op in program.ops:
            step = self._step(op)
            if isinstance(op, prog.Pause):
                parts.append([])
            elif step is not None:
                parts[-1].append(step)
        self._parts = tuple(map(tuple, parts))

    @property
    def num_parts(self) -> int:
        """Parts of a call, with a pause between any two."""
        return len(self._parts)

    def begin(self, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]) -> Frame:
        """A call whose parts are to be run. tensors, kernels: see `TensorKernels.frame`."""
        frame = self._kernels.frame(tensors, kernels)
        frame.tags = {channel: self._link.next_tags(count) for channel, count in self._tags.items()}
        return frame

    def run_part(self, frame: Frame, number: int) -> None:
        """Run one part of a call, all of which are run, in their order."""
        with self._lanes.in_use() if self._uses_lanes else nullcontext():
            for step in self._parts[number]:
                step(frame)

    def run_held(self, frame: Frame, number: int) -> None:
        """Run what was held back at a pause, behind the caller's kernel: nothing, transfers have begun at once."""

    def run(self, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]) -> None:
        """Run one call: inside the pass's with-block. tensors, kernels: see `TensorKernels.frame`."""
        frame = self.begin(tensors, kernels)
        for number in range(len(self._parts)):
            self.run_part(frame, number)

    def _step(self, op: prog.Op) -> FrameStep | None:
        match op:
            case prog.Gemm() | prog.Sum() | prog.WeightGrad() | prog.Compute():
                return self._kernels.step(op, self._latest_open())
            case prog.Issue():
                return self._issue_step(op)
            case prog.Wait():
                return self._wait_step(op)
            case prog.Copy():
                target, source = self._kernels.view(op.target), self._kernels.view(op.source)
                return lambda frame: frame.views[target].copy_(frame.views[source])
            case prog.Finish():
                return self._finish_step()
            case prog.Pause():
                return None
        return self._lane_step(op)

    def _issue_step(self, op: prog.Issue) -> FrameStep:
        link, join, channel, batch = self._link, self._gemm.join, op.channel, (op.channel, op.step)
        send, receive = op.send, op.receive
        sent = -1 if send is None else self._kernels.view(send.rows)
        received = -1 if receive is None else self._kernels.view(receive.rows)
        watched = self._open[batch] = Watched.of(self._program, op)

        def step(frame: Frame) -> None:
            first = frame.tags[channel]
            outgoing = incoming = None
            if send is not None:
                join()  # what is sent must be complete
                outgoing = base.Message(frame.views[sent], send.peer, first + send.chunk)
            if receive is not None:
                incoming = base.Message(frame.views[received], receive.peer, first + receive.chunk)
            frame.transfers[batch] = link.start(watched, outgoing, incoming)

        return step

    def _wait_step(self, op: prog.Wait) -> FrameStep | None:
        link = self._link
        first = {batch: self._open.pop(batch) for batch in op.batches if batch in self._open}
        again = [batch for batch in op.batches if batch[0] in self._tags and batch not in first]
        if not first and not again:  # copies of this stream
            return None
        due = list(first.items())

        def step(frame: Frame) -> None:
            transfers = frame.transfers
            for batch, watched in due:
                link.finish(watched, transfers[batch])
            for batch in again:  # another lane has waited
                transfers[batch].wait()

        return step

    def _finish_step(self) -> FrameStep:
        link, join, due = self._link, self._gemm.join, list(self._open.items())

        def step(frame: Frame) -> None:
            join()
            for batch, watched in due:
                link.finish(watched, frame.transfers[batch])

        return step

    def _lane_step(self, op: prog.Fork | prog.On | prog.After | prog.Join) -> FrameStep:
        lanes = self._lanes
        match op:
            case prog.Fork():
                return lambda frame: lanes.fork(op.lanes)
            case prog.On():
                return lambda frame: lanes.on(op.lane)
            case prog.After():
                return lambda frame: lanes.after(op.lane)
            case prog.Join():
                return lambda frame: lanes.join(op.lanes)

    def _latest_open(self) -> prog.Batch | None:
        """The batch that may run beside what comes next, which gets SMs then: the scatter's before the gather's."""
        of_scatter = [batch for batch in self._open if batch[0] == prog.SCATTER]
        return next(reversed(of_scatter or list(self._open)), None)


def _get(transfers: Mapping[prog.Batch, Transfer], batch: prog.Batch | None) -> Transfer | None:
    return None if batch is None else transfers.get(batch)
