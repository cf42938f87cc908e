"""Dry-run of programs in one process: predicts times from what ops cost, and finds deadlocks.

Runs what ranks run: a program's ops in the order of submission, each on its lane, and its batches one after the other:

    lane, device   |- op -|- op -|- wait ...|- op -| ...    an op begins when its lane and the device are free
    batches               |- {send, receive} -|- ...        issued behind what the lane held then

Trusts the data flow (`program_checks` proves it) but no order: what never meets its other end is reported. A message
begins when the batches of both of its ends have begun, and a batch ends with its last message, as a grouped NCCL call
does. So a rank sends one thing and receives one thing at a time: one full-duplex link per rank.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule import program as prog
from commfuse_megatron.schedule.program_text import render_program, say_batch
from commfuse_megatron.schedule.timeline import Activity, Interval, Simulation, Timeline

#: What runs on the device.
Work = prog.Computation | prog.Copy

# Of a program, in a message.
_MAX_OPS = 40


class Costs(NamedTuple):
    """What ops take, in microseconds.

    work_us: (group rank, op, time of the batches issued since the op before it and not waited for) -> how long the op
    runs alone, and for how much of that it keeps the device from other lanes. transfer_us: (from rank, to rank,
    channel, rows). is_beside: whether messages move while something is computed.
    """

    work_us: Callable[[int, Work, float], tuple[float, float]]
    transfer_us: Callable[[int, int, prog.Channel, int], float]
    is_beside: bool = True


def simulate(programs: Sequence[prog.Program], costs: Costs) -> Simulation:
    """Return when every rank computes, sends, receives and waits.

    Args:
        programs: of all ranks of a group, in their order; or of some, whose messages with others begin as if the
            others were always as far as they are. Where ranks have equal shards one stands for all.

    Raises:
        ScheduleError: a deadlock (it names who waits for whom), crossed messages, or a cost that is no time; with the
            program of a rank that it concerns.
    """
    ranks = [_Rank(program, _rank_of(program, number), costs) for number, program in enumerate(programs)]
    run = _Run(ranks, costs)
    run.run()
    return Simulation([rank.timeline() for rank in ranks])


def _rank_of(program: prog.Program, number: int) -> int:
    return next((bound.group_rank for bound in program.schedules.values()), number)


@dataclass(slots=True)
class _Queued:
    """A batch, or a copy beside what is computed, that has been issued."""

    op: prog.Issue | prog.Copy
    number: int
    ready_us: float
    begin_us: float = -1.0
    num_open: int = 0
    end_us: float = 0.0


class _Rank:
    """How far a rank is: its lanes, its device, its batches."""

    def __init__(self, program: prog.Program, rank: int, costs: Costs) -> None:
        self.program, self.rank, self._costs = program, rank, costs
        self.position = 0
        self._lane: int | None = None
        self._lanes: dict[int | None, float] = {None: 0.0}
        self._device_us = 0.0
        self._beside: dict[prog.Batch, float] = {}  # issued since the op before, and not waited for: their own times
        self.queue: deque[_Queued] = deque()
        self.batches_us = 0.0  # when the batches that have left the queue are over
        self.arrivals: dict[prog.Batch, float] = {}
        self.intervals: list[Interval] = []

    def timeline(self) -> Timeline:
        ends = [self._device_us, *self._lanes.values(), self.batches_us]
        return Timeline(tuple(sorted(self.intervals, key=lambda i: (i.start_us, i.end_us))), max(ends))

    def fail(self, number: int, sentence: str) -> NoReturn:
        table = render_program(self.program, mark=number, max_ops=_MAX_OPS)
        raise ScheduleError(f"rank {self.rank}, op {number}: {sentence}\n\n{table}")

    def advance(self) -> bool:
        """Go on as far as this rank can; whether a batch was issued."""
        ops, has_issued = self.program.ops, False
        while self.position < len(ops):
            op = ops[self.position]
            match op:
                case prog.Issue():
                    self._beside[op.channel, op.step] = self._batch_us(op)
                    self._enqueue(op)
                    has_issued = True
                case prog.Copy() if op.is_beside:
                    self._enqueue(op)
                    has_issued = True
                case prog.Gemm() | prog.Sum() | prog.WeightGrad() | prog.Compute() | prog.Copy():
                    if not self._costs.is_beside and self.queue:
                        return has_issued
                    self._work(op)
                case prog.Wait():
                    if any(batch not in self.arrivals for batch in op.batches):
                        return has_issued
                    for batch in op.batches:
                        self._beside.pop(batch, None)
                    self._wait(max(self.arrivals[batch] for batch in op.batches))
                case prog.Finish():
                    if self.queue:
                        return has_issued
                    self._wait(max(self.batches_us, *self.arrivals.values(), 0.0))
                case prog.Fork():
                    for lane in range(op.lanes):
                        self._lanes[lane] = max(self._lanes.get(lane, 0.0), self._lanes[None])
                case prog.On():
                    self._lane = op.lane
                case prog.After():
                    self._lanes[self._lane] = max(self._lanes[self._lane], self._lanes[op.lane])
                case prog.Join():
                    self._lanes[None] = max(self._lanes[None], *(self._lanes.pop(lane) for lane in range(op.lanes)))
                    self._lane = None
            self.position += 1
        return has_issued

    def _batch_us(self, op: prog.Issue) -> float:
        """A batch's own time: its messages go both ways at once."""
        return max(self.transfer_us(op, end, end is op.send) for end in (op.send, op.receive) if end is not None)

    def transfer_us(self, op: prog.Issue, message: prog.Message, is_send: bool) -> float:
        pair = (self.rank, message.peer) if is_send else (message.peer, self.rank)
        return _check(self._costs.transfer_us(*pair, op.channel, message.rows.count), self, self.position)

    def _enqueue(self, op: prog.Issue | prog.Copy) -> None:
        self.queue.append(_Queued(op, self.position, self._lanes[self._lane]))

    def work_us(self, number: int, op: Work) -> tuple[float, float]:
        lasting_us, device_us = self._costs.work_us(self.rank, op, sum(self._beside.values()))
        return _check(lasting_us, self, number), _check(device_us, self, number)

    def _work(self, op: Work) -> None:
        lasting_us, device_us = self.work_us(self.position, op)
        self._beside.clear()
        start_us = max(self._lanes[self._lane], self._device_us)
        if not self._costs.is_beside:
            start_us = max(start_us, self.batches_us)
        self._lanes[self._lane] = start_us + lasting_us
        self._device_us = start_us + device_us
        self.intervals.append(Interval(Activity.COMPUTE, self.position, start_us, start_us + lasting_us, self._lane))

    def _wait(self, until_us: float) -> None:
        now_us = self._lanes[self._lane]
        if until_us > now_us:
            self.intervals.append(Interval(Activity.WAIT, self.position, now_us, until_us, self._lane))
            self._lanes[self._lane] = until_us


