"""Every kind of mistake that `validate` claims to find is made in a correct schedule, and found."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule import Chunk, Receive, Schedule, Send, validate
from commfuse_megatron.schedule.data_flow import follow_data
from tests.harness.schedules import (
    Interpreter,
    break_randomly,
    build,
    change_step,
    change_transfer,
    drop,
    is_right,
    schedules,
    swap,
    transfer_at,
    with_program,
)

KINDS = [(c, a) for c in ("all_gather", "reduce_scatter") for a in ("ring", "direct")]


def gather(algorithm: str = "ring", n: int = 4, m: int = 1, **slots: int) -> Schedule:
    return build("all_gather", algorithm, n, m, **slots)


def scatter(algorithm: str = "ring", n: int = 4, m: int = 1, **slots: int) -> Schedule:
    return build("reduce_scatter", algorithm, n, m, **slots)


def with_transfer(schedule: Schedule, rank: int, step: int, transfer: Send | Receive) -> Schedule:
    return change_step(schedule, rank, step, transfers=(*schedule.programs[rank][step].transfers, transfer))


def move(schedule: Schedule, rank: int, step: int, other: int) -> Schedule:
    """All transfers of a step into another one, which has none."""
    transfers = schedule.programs[rank][step].transfers
    return change_step(change_step(schedule, rank, step, transfers=()), rank, other, transfers=transfers)


def move_all(schedule: Schedule, step: int, other: int) -> Schedule:
    for rank in range(schedule.group_size):
        schedule = move(schedule, rank, step, other)
    return schedule


def swap_all(schedule: Schedule, step: int, other: int, field: str) -> Schedule:
    for rank in range(schedule.group_size):
        schedule = swap(schedule, rank, step, other, field)
    return schedule


def change_all(schedule: Schedule, step: int, kind: type[Send | Receive], slot: int) -> Schedule:
    for rank in range(schedule.group_size):
        schedule = change_transfer(schedule, rank, step, kind, slot=slot)
    return schedule


def cross_pair(collective: str) -> Schedule:
    """A group of two whose rank 0 sends its two chunks in the order that rank 1 does not expect."""
    schedule = build(collective, "direct", 2, 2)
    first = 0 if collective == "all_gather" else 1
    early, late = (transfer_at(schedule, 0, first + i, Send) for i in range(2))
    schedule = change_transfer(schedule, 0, first, Send, chunk=late.chunk)
    return change_transfer(schedule, 0, first + 1, Send, chunk=early.chunk)


def double_delivery() -> Schedule:
    """Rank 0 sends its chunk to rank 1 once more, in the last step, which had no transfers."""
    schedule = with_transfer(gather(), 0, 3, Send(Chunk(0, 0), 1, None))
    return with_transfer(schedule, 1, 3, Receive(Chunk(0, 0), 0, 0))


def second_send() -> Schedule:
    """In step 2, every rank sends the partial of step 0 again, under its name, to the owner that has it already."""
    schedule = scatter("direct", n=3, m=2)
    for rank in range(3):
        again = transfer_at(schedule, rank, 1, Send)
        schedule = change_transfer(schedule, rank, 2, Send, chunk=again.chunk, slot=again.slot)
        peer = again.to_rank
        schedule = change_transfer(schedule, peer, 2, Receive, chunk=again.chunk)
    return schedule


def unsent_partial() -> Schedule:
    """Step 1 of rank 0 and its receive at rank 1 are gone: the owner's sum lacks a partial."""
    return drop(drop(scatter("direct"), 0, 1, Send), 1, 1, Receive)


def unadded_sum() -> Schedule:
    """Rank 2 starts the sum of its own chunk anew."""
    return change_step(scatter(), 2, 3, compute={"receive_slot": None})


