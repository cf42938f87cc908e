"""The context's buffers as one pass uses them: where its messages wait, arrive and are summed.

Views are carved again only when a buffer grew: what they cost the host, small problems could not hide.
"""

from collections.abc import Collection, Mapping

import torch

from commfuse_megatron.kernels.blas import WORKSPACE_BYTES
from commfuse_megatron.runtime.slots import Slots, ViewKeeper
from commfuse_megatron.schedule.actions import Algorithm
from commfuse_megatron.schedule.binding import BoundSchedule
from commfuse_megatron.schedule.program import GATHER, Channel, Message, Program
from commfuse_megatron.transport.base import MOST_CHUNKS, Place, Window

__all__ = ["PassBuffers", "buffers_of"]

# Flags of messages: a gather's are below, a scatter's from here on, so that one operation may run both.
_FIRST_SCATTER_FLAG = MOST_CHUNKS

_ORDER = ("gathered", "arrived", "sent", "own")


class PassBuffers:
    """Buffers by the names of operands: "gathered", "sent", "arrived" and "own", each [rows, features], once used.

    Args:
        features: of the rows that travel. dtype: of those; own_dtype: of own partials until their sum.
    """

    def __init__(self, slots: Slots, features: int, dtype: torch.dtype, own_dtype: torch.dtype) -> None:
        self._slots = slots
        self.dtype, self.device = dtype, slots.device
        self._features, self._own_dtype = features, own_dtype
        self._tensors: dict[str, torch.Tensor] = {}
        self._windows: dict[str, Window] = {}

    @property
    def generation(self) -> int:
        """Changes when buffers were made anew, so that what holds their addresses is void."""
        return self._slots.generation

    def note_views(self, keeper: ViewKeeper) -> None:
        """Remember that `keeper` keeps views of these buffers; it is told to drop them when one is freed."""
        self._slots.note_views(keeper)

    def drop_views(self) -> None:
        """Let go of all views; the next call carves them again."""
        self._tensors, self._windows = {}, {}

    def reserve(self, bounds: Mapping[str, BoundSchedule]) -> None:
        """Make these buffers; until another one grows, all views are valid then.

        All ranks together ask for the same windows, "gathered" and "arrived", even where no message of a rank lies in
        one.
        """
        # No candidate has more: flags would be shared.
        assert all(len(bound.chunk_rows) <= MOST_CHUNKS for bound in bounds.values())
        generation = None
        while generation != self._slots.generation:  # what grows makes the views of the others void
            generation = self._slots.generation
            for name in _ORDER:
                if name in bounds:
                    self.tensor(name, bounds[name])

    @torch.inference_mode(False)  # a call that trains uses them next
    def tensor(self, name: str, bound: BoundSchedule) -> torch.Tensor:
        """The buffer of this name for the messages of `bound`; all ranks make "gathered" and "arrived" together."""
        found = self._tensors.get(name)
        if found is None:
            found = self._carve(name, bound)
            self._slots.note_views(self)  # after the carving, which may free what others keep
            self._tensors[name] = found
        return found

    def workspace(self, lane: int | None) -> int:
        """Address of scratch memory for the GEMMs of a lane, by its handle, or of the current stream (None).

        All operations of the context share it: they, and what they put on one lane, run one after the other.
        """
        return self._slots.carve(f"workspace {lane}", (WORKSPACE_BYTES,), torch.uint8).data_ptr()

    def place(self, channel: Channel, message: Message) -> Place:
        """Where a message arrives at its receiver."""
        is_gather = channel == GATHER
        window = self._windows["gathered" if is_gather else "arrived"]
        flag = message.chunk if is_gather else _FIRST_SCATTER_FLAG + message.chunk
        return Place(window, message.at_row * self._features * self.dtype.itemsize, flag)

    def _carve(self, name: str, bound: BoundSchedule) -> torch.Tensor:
        slots, features = self._slots, self._features
        if name == "gathered":
            shape = (bound.total_rows, features)
            carved, self._windows[name] = slots.carve_window("gather", shape, self.dtype, bound.total_rows * features)
        elif name == "arrived":
            shape = (bound.arrived_rows, features)
            most = bound.most_arrived_rows * features
            carved, self._windows[name] = slots.carve_window("receive", shape, self.dtype, most)
        elif name == "sent":
            carved = slots.carve("send", (bound.total_rows - bound.own_rows, features), self.dtype)
        else:
            is_ring = bound.schedule.algorithm is Algorithm.RING
            rows = max(bound.chunk_rows) if is_ring else bound.own_rows
            carved = slots.carve("own", (rows, features), self._own_dtype)
        return carved


def buffers_of(program: Program, brings: Collection[str]) -> dict[str, BoundSchedule]:
    """The buffers that a program needs where calls bring the operands `brings`: windows on all ranks alike."""
    needed: dict[str, BoundSchedule] = {}
    if program.gather is not None:
        needed["gathered"] = program.gather
    if program.scatter is not None:
        needed["arrived"] = program.scatter
        needed |= {name: program.scatter for name in ("sent", "own") if name in program.operands}
    return {name: bound for name, bound in needed.items() if name not in brings}
