"""What happens to contexts that are given up, and to the process, while transfers wait for ranks that never come."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron.runtime import context, hardware, shutdown


class Link:
    def __init__(self, is_in_flight, timeout_s=600.0):
        self.is_in_flight, self.timeout_s = is_in_flight, timeout_s
        self.failure, self.is_left_by_error, self.is_disowned = None, False, False


class LinkUntil(Link):
    """In flight until so many seconds from now."""

    def __init__(self, after_s):
        self.timeout_s, self.failure, self.is_left_by_error = 600.0, None, False
        self._done = time.monotonic() + after_s

    @property
    def is_in_flight(self):
        return time.monotonic() < self._done


@pytest.fixture
def alarms(monkeypatch):
    """Seconds of the alarms that were set; none is."""
    found = []
    monkeypatch.setattr(shutdown, "_links", set())
    monkeypatch.setattr(shutdown, "_left", {})
    monkeypatch.setattr(shutdown, "_ending", [])
    monkeypatch.setattr(shutdown, "_child_failed", [])
    monkeypatch.setattr(signal, "signal", lambda number, handler: found.append((number, handler)))
    monkeypatch.setattr(signal, "alarm", found.append)
    monkeypatch.delattr(sys, "last_exc", raising=False)
    return found


def nothing():
    pass


def give_up(link, release):
    shutdown._links.add(link)
    shutdown.release_when_done(link, release)


def test_nothing_happens_where_nothing_is_in_flight(alarms):
    links = [Link(is_in_flight=False) for _ in range(2)]
    for link in links:
        shutdown.track_until_exit(link)
    give_up(links[0], nothing)
    shutdown.release_what_is_done()
    shutdown._limit_the_exit()
    assert alarms == []


@pytest.mark.parametrize("is_given_up", [False, True])
@pytest.mark.parametrize(
    ("timeout_s", "error", "limit_s"), [(0.2, None, 0.2), (600, ValueError(), 0.3), (0.1, ValueError(), 0.1)]
)
def test_the_exit_takes_a_limited_time(is_given_up, timeout_s, error, limit_s, alarms, monkeypatch, caplog):
    monkeypatch.setattr(shutdown, "_AFTER_AN_ERROR_S", 0.3)
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    link = Link(is_in_flight=True, timeout_s=timeout_s)
    shutdown.track_until_exit(link)
    shutdown.track_until_exit(Link(is_in_flight=True, timeout_s=0.01))
    if is_given_up:
        give_up(link, nothing)
    began = time.monotonic()
    shutdown._limit_the_exit()
    assert limit_s <= time.monotonic() - began < 10
    assert alarms == [(signal.SIGALRM, signal.SIG_DFL), 30]
    assert "killed in 30 s" in caplog.text


def test_buffers_are_left_to_the_driver_when_the_process_ends(alarms):
    """Freeing them may wait for the device, where another context's stream may wait for a rank that never comes."""
    freed = []
    slots = SimpleNamespace(device=torch.device("cpu"), release=lambda: freed.append("slots"))
    link = SimpleNamespace(
        stop_watching=nothing, failure=None, transport=SimpleNamespace(close=nothing), last_done=None
    )
    lanes = SimpleNamespace(close=nothing)
    context._release(link, lanes, slots, hardware.current.driver)
    assert freed == ["slots"]
    shutdown._limit_the_exit()
    context._release(link, lanes, slots, hardware.current.driver)
    assert freed == ["slots"]


def test_the_exit_waits_for_what_is_done_in_time(alarms):
    """Nobody is killed then: other exit handlers may have something to save."""
    link = LinkUntil(after_s=0.2)
    shutdown.track_until_exit(link)
    shutdown._limit_the_exit()
    assert not link.is_in_flight
    assert alarms == []


