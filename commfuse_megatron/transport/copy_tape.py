"""Operations over the copy engine, bound once and replayed: what `exchange`, `wait` and `release` do, without asking.

A tape is a list of steps that each make one or two driver calls; all that differs from call to call is a tuple of
addresses, which steps index. Knows no GEMM: the runtime puts its own steps between these.

With CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron sets it, all streams share one hardware queue: whatever waits at its
head, on whichever stream, holds up the kernels behind it. So what the copy stream does is submitted behind the next
kernel of the current stream, beside which it is to run: measured, a first GEMM otherwise starts when the first transfer
is over. Beware: a wait must not be submitted before the push of its own batch, else two ranks wait for each other's
pushes, which are behind the waits.

In a CUDA graph, ours or one that somebody else captures, it is the driver who orders what is independent. So a tape
keeps its steps a second time, in which each wait depends on the push of its own batch; see `transport.tape_graphs`. The
copy stream has been forked from the current one before these.

A tape with pauses is run part by part, never as a graph. What the copy stream has not been told by a pause is told
behind a kernel of the caller, when he says so; at the latest where the tape waits for it.
"""

import itertools
from collections.abc import Iterable

from commfuse_megatron.transport.base import Place
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.copy_flags import Key
from commfuse_megatron.transport.copy_steps import BoundOperation, GraphTable, HeldSteps, Ref, Step