BROKEN: dict[str, tuple[Callable[[], Schedule], str]] = {
    # Every send has its receive, and the other way round.
    "no receive": (
        lambda: drop(gather(), 2, 1, Receive),
        r"rank 1, step 1: sends chunk 0 to rank 2, which never receives it",
    ),
    "no send": (
        lambda: drop(gather(), 1, 1, Send),
        r"rank 2, step 1: receives chunk 0 from rank 1, which never sends it",
    ),
    "no send to owner": (
        lambda: drop(scatter("direct"), 0, 2, Send),
        r"rank 2, step 2: receives chunk 2 from rank 0, which never sends it",
    ),
    "wrong peer": (
        lambda: change_transfer(gather("direct"), 0, 1, Send, to_rank=3),
        r"rank 0, step 1: sends chunk 0 to rank 3, which receives it in step 2: both ends .* same step",
    ),
    "transfers of one rank in another order": (
        lambda: swap(gather("direct"), 1, 1, 2, "transfers"),
        r"rank 1, step 1: sends chunk 1 to rank 0, which receives it in step 2|which receives it in step 1: both ends",
    ),
    "crossed all-gather of two": (lambda: cross_pair("all_gather"), r"takes it for chunk 0\.0: values cross"),
    "crossed reduce-scatter of two": (lambda: cross_pair("reduce_scatter"), r"takes it for chunk 1\.0: values cross"),
    "crossed in the ring": (
        lambda: change_transfer(gather(m=2), 3, 4, Receive, chunk=Chunk(0, 1)),
        r"rank 2, step 4: sends chunk 0\.0 to rank 3, which takes it for chunk 0\.1: values cross",
    ),
    # At most one send and one receive per batch.
    "two receives": (
        lambda: with_transfer(scatter(), 1, 2, transfer_at(scatter(), 1, 2, Receive)),
        r"rank 1, step 2: the batch has 1 send\(s\) and 2 receive\(s\), at most one of each",
    ),
    "two sends": (
        lambda: with_transfer(gather(), 1, 0, transfer_at(gather(), 1, 0, Send)),
        r"rank 1, step 0: the batch has 2 send\(s\) and 1 receive\(s\)",
    ),
    # Every partial computed once.
    "computed twice": (
        lambda: change_step(scatter(), 1, 2, compute={"chunk": Chunk(3, 0)}),
        r"rank 1, step 2: computes chunk 3 a second time, after step 1",
    ),
    "multiplied twice": (
        lambda: change_step(gather(m=2), 1, 5, compute={"chunk": Chunk(3, 0)}),
        r"rank 1, step 5: computes chunk 3\.0 a second time, after step 4|from receive slot",
    ),
    "a step short": (
        lambda: with_program(gather(), 1, gather().programs[1][:-1]),
        r"rank 1: 3 steps, but 4 chunks are to be computed",
    ),
    # Own shard first or last; no tail.
    "own shard not first": (
        lambda: swap(gather(), 1, 0, 1, "compute"),
        r"rank 1, step 0: computes chunk 0, but an all-gather begins with the own shard",
    ),
    "own shard not last": (
        lambda: swap(scatter(), 1, 2, 3, "compute"),
        r"rank 1, step 3: computes chunk 2, but a reduce-scatter ends with the own shard",
    ),
    "a tail on one rank": (
        lambda: move(scatter("direct", 3, 2), 0, 4, 5),
        r"rank 0, step 5: issues transfers after the computation of the own shard began in step 4",
    ),
    "a tail": (
        lambda: move_all(scatter("direct", m=2), 6, 7),
        r"rank 0, step 7: issues transfers after the computation of the own shard began in step 6: a tail",
    ),
    # Every chunk delivered once.
    "delivered twice": (double_delivery, r"rank 1, step 3: receives chunk 0 a second time, after step 0"),
    "partial sent twice": (second_send, r"step 2: sends .* from send slot 0, which was sent in step 1 already"),
    "partial never sent": (unsent_partial, r"rank 0, step 3: never sends its partial of chunk 1"),
    "sum never added": (unadded_sum, r"rank 2, step 3: never adds the sum of chunk 2 that arrived"),
    "wrong sum added": (
        lambda: change_step(scatter(m=2), 1, 2, compute={"receive_slot": 1}),
        r"rank 1, step 2: adds a sum of chunk 3\.1 to chunk 3\.0",
    ),
    # Nothing is read before it was written.
    "multiplied before arrival": (
        lambda: swap(gather("direct"), 1, 1, 3, "compute"),
        r"rank 1, step 1: computes chunk 2 from receive slot 2, which holds nothing yet",
    ),
    "multiplied from the wrong slot": (
        lambda: change_step(gather(), 1, 2, compute={"receive_slot": 0}),
        r"rank 1, step 2: computes chunk 3 from receive slot 0, which holds chunk 0",
    ),
    "forwarded from the wrong slot": (
        lambda: change_transfer(gather(), 1, 2, Send, slot=0),
        r"rank 1, step 2: sends chunk 3 from receive slot 0, which holds chunk 0",
    ),
    "forwarded in the batch that brings it": (
        lambda: swap_all(gather(n=3), 0, 1, "transfers"),
        r"rank 0, step 0: sends chunk 2 from receive slot 0, which holds nothing yet",
    ),
    "sent before computed": (
        lambda: move_all(scatter("direct"), 1, 0),
        r"rank 0, step 0: sends chunk 1 from send slot 0, which holds nothing yet",
    ),
    "another partial sent": (
        lambda: swap(scatter("direct"), 1, 0, 1, "compute"),
        r"rank 1, step 1: sends chunk 2 from send slot 0, which holds nothing yet",
    ),
    "sent from the wrong slot": (
        lambda: change_transfer(scatter("direct"), 1, 2, Send, slot=0),
        r"rank 1, step 2: sends chunk 3 from send slot 0, which holds chunk 2",
    ),
    "sum added before arrival": (
        lambda: change_step(scatter(), 1, 1, compute={"receive_slot": 1}),
        r"rank 1, step 1: computes chunk 3 and adds receive slot 1, which is empty",
    ),
    # No slot is overwritten while readable.
    "receive slot reused before its multiplication": (
        lambda: change_all(gather("direct", m=2), 1, Receive, 0),
        r"rank 0, step 1: receives chunk 3\.1 into slot 0 over chunk 3\.0, which step 2 reads",
    ),
    "receive slot reused beside its multiplication": (
        lambda: change_all(gather("direct"), 1, Receive, 0),
        r"rank 0, step 1: receives chunk 2 into slot 0 over chunk 3, which step 1 reads",
    ),
    "receive slot reused beside its forwarding": (
        lambda: change_transfer(gather(), 2, 1, Receive, slot=0),
        r"rank 2, step 1: receives chunk 0 into slot 0 over chunk 1, which step 1 reads",
    ),
    "receive slot reused before its addition": (
        lambda: change_all(scatter(m=2), 2, Receive, 0),
        r"rank 0, step 2: receives chunk 2\.1 into slot 0 over chunk 2\.0, which is still to be added",
    ),
    "receive slot reused before the final sum": (
        lambda: change_transfer(scatter("direct"), 3, 3, Receive, slot=1),
        r"rank 3, step 3: receives chunk 3 into slot 1 over chunk 3, which is still to be added",
    ),
    "send slot reused beside its send": (
        lambda: change_step(scatter("direct"), 2, 1, compute={"send_slot": 0}),
        r"rank 2, step 1: computes chunk 0 into send slot 0 over chunk 3, which the batch of this step sends",
    ),
    "send slot reused though its partial was never sent": (
        lambda: drop(drop(scatter("direct", num_send_slots=2), 0, 1, Send), 1, 1, Receive),
        r"rank 0, step 2: computes chunk 3 into send slot 0 over chunk 1, which was never sent",
    ),
    # What the algorithm allows.
    "ring to a far rank": (
        lambda: change_transfer(gather(), 0, 0, Send, to_rank=2),
        r"rank 0, step 0: sends chunk 0 to rank 2, but a ring sends to rank 1 only",
    ),
    "ring from a far rank": (
        lambda: change_transfer(scatter(), 0, 1, Receive, from_rank=2),
        r"rank 0, step 1: receives chunk 2 from rank 2, but a ring receives from rank 3 only",
    ),
    "direct, but not to the owner": (
        lambda: change_transfer(scatter("direct"), 0, 1, Send, to_rank=2),
        r"rank 0, step 1: sends chunk 1 to rank 2, but direct means to its owner, rank 1",
    ),
    "direct, but not from the owner": (
        lambda: change_transfer(gather("direct"), 0, 1, Receive, chunk=Chunk(1, 0)),
        r"rank 0, step 1: receives chunk 1 from rank 2, but direct means from its owner, rank 1",
    ),
    "own shard received": (
        lambda: change_transfer(gather(), 0, 1, Receive, chunk=Chunk(0, 0)),
        r"rank 0, step 1: receives chunk 0 from rank 3, but the shard is its own",
    ),
    "direct adds a slot": (
        lambda: change_step(scatter("direct"), 0, 3, compute={"receive_slot": 0}),
        r"rank 0, step 3: computes chunk 0 and adds a slot, but direct partials are summed after the last step",
    ),
    # Names that mean nothing.
    "no such rank": (
        lambda: change_transfer(gather(), 0, 0, Send, to_rank=4),
        r"rank 4, which is no peer in a group of 4",
    ),
    "to itself": (lambda: change_transfer(gather(), 0, 0, Send, to_rank=0), r"rank 0, which is no peer"),
    "no such chunk": (
        lambda: change_step(gather(), 2, 1, compute={"chunk": Chunk(1, 1)}),
        r"rank 2, step 1: there is no chunk 1 of shard 1",
    ),
    "no such shard": (lambda: change_transfer(gather(), 2, 1, Receive, chunk=Chunk(4, 0)), r"no chunk 0 of shard 4"),
    "no such receive slot": (
        lambda: change_transfer(gather(), 2, 1, Receive, slot=3),
        r"rank 2, step 1: receives chunk 0 from rank 1 with receive slot 3, but there are 3",
    ),
    "no such send slot": (
        lambda: change_step(scatter(), 2, 1, compute={"send_slot": 7}),
        r"rank 2, step 1: computes chunk 0 with send slot 7, but there are 3",
    ),
    "no send slot": (
        lambda: change_step(scatter(), 2, 1, compute={"send_slot": None}),
        r"computes chunk 0 without a send slot",
    ),
    "no receive slot": (lambda: change_step(gather(), 2, 1, compute={"receive_slot": None}), r"without a receive slot"),
    "own shard from a slot": (
        lambda: change_step(gather(), 2, 0, compute={"receive_slot": 0}),
        r"computes chunk 2 from slot 0, but its own shard lies in no slot",
    ),
    "own shard sent from a slot": (
        lambda: change_transfer(gather(), 2, 0, Send, slot=0),
        r"sends chunk 2 to rank 3 from slot 0, but its own shard lies in no slot",
    ),
    "own result into a slot": (
        lambda: change_step(scatter(), 2, 3, compute={"send_slot": 0}),
        r"computes chunk 2 into send slot 0, but it is this rank's own result",
    ),
    "gathered into a send slot": (
        lambda: change_step(gather(), 2, 1, compute={"send_slot": 0}),
        r"computes chunk 1 into send slot 0, but an all-gather has none",
    ),
    "misnumbered step": (lambda: change_step(gather(), 2, 1, index=5), r"rank 2, step 1: .* calls itself step 5"),
    # Sizes.
    "a rank short": (
        lambda: replace(gather(), programs=gather().programs[:3]),
        r"programs for 3 ranks, the group has 4",
    ),
    "no ranks": (lambda: replace(gather(), group_size=0, programs=()), r"must be at least 1"),
    "negative slots": (lambda: replace(gather(), num_send_slots=-1), r"-1 send slots"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_mistake_is_found(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(ScheduleError, match=message):
        validate(make())


def test_sum_that_lacks_a_partial() -> None:
    """Follows from the other checks if every rank computes every chunk, so only `follow_data` alone can see it."""
    schedule = drop(drop(scatter("direct", 2), 0, 1, Send), 1, 1, Receive)
    schedule = change_step(schedule, 0, 0, compute={"chunk": Chunk(0, 0), "send_slot": None})
    with pytest.raises(ScheduleError, match="rank 1, step 1: its sum of chunk 1 lacks the partial of rank 0"):
        follow_data(schedule)


def test_sum_that_holds_a_partial_twice() -> None:
    schedule = change_step(scatter("direct", 2, 2), 0, 1, compute={"chunk": Chunk(1, 0)})
    schedule = change_transfer(schedule, 0, 2, Send, chunk=Chunk(1, 0))
    schedule = change_transfer(schedule, 1, 2, Receive, chunk=Chunk(1, 0))
    with pytest.raises(ScheduleError, match=r"adds the partial of rank 0 to chunk 1\.0 a second time"):
        follow_data(schedule)


@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
def test_the_unbroken_schedules_pass(collective: str, algorithm: str) -> None:
    for n, m in [(2, 2), (3, 1), (3, 2), (4, 1), (4, 2)]:
        validate(build(collective, algorithm, n, m))


def test_error_marks_the_cell_below_the_sentence() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(change_transfer(gather(), 1, 2, Send, slot=0))
    head, _, grid = str(caught.value).partition("\n\n")
    assert head == (
        "ring all-gather: 4 ranks, 1 chunk per shard, 3 receive slots: "
        "rank 1, step 2: sends chunk 3 from receive slot 0, which holds chunk 0."
    )
    (row,) = [line for line in grid.splitlines() if line.startswith("   2 ")]
    assert "|>@1[3]  3@0->r2  2@2<-r0<|" in row
    assert grid.count(">@") == 1


def test_error_of_a_large_group_fits_a_log() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(change_step(scatter(n=64, m=4), 40, 100, compute={"chunk": Chunk(0, 0)}))
    lines = str(caught.value).splitlines()
    assert max(map(len, lines[1:])) <= 160
    assert len(lines) < 40
    assert sum("|>" in line for line in lines) == 1


@given(schedules(min_group_size=2, max_group_size=4, max_chunks=3), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=500)
def test_what_passes_gives_right_results_whatever_comes_first(schedule: Schedule, rng: random.Random) -> None:
    """A random edit is either reported or harmless: in every order of events tried, and without deadlock."""
    broken = break_randomly(schedule, rng)
    try:
        validate(broken)
    except ScheduleError:
        return
    for _ in range(3):
        results = Interpreter(broken, rng).run()
        assert results is not None
        assert is_right(broken, results)


@given(schedules(min_group_size=2, max_group_size=6, max_chunks=3), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_dropped_transfer_is_always_found(schedule: Schedule, rng: random.Random) -> None:
    rank = rng.randrange(schedule.group_size)
    step = rng.choice([s.index for s in schedule.programs[rank] if s.transfers])
    kind = rng.choice([Send, Receive])
    with pytest.raises(ScheduleError, match="which never"):
        validate(drop(schedule, rank, step, kind))
