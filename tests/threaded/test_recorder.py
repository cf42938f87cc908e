"""What a context with `record` keeps of its calls."""

import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from tests.harness import run_threads


def test_a_long_recording_keeps_the_latest_calls(monkeypatch):
    """Fails without a limit: every call adds to what is kept."""
    monkeypatch.setattr("commfuse_megatron.runtime.recorder._MOST_CALLS", 5, raising=False)

    def body(group, device):
        with OverlapContext(group, OverlapConfig(record=True)) as context:
            weight = torch.ones(6, 5)
            for call in range(1, 31):
                ops.all_gather_linear(torch.ones(2 if call <= 15 else 3, 2, 5), weight, context=context)
                if call in (10, 30):  # twice, since what is read once is kept elsewhere
                    kept = {interval.call for interval in context.recorder.intervals()}
                    assert kept == set(range(call - 4, call + 1))
            first, second = context.report()
            assert (first.calls, first.exposed_comm_us) == (15, None), "its calls are forgotten, their number is not"
            assert second.exposed_comm_us >= 0

    run_threads(2, body)


def test_a_cleared_recording_goes_on():
    def body(group, device):
        with OverlapContext(group, OverlapConfig(record=True)) as context:
            weight = torch.ones(6, 5)
            for call in (1, 2):
                ops.all_gather_linear(torch.ones(2, 2, 5), weight, context=context)
                assert {interval.call for interval in context.recorder.intervals()} == {call}
                assert context.report()[0].exposed_comm_us >= 0
                context.recorder.clear()
                assert context.recorder.intervals() == []
                assert context.report()[0].exposed_comm_us is None

    run_threads(2, body)