class CopyTape:
    """Steps of one operation. Between `order` and the next change of what is sent, pushes need no further ordering.

    Kernels and waits go to the current stream, or to the lane that `on` chose.

    lanes_when_stepped: else lanes are for graphs only, and step by step all goes to the current stream: ordering lanes
    takes some seven calls of the driver.
    """

    def __init__(self, transport: CopyEngineTransport, *, lanes_when_stepped: bool = True) -> None:
        self._transport = transport
        self._lanes_when_stepped = lanes_when_stepped
        self._granted: set[int] = set()
        self._pending: list[Step] = []  # of the copy stream, for behind the next kernel
        self._pending_captured: list[Step] = []
        self._pending_keys: set[Key] = set()
        self._part_ends: list[int] = []  # how many steps there were at each pause
        self._held: list[HeldSteps] = []  # by pause
        self._unsent: list[HeldSteps] = []  # of these, what the tape itself has not told the copy stream
        self._unsent_keys: set[Key] = set()
        self.lane: int | None = None
        self.steps: list[Step] = []
        self._captured: list[Step] = []
        self._pushed: dict[Key, Step] = {}  # what makes a wait in a graph depend on the push of the same batch
        self._last_pushed: Step | None = None
        self.keys: list[Key] = []
        self._last_wait: tuple[int, tuple[Key, ...]] = (-1, ())  # how many steps there were after it, and its keys
        self.notes: list[tuple[Key, object]] = []

    def fork(self, lanes: tuple[int, ...]) -> None:
        """Let other streams, by handle, go on from where the current one is; `on` chooses between them."""
        follow = self.mark()
        for lane in lanes:
            self.on(lane)
            self.follow(follow)

    def mark(self) -> Step:
        """Remember how far the stream in use has come, for `follow`."""
        mark, follow = self._transport.bind_mark()
        self.follow(mark)
        return follow

    def follow(self, marked: Step) -> None:
        """What comes next on the stream in use comes after what was marked."""
        step = self._on_lane(marked)
        if self._lanes_when_stepped:
            self.steps.append(step)
        self._captured.append(step)

    def on(self, lane: int | None) -> None:
        """Put what comes next on that stream; None: on the current one."""
        self.lane = lane

    def join(self, lanes: tuple[int, ...]) -> None:
        """Let the current stream go on when all of these have come this far."""
        follows = []
        for lane in lanes:
            self.on(lane)
            follows.append(self.mark())
        self.on(None)
        for follow in follows:
            self.follow(follow)

    def order(self) -> None:
        """What is pushed from here on was computed by what comes before."""
        mark, follow = self._transport.bind_order()
        self.then(mark)
        self.beside(follow)

    def push(self, peer: int, place: Place, source: Ref, size_bytes: int) -> None:
        """Copy into the peer's window, beside the next kernel."""
        if peer not in self._granted:
            self._granted.add(peer)
            self.beside(self._transport.bind_take(peer))
        self.beside(self._transport.bind_push(peer, place, source, size_bytes))

    def issued(self, batch: Iterable[Key]) -> None:
        """Tell of a batch {send, receive} after its push: to wait for it, it and all before it must be submitted.

        The end of the operation clears its flags.
        """
        batch = tuple(batch)
        self.keys += batch
        if self._pending:
            self._pending_keys.update(batch)
            mark, self._last_pushed = self._transport.bind_copies_mark()
            self._pending_captured.append(mark)
        if self._last_pushed is not None:
            self._pushed.update(dict.fromkeys(batch, self._last_pushed))

    def copy(self, target: Ref, source: Ref, size_bytes: int, flag: int) -> Key:
        """Copy within this device, beside the next kernel; returns what to wait for."""
        self.beside(self._transport.bind_copy(target, source, size_bytes, flag))
        key = self._transport.key_of_copy(flag)
        self.issued((key,))
        return key

    def compute(self, step: Step) -> None:
        """A kernel."""
        self.then(step)
        self._submit()

    def pause(self) -> None:
        """The caller computes before what comes next."""
        held = HeldSteps(tuple(self._pending))
        self._held.append(held)
        self._unsent.append(held)
        self._unsent_keys |= self._pending_keys
        self._pending.clear()
        self._pending_keys.clear()
        self.then(held.begin)
        self._part_ends.append(len(self.steps))

    def beside(self, step: Step) -> None:
        """On the copy stream's side: goes where a push at this point goes."""
        self._take_up_unsent()
        self._pending.append(step)
        self._pending_captured.append(step)

    def then(self, step: Step) -> None:
        """On the side of the stream in use; no kernel."""
        on_lane = self._on_lane(step)
        self.steps.append(on_lane if self._lanes_when_stepped else step)
        self._captured.append(on_lane)

    def wait(self, *keys: Key) -> None:
        """What comes next needs these batches."""
        if keys:
            if not self._unsent_keys.isdisjoint(keys):
                self._take_up_unsent()
            if not self._pending_keys.isdisjoint(keys):
                self._submit()
            for pushed in dict.fromkeys(self._pushed[key] for key in keys if key in self._pushed):
                self._captured.append(self._on_lane(pushed))
            self.then(self._transport.bind_wait(keys))
            if self.lane is None:
                self._last_wait = (len(self.steps), keys)

    def finish(self) -> BoundOperation:
        """The tape, bound."""
        self._take_up_unsent()
        self._submit()
        length, awaited = self._last_wait
        if length == len(self.steps):  # one call of the driver for both
            self.steps.pop()
            self._captured.pop()
        else:
            awaited = ()
        silent = self._tell_of_no_message()
        keys = (*self.keys, *silent)
        release = self._transport.bind_release(keys, (*awaited, *silent))
        steps, bounds = tuple(self.steps), [0, *self._part_ends, len(self.steps)]
        parts = tuple(steps[start:stop] for start, stop in itertools.pairwise(bounds))
        held = tuple(each.run for each in self._held)
        notes, captured = tuple(self.notes), tuple(self._captured)
        return BoundOperation(steps, keys, notes, release, captured, GraphTable(), parts, held)

    def _tell_of_no_message(self) -> tuple[Key, ...]:
        """Tell the peers that get no message; returns what to wait for of those who send none."""
        tell, awaited = self._transport.bind_no_message(tuple(self.keys))
        if tell is not None:
            # It waits for nothing of this operation, and the release waits for the same of the peers.
            self.steps.append(tell)
            mark, follow = self._transport.bind_copies_mark()
            self._captured += [tell, mark, follow]
        return awaited

    def _on_lane(self, step: Step) -> Step:
        lane = self.lane
        return step if lane is None else lambda at, stream: step(at, lane)

    def _take_up_unsent(self) -> None:
        self._pending[:0] = [held.run for held in self._unsent]
        self._pending_keys |= self._unsent_keys
        self._unsent.clear()
        self._unsent_keys.clear()

    def _submit(self) -> None:
        self.steps += self._pending
        self._captured += self._pending_captured
        self._pending.clear()
        self._pending_captured.clear()
        self._pending_keys.clear()
