"""What is timed or drawn begins with the device's work, not with how late the host was: `runtime/head_start.py`."""

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron.runtime.head_start import start_together
from commfuse_megatron.tools.bench import timing
from commfuse_megatron.tools.bench.timing import Timed


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What a stand-in for a GPU was given, in order."""
    found: list[tuple[str, float]] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            found.append(("event", 0))

        def elapsed_time(self, _: object) -> float:
            return 16.0

    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: found.append(("sleep", cycles)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: found.append(("meet", 0)))
    return found


@pytest.mark.parametrize(("device", "expected"), [("cpu", []), ("cuda", [("sleep", 2_000_000), ("meet", 0)])])
def test_the_device_waits_for_the_host_and_then_for_the_others(submitted, device, expected):
    start_together(None, torch.device(device), 1000.0)
    assert submitted == expected


@pytest.mark.parametrize(("host_ms", "head_start_us"), [(0.01, 200.0), (1.0, 1500.0), (50.0, 5000.0)])
def test_a_burst_begins_a_call_of_the_host_later(submitted, monkeypatch, host_ms, head_start_us):
    monkeypatch.setattr(timing, "largest_of_ranks", lambda values, device, group: values)
    clock_s = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock_s[0])

    def call() -> None:
        submitted.append(("call", 0))
        clock_s[0] += host_ms / 1e3

    (sample,) = timing.measure({"one": Timed(call)}, None, rounds=2, device=torch.device("cuda")).values()
    assert sample.median_ms == 16.0
    sleeps = [cycles for what, cycles in submitted if what == "sleep"]
    # Warm-up and the burst that the host is timed in have the least of all.
    assert sleeps == pytest.approx([400_000, 400_000, 2000 * head_start_us, 2000 * head_start_us])
    assert submitted[-5:] == [("sleep", sleeps[-1]), ("meet", 0), ("event", 0), ("call", 0), ("event", 0)]