def test_links_are_released_once_and_forgotten(alarms):
    released = []
    links = [Link(is_in_flight=True) for _ in range(3)]
    for link in links:
        shutdown.track_until_exit(link)
    give_up(links[0], lambda: released.append(0))
    assert released == []
    assert shutdown._links == set(links)
    links[0].is_in_flight = links[1].is_in_flight = False
    give_up(links[1], lambda: released.append(1))
    assert released == [], "garbage collection may have called this"
    shutdown.release_what_is_done()
    shutdown.release_what_is_done()
    assert released == [0, 1]
    assert (shutdown._links, shutdown._left) == ({links[2]}, {})


def device_error():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("asked", [lambda: True, device_error], ids=["captured", "failed"])
def test_nothing_is_released_in_a_capture_nor_on_a_failed_device(asked, alarms, monkeypatch):
    """PyTorch raises what the device's error was when it is asked about captures: not the program's own error."""
    released = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    give_up(Link(is_in_flight=False), lambda: released.append(0))
    shutdown.release_what_is_done()
    assert released == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    shutdown.track_until_exit(Link(is_in_flight=False))
    assert released == [0]


def test_a_context_may_be_found_by_garbage_collection_meanwhile(alarms):
    """The collection runs its finalizer in the same thread, at any allocation: no lock may be held."""
    released = []

    class Collecting(Link):
        garbage: tuple[Link, ...] = ()

        @property
        def is_in_flight(self):
            garbage, self.garbage = self.garbage, ()
            for link in garbage:
                give_up(link, lambda: released.append("found"))
            return self.is_busy

        @is_in_flight.setter
        def is_in_flight(self, value):
            self.is_busy = value

    first, found, later = Collecting(is_in_flight=True), Link(is_in_flight=False), Link(is_in_flight=True)
    for link in (first, found):
        shutdown.track_until_exit(link)
    give_up(first, lambda: released.append("first"))
    first.is_busy, first.garbage = False, (found,)
    shutdown.track_until_exit(later)
    shutdown.release_what_is_done()
    assert sorted(released) == ["first", "found"]
    assert (shutdown._links, shutdown._left) == ({later}, {})


@pytest.mark.parametrize("is_first_to_fail", [False, True])
def test_who_closes_waits_for_the_thread_that_releases(is_first_to_fail, alarms):
    """Else its buffers would be there still when close() returns."""
    own, released, is_at_it, may_go_on = Link(is_in_flight=False), [], threading.Event(), threading.Event()

    def release():
        is_at_it.set()
        assert may_go_on.wait(20.0)
        released.append(0)
        if is_first_to_fail:
            raise ValueError

    give_up(own, release)
    other = threading.Thread(target=shutdown.release_what_is_done)
    other.start()
    assert is_at_it.wait(20.0)
    shutdown.release_what_is_done(Link(is_in_flight=False))  # of which nobody knows: no wait
    threading.Timer(0.2, may_go_on.set).start()
    shutdown.release_what_is_done(own)
    assert released == [0]
    other.join(20.0)
    assert (shutdown._left, shutdown._at_work) == ({}, {})


def test_a_context_may_be_closed_while_this_thread_releases_it(alarms):
    """By a signal's handler, say, which must not wait for what it interrupts."""
    own, released = Link(is_in_flight=False), []

    def release():
        shutdown.release_what_is_done(own)
        released.append(0)

    give_up(own, release)
    shutdown.release_what_is_done(own)
    assert released == [0]


