"""Replays programs: issues batches, waits for arrivals, hands slices to the caller's GEMM.

An all-gather and a reduce-scatter are two small state machines that an op drives step by step, so that one pass can
interleave both (a column-parallel backward gathers x again under the dgrad slices whose partials it sends). Streams:

    compute   [slice 0][slice 1      ][slice 2      ]...[own slice][sum]
    transfer           [send 0, recv 0][send 1, recv 1]...         ^ waits for the last arrival

Each batch is issued before the slice it runs beside and starts once the slice before it is done, which is when what it
sends is complete; no slice waits for a transfer that its own result does not need.
"""

from collections.abc import Callable

import torch

from commfuse_megatron.runtime.binding import BoundSchedule
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.runtime.program import GatherProgram, ScatterProgram, StepPlaces, split_rows
from commfuse_megatron.transport.base import Message, Transfer

__all__ = ["AllGatherRun", "Produce", "ReduceScatterRun"]

#: Multiplies one chunk: (flat chunk, out, addend or several [P, M, N] of them, the last transfer in flight).
Produce = Callable[[int, torch.Tensor, torch.Tensor | None, Transfer | None], None]


class _Run:
    """What both directions share: the batches in flight of one call."""

    __slots__ = ("_link", "_places", "_steps", "_tag_base", "_transfers", "bound", "label", "num_steps")

    def __init__(self, link: Link, bound: BoundSchedule, places: StepPlaces, label: str) -> None:
        self._link = link
        self._places = places
        self.bound = bound
        self.label = label
        self._steps = bound.steps
        self.num_steps = len(bound.steps)
        self._tag_base = link.next_tags(len(bound.chunk_rows))
        self._transfers: dict[int, Transfer] = {}

    def _start(self, index: int, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        step = self._steps[index]
        send = receive = None
        send_place, receive_place = self._places[index]
        if source is not None and step.send is not None:
            send = Message(source, step.send[1], self._tag_base + step.send[0], send_place)
        if target is not None and step.receive is not None:
            receive = Message(target, step.receive[1], self._tag_base + step.receive[0], receive_place)
        if send is not None or receive is not None:
            self._transfers[index] = self._link.start(self, index, send, receive)

    def arrive(self, index: int | None) -> None:
        """Wait for batch `index`, once; nothing to do when it had no rows."""
        if index is not None and (transfer := self._transfers.pop(index, None)) is not None:
            self._link.finish(self, index, transfer)

    @property
    def in_flight(self) -> Transfer | None:
        """The last batch issued that no slice has waited for: it may be running beside the next slice."""
        return next(reversed(self._transfers.values()), None)

    def finish(self) -> None:
        """Wait for everything still in flight: sends have left and all chunks have arrived, in stream order."""
        for index in list(self._transfers):
            self.arrive(index)


class AllGatherRun(_Run):
    """Gathers [M_r, features] shards; step by step, the caller multiplies each chunk as it arrives.

    Call `issue(t)` and `chunk(t)` for all steps in order, then `finish()`. `gathered` is where others' chunks go
    (default: the program's buffer); the own shard is used where it lies.
    """

    __slots__ = ("_chunks",)

    def __init__(
        self,
        link: Link,
        program: GatherProgram,
        shard: torch.Tensor,
        gathered: torch.Tensor | None = None,
        label: str = "all-gather",
    ) -> None:
        super().__init__(link, program.bound, program.places(), label)
        chunks = program.chunks() if gathered is None else split_rows(gathered, program.bound.chunk_rows)
        own = program.bound.own_chunks
        chunks[own.start : own.stop] = split_rows(shard, program.own_rows)
        self._chunks = chunks

    def issue(self, index: int) -> None:
        """Start the batch of step `index`, after the arrival that it forwards, if it does."""
        step = self._steps[index]
        if step.is_forward:
            self.arrive(step.needs_batch)
        source = None if step.send is None else self._chunks[step.send[0]]
        target = None if step.receive is None else self._chunks[step.receive[0]]
        self._start(index, source, target)

    def chunk(self, index: int) -> tuple[int, torch.Tensor, Transfer | None] | None:
        """(flat chunk, its rows, the last transfer in flight) of step `index`; None when it is empty."""
        step = self._steps[index]
        if step.compute is None:
            return None
        self.arrive(step.needs_batch)
        return step.compute, self._chunks[step.compute], self.in_flight


class ReduceScatterRun(_Run):
    """Sums [M, features] partials of all ranks into this rank's shard `out`.

    `produce` computes one chunk's partial. Call `step(t)` for all steps in order, then `finish()`; what is put between
    the last step and `finish` runs beside the last transfer.
    """

    __slots__ = ("_bias", "_folds", "_gemm", "_out", "_out_chunks", "_produce", "_program", "first_own_step")

    def __init__(
        self,
        link: Link,
        program: ScatterProgram,
        produce: Produce,
        out: torch.Tensor,
        gemm: SliceGemm,
        bias: torch.Tensor | None = None,
    ) -> None:
        program.refresh()
        super().__init__(link, program.bound, program.places, "reduce-scatter")
        self._program = program
        self._produce = produce
        self._gemm = gemm
        self._bias = bias
        self._out = out
        self._out_chunks = split_rows(out, program.own_rows)
        self._folds = program.folds_arrivals and bias is None and program.has_transfers
        #: From this step on all chunks are this rank's own, and all sends are issued.
        self.first_own_step = self.num_steps - len(program.own_rows)

    def step(self, index: int) -> None:
        """Start the batch of step `index` and compute its partial."""
        self.issue(index)
        self.compute(index)

    def issue(self, index: int) -> None:
        """Start the batch of step `index`."""
        step, program = self._steps[index], self._program
        source = None if step.send is None else program.partials[step.send[0]]
        target = None if step.receive is None else program.slots[step.receive_slot]
        self._gemm.join()  # what is sent must be complete
        self._start(index, source, target)

    def compute(self, index: int) -> None:
        """Compute the partial of step `index`."""
        step, program = self._steps[index], self._program
        chunk = step.compute
        if chunk is None:
            return
        own = chunk - self.bound.own_chunks.start
        if program.is_ring and step.needs_batch is not None:
            self._add_running_sum(chunk, step.needs_batch, self._out_chunks[own] if step.is_own else None)
        elif step.is_own and self._folds:
            self._produce(chunk, self._out_chunks[own], self._arrived(own), self.in_flight)
        elif step.is_own:
            target = self._out_chunks[own] if program.own is None else program.own[own]
            self._produce(chunk, target, None if program.has_transfers else self._bias, self.in_flight)
        else:
            self._produce(chunk, program.partials[chunk], None, self.in_flight)

    def finish(self) -> None:
        """Add what arrived, wait for the sends: `out` is complete in stream order."""
        self._gemm.join()
        if self._folds:
            pass  # every own chunk was added to what had arrived
        elif self._program.has_transfers and not self._program.is_ring:
            self._sum_owned()
        elif self._program.has_transfers and self._bias is not None:
            self._out.add_(self._bias)
        super().finish()

    def _add_running_sum(self, chunk: int, batch: int, own: torch.Tensor | None) -> None:
        program = self._program
        out = program.partials[chunk] if own is None else own
        running_sum = program.slots[self._steps[batch].receive_slot]
        if program.folds_sum:
            self.arrive(batch)
            self._produce(chunk, out, running_sum, self.in_flight)
            return
        assert program.own is not None
        partial = program.own[chunk]
        self._produce(chunk, partial, None, self.in_flight)
        self.arrive(batch)
        self._gemm.join()
        self._sum(partial, running_sum.unsqueeze(0), out, None)

    def _sum_owned(self) -> None:
        own_chunks = self._out_chunks if self._program.own is None else self._program.own
        for index, out in enumerate(self._out_chunks):
            self._sum(own_chunks[index], self._arrived(index), out, self._bias)

    def _arrived(self, index: int) -> torch.Tensor:
        """[senders, rows, features]: the other ranks' partials of own chunk `index`, once they are here."""
        arrived, chunks_per_shard = self._program.arrived, self.bound.schedule.chunks_per_shard
        assert arrived is not None
        # Chunk `index` comes with batches index+1, m+index+1, ...: its sum runs beside the next arrival.
        for sender in range(arrived.size(0)):
            self.arrive(sender * chunks_per_shard + index + 1)
        return self._program.arrived_chunks[index]

    def _sum(self, own: torch.Tensor, arrived: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        mark = self._link.mark()
        self._gemm.sum_arrived(own, arrived, out, bias)
        self._link.note_compute("sum", mark, None)
