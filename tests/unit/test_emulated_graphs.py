"""The emulation of CUDA graphs: it finds what would be wrong on a GPU."""

import types

import pytest
import torch

from tests.harness import emulated_gpu
from tests.harness.emulated_gpu import emulate_copy_engine

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[emulated_gpu._Stream, emulated_gpu._Stream]:
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(emulated_gpu._local, "group", types.SimpleNamespace(rank=lambda: 0), raising=False)
    return emulated_gpu._Stream(), emulated_gpu._Stream()


def say(log: list[str], stream: emulated_gpu._Stream, word: str) -> None:
    emulated_gpu._submit(stream.handle, lambda: log.append(word))


@pytest.mark.parametrize("is_ordered", [True, False])
def test_what_streams_leave_open_comes_in_any_order(streams, is_ordered: bool) -> None:
    main, side = streams
    fork, middle, join = (emulated_gpu._Event() for _ in range(3))
    log: list[str] = []

    def tell() -> None:
        fork.record(main.handle)
        fork.wait(side.handle)
        say(log, main, "a")
        middle.record(main.handle)
        if is_ordered:
            middle.wait(side.handle)
        say(log, side, "b")
        join.record(side.handle)
        join.wait(main.handle)
        say(log, main, "c")

    graph = emulated_gpu._Graph(main, tell)
    orders = set()
    for _ in range(30):
        graph.launch(0)
        orders.add("".join(log))
        log.clear()
    assert orders == ({"abc"} if is_ordered else {"abc", "bac"})


def test_a_stream_that_does_not_join_is_an_error(streams) -> None:
    main, side = streams
    fork = emulated_gpu._Event()

    def tell() -> None:
        fork.record(main.handle)
        fork.wait(side.handle)
        say([], side, "a")

    with pytest.raises(AssertionError, match="has not joined"):
        emulated_gpu._Graph(main, tell)
    with pytest.raises(AssertionError, match="not captured"):
        emulated_gpu._Graph(main, lambda: say([], side, "a"))


def test_waits_do_not_cross_the_border_of_a_graph(streams) -> None:
    main, _ = streams
    outside, inside = emulated_gpu._Event(), emulated_gpu._Event()
    outside.record(main.handle)
    with pytest.raises(AssertionError, match="outside of it"):
        emulated_gpu._Graph(main, lambda: outside.wait(main.handle))
    emulated_gpu._Graph(main, lambda: inside.record(main.handle))
    with pytest.raises(AssertionError, match="what is in it"):
        inside.wait(main.handle)
    with pytest.raises(AssertionError, match="another graph"):
        emulated_gpu._Graph(main, lambda: inside.wait(main.handle))
