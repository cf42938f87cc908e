"""What every slot holds when: follows chunks (all-gather) and partial sums (reduce-scatter) through all ranks.

Expects what `validate` checks first: sizes, matching transfers, order. The contract that bites: transfers of a step
run beside its computation. So a slot may be written by a batch or a computation of step t only if whatever reads it
belongs to an earlier step; but a computation may use what arrives in the batch of its own step, as it waits for it.
"""

from dataclasses import dataclass

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Compute, Receive, Schedule, Send
from commfuse_megatron.schedule.failure import fail, say_chunk

__all__ = ["follow_data"]


def follow_data(schedule: Schedule) -> None:
    """Raise ScheduleError unless all ranks end with the right data, reading and overwriting nothing out of turn."""
    if schedule.collective is Collective.ALL_GATHER:
        for rank in range(schedule.group_size):
            _follow_chunks(schedule, rank)
    else:
        _PartialSums(schedule).follow()


def _follow_chunks(schedule: Schedule, rank: int) -> None:
    """All-gather: a chunk lies in its slot from its arrival, once, to the last step that multiplies or forwards it.

    One rank at a time: what arrives is what its receive says, since the sender's slot held what its send says.
    """
    last_use: dict[Chunk, int] = {}
    for step in schedule.programs[rank]:
        last_use[step.compute.chunk] = step.index
        for transfer in step.transfers:
            if isinstance(transfer, Send):
                last_use[transfer.chunk] = step.index

    held: list[Chunk | None] = [None] * schedule.num_receive_slots
    arrived_at: dict[Chunk, int] = {}

    def read(verb: str, chunk: Chunk, slot: int | None, step: int) -> None:
        if slot is None or held[slot] == chunk:
            return
        what = f"{verb} {say_chunk(schedule, chunk)} from receive slot {slot}, which holds"
        content = held[slot]
        fail(schedule, f"{what} {'nothing yet' if content is None else say_chunk(schedule, content)}.", rank, step)

    for step in schedule.programs[rank]:
        for transfer in step.transfers:
            if isinstance(transfer, Send):
                read("sends", transfer.chunk, transfer.slot, step.index)
        for transfer in step.transfers:
            if not isinstance(transfer, Receive):
                continue
            what = f"receives {say_chunk(schedule, transfer.chunk)}"
            if transfer.chunk in arrived_at:
                fail(schedule, f"{what} a second time, after step {arrived_at[transfer.chunk]}.", rank, step.index)
            arrived_at[transfer.chunk] = step.index
            old = held[transfer.slot]
            if old is not None and last_use[old] >= step.index:
                over = f"over {say_chunk(schedule, old)}, which step {last_use[old]} reads."
                fail(schedule, f"{what} into slot {transfer.slot} {over}", rank, step.index)
            held[transfer.slot] = transfer.chunk
        read("computes", step.compute.chunk, step.compute.receive_slot, step.index)


@dataclass(slots=True)
class _Partial:
    """A sum in a slot. `ranks` is a bit set of those whose partial it holds, `sent_at` the step of its send."""

    chunk: Chunk
    ranks: int
    sent_at: int | None = None


