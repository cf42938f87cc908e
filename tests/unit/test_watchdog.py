"""The watchdog's thread must not break a CUDA graph that another thread captures."""

import threading

import pytest
import torch

from commfuse_megatron.runtime.watchdog import Watchdog


def _modes_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    from cuda.bindings import driver

    asked: list[tuple[str, int]] = []

    def exchange(mode: int) -> tuple[int, int]:
        asked.append((threading.current_thread().name, mode))
        return 0, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    monkeypatch.setattr(driver, "cuThreadExchangeStreamCaptureMode", exchange)
    watchdog = Watchdog(1.0, lambda entry: None)
    watchdog.stop()
    return asked


def test_it_may_ask_for_events_whatever_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert _modes_asked_for(monkeypatch) == [("commfuse-watchdog", relaxed)]


def test_without_a_gpu_the_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert _modes_asked_for(monkeypatch) == []
