"""The context's buffers as one pass uses them: where its messages wait, arrive and are summed.

Programs keep their views until a buffer grows: what carving costs the host, small problems could not hide.
"""

from collections.abc import Collection, Mapping

import torch

from commfuse_megatron.runtime.slots import Slots
from commfuse_megatron.schedule.actions import Algorithm
from commfuse_megatron.schedule.binding import BoundSchedule
from commfuse_megatron.schedule.program import GATHER, Channel, Message, Program
from commfuse_megatron.transport.base import MOST_CHUNKS, Place

# Flags of messages: a gather's are below, a scatter's from here on, so that one operation may run both.
_FIRST_SCATTER_FLAG = MOST_CHUNKS

# Scratch memory of GEMMs comes in pieces of this. Of 182 GEMMs of 8B and 70B models at 2, 4 and 8 ranks, allowed 32 MiB
# each, none wants more (one H200, December 2026, 7bdea3f).
_WORKSPACE_STEP_BYTES = 4 << 20

_ORDER = ("gathered", "arrived", "sent", "own", "running")


class PassBuffers:
    """Buffers by the names of operands: "gathered", "sent", "arrived", "own" and "running", each [rows, features].

    Args:
        features: of the rows that travel. dtype: of those; own_dtype: of own partials until their sum.
    """

    def __init__(self, slots: Slots, features: int, dtype: torch.dtype, own_dtype: torch.dtype) -> None:
        self.slots, self.device = slots, slots.device
        self.features, self.dtype, self._own_dtype = features, dtype, own_dtype
        self._running_dtype = torch.promote_types(dtype, torch.float32)  # what sums accumulate in

    @property
    def generation(self) -> int:
        """Changes when buffers were made anew, so that what holds their addresses is void."""
        return self.slots.generation

    def reserve(self, bounds: Mapping[str, BoundSchedule]) -> None:
        """Make these buffers; until another one grows, all views are valid then.

        All ranks together ask for the same windows, "gathered" and "arrived", even where no message of a rank lies in
        one.
        """
        # No candidate has more: flags would be shared.
        assert all(len(bound.chunk_rows) <= MOST_CHUNKS for bound in bounds.values())
        for name in _ORDER:
            if name in bounds:
                self.tensor(name, bounds[name])

    @torch.inference_mode(False)  # a call that trains uses them next
    def tensor(self, name: str, bound: BoundSchedule) -> torch.Tensor:
        """The buffer of this name for the messages of `bound`; all ranks make "gathered" and "arrived" together."""
        slots, features = self.slots, self.features
        if name == "gathered":
            return slots.carve_window("gather", (bound.total_rows, features), self.dtype, bound.total_rows * features)
        if name == "arrived":
            most = bound.most_arrived_rows * features
            return slots.carve_window("receive", (bound.arrived_rows, features), self.dtype, most)
        if name == "sent":
            return slots.carve("send", (bound.total_rows - bound.own_rows, features), self.dtype)
        if name == "running":  # where it is used, "own" is not
            return slots.carve("own", (bound.own_rows, features), self._running_dtype)
        is_ring = bound.schedule.algorithm is Algorithm.RING
        return slots.carve("own", (max(bound.chunk_rows) if is_ring else bound.own_rows, features), self._own_dtype)

    def workspace(self, lane: int | None, size_bytes: int) -> int:
        """Address of scratch memory for the GEMMs of a lane, by its handle, or of the current stream (None).

        All operations of the context share it: they, and what they put on one lane, run one after the other. Where it
        grows, addresses of before are void, and `generation` changes.
        """
        rounded = -(-size_bytes // _WORKSPACE_STEP_BYTES) * _WORKSPACE_STEP_BYTES
        return self.slots.carve(f"workspace {lane}", (rounded,), torch.uint8).data_ptr()

    def place(self, channel: Channel, message: Message) -> Place:
        """Where a message arrives at its receiver."""
        is_gather = channel == GATHER
        window = self.slots.window("gather" if is_gather else "receive")
        flag = message.chunk if is_gather else _FIRST_SCATTER_FLAG + message.chunk
        return Place(window, message.at_row * self.features * self.dtype.itemsize, flag)


def buffers_of(program: Program, brings: Collection[str]) -> dict[str, BoundSchedule]:
    """The buffers that a program needs where calls bring the operands `brings`: windows on all ranks alike."""
    needed: dict[str, BoundSchedule] = {}
    if program.gather is not None:
        needed["gathered"] = program.gather
    if program.scatter is not None:
        needed["arrived"] = program.scatter
        needed |= {name: program.scatter for name in ("sent", "own", "running") if name in program.operands}
    return {name: bound for name, bound in needed.items() if name not in brings}
