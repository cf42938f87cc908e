"""Replays bound schedules: issues batches, waits for arrivals, hands slices to the caller's GEMM.

An all-gather and a reduce-scatter are two small state machines that an op drives step by step, so that one pass can
interleave both (a column-parallel backward gathers x again under the dgrad slices whose partials it sends). Streams:

    compute   [slice 0][slice 1      ][slice 2      ]...[own slice][sum]
    transfer           [send 0, recv 0][send 1, recv 1]...         ^ waits for the last arrival

Each batch is issued before the slice it runs beside and starts once the slice before it is done, which is when what it
sends is complete; no slice waits for a transfer that its own result does not need.
"""

from collections.abc import Callable

import torch

from commfuse_megatron.runtime.binding import BoundSchedule, BoundStep
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.transport.base import Message, Transfer

__all__ = ["AllGatherRun", "ReduceScatterRun"]

#: Multiplies one chunk: (flat chunk, out, addend, is_beside_transfer).
Produce = Callable[[int, torch.Tensor, torch.Tensor | None, bool], None]


class _Run:
    """What both directions share: the batches in flight of one call."""

    def __init__(self, link: Link, bound: BoundSchedule, label: str) -> None:
        self._link = link
        self._bound = bound
        self._label = label
        self._tag_base = link.next_tags(len(bound.chunk_rows))
        self._transfers: dict[int, Transfer] = {}
        self.num_steps = len(bound.steps)

    def _start(self, index: int, step: BoundStep, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        send = receive = None
        if step.send is not None and source is not None:
            send = Message(source, step.send[1], self._tag_base + step.send[0])
        if step.receive is not None and target is not None:
            receive = Message(target, step.receive[1], self._tag_base + step.receive[0])
        if send is not None or receive is not None:
            self._transfers[index] = self._link.start(self, index, send, receive)

    def _arrive(self, index: int | None) -> None:
        """Wait for batch `index`, once; nothing to do when it had no rows."""
        if index is not None and (transfer := self._transfers.pop(index, None)) is not None:
            self._link.finish(self, index, transfer)

    def _arrive_all(self) -> None:
        for index in sorted(self._transfers):
            self._arrive(index)

    def describe(self, index: int) -> tuple[str, BoundSchedule]:
        """For error messages: the operation and step, and the schedule it belongs to."""
        return f"{self._label}, step {index} of {self.num_steps}", self._bound


class AllGatherRun(_Run):
    """Gathers [rows, features] shards into `gathered`; step by step, the caller multiplies each chunk as it arrives.

    The own shard is not copied into `gathered`: `chunk_of` gives each step its input. Call `issue(t)` and `chunk(t)`
    for all steps in order, then `finish()`.
    """

    def __init__(
        self, link: Link, bound: BoundSchedule, shard: torch.Tensor, gathered: torch.Tensor, label: str = "all-gather"
    ) -> None:
        super().__init__(link, bound, label)
        self._chunks = list(gathered.split(bound.chunk_rows))
        own = shard.split([bound.chunk_rows[chunk] for chunk in bound.own_chunks])
        self._chunks[bound.own_chunks.start : bound.own_chunks.stop] = own

    def issue(self, index: int) -> None:
        """Start the batch of step `index`, after the arrival that it forwards, if it does."""
        step = self._bound.steps[index]
        if step.is_forward:
            self._arrive(step.needs_batch)
        source = self._chunks[step.send[0]] if step.send is not None else None
        target = self._chunks[step.receive[0]] if step.receive is not None else None
        self._start(index, step, source, target)

    def chunk(self, index: int) -> tuple[int, torch.Tensor, bool] | None:
        """(flat chunk, its rows, whether transfers may be in flight) of step `index`; None when it is empty."""
        step = self._bound.steps[index]
        if step.compute is None:
            return None
        self._arrive(step.needs_batch)
        return step.compute, self._chunks[step.compute], not step.is_last_use

    def finish(self) -> None:
        """Wait for everything still in flight: sends have left, and all chunks have arrived."""
        self._arrive_all()


class ReduceScatterRun(_Run):
    """Sums [rows, features] partials of all ranks into this rank's shard `out`.

    `produce` computes one chunk's partial. Call `step(t)` for all steps in order, then `finish()`; what is put between
    the last step and `finish` runs beside the last transfer.
    """

    def __init__(
        self,
        link: Link,
        bound: BoundSchedule,
        produce: Produce,
        out: torch.Tensor,
        *,
        gemm: SliceGemm,
        bias: torch.Tensor | None = None,
        label: str = "reduce-scatter",
    ) -> None:
        super().__init__(link, bound, label)
        self._produce = produce
        self._gemm = gemm
        self._bias = bias
        self._out = out
        features = out.size(1)
        own_rows = [bound.chunk_rows[chunk] for chunk in bound.own_chunks]
        is_alone = not bound.slot_rows
        self._is_ring = bound.schedule.algorithm is Algorithm.RING
        # With one chunk per shard a ring step adds what arrives beside its own GEMM, so the sum comes after it; with
        # more, the sum arrived a step earlier and the GEMM adds it on the way out.
        self._folds_sum = self._is_ring and bound.schedule.chunks_per_shard > 1
        others = list(bound.chunk_rows)
        others[bound.own_chunks.start : bound.own_chunks.stop] = [0] * len(own_rows)
        self._partials = link.carve("send", (sum(others), features), out.dtype).split(others)
        self._received = link.carve("receive", (sum(bound.slot_rows), features), out.dtype)
        self._slots = self._received.split(bound.slot_rows) if bound.slot_rows else ()
        self._out_chunks = out.split(own_rows)
        # The ring's intermediate partial, and the own partial, stay un-rounded until their sum where the GEMM can.
        if is_alone or self._folds_sum or gemm.own_dtype == out.dtype:
            self._own_chunks = self._out_chunks
        else:
            self._own_chunks = link.carve("own", (sum(own_rows), features), gemm.own_dtype).split(own_rows)

    def step(self, index: int) -> None:
        """Start the batch of step `index` and compute its partial."""
        step = self._bound.steps[index]
        source = self._partials[step.send[0]] if step.send is not None else None
        target = self._slots[step.receive_slot] if step.receive is not None else None
        self._start(index, step, source, target)
        if step.compute is None:
            return
        own = step.compute - self._bound.own_chunks.start
        if self._is_ring and step.needs_batch is not None:
            out = self._out_chunks[own] if step.is_own else self._partials[step.compute]
            self._add_running_sum(step, out)
        elif step.is_own:
            alone = self._bias if not self._bound.slot_rows else None
            self._produce(step.compute, self._own_chunks[own], alone, bool(self._bound.slot_rows))
        else:
            self._produce(step.compute, self._partials[step.compute], None, True)

    def finish(self) -> None:
        """Add what arrived, wait for the sends: `out` is complete in stream order."""
        if self._bound.slot_rows and not self._is_ring:
            self._sum_owned()
        elif self._is_ring and self._bias is not None and self._bound.slot_rows:
            self._out.add_(self._bias)
        self._arrive_all()

    def _add_running_sum(self, step: BoundStep, out: torch.Tensor) -> None:
        assert step.compute is not None
        assert step.needs_batch is not None
        running_sum = self._slots[self._bound.steps[step.needs_batch].receive_slot]
        if self._folds_sum:
            self._arrive(step.needs_batch)
            self._produce(step.compute, out, running_sum, True)
            return
        partial = self._link.carve("own", tuple(out.shape), self._gemm.own_dtype)
        self._produce(step.compute, partial, None, True)
        self._arrive(step.needs_batch)
        mark = self._link.mark()
        self._gemm.sum_arrived(partial, running_sum.unsqueeze(0), out, None)
        self._link.note_compute("sum", mark, None)

    def _sum_owned(self) -> None:
        chunks_per_shard = self._bound.schedule.chunks_per_shard
        senders = self._bound.schedule.group_size - 1
        arrived = self._received.view(senders, self._bound.own_rows, self._received.size(1))
        start = 0
        for index, (own, out) in enumerate(zip(self._own_chunks, self._out_chunks, strict=True)):
            # Chunk `index` comes with batches index+1, m+index+1, ...: the sum of one chunk runs beside the next
            # arrival.
            for sender in range(senders):
                self._arrive(sender * chunks_per_shard + index + 1)
            stop = start + out.size(0)
            mark = self._link.mark()
            self._gemm.sum_arrived(own, arrived[:, start:stop], out, self._bias)
            self._link.note_compute("sum", mark, None)
            start = stop
