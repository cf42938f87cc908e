"""One linear, traced on ranks as threads: what a profiler or a recorder that saw too little becomes on all ranks."""

import threading

import pytest
import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.runtime.meter import COMPUTE, TRANSFER
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.trace.kernels import Profile
from commfuse_megatron.tools.trace.operation import LinearToTrace, trace_linear
from commfuse_megatron.tools.trace.session import Session
from tests.harness import on_ranks, run_threads


def linear(is_profiled):
    return LinearToTrace(
        op="linear_reduce_scatter", pass_name="fprop", M=12, N=6, K=4, dtype=torch.float64, calls=3, warm_up=1,
        is_profiled=is_profiled,
    )  # fmt: skip


@pytest.fixture
def profiled(monkeypatch):
    """A function: gives `check` a way to trace, on each of two ranks; `profiles` are what their profilers see."""
    thread = threading.local()

    def run(profiles, check):
        def profile(calls, *, prepare, are_apart):
            assert not are_apart
            for number, call in enumerate(calls, 1):
                prepare(number)
                call()
            return profiles[thread.rank]

        def body(group, device):
            thread.rank = group.rank()
            return check(lambda: trace_linear(linear(is_profiled=True), OverlapConfig(), group))

        monkeypatch.setattr("commfuse_megatron.tools.trace.operation.profile_calls", profile)
        return run_threads(2, body)

    return run


def profile_of(calls, base_ns=1_000_000, complaint=""):
    """A GEMM of 10 us and a copy behind it in each of these calls."""
    intervals = []
    for call in calls:
        gemm = Interval("GEMM", COMPUTE, 100 * call, 100 * call + 10, None, "GEMM kernels", call, "stream 7")
        push = Interval("copy to a peer", TRANSFER, 100 * call + 10, 100 * call + 14, None, "copies", call, "stream 20")
        intervals += [gemm, push]
    return Profile(base_ns, tuple(intervals), complaint)


def test_profiles_of_all_ranks_make_the_trace(profiled):
    for found in profiled((profile_of([1, 2, 3]), profile_of([1, 2, 3], base_ns=1_005_000)), lambda trace: trace()):
        assert [i.start_us for i in found.recording[0]] == [100, 110, 200, 210, 300, 310]
        assert [i.start_us for i in found.recording[1]] == [105, 115, 205, 215, 305, 315]
        assert found.summaries[1].calls == 3
        assert found.summaries[1].exposed_us == 4


@pytest.mark.parametrize(("profiles", "message"), [
    # Fails where the rank with the complaint raises: the other one waits for its profile.
    ((profile_of([1, 2, 3]), profile_of([], complaint="marks were lost")), "^rank 1: marks were lost$"),
    ((profile_of([1, 3]), profile_of([1, 2, 3])), r"nothing was seen to run in a call of sliced on the ranks \[0\]"),
    ((profile_of([]), profile_of([])), r"nothing was seen to run in a call of sliced on the ranks \[0, 1\]"),
])  # fmt: skip
def test_a_profile_that_lacks_something_is_refused_on_all_ranks(profiled, profiles, message):
    def check(trace):
        with pytest.raises(UnsupportedError, match=message):
            trace()

    profiled(profiles, check)


@on_ranks(2)
def test_a_recording_of_nothing_is_refused_on_all_ranks(group, device, monkeypatch):
    """Fails where it is returned: it cannot be drawn."""
    monkeypatch.setattr(Session, "finish", lambda session: [[], []])
    said = r"nothing was seen to run in the calls of sliced on the ranks \[0, 1\]"
    with pytest.raises(UnsupportedError, match=said):
        trace_linear(linear(is_profiled=False), OverlapConfig(), group)
