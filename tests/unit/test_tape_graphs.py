"""When a call of a tape is made step by step, when as a graph; which graphs give way, and what they seem to take."""

import random
from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron.runtime import lanes
from commfuse_megatron.transport import tape_graphs
from commfuse_megatron.transport.copy_steps import BoundOperation, GraphTable
from commfuse_megatron.transport.stream_memory import Driver
from commfuse_megatron.transport.tape_graphs import TapeGraphs

HERE, THERE = (0, 16), (0, 32)
STREAM = SimpleNamespace(handle=7)
MIB = 1 << 20


class Device:
    """Memory as the driver takes it: in blocks, for as many graphs as there are, or for as many as there ever were."""

    def __init__(self):
        self.graph_bytes, self.block_bytes, self.keeps = MIB, 1, False
        self.used_bytes = self.held_bytes = self.num_made = 0
        self.others_bytes, self.others_next_bytes = 0, 0  # of other processes: now, and once the next graph is made

    def take(self, size_bytes):
        self.used_bytes += size_bytes
        needed_bytes = -(-self.used_bytes // self.block_bytes) * self.block_bytes
        self.held_bytes = max(self.held_bytes, needed_bytes) if self.keeps else needed_bytes

    def free_bytes(self):
        return 100_000 * MIB - self.held_bytes - self.others_bytes


class Graph:
    """Keeps nothing that it was told, as the driver's does not."""

    refusal: Exception | None = None
    used_device: Device

    def __init__(self, stream, tell):
        self.size_bytes, self.device = 0, self.used_device
        if self.refusal is not None:
            raise self.refusal
        self.device.num_made += 1
        self.device.others_bytes = self.device.others_next_bytes
        self.size_bytes = self.device.graph_bytes
        self.device.take(self.size_bytes)

    def launch(self, stream):
        LOG.append(f"launch on {stream}")

    def __del__(self):
        self.device.take(-self.size_bytes)


LOG: list[str] = []


@pytest.fixture
def device(monkeypatch):
    LOG.clear()
    found = Device()
    monkeypatch.setattr(Graph, "refusal", None)
    monkeypatch.setattr(Graph, "used_device", found, raising=False)
    return found


class FakeDriver(Driver):
    def event(self):
        return SimpleNamespace(record=lambda stream: None, wait=lambda stream: None)

    def graph(self, stream, tell):
        return Graph(stream, tell)

    def free_memory_bytes(self):
        return Graph.used_device.free_bytes()


def within(mib):
    return TapeGraphs(FakeDriver(), STREAM, STREAM, lambda stream, batch: LOG.append(f"{batch} on {stream}"), mib * MIB)


@pytest.fixture
def graphs(device):
    return within(2)


def tape():
    def step(at, stream):
        LOG.append(f"step on {stream}")

    return BoundOperation((step,), (), (), "release", (step,), GraphTable())


def call(graphs, one, *addresses, times=1):
    """Whether the last call was the launch of a graph."""
    for _ in range(times):
        LOG.clear()
        graphs.run(one, addresses, 0)
    return LOG == ["launch on 0"]


def test_a_call_becomes_a_graph_when_it_was_seen_three_times(graphs):
    """Those of other addresses and other tapes are other calls."""
    one, other = tape(), tape()
    assert [graphs.run(one, HERE, 0) for _ in range(2)] == [False, False]
    assert LOG == []
    assert graphs.run(one, HERE, 0)
    assert LOG == ["step on 7", "release on 7"]
    assert graphs.run(one, HERE, 3)
    assert graphs.run(one, HERE, 4)
    assert LOG[2:] == ["launch on 3", "launch on 4"]
    assert not graphs.run(one, THERE, 0)
    assert not graphs.run(other, HERE, 0)


def test_what_the_driver_refuses_is_made_step_by_step_after(graphs, monkeypatch, caplog):
    monkeypatch.setattr(Graph, "refusal", RuntimeError("not permitted"))
    one = tape()
    for _ in range(3):
        graphs.run(one, HERE, 0)
    assert [graphs.run(one, HERE, 0) for _ in range(3)] == [False] * 3
    assert caplog.text.count("not permitted") == 1


def test_the_graph_that_was_launched_the_longest_ago_gives_way(device, graphs):
    one, other = tape(), tape()
    assert call(graphs, one, 1, times=4)
    assert call(graphs, one, 2, times=4)
    assert call(graphs, one, 1)
    assert not call(graphs, other, 1, times=6)
    assert call(graphs, other, 1)
    assert set(one.graphs) == set(other.graphs) == {(1,)}
    assert (graphs.num_alive, device.used_bytes) == (2, 2 * MIB), "the one that gave way is destroyed"
    assert call(graphs, one, 1)
    assert not call(graphs, one, 2, times=6)
    assert call(graphs, one, 2)
    assert not other.graphs


def test_a_tape_that_is_forgotten_takes_its_graphs_with_it(device, graphs):
    one, other = tape(), tape()
    for address in (1, 2):
        assert call(graphs, one, address, times=4)
    del one
    assert graphs.num_alive == graphs.size_bytes == device.used_bytes == 0
    assert call(graphs, other, 1, times=4), "there is room"
    del other
    for _ in range(5):  # its table may lie where that of the last one was
        another = tape()
        assert not call(graphs, another, 1, times=3)
        del another


def test_of_too_many_calls_in_a_cycle_the_graphs_remain(device):
    graphs, one = within(4), tape()
    for _ in range(4):
        for address in range(6):
            call(graphs, one, address)
    before = set(one.graphs)
    launched = sum(call(graphs, one, address) for _ in range(100) for address in range(6))
    assert (launched, set(one.graphs), device.num_made) == (400, before, 4)


def test_a_call_that_was_refused_counts_again(graphs):
    one = tape()
    call(graphs, one, 1, times=4)
    call(graphs, one, 2, times=4)
    assert not call(graphs, one, 3, times=6)
    assert call(graphs, one, 1)
    assert call(graphs, one, 2)
    assert not call(graphs, one, 3, times=4)
    assert call(graphs, one, 3)


def test_frequent_calls_become_graphs_in_place_of_rare_ones(graphs):
    one = tape()
    call(graphs, one, 1, times=4)
    call(graphs, one, 2, times=4)
    for number in range(30):
        if number % 10 == 0:
            call(graphs, one, 1)
        call(graphs, one, 2)
        call(graphs, one, 3)
    assert set(one.graphs) == {(2,), (3,)}


@pytest.mark.parametrize("num_lengths", [10, 100, 1000])
def test_after_a_thousand_random_lengths_a_known_one_is_a_graph(device, num_lengths):
    graphs, known, draw = within(16), tape(), random.Random(0)
    assert call(graphs, known, 1, times=4)
    tapes = [tape() for _ in range(num_lengths)]
    for _ in range(1000):
        call(graphs, draw.choice(tapes), draw.randrange(2))
        assert device.used_bytes <= 16 * MIB
    assert device.num_made < 60, "nothing is made over and over"
    assert call(graphs, known, 1, times=8)
    assert graphs.size_bytes <= 16 * MIB


def test_addresses_that_do_not_return_are_forgotten(graphs, monkeypatch):
    monkeypatch.setattr(tape_graphs, "_MOST_SEEN", 8)
    one, tapes = tape(), [tape() for _ in range(10)]
    call(graphs, one, 1, times=4)
    for number in range(100):
        call(graphs, tapes[number % 10], number)
    assert len(graphs._seen) <= 8
    assert call(graphs, one, 1)


def test_there_is_no_graph_where_none_has_room(graphs, device):
    device.graph_bytes = 30 * MIB
    one, none = tape(), within(0)
    call(graphs, one, 1, times=20)
    call(none, one, 2, times=20)
    assert graphs.num_alive == none.num_alive == device.used_bytes == 0


def test_graphs_that_go_with_their_tapes_do_not_seem_to_grow(device):
    graphs = within(16)
    for _ in range(50):
        tapes = [tape() for _ in range(4)]
        assert all(call(graphs, one, 1, times=4) for one in tapes)
    assert graphs.size_bytes == device.used_bytes == 4 * MIB


def test_graphs_that_seem_to_take_nothing_are_limited_too(device):
    device.graph_bytes = 0
    graphs, one = within(16), tape()
    for address in range(100):
        call(graphs, one, address, times=4)
    assert graphs.num_alive == 64


@pytest.mark.parametrize("mean_kib", [300, 1400])
@pytest.mark.parametrize("block_kib", [1, 2048])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("others_mib", [0, 20_000, -20_000])
def test_the_memory_of_graphs_stays_within_its_bound(mean_kib, block_kib, keeps, others_mib, device):
    """Within a fifth: also where another process takes or gives back memory while one is made."""
    graphs, one = within(256), tape()
    device.block_bytes, device.keeps = block_kib << 10, keeps
    draw = random.Random(0)
    for address in range(800):
        if address % 200 == 0:  # the next ones are of another size
            mean_kib *= draw.choice([0.8, 1.2])
        if address == 50:
            device.others_next_bytes = others_mib * MIB
        device.graph_bytes = int(draw.uniform(0.5, 1.5) * mean_kib) << 10
        call(graphs, one, address, times=8)
        assert graphs.size_bytes <= 256 * MIB
        assert device.held_bytes <= 1.2 * 256 * MIB
    assert device.used_bytes > 0.4 * 256 * MIB


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


@pytest.mark.parametrize(("queries", "heads", "num_lanes"), [
    (4096, 16, 2),  # 8B, two ranks, 8192 tokens: 512 blocks
    (2048, 8, 3),  # four ranks: 128, a few fewer than an H200 runs at a time
    (1024, 4, 4),  # eight: 32
    (512, 1024, 2), (1, 1, 4), (0, 4, 4),
])  # fmt: skip
def test_as_many_lanes_as_small_pieces_need_to_fill_a_gpu(queries, heads, num_lanes):
    assert lanes.choose_num_lanes(queries, heads, torch.device("cpu")) == num_lanes
