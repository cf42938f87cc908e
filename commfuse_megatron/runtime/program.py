"""A bound schedule with its views into the context's buffers: what a call replays. Built once per problem.

Views are carved again only when a buffer grew. Everything per call that is not a transfer or a GEMM costs host time
that small problems cannot hide, so there is as little of it as possible.
"""

import torch

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.runtime.binding import BoundSchedule
from commfuse_megatron.runtime.slots import Slots
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.transport.base import MOST_FLAGS, Place, Window

__all__ = ["GatherProgram", "ScatterProgram", "StepPlaces", "split_rows"]

# Flags of messages: a gather's are below, a scatter's from here on, so that one operation may run both.
_FIRST_SCATTER_FLAG = MOST_FLAGS // 2

#: Of every step, where its send and its receive arrive; None where there is none.
StepPlaces = list[tuple[Place | None, Place | None]]


def split_rows(tensor: torch.Tensor, rows: tuple[int, ...]) -> list[torch.Tensor]:
    """Cut a [M, features] tensor into consecutive views of `rows` rows each."""
    return [tensor] if len(rows) == 1 else list(tensor.split_with_sizes(rows))


def _places(bound: BoundSchedule, window: Window, row_bytes: int, first_flag: int) -> StepPlaces:
    if len(bound.chunk_rows) > MOST_FLAGS // 2:
        raise ConfigError(
            f"{len(bound.chunk_rows)} chunks are more than {MOST_FLAGS // 2}: lower chunks_per_shard, or"
            " attention's splits_per_shard"
        )
    return [
        (
            None if step.send is None else Place(window, step.send_row * row_bytes, first_flag + step.send[0]),
            None if step.receive is None else Place(window, step.receive_row * row_bytes, first_flag + step.receive[0]),
        )
        for step in bound.steps
    ]


class GatherProgram:
    """An all-gather of [M_r, features] shards; `chunks()` are the places where others' chunks arrive."""

    def __init__(self, slots: Slots, bound: BoundSchedule, features: int, dtype: torch.dtype) -> None:
        self.bound = bound
        self.own_rows = tuple(bound.chunk_rows[chunk] for chunk in bound.own_chunks)
        self._slots = slots
        self._shape = (bound.total_rows, features)
        self._dtype = dtype
        self._generation = -1
        self._gathered: torch.Tensor | None = None
        self._chunks: list[torch.Tensor] = []
        self._places: StepPlaces = []

    def places(self) -> StepPlaces:
        """Where the messages of every step arrive."""
        self._refresh()
        return self._places

    def gathered(self) -> torch.Tensor:
        """[M, features] buffer, valid for this call."""
        self._refresh()
        assert self._gathered is not None
        return self._gathered

    def chunks(self) -> list[torch.Tensor]:
        """All chunks of the buffer, flat; a list for the caller to change."""
        self._refresh()
        return self._chunks.copy()

    def drop_views(self) -> None:
        """Let go of all views; the next call carves them again."""
        self._gathered, self._chunks, self._places = None, [], []

    def _refresh(self) -> None:
        if self._generation != self._slots.generation:
            self._make_views()

    @torch.inference_mode(False)  # a call that trains uses them next
    def _make_views(self) -> None:
        rows, features = self._shape
        gathered, window = self._slots.carve_window("gather", self._shape, self._dtype, rows * features)
        self._gathered = gathered
        self._chunks = split_rows(gathered, self.bound.chunk_rows)
        self._places = _places(self.bound, window, features * self._dtype.itemsize, 0)
        self._slots.note_views(self)
        self._generation = self._slots.generation


class ScatterProgram:
    """A reduce-scatter of [M, features] partials in `dtype`, kept in `own_dtype` until their sum.

    partials: where each chunk's partial waits to be sent, flat (own chunks: empty). slots: where partials (direct) or
    running sums (ring) arrive, in order; arrived: the same as [senders, own rows, features] for the direct sum, and cut
    into own chunks. sent: all of `partials`. folds_arrivals: the GEMMs of own chunks add what arrived, where no bias is
    to be added too.
    own: un-rounded own partials, or the ring's partial of the step in hand; None: put them into the output directly.
    """

    def __init__(
        self,
        slots: Slots,
        bound: BoundSchedule,
        features: int,
        dtype: torch.dtype,
        own_dtype: torch.dtype,
        *,
        folds_arrivals: bool = False,
    ) -> None:
        self.bound = bound
        self.folds_arrivals = folds_arrivals
        self.is_ring = bound.schedule.algorithm is Algorithm.RING
        # With one chunk per shard a ring step adds what arrives beside its own GEMM, so the sum comes after it; with
        # more, the sum arrived a step earlier and the GEMM adds it on the way out.
        self.folds_sum = self.is_ring and bound.schedule.chunks_per_shard > 1
        self.own_rows = tuple(bound.chunk_rows[chunk] for chunk in bound.own_chunks)
        self.features = features
        self.has_transfers = any(bound.slot_rows)
        is_summed_in_place = not bound.slot_rows or self.folds_sum or (own_dtype == dtype and not self.is_ring)
        self._own_dtype = None if is_summed_in_place else own_dtype
        self._slots = slots
        self._dtype = dtype
        self._generation = -1
        self.partials: list[torch.Tensor] = []
        self.slots: list[torch.Tensor] = []
        self.sent: torch.Tensor | None = None
        self.arrived: torch.Tensor | None = None
        self.arrived_chunks: list[torch.Tensor] = []
        self.own: list[torch.Tensor] | None = None
        self.places: StepPlaces = []

    def drop_views(self) -> None:
        """Let go of all views; the next call carves them again."""
        self.partials, self.slots, self.arrived_chunks, self.places = [], [], [], []
        self.sent = self.arrived = self.own = None

    def refresh(self) -> None:
        """Make the views valid for this call."""
        if self._generation != self._slots.generation:
            self._make_views()

    @torch.inference_mode(False)  # a call that trains uses them next
    def _make_views(self) -> None:
        bound, features, carve = self.bound, self.features, self._slots.carve
        sent_rows = list(bound.chunk_rows)
        sent_rows[bound.own_chunks.start : bound.own_chunks.stop] = [0] * len(self.own_rows)
        received, window = self._slots.carve_window(
            "receive", (sum(bound.slot_rows), features), self._dtype, bound.most_slot_rows * features
        )
        self.places = _places(bound, window, features * self._dtype.itemsize, _FIRST_SCATTER_FLAG)
        self.sent = carve("send", (sum(sent_rows), features), self._dtype)
        self.partials = split_rows(self.sent, tuple(sent_rows))
        self.slots = split_rows(received, bound.slot_rows) if bound.slot_rows else []
        if not self.is_ring:
            senders = bound.schedule.group_size - 1
            self.arrived = received.view(senders, bound.own_rows, features)
            self.arrived_chunks = list(self.arrived.split_with_sizes(self.own_rows, dim=1))
        if self._own_dtype is not None and self.is_ring:
            largest = carve("own", (max(bound.chunk_rows), features), self._own_dtype)
            self.own = [largest[:rows] for rows in bound.chunk_rows]
        elif self._own_dtype is not None:
            self.own = split_rows(carve("own", (sum(self.own_rows), features), self._own_dtype), self.own_rows)
        self._slots.note_views(self)
        self._generation = self._slots.generation
