"""In which order a tape submits: copies behind the kernel beside which they run, waits behind what they wait for."""

from typing import NamedTuple

import pytest

from commfuse_megatron.transport.copy_steps import Ref
from commfuse_megatron.transport.copy_tape import CopyTape

HERE = Ref(0, 0)


class Transport:
    """Binds steps that write their names into `log` when they run."""

    def __init__(self, silent=()):
        self.log = []
        self.silent = silent

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
        return " ".join(["release", *(key[0] for key in awaited)])


def tell(tape, transport, told):
    """What a lowering tells a tape, by words; keys are named, that of the copy "copy"."""
    for words in told.split(", "):
        what, *names = words.split()
        keys = [(name, 0) if name == "copy" else (name,) for name in names]
        match what:
            case "order":
                tape.order()
            case "push":
                tape.push(int(names[0]), None, HERE, 8)
            case "issued":
                tape.issued(keys)
            case "copy":
                assert tape.copy(HERE, HERE, 8, flag=0) == ("copy", 0)
            case "kernel":
                tape.compute(transport.step("kernel"))
            case "wait":
                tape.wait(*keys)


class Story(NamedTuple):
    """What is told, and what is submitted then, step by step and in a graph. silent: who sends no message."""

    told: str
    stepped: str = ""
    captured: str = ""
    silent: tuple = ()


SILENT = (("silent",),)
STORIES = {
    "copies are submitted behind the next kernel": Story(
        "order, push 1, issued sent arrived, copy, kernel, kernel",
        "mark, kernel, follow, take 1, push 1, copy, kernel, release",
    ),
    # A batch that sends nothing: the peer's push may be behind its wait for ours.
    "a wait is submitted behind the pushes of its batch": Story(
        "order, push 1, issued sent, issued arrived, wait arrived, kernel",
        "mark, follow, take 1, push 1, wait arrived, kernel, release",
    ),
    "a wait for an earlier batch holds nothing up": Story(
        "issued arrived, order, push 1, issued later, wait arrived, kernel",
        "mark, wait arrived, kernel, follow, take 1, push 1, release",
    ),
    "a wait for a copy is submitted behind it, or made by the release": Story("copy, wait copy", "copy, release copy"),
    "nothing is left out at the end": Story("order, push 1, issued sent", "mark, follow, take 1, push 1, release"),
    "a wait depends on its batch's push alone": Story(
        "order, push 1, issued sent, issued arrived, kernel, push 2, issued later, wait arrived, kernel, "
        "wait later sent, kernel",
        captured="mark, kernel, follow, take 1, push 1, mark copies, mark copies, "
        "follow copies, wait arrived, kernel, take 2, push 2, mark copies, "
        "follow copies, follow copies, wait later sent, kernel",
    ),
    # Nothing is pending any more when the second one is issued.
    "a batch without push depends on earlier ones": Story(
        "order, push 1, issued sent, kernel, issued arrived, wait arrived, kernel",
        captured="mark, kernel, follow, take 1, push 1, mark copies, follow copies, wait arrived, kernel",
    ),
    "a wait that the release makes is in no list": Story(
        "kernel, copy, wait copy", captured="kernel, copy, mark copies, follow copies"
    ),
    "who gets no message is told last and waited for": Story(
        "order, push 1, issued sent arrived, kernel, wait arrived",
        "mark, kernel, follow, take 1, push 1, tell, release arrived silent",
        silent=SILENT,
    ),
    "in a graph the release depends on what was told": Story(
        "kernel", captured="kernel, tell, mark copies, follow copies", silent=SILENT
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_what_is_submitted_in_which_order(name):
    story = STORIES[name]
    for expected, in_graph in ((story.stepped, False), (story.captured, True)):
        transport = Transport(story.silent)
        tape = CopyTape(transport)
        tell(tape, transport, story.told)
        operation = tape.finish()
        for step in operation.captured if in_graph else operation.steps:
            step((0,), 0)
        submitted = [*transport.log, *([] if in_graph else [operation.release])]
        assert not expected or submitted == expected.split(", ")


def test_no_message_is_among_what_a_release_clears():
    tape = CopyTape(Transport(SILENT))
    tape.issued([("sent",)])
    assert tape.finish().keys == (("sent",), *SILENT)


@pytest.mark.parametrize("when_stepped", [True, False])
def test_lanes_may_be_for_graphs_only(when_stepped):
    transport, log = Transport(), []
    tape = CopyTape(transport, lanes_when_stepped=when_stepped)
    tape.fork((2, 3))
    for lane, key in ((2, ("arrived",)), (3, ("sent",))):
        tape.on(lane)
        tape.wait(key)
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


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
def test_what_a_pause_holds_is_run_behind_a_kernel_of_the_caller(is_told):
    """Once: when the caller says so, else where the tape waits for it; so too in the next call."""
    transport = Transport()
    tape = CopyTape(transport)
    tell(tape, transport, "kernel, order, push 1, issued a")
    tape.pause()
    tell(tape, transport, "kernel, order, push 1, issued b")
    tape.pause()
    tell(tape, transport, "wait a, kernel")
    tape.pause()
    tell(tape, transport, "wait b, kernel")
    bound = tape.finish()
    pushes = [["follow", "take 1", "push 1"], ["follow", "push 1"]]
    late, (sent, early) = ([], pushes) if is_told else ([*pushes[0], *pushes[1]], ([], []))
    for _ in range(2):
        runs = []
        for number, part in enumerate(bound.parts):
            transport.log.clear()
            for step in part:
                step((), 0)
            parted = list(transport.log)
            transport.log.clear()
            if is_told and number < len(bound.held):
                bound.held[number]((), 0)
            runs.append((parted, list(transport.log)))
        assert runs[0] == (["kernel", "mark"], sent)
        assert runs[1] == (["kernel", "mark"], early)
        assert runs[2] == ([*late, "wait a", "kernel"], [])
        assert runs[3] == (["wait b", "kernel"], [])
