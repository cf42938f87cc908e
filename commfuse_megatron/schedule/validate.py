"""Proof that a schedule is a correct program, for any transport that keeps the order of messages between two ranks.

Looks at names and order only; what each slot holds when is followed in `data_flow`. The contract that bites: both ends
of a transfer stand in the same step. Then no tags are needed, also in a group of two, where all transfers share one
pair of ranks, and no rank can wait in a circle: the batch of step t needs nothing but earlier steps.
"""

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Compute, Receive, Schedule, Send, Step
from commfuse_megatron.schedule.data_flow import follow_data
from commfuse_megatron.schedule.failure import fail, say_chunk

__all__ = ["validate"]


def validate(schedule: Schedule) -> None:
    """Return if the schedule is correct on every rank, in time proportional to its number of steps.

    Proven: every rank computes every chunk once, its own shard first (all-gather) or last (reduce-scatter); a batch
    holds at most one send and one receive, and every send meets its receive; every chunk is delivered once: in an
    all-gather to every rank, in a reduce-scatter as a sum that holds every rank's partial exactly once; nothing is
    read before it is written, and no slot is overwritten while it can still be read; a reduce-scatter issues no
    transfer after the computation of the own shard has begun.

    Raises:
        ScheduleError: what is wrong, on which rank and in which step, with that cell marked in the printed grid.
    """
    _check_counts(schedule)
    for rank, program in enumerate(schedule.programs):
        for position, step in enumerate(program):
            if step.index != position:
                fail(schedule, f"the step at this position calls itself step {step.index}.", rank, position)
            _check_batch_size(schedule, rank, step)
            for transfer in step.transfers:
                _check_transfer(schedule, rank, position, transfer)
            _check_compute(schedule, rank, position, step.compute)
        _check_order(schedule, rank)
    _check_matching(schedule)
    follow_data(schedule)


def _check_counts(schedule: Schedule) -> None:
    """As many ranks and steps as the sizes say, and slot counts that make sense."""
    group_size, chunks_per_shard = schedule.group_size, schedule.chunks_per_shard
    if group_size < 1 or chunks_per_shard < 1:
        fail(schedule, "group_size and chunks_per_shard must be at least 1.")
    if schedule.num_receive_slots < 0 or schedule.num_send_slots < 0:
        fail(schedule, f"{schedule.num_receive_slots} receive and {schedule.num_send_slots} send slots: not a count.")
    if len(schedule.programs) != group_size:
        fail(schedule, f"there are programs for {len(schedule.programs)} ranks, the group has {group_size}.")
    num_steps = group_size * chunks_per_shard
    for rank, program in enumerate(schedule.programs):
        if len(program) != num_steps:
            fail(schedule, f"{len(program)} steps, but {num_steps} chunks are to be computed, one in each step.", rank)


def _check_batch_size(schedule: Schedule, rank: int, step: Step) -> None:
    """At most one send and one receive per batch."""
    num_sends = sum(isinstance(transfer, Send) for transfer in step.transfers)
    num_receives = len(step.transfers) - num_sends
    if num_sends > 1 or num_receives > 1:
        counts = f"{num_sends} send(s) and {num_receives} receive(s)"
        fail(schedule, f"the batch has {counts}, at most one of each is allowed.", rank, step.index)


def _check_transfer(schedule: Schedule, rank: int, step: int, transfer: Send | Receive) -> None:
    """Peer, chunk and slot exist and are what the collective and the algorithm allow."""
    is_send = isinstance(transfer, Send)
    peer_rank = transfer.to_rank if isinstance(transfer, Send) else transfer.from_rank
    verb, toward = ("sends", "to") if is_send else ("receives", "from")
    what = f"{verb} {_checked_name(schedule, rank, step, transfer.chunk)} {toward} rank {peer_rank}"
    if not 0 <= peer_rank < schedule.group_size or peer_rank == rank:
        fail(schedule, f"{what}, which is no peer in a group of {schedule.group_size}.", rank, step)

    is_gather = schedule.collective is Collective.ALL_GATHER
    is_own = transfer.chunk.owner_rank == rank
    if is_gather and is_own and not is_send:
        fail(schedule, f"{what}, but the shard is its own.", rank, step)
    if schedule.algorithm is Algorithm.RING:
        neighbour = (rank + 1 if is_send else rank - 1) % schedule.group_size
        if peer_rank != neighbour:
            fail(schedule, f"{what}, but a ring {verb} {toward} rank {neighbour} only.", rank, step)
    else:
        # All-gather: from the owner. Reduce-scatter: to the owner.
        sender, receiver = (rank, peer_rank) if is_send else (peer_rank, rank)
        end, name = (sender, "from its owner") if is_gather else (receiver, "to its owner")
        if transfer.chunk.owner_rank != end:
            fail(schedule, f"{what}, but direct means {name}, rank {transfer.chunk.owner_rank}.", rank, step)

    if is_send and is_gather and is_own:
        if transfer.slot is not None:
            fail(schedule, f"{what} from slot {transfer.slot}, but its own shard lies in no slot.", rank, step)
        return
    kind = "send" if is_send and not is_gather else "receive"
    _check_slot(schedule, rank, step, what, kind, transfer.slot)