class _Run:
    """Lets every rank go on until it waits for another; when nobody can go on, all have finished or hang."""

    def __init__(self, ranks: list[_Rank], costs: Costs) -> None:
        self.ranks = {rank.rank: rank for rank in ranks}
        self.costs = costs
        #: Messages of which one end's batch has begun: (from rank, to rank, batch).
        self.begun: dict[tuple[int, int, prog.Batch], tuple[_Queued, prog.Message]] = {}

    def run(self) -> None:
        awake = deque(self.ranks.values())
        while awake:
            rank = awake.popleft()
            if rank.advance():
                for other in self._move(rank):
                    if other not in awake:
                        awake.append(other)
        if any(rank.position < len(rank.program.ops) for rank in self.ranks.values()):
            self._fail_deadlock()

    def _move(self, first: _Rank) -> list[_Rank]:
        """Begin what can begin in the queues; the ranks for which something has ended."""
        woken: list[_Rank] = []
        moving = [first]
        while moving:
            rank = moving.pop()
            while rank.queue and rank.queue[0].begin_us < 0:
                for other in self._begin(rank, rank.queue[0]):
                    if other is not rank:
                        moving.append(other)
                    woken.append(other)
        return woken

    def _begin(self, rank: _Rank, queued: _Queued) -> list[_Rank]:
        """Begin a batch; its messages whose other ends wait take place at once. The ranks whose batches end so."""
        queued.begin_us = max(rank.batches_us, queued.ready_us)
        op = queued.op
        if isinstance(op, prog.Copy):
            queued.end_us = queued.begin_us + rank.work_us(queued.number, op)[0]
            rank.arrivals[prog.COPIES, op.number] = queued.end_us
            rank.intervals.append(Interval(Activity.COPY, queued.number, queued.begin_us, queued.end_us))
            return self._end(rank, queued)
        ended: list[_Rank] = []
        messages = [message for message in (op.send, op.receive) if message is not None]
        queued.num_open = len(messages)
        for message in messages:
            is_send = message is op.send
            pair = (rank.rank, message.peer) if is_send else (message.peer, rank.rank)
            key = (*pair, (op.channel, op.step))
            peer = self.ranks.get(message.peer)
            if peer is None or peer is rank:
                ended += self._carry(rank, queued, message, queued.begin_us)
            elif key not in self.begun:
                self.begun[key] = queued, message
            else:
                theirs, other = self.begun.pop(key)
                if (other.chunk, other.rows.count) != (message.chunk, message.rows.count):
                    what = f"chunk {message.chunk} in {say_batch(key[2])} is chunk {other.chunk} for rank {peer.rank}"
                    rank.fail(queued.number, f"{what}: messages cross.")
                start_us = max(queued.begin_us, theirs.begin_us)
                ended += self._carry(rank, queued, message, start_us)
                ended += self._carry(peer, theirs, other, start_us)
        return ended

    def _carry(self, rank: _Rank, queued: _Queued, message: prog.Message, start_us: float) -> list[_Rank]:
        """One end of a message that begins now."""
        op = queued.op
        assert isinstance(op, prog.Issue)
        is_send = message is op.send
        end_us = start_us + rank.transfer_us(op, message, is_send)
        activity = Activity.SEND if is_send else Activity.RECEIVE
        rank.intervals.append(Interval(activity, queued.number, start_us, end_us, None, message.peer))
        if not is_send:
            rank.arrivals[op.channel, op.step] = end_us
        queued.end_us = max(queued.end_us, end_us)
        queued.num_open -= 1
        return [] if queued.num_open else self._end(rank, queued)

    def _end(self, rank: _Rank, queued: _Queued) -> list[_Rank]:
        rank.queue.popleft()
        rank.batches_us = queued.end_us
        return [rank]

    def _fail_deadlock(self) -> NoReturn:
        """Name whom a rank waits for; its program shows where."""
        hanging = next(rank for rank in self.ranks.values() if rank.position < len(rank.program.ops))
        if not hanging.queue:
            hanging.fail(hanging.position, "deadlock: it waits for what nobody has issued.")
        number, others = (
            hanging.queue[0].number,
            " and ".join(f"rank {peer}" for peer in _peers_of(hanging, self.begun)),
        )
        hanging.fail(number, f"deadlock: this batch waits for {others}, which does not come to it.")


def _peers_of(rank: _Rank, begun: dict[tuple[int, int, prog.Batch], tuple[_Queued, prog.Message]]) -> list[int]:
    """Whom the first batch of a rank waits for."""
    op = rank.queue[0].op
    assert isinstance(op, prog.Issue)
    batch = (op.channel, op.step)
    peers = set()
    if op.send is not None and (rank.rank, op.send.peer, batch) in begun:
        peers.add(op.send.peer)
    if op.receive is not None and (op.receive.peer, rank.rank, batch) in begun:
        peers.add(op.receive.peer)
    return sorted(peers)


def _check(cost_us: float, rank: _Rank, number: int) -> float:
    if not (math.isfinite(cost_us) and cost_us >= 0):
        rank.fail(number, f"a cost of {cost_us}: it must be a time, finite and not negative.")
    return cost_us
