"""The watchdog's thread must not break a CUDA graph that another thread captures."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron.errors import TransportError
from commfuse_megatron.runtime.link import Link, Peers
from commfuse_megatron.runtime.watchdog import Watchdog
from commfuse_megatron.transport.base import Transfer


def _modes_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    from cuda.bindings import driver

    asked: list[tuple[str, int]] = []

    def exchange(mode: int) -> tuple[int, int]:
        asked.append((threading.current_thread().name, mode))
        return 0, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    monkeypatch.setattr(driver, "cuThreadExchangeStreamCaptureMode", exchange)
    watchdog = Watchdog(1.0, lambda entry: None, pytest.fail)
    watchdog.stop()
    return asked


def test_who_is_late_is_logged_with_the_way_on(caplog: pytest.LogCaptureFixture) -> None:
    """Fails without the advice: the log is the first that is seen of it, and named no way on."""
    transport = SimpleNamespace(needs_watchdog=False, abort=lambda: None)
    board = SimpleNamespace(reasons_of_leaving=lambda wait_s: {})
    link = Link(transport, Peers(0, (4, 6)), 2.0, None, board)  # type: ignore[arg-type]
    link._overdue(1)
    (said,) = caplog.messages
    assert said.startswith("group rank 0 (global rank 4) waited 2.0 s for group rank 1 (global rank 6)")
    assert said.endswith(link.advice)


def test_it_may_ask_for_events_whatever_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert _modes_asked_for(monkeypatch) == [("commfuse-watchdog", relaxed)]


def test_without_a_gpu_the_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert _modes_asked_for(monkeypatch) == []


class _Transfer(Transfer):
    def __init__(self, is_done: bool) -> None:
        self._is_done = is_done

    def wait(self) -> None:
        pass

    def is_complete(self) -> bool:
        time.sleep(1e-5)  # the interpreter's lock is released, as while the driver is asked
        return self._is_done


def test_who_asks_takes_nothing_from_the_watchdogs_list() -> None:
    """Both drop what is complete: what the other has dropped meanwhile must not cost the next entry."""
    overdue: list[str] = []
    for _ in range(20):
        watchdog = Watchdog(0.02, overdue.append, pytest.fail)  # its thread looks every 5 ms
        for number in range(300):
            watchdog.watch(_Transfer(is_done=True), f"{number}")
        watchdog.watch(_Transfer(is_done=False), "missing")
        deadline = time.monotonic() + 10.0
        while not overdue:
            assert not watchdog.is_idle
            assert time.monotonic() < deadline
        watchdog.stop()
        assert overdue == ["missing"]
        overdue.clear()


class _Broken(_Transfer):
    def is_complete(self) -> bool:
        raise TransportError("cuEventQuery failed: CUDA_ERROR_ASSERT")


@pytest.mark.parametrize("asks", ["the watchdog", "the program"])
def test_a_failed_device_is_said_to_have_failed(asks: str) -> None:
    """Not that a peer is late, after the whole time that is allowed for that.

    The watchdog went on, asked once more after that time, and ended by an exception that nobody caught.
    """
    broken: list[TransportError] = []
    watchdog = Watchdog(0.04 if asks == "the watchdog" else 600.0, pytest.fail, broken.append)
    watchdog.watch(_Broken(is_done=False), "first")
    deadline = time.monotonic() + 10.0
    while not broken:
        assert asks == "the watchdog" or not watchdog.is_idle
        assert time.monotonic() < deadline
        time.sleep(0.005)
    if asks == "the watchdog":
        watchdog._thread.join(20.0)
        assert not watchdog._thread.is_alive()
    watchdog.stop()
    (said,) = broken
    assert "CUDA_ERROR_ASSERT" in str(said)
