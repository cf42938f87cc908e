"""For tests of schedules: which ones to try, ways to break them, and an interpreter that races where it may.

The interpreter shares no code with `validate` and `simulate`, so that they can be tested against it.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from commfuse_megatron.schedule import (
    Algorithm,
    Chunk,
    Collective,
    Compute,
    Receive,
    Schedule,
    Send,
    Step,
    build_all_gather,
    build_reduce_scatter,
)

Transfer = Send | Receive


def build(collective: str, algorithm: str, group_size: int, chunks_per_shard: int = 1, **slots: int | None) -> Schedule:
    builder = {"all_gather": build_all_gather, "reduce_scatter": build_reduce_scatter}[collective]
    return builder(group_size, Algorithm(algorithm), chunks_per_shard, **slots)


def fewest_slots(collective: str, algorithm: str, group_size: int, chunks_per_shard: int) -> dict[str, int]:
    """The smallest slot counts that a builder accepts, as its arguments."""
    num_transfers = (group_size - 1) * chunks_per_shard
    if collective == "all_gather":
        return {"num_receive_slots": min(chunks_per_shard + 1, num_transfers)}
    num_receive_slots = min(chunks_per_shard, num_transfers) if algorithm == "ring" else num_transfers
    return {"num_receive_slots": num_receive_slots, "num_send_slots": min(2, num_transfers)}


@st.composite
def schedules(draw: st.DrawFn, max_group_size: int = 16, max_chunks: int = 4, min_group_size: int = 1) -> Schedule:
    """Any schedule that can be built: both collectives and algorithms, with no, some or all slots reused."""
    collective = draw(st.sampled_from(["all_gather", "reduce_scatter"]))
    algorithm = draw(st.sampled_from(["ring", "direct"]))
    group_size = draw(st.integers(min_group_size, max_group_size))
    chunks_per_shard = draw(st.integers(1, max_chunks))
    slots: dict[str, int | None] = {
        name: draw(st.none() | st.integers(fewest, max(fewest, (group_size - 1) * chunks_per_shard)))
        for name, fewest in fewest_slots(collective, algorithm, group_size, chunks_per_shard).items()
    }
    return build(collective, algorithm, group_size, chunks_per_shard, **slots)


def change_step(schedule: Schedule, rank: int, step: int, **changes: Any) -> Schedule:
    """The same schedule with fields of one step replaced; `compute` may be a dict of fields to replace in it."""
    program = list(schedule.programs[rank])
    if isinstance(changes.get("compute"), dict):
        changes["compute"] = replace(program[step].compute, **changes["compute"])
    program[step] = replace(program[step], **changes)
    return with_program(schedule, rank, program)


def with_program(schedule: Schedule, rank: int, program: Iterable[Step]) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def transfer_at(schedule: Schedule, rank: int, step: int, kind: type[Transfer]) -> Transfer:
    return next(t for t in schedule.programs[rank][step].transfers if isinstance(t, kind))


def drop(schedule: Schedule, rank: int, step: int, kind: type[Transfer]) -> Schedule:
    kept = tuple(t for t in schedule.programs[rank][step].transfers if not isinstance(t, kind))
    return change_step(schedule, rank, step, transfers=kept)


def change_transfer(schedule: Schedule, rank: int, step: int, kind: type[Transfer], **changes: Any) -> Schedule:
    changed = tuple(
        replace(t, **changes) if isinstance(t, kind) else t for t in schedule.programs[rank][step].transfers
    )
    return change_step(schedule, rank, step, transfers=changed)


def swap(schedule: Schedule, rank: int, step: int, other: int, field: str) -> Schedule:
    """Exchange the `compute` or the `transfers` of two steps of a rank."""
    steps = schedule.programs[rank]
    first, second = getattr(steps[step], field), getattr(steps[other], field)
    return change_step(change_step(schedule, rank, step, **{field: second}), rank, other, **{field: first})


def break_randomly(schedule: Schedule, rng: random.Random) -> Schedule:
    """One random edit, most of which break the schedule (a change to a slot that is free then does not)."""
    rank = rng.randrange(schedule.group_size)
    program = schedule.programs[rank]
    step, other = rng.randrange(len(program)), rng.randrange(len(program))
    kind = rng.choice([Send, Receive])
    has_transfer = any(isinstance(t, kind) for t in program[step].transfers)
    num_slots = max(schedule.num_receive_slots, schedule.num_send_slots)
    chunk = Chunk(rng.randrange(schedule.group_size), rng.randrange(schedule.chunks_per_shard))
    edits = ["swap compute", "swap transfers", "compute receive slot", "compute send slot", "compute chunk"]
    if has_transfer:
        edits += ["drop", "move", "copy", "slot", "slot", "chunk", "peer"]
    match rng.choice(edits):
        case "swap compute":
            return swap(schedule, rank, step, other, "compute")
        case "swap transfers":
            return swap(schedule, rank, step, other, "transfers")
        case "compute receive slot":
            return change_step(schedule, rank, step, compute={"receive_slot": rng.choice([None, *range(num_slots)])})
        case "compute send slot":
            return change_step(schedule, rank, step, compute={"send_slot": rng.choice([None, *range(num_slots)])})
        case "compute chunk":
            return change_step(schedule, rank, step, compute={"chunk": chunk})
        case "drop":
            return drop(schedule, rank, step, kind)
        case ("move" | "copy") as edit:
            transfers = (*program[other].transfers, transfer_at(schedule, rank, step, kind))
            source = schedule if edit == "copy" else drop(schedule, rank, step, kind)
            return change_step(source, rank, other, transfers=transfers)
        case "slot":
            return change_transfer(schedule, rank, step, kind, slot=rng.choice([None, *range(num_slots)]))
        case "chunk":
            return change_transfer(schedule, rank, step, kind, chunk=chunk)
        case _:
            field = "to_rank" if kind is Send else "from_rank"
            return change_transfer(schedule, rank, step, kind, **{field: rng.randrange(schedule.group_size)})


def is_right(schedule: Schedule, results: list[dict[Chunk, Any]]) -> bool:
    """Whether `Interpreter.run` ended with what the collective promises."""
    group = range(schedule.group_size)
    chunks = [Chunk(owner, index) for owner in group for index in range(schedule.chunks_per_shard)]
    if schedule.collective is Collective.ALL_GATHER:
        return all(result == {chunk: chunk for chunk in chunks} for result in results)
    return all(
        results[rank] == {chunk: Counter((r, chunk) for r in group) for chunk in chunks if chunk.owner_rank == rank}
        for rank in group
    )


class Interpreter:
    """Runs a schedule on symbols, in a random order of everything that no rule of a real runtime orders.

    Each rank has two streams in program order. A computation waits for those transfers of its own or earlier batches,
    and a batch for those computations of earlier steps, that use one of its slots. Messages between two ranks carry
    no name and keep their order. What is sent is read as late as possible.
    """

    def __init__(self, schedule: Schedule, rng: random.Random) -> None:
        group = range(schedule.group_size)
        self.schedule, self.rng = schedule, rng
        self.wires: dict[tuple[int, int], deque[Any]] = {(a, b): deque() for a in group for b in group}
        self.slots: list[dict[tuple[str, int], Any]] = [{} for _ in group]
        self.computed = [0 for _ in group]
        self.batch = [0 for _ in group]
        self.pending = [list(program[0].transfers) for program in schedule.programs]
        self.results: list[dict[Chunk, Any]] = [{} for _ in group]

    def run(self) -> list[dict[Chunk, Any]] | None:
        """What every rank has at the end, or None if it hung or read an empty slot."""
        try:
            while events := [event for rank in range(self.schedule.group_size) for event in self.possible(rank)]:
                self.happen(*self.rng.choice(events))
        except KeyError:
            return None
        if any(n < len(self.schedule.programs[0]) for n in [*self.computed, *self.batch]):
            return None
        if self.schedule.collective is Collective.REDUCE_SCATTER and self.schedule.algorithm is Algorithm.DIRECT:
            for rank, slots in enumerate(self.slots):
                for (kind, _), (chunk, value) in slots.items():
                    if kind == "receive":
                        self.results[rank][chunk] = self.results[rank].get(chunk, Counter()) + value
        return self.results

    def slots_of(self, action: Transfer | Compute) -> set[tuple[str, int | None]]:
        if isinstance(action, Compute):
            return {("receive", action.receive_slot), ("send", action.send_slot)} - {("receive", None), ("send", None)}
        is_send_slot = isinstance(action, Send) and self.schedule.collective is Collective.REDUCE_SCATTER
        return {("send" if is_send_slot else "receive", action.slot)} - {("receive", None)}

    def possible(self, rank: int) -> list[tuple[int, Transfer | Compute | None]]:
        program = self.schedule.programs[rank]
        events: list[tuple[int, Transfer | Compute | None]] = []
        batch, step = self.batch[rank], self.computed[rank]
        if batch < len(program):
            used = {slot for transfer in program[batch].transfers for slot in self.slots_of(transfer)}
            if not any(used & self.slots_of(s.compute) for s in program[step:batch]):
                if not self.pending[rank]:
                    events.append((rank, None))
                for transfer in self.pending[rank]:
                    if isinstance(transfer, Send) or self.wires[transfer.from_rank, rank]:
                        events.append((rank, transfer))
        if step < len(program):
            compute = program[step].compute
            unfinished = [
                *(self.pending[rank] if batch <= step else []),
                *(t for s in program[batch + 1 : step + 1] for t in s.transfers),
            ]
            if not any(self.slots_of(compute) & self.slots_of(transfer) for transfer in unfinished):
                events.append((rank, compute))
        return events

    def happen(self, rank: int, action: Transfer | Compute | None) -> None:
        slots = self.slots[rank]
        is_gather = self.schedule.collective is Collective.ALL_GATHER
        if action is None:
            self.batch[rank] += 1
            program = self.schedule.programs[rank]
            self.pending[rank] = list(program[self.batch[rank]].transfers) if self.batch[rank] < len(program) else []
        elif isinstance(action, Send):
            self.pending[rank].remove(action)
            kind = "receive" if is_gather else "send"
            value = action.chunk if action.slot is None else slots[kind, action.slot][1]
            self.wires[rank, action.to_rank].append(value)
        elif isinstance(action, Receive):
            self.pending[rank].remove(action)
            slots["receive", action.slot] = (action.chunk, self.wires[action.from_rank, rank].popleft())
        else:
            self.computed[rank] += 1
            if is_gather:
                value = action.chunk if action.receive_slot is None else slots["receive", action.receive_slot][1]
            else:
                value = Counter({(rank, action.chunk): 1})
                if action.receive_slot is not None:
                    value = value + slots.pop(("receive", action.receive_slot))[1]
            if action.send_slot is not None:
                slots["send", action.send_slot] = (action.chunk, value)
            else:
                self.results[rank][action.chunk] = value
