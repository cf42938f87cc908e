"""When a call of a tape is made step by step, when as a graph: by how often its addresses were seen."""

import pytest
import torch

from commfuse_megatron.runtime import lanes
from commfuse_megatron.transport import tape_graphs
from commfuse_megatron.transport.copy_tape import BoundOperation
from commfuse_megatron.transport.tape_graphs import TapeGraphs

HERE, THERE = (0, 16), (0, 32)


class Event:
    def record(self, stream):
        pass

    def wait(self, stream):
        pass


class Graph:
    """Keeps nothing, as the driver's does not."""

    refusal: Exception | None = None

    def __init__(self, stream, tell):
        if self.refusal is not None:
            raise self.refusal

    def launch(self, stream):
        LOG.append(f"launch on {stream}")


class Stream:
    handle = 7


LOG: list[str] = []


@pytest.fixture
def graphs(monkeypatch):
    LOG.clear()
    monkeypatch.setattr(tape_graphs, "StreamEvent", Event)
    monkeypatch.setattr(tape_graphs, "StreamGraph", Graph)
    monkeypatch.setattr(Graph, "refusal", None)
    return TapeGraphs(Stream(), Stream(), lambda stream, batch: LOG.append(f"{batch} on {stream}"), 2)


def tape():
    def step(at, stream):
        LOG.append(f"step on {stream}")

    return BoundOperation((step,), (), (), "release", (step,), {})


def test_a_call_becomes_a_graph_when_it_was_seen_three_times(graphs):
    one = tape()
    assert [graphs.run(one, HERE, 0) for _ in range(2)] == [False, False]
    assert LOG == []
    assert graphs.run(one, HERE, 0)
    assert LOG == ["step on 7", "release on 7"]
    assert graphs.run(one, HERE, 3)
    assert graphs.run(one, HERE, 4)
    assert LOG[2:] == ["launch on 3", "launch on 4"]


def test_other_addresses_and_other_tapes_are_other_calls(graphs):
    one, other = tape(), tape()
    for _ in range(3):
        graphs.run(one, HERE, 0)
    assert not graphs.run(one, THERE, 0)
    assert not graphs.run(other, HERE, 0)


def test_what_the_driver_refuses_is_made_step_by_step_from_then_on(graphs, monkeypatch, caplog):
    monkeypatch.setattr(Graph, "refusal", RuntimeError("not permitted"))
    one = tape()
    for _ in range(3):
        graphs.run(one, HERE, 0)
    assert [graphs.run(one, HERE, 0) for _ in range(3)] == [False] * 3
    assert caplog.text.count("not permitted") == 1


def test_graphs_are_limited_in_number_until_their_tape_is_forgotten(graphs):
    one, other = tape(), tape()
    for number in range(4):
        for _ in range(5):
            graphs.run(one, (number,), 0)
    assert sum(isinstance(found, Graph) for found in one.graphs.values()) == 2
    assert not graphs.run(one, (3,), 0)
    del one
    for _ in range(4):
        graphs.run(other, HERE, 0)
    assert isinstance(other.graphs[HERE], Graph)


def test_addresses_that_do_not_return_are_forgotten_and_graphs_are_not(graphs, monkeypatch):
    monkeypatch.setattr(tape_graphs, "_MOST_SEEN", 8)
    one = tape()
    for _ in range(4):
        graphs.run(one, HERE, 0)
    for number in range(100):
        graphs.run(one, (number,), 0)
    assert len(one.graphs) <= 8
    assert isinstance(one.graphs[HERE], Graph)


def test_lanes_are_given_back_once_when_a_context_closes(monkeypatch):
    given_back = []
    own = type("Own", (), {"torch": None})
    monkeypatch.setattr(lanes, "borrow_stream", lambda device: own())
    monkeypatch.setattr(lanes, "give_stream_back", lambda device, stream: given_back.append(stream))
    monkeypatch.setattr(torch.cuda, "Event", object)
    of_context = lanes.Lanes(torch.device("cuda", 0))
    of_context.close()
    assert not given_back  # none was borrowed
    for num_lanes in (2, 4, 3):
        of_context._make(num_lanes)
    of_context.close()
    of_context.close()
    assert len(set(map(id, given_back))) == len(given_back) == 4


@pytest.mark.parametrize(
    ("queries", "heads", "num_lanes"),
    [
        (4096, 16, 2),  # 8B, two ranks, 8192 tokens: 512 blocks
        (2048, 8, 3),  # four ranks: 128, a few fewer than an H200 runs at a time
        (1024, 4, 4),  # eight: 32
        (512, 1024, 2),
        (1, 1, 4),
        (0, 4, 4),
    ],
)
def test_as_many_lanes_as_small_pieces_need_to_fill_a_gpu(queries, heads, num_lanes):
    assert lanes.choose_num_lanes(queries, heads, torch.device("cpu")) == num_lanes
