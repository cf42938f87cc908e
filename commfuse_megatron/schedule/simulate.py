"""Dry-run of all ranks in one process: predicts times from GEMM and link costs, and finds deadlocks.

Trusts the data flow (`validate` proves it) but no order: what never meets its other end is reported. The contract that
bites: time is counted as on two streams per rank, and a transfer begins only when both of its ends are issued:

    computations    |- step 0 -|- step 1 -|- step 2 -| ...     in order, each once its inputs are there
    batches                    |- step 1 -|- step 2 -| ...     in order, each once its partial is there

A batch ends with its last transfer, as a grouped NCCL call does. So a rank sends one thing at a time and receives one
thing at a time (`validate`: one of each per batch), both at once: one full-duplex link per rank.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule.actions import Chunk, Collective, Receive, Schedule, Send, Step
from commfuse_megatron.schedule.failure import fail, say_chunk
from commfuse_megatron.schedule.timeline import Activity, Interval, Simulation, Timeline

__all__ = ["simulate"]

type ComputeCost = float | Callable[[int, Chunk], float]
type TransferCost = float | Callable[[int, int, Chunk], float]

# A deadlock of many ranks is understood from a few of them.
_MAX_NAMED_RANKS = 8


def simulate(
    schedule: Schedule,
    *,
    compute_us_per_chunk: ComputeCost,
    transfer_us_per_chunk: TransferCost,
    latency_us: float = 0.0,
    adds_in_epilogue: bool = False,
) -> Simulation:
    """Return when every rank computes, sends, receives and waits.

    Equal costs give `schedule_bound_us` for both collectives and both algorithms, with one exception: a ring
    reduce-scatter with `adds_in_epilogue` cannot start a computation before its addend is there. With one chunk per
    shard nothing is hidden then (T_c + T_m); with m >= 2 it takes max(T_c, T_m + 2 T_c / (m N)).
    Reusing slots can only make it longer. Final sums of a direct reduce-scatter count as free.

    Args:
        compute_us_per_chunk: a time, or a function of (group rank, chunk), for causal attention or a slow rank.
        transfer_us_per_chunk: a time, or a function of (from_rank, to_rank, chunk), for links that differ.
        latency_us: added to every transfer, during which its link is busy.
        adds_in_epilogue: ring reduce-scatter: the GEMM adds the running sum itself; by default it is added after.

    Raises:
        ScheduleError: a deadlock (it names who waits for whom), crossed values, or a cost that is no time.
    """
    run = _Run(schedule, compute_us_per_chunk, transfer_us_per_chunk, latency_us, adds_in_epilogue)
    run.run()
    return Simulation(schedule, tuple(rank.timeline() for rank in run.ranks))


@dataclass(frozen=True, slots=True)
class _Needs:
    """What one step waits for besides the order of its stream; None for nothing.

    batch_after_compute: its batch, for the end of that step's computation, which filled or last read a slot of it.
    addend_from, input_from: its computation, for what the batch of that step receives.
    free_after_send: its computation, for the end of the send in that step's batch, which empties its send slot.
    """

    batch_after_compute: int | None
    input_from: int | None
    addend_from: int | None
    free_after_send: int | None


def _find_needs(program: tuple[Step, ...], collective: Collective) -> list[_Needs]:
    """Whatever used a slot last before a step, in program order, is what the step waits for."""
    is_gather = collective is Collective.ALL_GATHER
    filled_by_receive: dict[int, int] = {}
    read_by_compute: dict[int, int] = {}
    filled_by_compute: dict[int, int] = {}
    read_by_send: dict[int, int] = {}
    needs = []
    for position, step in enumerate(program):
        batch_after: set[int | None] = set()
        for transfer in step.transfers:
            if isinstance(transfer, Receive):
                batch_after.add(read_by_compute.get(transfer.slot))
                filled_by_receive[transfer.slot] = position
            elif not is_gather and transfer.slot is not None:
                batch_after.add(filled_by_compute.get(transfer.slot))
                read_by_send[transfer.slot] = position
        compute = step.compute
        arrival = free_after_send = None
        if compute.receive_slot is not None:
            arrival = filled_by_receive.get(compute.receive_slot)
            read_by_compute[compute.receive_slot] = position
        if compute.send_slot is not None:
            free_after_send = read_by_send.get(compute.send_slot)
            filled_by_compute[compute.send_slot] = position
        needs.append(
            _Needs(
                batch_after_compute=max((at for at in batch_after if at is not None), default=None),
                input_from=arrival if is_gather else None,
                addend_from=None if is_gather else arrival,
                free_after_send=free_after_send,
            )
        )
    return needs


@dataclass(slots=True)
class _Rank:
    """One rank's two streams. A batch is open from its issue until all of its transfers have met their other ends."""

    program: tuple[Step, ...]
    needs: list[_Needs]
    compute_ends: list[float] = field(default_factory=list)
    next_batch: int = 0
    unmet: list[Send | Receive] = field(default_factory=list)
    issued_us: float = 0.0
    batches_end_us: float = 0.0
    send_ends: dict[int, float] = field(default_factory=dict)
    receive_ends: dict[int, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return len(self.compute_ends) == len(self.program) and self.next_batch == len(self.program)

    @property
    def compute_end_us(self) -> float:
        return self.compute_ends[-1] if self.compute_ends else 0.0

    def timeline(self) -> Timeline:
        last = len(self.program) - 1
        tail = self._wait(last, self.compute_end_us, self.batches_end_us)
        return Timeline(tuple(sorted([*self.intervals, *tail], key=lambda i: (i.start_us, i.end_us))))

    def add_compute(self, step: int, start_us: float, gemm_us: float, addend_us: float) -> None:
        """Record a computation, and around it what it waits for: before for its input, after for its addend."""
        gemm_end_us = start_us + gemm_us
        end_us = max(gemm_end_us, addend_us)
        self.intervals += self._wait(step, self.compute_end_us, start_us)
        self.intervals.append(Interval(Activity.COMPUTE, step, start_us, gemm_end_us, self.program[step].compute.chunk))
        self.intervals += self._wait(step, gemm_end_us, end_us)
        self.compute_ends.append(end_us)

    def add_transfer(self, transfer: Send | Receive, start_us: float, end_us: float) -> None:
        """Record a transfer of the open batch, and close the batch if it was the last one."""
        step = self.next_batch
        if isinstance(transfer, Send):
            self.send_ends[step] = end_us
            interval = Interval(Activity.SEND, step, start_us, end_us, transfer.chunk, transfer.to_rank)
        else:
            self.receive_ends[step] = end_us
            interval = Interval(Activity.RECEIVE, step, start_us, end_us, transfer.chunk, transfer.from_rank)
        self.intervals.append(interval)
        self.batches_end_us = max(self.batches_end_us, end_us)
        self.unmet.remove(transfer)
        if not self.unmet:
            self.next_batch += 1

    @staticmethod
    def _wait(step: int, start_us: float, end_us: float) -> list[Interval]:
        return [Interval(Activity.WAIT, step, start_us, end_us)] if end_us > start_us else []


class _Run:
    """Lets every rank go on until it waits for another; when nobody can go on, all have finished or hang."""

    def __init__(
        self,
        schedule: Schedule,
        compute_us: ComputeCost,
        transfer_us: TransferCost,
        latency_us: float,
        adds_in_epilogue: bool,
    ) -> None:
        self.schedule = schedule
        self.compute_us = compute_us
        self.transfer_us = transfer_us
        self.latency_us = _check_cost(latency_us, "latency_us")
        self.adds_in_epilogue = adds_in_epilogue
        self.ranks = [_Rank(program, _find_needs(program, schedule.collective)) for program in schedule.programs]
        self.awake = deque(range(len(self.ranks)))

    def run(self) -> None:
        while self.awake:
            rank = self.awake.popleft()
            while self._issue_batch(rank) or self._run_compute(rank):
                pass
        if not all(rank.is_finished for rank in self.ranks):
            self._fail_deadlock()

    def _issue_batch(self, rank: int) -> bool:
        """Issue the next batch if its turn has come; transfers whose other ends wait already take place at once."""
        state = self.ranks[rank]
        if state.unmet or state.next_batch == len(state.program):
            return False
        after = state.needs[state.next_batch].batch_after_compute
        if after is not None and after >= len(state.compute_ends):
            return False
        transfers = state.program[state.next_batch].transfers
        if not transfers:
            state.next_batch += 1
            return True
        state.issued_us = max(state.batches_end_us, 0.0 if after is None else state.compute_ends[after])
        state.unmet = list(transfers)
        for transfer in transfers:
            self._meet(rank, transfer)
        return True

    def _meet(self, rank: int, transfer: Send | Receive) -> None:
        """Carry out a transfer if its other end is issued: the first one between the two ranks in that direction."""
        if isinstance(transfer, Send):
            from_rank, to_rank = rank, transfer.to_rank
        else:
            from_rank, to_rank = transfer.from_rank, rank
        sender, receiver = self.ranks[from_rank], self.ranks[to_rank]
        send = next((t for t in sender.unmet if isinstance(t, Send) and t.to_rank == to_rank), None)
        receive = next((t for t in receiver.unmet if isinstance(t, Receive) and t.from_rank == from_rank), None)
        if send is None or receive is None:
            return
        if send.chunk != receive.chunk:
            sent, expected = say_chunk(self.schedule, send.chunk), say_chunk(self.schedule, receive.chunk)
            sentence = f"sends {sent} to rank {to_rank}, which takes it for {expected}: values cross."
            fail(self.schedule, sentence, from_rank, sender.next_batch)
        start_us = max(sender.issued_us, receiver.issued_us)
        end_us = start_us + self._transfer_cost(from_rank, to_rank, send.chunk)
        sender.add_transfer(send, start_us, end_us)
        receiver.add_transfer(receive, start_us, end_us)
        self.awake.append(to_rank if rank == from_rank else from_rank)

    def _run_compute(self, rank: int) -> bool:
        """Run the next computation if what it needs is known to arrive."""
        state = self.ranks[rank]
        step = len(state.compute_ends)
        if step == len(state.program):
            return False
        needs = state.needs[step]
        input_us = _look_up(state.receive_ends, needs.input_from)
        addend_us = _look_up(state.receive_ends, needs.addend_from)
        free_us = _look_up(state.send_ends, needs.free_after_send)
        if input_us is None or addend_us is None or free_us is None:
            return False
        start_us = max(state.compute_end_us, input_us, free_us, addend_us if self.adds_in_epilogue else 0.0)
        state.add_compute(step, start_us, self._compute_cost(rank, state.program[step].compute.chunk), addend_us)
        return True

    def _compute_cost(self, rank: int, chunk: Chunk) -> float:
        cost = self.compute_us(rank, chunk) if callable(self.compute_us) else self.compute_us
        return _check_cost(cost, f"compute_us_per_chunk of rank {rank} for {chunk}")

    def _transfer_cost(self, from_rank: int, to_rank: int, chunk: Chunk) -> float:
        cost = self.transfer_us(from_rank, to_rank, chunk) if callable(self.transfer_us) else self.transfer_us
        return _check_cost(cost, f"transfer_us_per_chunk from {from_rank} to {to_rank} for {chunk}") + self.latency_us

    def _fail_deadlock(self) -> None:
        """Name who waits for whom, the ranks of a circle first if there is one.

        Whoever hangs has an open batch: batches and computations need only earlier steps of their own rank.
        """
        waiting_for = {
            rank: [(t.to_rank if isinstance(t, Send) else t.from_rank) for t in state.unmet]
            for rank, state in enumerate(self.ranks)
            if state.unmet
        }
        path = [next(iter(waiting_for))]
        while path[-1] in waiting_for and path[-1] not in path[:-1]:
            path.append(waiting_for[path[-1]][0])
        if path[-1] in waiting_for:
            path = path[path.index(path[-1]) :]
            how = "they wait in a circle, rank " + " -> ".join(map(str, path))
        else:
            how = f"rank {path[-1]} has finished its program"
        named = list(dict.fromkeys([*(rank for rank in path if rank in waiting_for), *waiting_for]))
        sentences = [sentence for rank in named[:_MAX_NAMED_RANKS] for sentence in self._describe_wait(rank)]
        more = f"\n  and {len(named) - _MAX_NAMED_RANKS} more ranks" if len(named) > _MAX_NAMED_RANKS else ""
        sentence = f"deadlock, {how}:" + "".join(f"\n  {text}" for text in sentences) + more
        fail(self.schedule, sentence, named[0], self.ranks[named[0]].next_batch)

    def _describe_wait(self, rank: int) -> Iterator[str]:
        state = self.ranks[rank]
        for transfer in state.unmet:
            name = say_chunk(self.schedule, transfer.chunk)
            if isinstance(transfer, Send):
                yield f"rank {rank}, step {state.next_batch}: waits for rank {transfer.to_rank} to receive {name}"
            else:
                yield f"rank {rank}, step {state.next_batch}: waits for rank {transfer.from_rank} to send {name}"


def _look_up(ends_us: dict[int, float], step: int | None) -> float | None:
    """When the transfer of a step ends; 0 if none is waited for, None if it is not known yet."""
    return 0.0 if step is None else ends_us.get(step)


def _check_cost(cost_us: float, what: str) -> float:
    if not (math.isfinite(cost_us) and cost_us >= 0):
        raise ScheduleError(f"{what} is {cost_us}: it must be a time, finite and not negative.")
    return cost_us