class _PartialSums:
    """Reduce-scatter: every partial is put into a send slot, sent once, and added once where it arrived."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        group = range(schedule.group_size)
        self.send_slots: list[list[_Partial | None]] = [[None] * schedule.num_send_slots for _ in group]
        self.receive_slots: list[list[_Partial | None]] = [[None] * schedule.num_receive_slots for _ in group]
        self.results: list[dict[Chunk, int]] = [{} for _ in group]

    def follow(self) -> None:
        """Run all ranks in step: first the batches, then the computations, at last the sums of the owners."""
        for step, row in enumerate(zip(*self.schedule.programs, strict=True)):
            in_flight: dict[tuple[int, int], _Partial] = {}
            for rank, cell in enumerate(row):
                for transfer in cell.transfers:
                    if isinstance(transfer, Send):
                        in_flight[rank, transfer.to_rank] = self._send(rank, step, transfer)
            for rank, cell in enumerate(row):
                for transfer in cell.transfers:
                    if isinstance(transfer, Receive):
                        self._receive(rank, step, transfer, in_flight[transfer.from_rank, rank])
            for rank, cell in enumerate(row):
                self._compute(rank, step, cell.compute)
        for rank in range(self.schedule.group_size):
            self._finish(rank)

    def _name(self, chunk: Chunk) -> str:
        return say_chunk(self.schedule, chunk)

    def _send(self, rank: int, step: int, send: Send) -> _Partial:
        assert send.slot is not None  # validate checked it
        partial = self.send_slots[rank][send.slot]
        what = f"sends {self._name(send.chunk)} from send slot {send.slot}, which"
        if partial is None:
            fail(self.schedule, f"{what} holds nothing yet.", rank, step)
        if partial.chunk != send.chunk:
            fail(self.schedule, f"{what} holds {self._name(partial.chunk)}.", rank, step)
        if partial.sent_at is not None:
            fail(self.schedule, f"{what} was sent in step {partial.sent_at} already.", rank, step)
        partial.sent_at = step
        return partial

    def _receive(self, rank: int, step: int, receive: Receive, partial: _Partial) -> None:
        old = self.receive_slots[rank][receive.slot]
        if old is not None:
            what = f"receives {self._name(receive.chunk)} into slot {receive.slot} over {self._name(old.chunk)}"
            fail(self.schedule, f"{what}, which is still to be added.", rank, step)
        self.receive_slots[rank][receive.slot] = _Partial(partial.chunk, partial.ranks)

    def _compute(self, rank: int, step: int, compute: Compute) -> None:
        what = f"computes {self._name(compute.chunk)}"
        ranks = 1 << rank
        if compute.receive_slot is not None:
            addend = self.receive_slots[rank][compute.receive_slot]
            if addend is None:
                fail(self.schedule, f"{what} and adds receive slot {compute.receive_slot}, which is empty.", rank, step)
            ranks = self._add(rank, step, compute.chunk, ranks, addend)
            self.receive_slots[rank][compute.receive_slot] = None
        if compute.send_slot is None:
            self.results[rank][compute.chunk] = ranks
            return
        old = self.send_slots[rank][compute.send_slot]
        if old is not None and (old.sent_at is None or old.sent_at >= step):
            when = "was never sent" if old.sent_at is None else "the batch of this step sends"
            sentence = f"{what} into send slot {compute.send_slot} over {self._name(old.chunk)}, which {when}."
            fail(self.schedule, sentence, rank, step)
        self.send_slots[rank][compute.send_slot] = _Partial(compute.chunk, ranks)

    def _add(self, rank: int, step: int, chunk: Chunk, ranks: int, addend: _Partial) -> int:
        if addend.chunk != chunk:
            fail(self.schedule, f"adds a sum of {self._name(addend.chunk)} to {self._name(chunk)}.", rank, step)
        if ranks & addend.ranks:
            twice = _list_ranks(ranks & addend.ranks)
            fail(self.schedule, f"adds the partial of rank {twice} to {self._name(chunk)} a second time.", rank, step)
        return ranks | addend.ranks

    def _finish(self, rank: int) -> None:
        """The owner's sum after the last step, which must hold every rank's partial."""
        last_step = len(self.schedule.programs[rank]) - 1
        for sent in self.send_slots[rank]:
            if sent is not None and sent.sent_at is None:
                fail(self.schedule, f"never sends its partial of {self._name(sent.chunk)}.", rank, last_step)
        results = self.results[rank]
        for arrived in self.receive_slots[rank]:
            if arrived is None:
                continue
            if self.schedule.algorithm is Algorithm.RING:
                fail(self.schedule, f"never adds the sum of {self._name(arrived.chunk)} that arrived.", rank, last_step)
            results[arrived.chunk] = self._add(rank, last_step, arrived.chunk, results[arrived.chunk], arrived)
        everyone = (1 << self.schedule.group_size) - 1
        for step in self.schedule.programs[rank]:
            missing = everyone & ~results.get(step.compute.chunk, everyone)
            if missing:
                name = self._name(step.compute.chunk)
                fail(
                    self.schedule,
                    f"its sum of {name} lacks the partial of rank {_list_ranks(missing)}.",
                    rank,
                    step.index,
                )


def _list_ranks(ranks: int) -> str:
    return ", ".join(str(rank) for rank in range(ranks.bit_length()) if ranks >> rank & 1)