def _check_compute(schedule: Schedule, rank: int, step: int, compute: Compute) -> None:
    """Chunk and slots exist and are what the collective and the algorithm allow."""
    what = f"computes {_checked_name(schedule, rank, step, compute.chunk)}"
    is_own = compute.chunk.owner_rank == rank
    if schedule.collective is Collective.ALL_GATHER:
        if compute.send_slot is not None:
            fail(schedule, f"{what} into send slot {compute.send_slot}, but an all-gather has none.", rank, step)
        if not is_own:
            _check_slot(schedule, rank, step, what, "receive", compute.receive_slot)
        elif compute.receive_slot is not None:
            fail(schedule, f"{what} from slot {compute.receive_slot}, but its own shard lies in no slot.", rank, step)
        return
    if not is_own:
        _check_slot(schedule, rank, step, what, "send", compute.send_slot)
    elif compute.send_slot is not None:
        fail(schedule, f"{what} into send slot {compute.send_slot}, but it is this rank's own result.", rank, step)
    if compute.receive_slot is not None:
        if schedule.algorithm is Algorithm.DIRECT:
            fail(schedule, f"{what} and adds a slot, but direct partials are summed after the last step.", rank, step)
        _check_slot(schedule, rank, step, what, "receive", compute.receive_slot)


def _check_slot(schedule: Schedule, rank: int, step: int, what: str, kind: str, slot: int | None) -> None:
    num_slots = schedule.num_receive_slots if kind == "receive" else schedule.num_send_slots
    if slot is None:
        fail(schedule, f"{what} without a {kind} slot.", rank, step)
    if not 0 <= slot < num_slots:
        fail(schedule, f"{what} with {kind} slot {slot}, but there are {num_slots}.", rank, step)


def _checked_name(schedule: Schedule, rank: int, step: int, chunk: Chunk) -> str:
    if not (0 <= chunk.owner_rank < schedule.group_size and 0 <= chunk.index < schedule.chunks_per_shard):
        fail(schedule, f"there is no chunk {chunk.index} of shard {chunk.owner_rank}.", rank, step)
    return say_chunk(schedule, chunk)


def _check_order(schedule: Schedule, rank: int) -> None:
    """Every chunk once (as many steps as chunks, no chunk twice), own shard at the right end, no transfer behind it."""
    computed_at: dict[Chunk, int] = {}
    num_foreign = (schedule.group_size - 1) * schedule.chunks_per_shard
    for step in schedule.programs[rank]:
        name = say_chunk(schedule, step.compute.chunk)
        earlier = computed_at.setdefault(step.compute.chunk, step.index)
        if earlier != step.index:
            fail(schedule, f"computes {name} a second time, after step {earlier}.", rank, step.index)
        is_own = step.compute.chunk.owner_rank == rank
        if schedule.collective is Collective.ALL_GATHER:
            if step.index < schedule.chunks_per_shard and not is_own:
                fail(schedule, f"computes {name}, but an all-gather begins with the own shard.", rank, step.index)
            continue
        if step.index >= num_foreign and not is_own:
            fail(schedule, f"computes {name}, but a reduce-scatter ends with the own shard.", rank, step.index)
        if step.index > num_foreign and step.transfers:
            sentence = f"issues transfers after the computation of the own shard began in step {num_foreign}: a tail."
            fail(schedule, sentence, rank, step.index)


def _check_matching(schedule: Schedule) -> None:
    """Every send meets, in the batch of the same step of its receiver, the receive of the same chunk; and back."""
    for step, row in enumerate(zip(*schedule.programs, strict=True)):
        sent: dict[tuple[int, int], Chunk] = {}
        received: dict[tuple[int, int], Chunk] = {}
        for rank, cell in enumerate(row):
            for transfer in cell.transfers:
                if isinstance(transfer, Send):
                    sent[rank, transfer.to_rank] = transfer.chunk
                else:
                    received[transfer.from_rank, rank] = transfer.chunk
        for (from_rank, to_rank), chunk in sent.items():
            what = f"sends {say_chunk(schedule, chunk)} to rank {to_rank}"
            expected = received.get((from_rank, to_rank))
            if expected is None:
                end = _describe_other_end(schedule, to_rank, Receive, from_rank, chunk)
                fail(schedule, f"{what}, which {end}", from_rank, step)
            if expected != chunk:
                sentence = f"{what}, which takes it for {say_chunk(schedule, expected)}: values cross."
                fail(schedule, sentence, from_rank, step)
        for (from_rank, to_rank), chunk in received.items():
            if (from_rank, to_rank) not in sent:
                what = f"receives {say_chunk(schedule, chunk)} from rank {from_rank}"
                end = _describe_other_end(schedule, from_rank, Send, to_rank, chunk)
                fail(schedule, f"{what}, which {end}", to_rank, step)


def _describe_other_end(schedule: Schedule, rank: int, kind: type[Send | Receive], peer_rank: int, chunk: Chunk) -> str:
    """Where `rank` has the other end of a transfer that nobody met, as the end of a sentence."""
    verb = "sends" if kind is Send else "receives"
    for step in schedule.programs[rank]:
        for transfer in step.transfers:
            peer = transfer.to_rank if isinstance(transfer, Send) else transfer.from_rank
            if isinstance(transfer, kind) and (peer, transfer.chunk) == (peer_rank, chunk):
                return f"{verb} it in step {step.index}: both ends of a transfer belong into the same step."
    return f"never {verb} it."
