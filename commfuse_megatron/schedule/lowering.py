"""What all lowerings share: from bound schedules to the ops of a program, in the order of submission.

A lowering calls these parts one after the other; each appends ops. What two transports differ in for a pass is a
`Policy`, so that the order of a pass is written once.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from commfuse_megatron.schedule import program as prog
from commfuse_megatron.schedule.actions import Algorithm
from commfuse_megatron.schedule.binding import BoundSchedule, Transfer
from commfuse_megatron.schedule.pieces import cut_into_halves

#: Computes what belongs to a chunk: (chunk, where its result goes, what has arrived and is to be added to it).
Produce = Callable[[int, prog.Rows, tuple[prog.Rows, ...]], None]


@dataclass(frozen=True, slots=True)
class Policy:
    """How a transport and its GEMMs want a pass to be run.

    has_windows: peers write into buffers of the context only, and transfers take no SM: what must be gathered again is
    issued at once, and the own rows are copied by the transport beside the last GEMM. Without, own rows come first.
    most_adds: how many arrived partials a GEMM adds on the way out. adds_bias_too: beside them.
    keeps_own_apart: own partials are un-rounded until their sum.
    sums_on_the_way: sums of a direct reduce-scatter take what has arrived while the rest travels, see `sum_own`.
    lanes: between which pieces take turns; 0 for none.
    is_tape: the program is put on a tape, so that what runs side by side can be submitted in any order.
    pieces: of how many other owners GEMMs of a linear take the rows, in the order of a gather's arrivals (backwards in
    a reduce-scatter); empty: of one, chunk by chunk.
    """

    has_windows: bool
    most_adds: int = 0
    adds_bias_too: bool = False
    keeps_own_apart: bool = False
    sums_on_the_way: bool = False
    lanes: int = 0
    is_tape: bool = False
    pieces: tuple[int, ...] = ()


class Lowering:
    """The ops of one rank's pass, as far as they have been appended.

    gather, scatter: the bound schedules of the pass, where it has them. At most one of them gives the order of the
    computations; the other one's batches are issued along with it. gather_label, scatter_label: what messages call
    them.
    """

    def __init__(
        self,
        policy: Policy,
        gather: BoundSchedule | None = None,
        scatter: BoundSchedule | None = None,
        gather_label: str = "all-gather",
        scatter_label: str = "reduce-scatter",
    ) -> None:
        self.policy = policy
        self._labels = (gather_label, scatter_label)
        self.ops: list[prog.Op] = []
        self._gather, self._scatter = gather, scatter
        bound = gather if gather is not None else scatter
        assert bound is not None
        self.bound = bound
        self.starts = tuple(itertools.accumulate(bound.chunk_rows, initial=0))
        self._sent_starts = _sent_starts(bound)
        self._num_gather_issued = 0
        self._arriving: dict[prog.Batch, None] = {}
        self._waited: dict[int | None, set[prog.Batch]] = {None: set()}  # by lane
        self.lane: int | None = None
        self.num_lanes = 0
        self._turn = -1
        self._copies = 0

    def program(self) -> prog.Program:
        """What was appended, and then the wait for all that is still in flight."""
        return prog.Program((*self.ops, prog.Finish()), self._gather, self._scatter, *self._labels)

    # -- names of rows ------------------------------------------------------------------------------------------------

    def all_rows(self, operand: str) -> prog.Rows:
        """Every row of an operand of all ranks' rows."""
        return prog.Rows(operand, 0, self.bound.total_rows)

    def chunk(self, operand: str, chunk: int) -> prog.Rows:
        """The rows of a chunk in an operand of all ranks' rows."""
        return prog.Rows(operand, self.starts[chunk], self.bound.chunk_rows[chunk])

    def own_chunk(self, operand: str, chunk: int) -> prog.Rows:
        """The rows of one of this rank's chunks in an operand of this rank's rows."""
        return prog.Rows(operand, self.starts[chunk] - self.bound.own_start, self.bound.chunk_rows[chunk])

    def gathered_chunk(self, chunk: int) -> prog.Rows:
        """Where a chunk lies that was gathered: the own ones where they were before."""
        is_own = chunk in self.bound.own_chunks
        return self.own_chunk("shard", chunk) if is_own else self.chunk("gathered", chunk)

    def partial(self, chunk: int) -> prog.Rows:
        """Where the partial of another rank's chunk waits to be sent."""
        return prog.Rows("sent", self._sent_starts[chunk], self.bound.chunk_rows[chunk])

    def rows_of(self, operand: str, owners: range) -> prog.Rows:
        """The rows of these owners in an operand of all ranks' rows."""
        start, stop = (self.starts[owner * self.bound.schedule.chunks_per_shard] for owner in (owners[0], owners.stop))
        return prog.Rows(operand, start, stop - start)

    def partials(self, owners: range) -> prog.Rows:
        """Where the partials of these other ranks' rows wait to be sent."""
        start = self._sent_starts[owners[0] * self.bound.schedule.chunks_per_shard]
        return prog.Rows("sent", start, self.rows_of("a", owners).count)

    def arrived(self, own_number: int) -> tuple[prog.Rows, ...]:
        """Other ranks' partials of own chunk number `own_number` in a direct reduce-scatter, in a fixed order."""
        bound = self._scatter
        assert bound is not None
        rows, own = bound.chunk_rows[bound.own_chunks[own_number]], bound.own_rows
        start = sum(bound.chunk_rows[chunk] for chunk in bound.own_chunks[:own_number])
        return tuple(
            prog.Rows("arrived", sender * own + start, rows) for sender in range(bound.schedule.group_size - 1)
        )

    # -- transfers ----------------------------------------------------------------------------------------------------

    @property
    def can_gather_ahead(self) -> bool:
        """Whether all batches of the all-gather can begin before anything is computed: a ring's wait for each other."""
        gather = self._gather
        return self.policy.has_windows and gather is not None and gather.schedule.algorithm is Algorithm.DIRECT

    def issue_gather(self, steps: Iterable[int] | None = None) -> None:
        """Issue batches of the all-gather, each once; None: all of them."""
        bound = self._gather
        assert bound is not None
        for index in range(len(bound.steps)) if steps is None else steps:
            if index < self._num_gather_issued or index >= len(bound.steps):
                continue
            self._num_gather_issued = index + 1
            step, source = bound.steps[index], None
            if step.send is not None:
                if step.send.chunk not in bound.own_chunks:  # passed on: it must have arrived
                    self.wait_for_step(prog.GATHER, step.needs)
                source = self.gathered_chunk(step.send.chunk)
            self.issue(prog.GATHER, bound, index, source)

    def issue_scatter(self, index: int) -> None:
        """Issue a batch of the reduce-scatter."""
        bound = self._scatter
        assert bound is not None
        send = bound.steps[index].send
        self.issue(prog.SCATTER, bound, index, None if send is None else self.partial(send.chunk))

    def issue(self, channel: prog.Channel, bound: BoundSchedule, index: int, source: prog.Rows | None) -> None:
        """Issue a batch of a schedule; source: where what it sends, if anything, lies here."""
        step, send, receive = bound.steps[index], None, None
        if step.send is not None:
            assert source is not None
            send = _message(source, step.send)
        if step.receive is not None:
            rows = prog.Rows(prog.ARRIVES_IN[channel], step.receive.row, bound.chunk_rows[step.receive.chunk])
            receive = _message(rows, step.receive)
            self._arriving[channel, index] = None
        if send is not None or receive is not None:
            self.ops.append(prog.Issue(channel, index, send, receive))

    def wait(self, batches: Iterable[prog.Batch]) -> None:
        """Wait for what these bring, if anything, as far as the lane in use has not yet."""
        waited = self._waited[self.lane]
        due = tuple(batch for batch in batches if batch in self._arriving and batch not in waited)
        waited.update(due)
        if due:
            self.ops.append(prog.Wait(due))

    def wait_for_step(self, channel: prog.Channel, step: int | None) -> None:
        """Wait for what one step brings."""
        if step is not None:
            self.wait([(channel, step)])

    def copy_own_rows(self, *, is_beside: bool) -> None:
        """Put the own rows into the gathered ones."""
        bound = self._gather
        assert bound is not None
        target = prog.Rows("gathered", bound.own_start, bound.own_rows)
        self.copy(target, prog.Rows("shard", 0, bound.own_rows), is_beside=is_beside)

    def copy(self, target: prog.Rows, source: prog.Rows, *, is_beside: bool) -> prog.Batch:
        """Copy rows within the device; returns what to wait for."""
        batch = (prog.COPIES, self._copies)
        if target.count:
            self.ops.append(prog.Copy(target, source, self._copies, is_beside))
            if is_beside:
                self._arriving[batch] = None
            self._copies += 1
        return batch

    def complete_gather(self) -> None:
        """Wait, on the lane in use, for all rows of all ranks."""
        self.wait(batch for batch in self._arriving if batch[0] != prog.SCATTER)

    # -- lanes --------------------------------------------------------------------------------------------------------

    def fork(self, num_lanes: int | None = None) -> None:
        """Let lanes go on from the main one: so many, or as the policy says."""
        self.num_lanes = self.policy.lanes if num_lanes is None else num_lanes
        self._turn = -1
        if self.num_lanes:
            self.ops.append(prog.Fork(self.num_lanes))
            for lane in range(self.num_lanes):
                self._waited[lane] = set(self._waited[None])

    def turn(self, piece: int | None = None) -> None:
        """What follows is the next piece, or piece number `piece`, on its lane."""
        self._turn = self._turn + 1 if piece is None else piece
        if self.num_lanes:
            self.on(self._turn % self.num_lanes)

    def on(self, lane: int | None) -> None:
        """What follows goes to this lane."""
        if lane != self.lane:
            self.lane = lane
            self.ops.append(prog.On(lane))

    def after(self, lane: int | None) -> None:
        """The lane in use goes on after all that `lane` holds."""
        self.ops.append(prog.After(lane))
        self._waited[self.lane] |= self._waited[lane]

    def follow_in_all_lanes(self) -> None:
        """All other lanes go on after what the lane in use holds."""
        here = self.lane
        for lane in range(self.num_lanes):
            if lane != here:
                self.on(lane)
                self.after(here)
        self.on(here)

    def pause(self) -> None:
        """The caller computes before the call goes on."""
        self.ops.append(prog.Pause())

    def join(self) -> None:
        """The main lane goes on when all are here."""
        if self.num_lanes:
            self.ops.append(prog.Join(self.num_lanes))
            for lane in range(self.num_lanes):
                self._waited[None] |= self._waited.pop(lane)
            self.lane, self.num_lanes = None, 0

    # -- the two directions -------------------------------------------------------------------------------------------

    def gather_under(
        self, consume: Callable[[int], None], *, is_ahead: bool = False, before_last: Callable[[], None] = lambda: None
    ) -> None:
        """An all-gather whose chunks are consumed one by one, each while the next one travels.

        is_ahead: all batches are issued before. before_last: called before the last chunk's turn.
        """
        bound = self._gather
        assert bound is not None
        if is_ahead:
            self.issue_gather()
        last = _last_that_computes(bound)
        for index, step in enumerate(bound.steps):
            if index == last:
                before_last()
            self.issue_gather([index])
            if step.compute is not None:
                self.turn()
                self.wait_for_step(prog.GATHER, step.needs)
                consume(step.compute)

    def scatter_from(
        self,
        produce: Produce,
        *,
        adds_in_epilogue: bool,
        gathers_too: bool = False,
        is_only_own: bool = False,
        before_last: Callable[[], None] = lambda: None,
        before_piece: Callable[[], None] | None = None,
        find_arrived: Callable[[int], tuple[prog.Rows, ...]] | None = None,
    ) -> None:
        """A reduce-scatter whose partials `produce` computes; each travels beside the next. Sums apart: `sum_own`.

        adds_in_epilogue: what arrived is added to own partials as they are produced. gathers_too: batches of the
        all-gather are issued along. is_only_own: the others' partials were produced and issued before. before_last:
        called before the last chunk's turn. before_piece: takes each chunk's turn. find_arrived: waits for what is to
        be added to own chunk number i, and says where it lies.
        """
        bound = self._scatter
        assert bound is not None
        find_arrived = find_arrived or self.wait_for_arrived
        last = _last_that_computes(bound)
        for index, step in enumerate(bound.steps):
            if index == last and not is_only_own:
                before_last()
            if gathers_too:
                self.issue_gather([index])
            if not is_only_own:
                self.issue_scatter(index)
            is_own = step.compute in bound.own_chunks
            if step.compute is None or (is_only_own and not is_own):
                continue
            (before_piece or self.turn)()
            chunk, own_number = step.compute, step.compute - bound.own_chunks.start
            if bound.schedule.algorithm is Algorithm.RING:
                self._produce_running_sum(produce, chunk, step.needs, is_own=is_own)
            elif not is_own:
                produce(chunk, self.partial(chunk), ())
            elif adds_in_epilogue:
                arrived = find_arrived(own_number)
                produce(chunk, self.own_chunk("out", chunk), arrived)
            else:
                produce(chunk, self.own_chunk(self._own_operand, chunk), ())

    def wait_for_arrived(self, own_number: int) -> tuple[prog.Rows, ...]:
        """Wait for all partials of an own chunk; where they lie."""
        bound = self._scatter
        assert bound is not None
        self._wait_for_senders(range(bound.schedule.group_size - 1), [own_number])
        return self.arrived(own_number)

    def _wait_for_senders(self, senders: range, own_numbers: Iterable[int]) -> None:
        """Wait for what these, by the order of arrival, bring of own chunks."""
        assert self._scatter is not None
        per_shard = self._scatter.schedule.chunks_per_shard
        self.wait((prog.SCATTER, sender * per_shard + own + 1) for own in own_numbers for sender in senders)

    def sum_own(self, *, has_bias: bool) -> None:
        """Of a direct reduce-scatter whose GEMMs add nothing: add what arrived to the own partials.

        In one pass at the end, chunk by chunk; or, on the way, in passes of fewer and fewer senders, so that the last
        one adds one. Between passes the sum is un-rounded, so both add in the same order, to the same bits.
        """
        bound, total = self._scatter, self._own_operand
        assert bound is not None
        num_senders, chunks = bound.schedule.group_size - 1, bound.own_chunks
        senders = cut_into_halves(num_senders) if self.policy.sums_on_the_way else [range(num_senders)]
        for early in senders[:-1]:
            self._wait_for_senders(early, range(len(chunks)))
            running = "own" if self.policy.keeps_own_apart else "running"
            whole = prog.Rows(running, 0, bound.own_rows)
            adds = tuple(prog.Rows("arrived", sender * bound.own_rows, bound.own_rows) for sender in early)
            self.ops.append(prog.Sum(whole, prog.Rows(total, 0, bound.own_rows), adds))
            total = running
        late = senders[-1]
        for own_number, chunk in enumerate(chunks):
            if bound.chunk_rows[chunk]:
                self._wait_for_senders(late, [own_number])
                own, adds = self.own_chunk(total, chunk), self.arrived(own_number)[late.start : late.stop]
                self.ops.append(prog.Sum(self.own_chunk("out", chunk), own, adds, has_bias))

    def add_bias(self) -> None:
        """Of a ring: add the bias to the sums, which have been rounded."""
        rows = prog.Rows("out", 0, self.bound.own_rows)
        if rows.count:
            self.ops.append(prog.Sum(rows, rows, (), has_bias=True))

    def may_add_arrived(self, *, has_cover: bool, has_bias: bool) -> bool:
        """Whether own GEMMs may add what arrived, or part of it; has_cover: something is computed while it travels.

        Where transfers are slower than GEMMs, that wait costs more than a pass over the output at the end.
        """
        bound, policy = self._scatter, self.policy
        assert bound is not None
        is_direct = bound.schedule.algorithm is Algorithm.DIRECT
        is_fit = policy.has_windows and policy.most_adds > 0 and (policy.adds_bias_too or not has_bias)
        return has_cover and is_direct and is_fit and bound.arrived_rows > 0

    def _arrived_at(self, receive: Transfer) -> prog.Rows:
        return prog.Rows("arrived", receive.row, self.bound.chunk_rows[receive.chunk])

    @property
    def _own_operand(self) -> str:
        return "own" if self.policy.keeps_own_apart and self.bound.schedule.group_size > 1 else "out"

    def _produce_running_sum(self, produce: Produce, chunk: int, batch: int | None, *, is_own: bool) -> None:
        """A ring adds its partial to the sum that came from the neighbour, and passes it on."""
        bound = self._scatter
        assert bound is not None
        target = self.own_chunk("out", chunk) if is_own else self.partial(chunk)
        if batch is None:
            produce(chunk, target, ())
            return
        brought = bound.steps[batch].receive
        assert brought is not None
        running = self._arrived_at(brought)
        # With one chunk per shard the sum arrives beside the step's own GEMM, so it is added after it; with more, it
        # arrived a step earlier and the GEMM adds it on the way out.
        if bound.schedule.chunks_per_shard > 1:
            self.wait_for_step(prog.SCATTER, batch)
            produce(chunk, target, (running,))
            return
        partial = prog.Rows("own", 0, bound.chunk_rows[chunk])
        produce(chunk, partial, ())
        self.wait_for_step(prog.SCATTER, batch)
        self.ops.append(prog.Sum(target, partial, (running,)))

    # -- what ends a backward pass ------------------------------------------------------------------------------------

    def gemm(
        self,
        a: prog.Rows,
        out: prog.Rows,
        adds: tuple[prog.Rows, ...] = (),
        *,
        has_bias: bool = False,
        is_forward: bool,
        chunk: int = -1,
    ) -> None:
        """Append a product, if it has rows."""
        if out.count:
            self.ops.append(prog.Gemm(a, out, adds, has_bias, is_forward, chunk))

    def weight_gradient(self, grad: str, x: str, accumulates: bool, *, is_later: bool) -> None:
        """The weight's gradient from operands of all ranks' rows; is_later: leave the caller what it is made of."""
        self.complete_gather()
        if not is_later:
            self.ops.append(prog.WeightGrad(self.all_rows(grad), self.all_rows(x), accumulates))
        elif "gathered" in (grad, x):
            self.keep_gathered()

    def keep_gathered(self) -> None:
        """Leave the caller all gathered rows, which are here: in "kept", where the window is not the caller's own."""
        if self.policy.has_windows:
            self.copy(self.all_rows("kept"), self.all_rows("gathered"), is_beside=True)


def _message(rows: prog.Rows, transfer: Transfer) -> prog.Message:
    return prog.Message(rows, transfer.peer, transfer.chunk, transfer.row)


def _last_that_computes(bound: BoundSchedule) -> int:
    return max((index for index, step in enumerate(bound.steps) if step.compute is not None), default=-1)


def _sent_starts(bound: BoundSchedule) -> Sequence[int]:
    """Where the partial of each chunk begins among those that are sent: own ones take no room."""
    rows = [0 if chunk in bound.own_chunks else count for chunk, count in enumerate(bound.chunk_rows)]
    return tuple(itertools.accumulate(rows, initial=0))
