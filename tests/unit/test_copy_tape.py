"""In which order a tape submits: copies behind the kernel beside which they run, waits behind what they wait for."""

import pytest

from commfuse_megatron.transport.copy_steps import Ref
from commfuse_megatron.transport.copy_tape import CopyTape

HERE = Ref(0, 0)
SENT, ARRIVED, LATER, SILENT = ("sent",), ("arrived",), ("later",), ("silent",)


class Transport:
    """Binds steps that write their names into `log` when they run."""

    def __init__(self):
        self.log = []
        self.silent = ()

    def step(self, name):
        return lambda at, stream: self.log.append(name)

    def bind_order(self):
        return self.step("mark"), self.step("follow")

    def bind_mark(self):
        return self.step("mark lane"), self.step("follow lane")

    def bind_copies_mark(self):
        return self.step("mark copies"), self.step("follow copies")

    def bind_take(self, peer):
        return self.step(f"take {peer}")

    def bind_push(self, peer, place, source, size_bytes):
        return self.step(f"push {peer}")

    def bind_copy(self, target, source, size_bytes, flag):
        return self.step("copy")

    def key_of_copy(self, flag):
        return ("copy", flag)

    def bind_wait(self, keys):
        return self.step("wait " + " ".join(key[0] for key in keys))

    def bind_no_message(self, keys):
        return self.step("tell") if self.silent else None, self.silent

    def bind_release(self, keys, awaited):
        return "release " + " ".join(key[0] for key in awaited)


@pytest.fixture
def transport():
    return Transport()


@pytest.fixture
def tape(transport):
    return CopyTape(transport)


def run(tape, transport):
    operation = tape.finish()
    for step in operation.steps:
        step((0,), 0)
    return [*transport.log, operation.release]


def test_copies_are_submitted_behind_the_next_kernel(tape, transport):
    tape.order()
    tape.push(1, None, HERE, 8)
    tape.issued([SENT, ARRIVED])
    tape.copy(HERE, HERE, 8, flag=0)
    tape.compute(transport.step("kernel"))
    tape.compute(transport.step("kernel"))
    expected = ["mark", "kernel", "follow", "take 1", "push 1", "copy", "kernel", "release "]
    assert run(tape, transport) == expected


def test_a_wait_is_submitted_behind_the_pushes_of_its_batch(tape, transport):
    tape.order()
    tape.push(1, None, HERE, 8)
    tape.issued([SENT])
    tape.issued([ARRIVED])  # a batch that sends nothing: the peer's push may be behind its wait for ours
    tape.wait(ARRIVED)
    tape.compute(transport.step("kernel"))
    assert run(tape, transport) == ["mark", "follow", "take 1", "push 1", "wait arrived", "kernel", "release "]


def test_a_wait_for_an_earlier_batch_holds_nothing_up(tape, transport):
    tape.issued([ARRIVED])
    tape.order()
    tape.push(1, None, HERE, 8)
    tape.issued([LATER])
    tape.wait(ARRIVED)
    tape.compute(transport.step("kernel"))
    assert run(tape, transport) == ["mark", "wait arrived", "kernel", "follow", "take 1", "push 1", "release "]


def test_a_wait_for_a_copy_is_submitted_behind_it(tape, transport):
    key = tape.copy(HERE, HERE, 8, flag=0)
    tape.wait(key)
    assert run(tape, transport) == ["copy", "release copy"]


def test_nothing_is_left_out_at_the_end(tape, transport):
    tape.order()
    tape.push(1, None, HERE, 8)
    tape.issued([SENT])
    assert run(tape, transport) == ["mark", "follow", "take 1", "push 1", "release "]


def captured(tape, transport):
    for step in tape.finish().captured:
        step((0,), 0)
    return transport.log


def test_in_a_graph_a_wait_depends_on_its_batchs_push_alone(tape, transport):
    tape.order()
    tape.push(1, None, HERE, 8)
    tape.issued([SENT])
    tape.issued([ARRIVED])
    tape.compute(transport.step("kernel"))
    tape.push(2, None, HERE, 8)
    tape.issued([LATER])
    tape.wait(ARRIVED)
    tape.compute(transport.step("kernel"))
    tape.wait(LATER, SENT)
    tape.compute(transport.step("kernel"))
    first = ["mark", "kernel", "follow", "take 1", "push 1", "mark copies", "mark copies"]
    second = ["follow copies", "wait arrived", "kernel", "take 2", "push 2", "mark copies"]
    third = ["follow copies", "follow copies", "wait later sent", "kernel"]
    assert captured(tape, transport) == [*first, *second, *third]


def test_in_a_graph_a_batch_without_push_depends_on_earlier_ones(tape, transport):
    tape.order()
    tape.push(1, None, HERE, 8)
    tape.issued([SENT])
    tape.compute(transport.step("kernel"))
    tape.issued([ARRIVED])  # nothing is pending any more
    tape.wait(ARRIVED)
    tape.compute(transport.step("kernel"))
    expected = [
        "mark", "kernel", "follow", "take 1", "push 1", "mark copies", "follow copies", "wait arrived", "kernel",
    ]  # fmt: skip
    assert captured(tape, transport) == expected


def test_a_wait_that_the_release_makes_is_in_no_list(tape, transport):
    tape.compute(transport.step("kernel"))
    tape.wait(tape.copy(HERE, HERE, 8, flag=0))
    assert captured(tape, transport) == ["kernel", "copy", "mark copies", "follow copies"]


def test_who_gets_no_message_is_told_last_and_waited_for(tape, transport):
    transport.silent = (SILENT,)
    tape.order()
    tape.push(1, None, HERE, 8)
    tape.issued([SENT, ARRIVED])
    tape.compute(transport.step("kernel"))
    tape.wait(ARRIVED)
    expected = ["mark", "kernel", "follow", "take 1", "push 1", "tell", "release arrived silent"]
    assert run(tape, transport) == expected


def test_in_a_graph_the_release_depends_on_what_was_told(tape, transport):
    transport.silent = (SILENT,)
    tape.compute(transport.step("kernel"))
    assert captured(tape, transport) == ["kernel", "tell", "mark copies", "follow copies"]


def test_no_message_is_among_what_a_release_clears(tape, transport):
    transport.silent = (SILENT,)
    tape.issued([SENT])
    assert tape.finish().keys == (SENT, SILENT)


@pytest.mark.parametrize("when_stepped", [True, False])
def test_lanes_may_be_for_graphs_only(when_stepped, transport):
    tape = CopyTape(transport, lanes_when_stepped=when_stepped)
    log = []
    tape.fork((2, 3))
    for lane in (2, 3):
        tape.on(lane)
        tape.wait(ARRIVED if lane == 2 else SENT)
        tape.compute(lambda at, stream: log.append(stream))
    tape.join((2, 3))
    operation = tape.finish()
    for step in operation.steps:
        step((0,), 0)
    ordered = ["mark lane", *2 * ["follow lane"], *2 * ["mark lane"], *2 * ["follow lane"]]
    assert log == ([2, 3] if when_stepped else [0, 0])
    assert [name for name in transport.log if "lane" in name] == (ordered if when_stepped else [])
    assert [name for name in transport.log if "wait" in name] == ["wait arrived", "wait sent"]
    log.clear()
    for step in operation.captured:
        step((0,), 0)
    assert log == [2, 3]