def test_many_threads_release_each_context_once(alarms):
    released = []

    class SlowLink(LinkUntil):
        """Asking takes a while, so others ask, too."""

        @property
        def is_in_flight(self):
            time.sleep(1e-4)
            return False

    def give_up_many(thread):
        for number in range(50):
            own = SlowLink(after_s=0)
            give_up(own, lambda entry=(thread, number): (time.sleep(1e-3), released.append(entry)))
            shutdown.release_what_is_done(own)
            if (thread, number) not in released:
                released.append("too late")

    threads = [threading.Thread(target=give_up_many, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(released, key=str) == sorted(((t, n) for t in range(8) for n in range(50)), key=str)


def test_what_cannot_be_released_is_no_error_of_another_context(alarms, caplog):
    released = []
    first, second = (Link(is_in_flight=False) for _ in range(2))
    give_up(first, lambda: 1 / 0)
    give_up(second, lambda: released.append("second"))
    later = Link(is_in_flight=True)
    shutdown.track_until_exit(later)
    assert released == ["second"]
    assert "could not be released" in caplog.text
    assert (shutdown._links, shutdown._left) == ({later}, {})


@pytest.mark.parametrize("said", [{"failure": ValueError()}, {"is_left_by_error": True}])
def test_a_failed_context_makes_the_exit_short(said, alarms, monkeypatch):
    monkeypatch.setattr(shutdown, "_AFTER_AN_ERROR_S", 0.1)
    link = Link(is_in_flight=True)
    vars(link).update(said)
    shutdown.track_until_exit(link)
    began = time.monotonic()
    shutdown._limit_the_exit()
    assert time.monotonic() - began < 10
    assert alarms[-1] == 30


def test_a_forked_child_has_none_of_the_links(alarms):
    """Nor does it release what its parent uses, when its copy of a context is found by garbage collection."""
    link, released = Link(is_in_flight=False), []
    shutdown.track_until_exit(link)
    child = os.fork()
    if child == 0:
        shutdown.release_when_done(link, lambda: released.append(0))
        shutdown._limit_the_exit()
        os._exit(len(shutdown._links) + len(shutdown._left) + len(released))
    assert os.waitpid(child, 0)[1] == 0
    assert len(shutdown._links) == 1


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_what_was_left_before_the_exit_is_released_there(is_in_flight, alarms):
    released = []
    link = LinkUntil(after_s=0.2) if is_in_flight else Link(is_in_flight=False)
    give_up(link, lambda: released.append(0))
    shutdown._limit_the_exit()
    assert released == [0]
    assert alarms == []


def test_ctrl_c_while_the_exit_waits_leaves_a_limit(alarms, monkeypatch, caplog):
    """The teardown after it may hang, as it may after the whole wait."""

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    shutdown.track_until_exit(Link(is_in_flight=True))
    shutdown._limit_the_exit()
    assert alarms == [(signal.SIGALRM, signal.SIG_DFL), 30]
    assert "KeyboardInterrupt" in caplog.text


def test_ctrl_c_in_a_release_leaves_it_to_the_next_time(alarms):
    released = []

    def release():
        if not released:
            released.append("interrupted")
            raise KeyboardInterrupt
        released.append("done")

    give_up(Link(is_in_flight=False), release)
    with pytest.raises(KeyboardInterrupt):
        shutdown.release_what_is_done()
    assert shutdown._at_work == {}
    shutdown.release_what_is_done()
    shutdown.release_what_is_done()
    assert released == ["interrupted", "done"]
    assert (shutdown._links, shutdown._left) == (set(), {})


def _end_with_something_in_flight(how, folder):
    def note_alarm(seconds):
        (folder / f"{how} alarm").write_text(f"{seconds} {time.time()}", encoding="utf-8")

    signal.alarm = note_alarm
    shutdown._AFTER_AN_ERROR_S = 0.1
    shutdown.track_until_exit(Link(is_in_flight=True, timeout_s=6.0))
    (folder / f"{how} began").write_text(f"{time.time()}", encoding="utf-8")
    if how == "raises":
        raise ValueError("a fault of the program")
    if how != "returns":
        sys.exit(how == "exits")


@pytest.mark.timeout(150)
def test_the_exit_is_short_in_a_child_that_has_failed(tmp_path):
    """multiprocessing prints the exception and forgets it before exit handlers run. All import PyTorch, so at once."""
    spawn = multiprocessing.get_context("spawn")
    is_short = {"raises": True, "exits": True, "exits well": False, "returns": False}
    children = [spawn.Process(target=_end_with_something_in_flight, args=(how, tmp_path)) for how in is_short]
    for child in children:
        child.start()
    for child in children:
        child.join(100)
    for how, expected in is_short.items():
        seconds, ended = map(float, (tmp_path / f"{how} alarm").read_text(encoding="utf-8").split())
        assert seconds == 30
        took_s = ended - float((tmp_path / f"{how} began").read_text(encoding="utf-8"))
        assert (took_s < 5.5) == expected, how
