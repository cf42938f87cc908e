"""What a context with `record` keeps of its calls."""

import contextlib
import dataclasses

import numpy
import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import KernelConfig, LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.runtime.recorder import Recorder
from commfuse_megatron.transport.base import Transfer
from tests.harness import on_ranks, run_threads
from tests.harness.contexts import in_context
from tests.harness.emulated_gpu import emulate_copy_engine, take_part

RECORDING = OverlapConfig(record=True)
WEIGHT = torch.ones(6, 5)


@pytest.fixture
def few_calls(monkeypatch):
    monkeypatch.setattr("commfuse_megatron.runtime.recorder._MOST_CALLS", 5)


@pytest.mark.usefixtures("few_calls")
@in_context(2, RECORDING)
def test_a_long_recording_keeps_the_latest_calls(group, context):
    """Fails without a limit: every call adds to what is kept."""
    for call in range(1, 31):
        ops.all_gather_linear(torch.ones(2 if call <= 15 else 3, 2, 5), WEIGHT, context=context)
        if call in (10, 30):  # twice, since what is read once is kept elsewhere
            kept = {interval.call for interval in context.recorder.intervals()}
            assert kept == set(range(call - 4, call + 1))
    first, second = context.report()
    assert (first.calls, first.exposed_comm_us) == (15, None), "its calls are forgotten, their number is not"
    assert second.exposed_comm_us >= 0


@in_context(2, RECORDING)
def test_a_cleared_recording_goes_on(group, context):
    for call in (1, 2):
        ops.all_gather_linear(torch.ones(2, 2, 5), WEIGHT, context=context)
        assert {interval.call for interval in context.recorder.intervals()} == {call}
        assert context.report()[0].exposed_comm_us >= 0
        context.recorder.clear()
        assert context.recorder.intervals() == []
        assert context.report()[0].exposed_comm_us is None


def recording_by(fprop: str, dgrad: str) -> OverlapConfig:
    return OverlapConfig.from_dict({"linear": {"fprop": {"path": fprop}, "dgrad": {"path": dgrad}}, "record": True})


@pytest.mark.parametrize("path", ["sequential", "async"])
@pytest.mark.parametrize("op", [ops.all_gather_linear, ops.linear_reduce_scatter])
@in_context(2, lambda path: recording_by("sequential", path))
def test_collectives_are_not_recorded_nor_timed(group, context, op):
    """Their passes record GEMMs; a zero in the report would say that the whole collective was hidden."""
    x, weight = torch.ones(8, 2, 6, requires_grad=True), torch.ones(6, 6, requires_grad=True)
    op(x, weight, context=context).sum().backward()
    assert [record.exposed_comm_us for record in context.report()] == [None, None]


@on_ranks(2)
def test_the_exposed_time_of_a_linear_is_that_of_its_own_calls(group, device):
    """The projection of sequential attention states the same problem, and leaves its transfers to a collective."""
    config = OverlapConfig.from_dict(
        {"linear": {"dgrad": {"path": "sliced"}}, "attention": {"path": "sequential"}, "record": True}
    )
    with OverlapContext(group, config) as context:
        x, weight = torch.ones(8, 1, 6, requires_grad=True), torch.ones(6, 6, requires_grad=True)
        q, k, v = (torch.ones(8, 1, 2, 3, requires_grad=True) for _ in range(3))

        def report():
            return {(r.op, r.pass_name): (r.calls, r.exposed_comm_us) for r in context.report()}

        ops.linear_reduce_scatter(x, weight, context=context).sum().backward()
        before = report()
        for _ in range(3):
            ops.query_split_attention(q, k, v, weight, context=context).sum().backward()
        assert before["linear_reduce_scatter", "backward"][1] > 0
        assert report().items() >= before.items()


@on_ranks(2)
def test_a_call_that_failed_does_not_spoil_the_report(group, device):
    """A transfer that nobody waited for has no end; the report raised, on the rank whose report is wanted most."""
    config = OverlapConfig(record=True, transport=TransportConfig(timeout_s=2.0))
    context = OverlapContext(group, config)
    operands = torch.ones(4, 1, 5), torch.ones(6, 5)
    ops.all_gather_linear(*operands, context=context)
    before = context.report()[0].exposed_comm_us
    (prepared,) = context._prepared.values()
    whole, run = prepared.gemm.multiply, []

    def multiply_once(*arguments, **keywords):
        if run:
            raise torch.OutOfMemoryError("no memory")
        run.append(whole(*arguments, **keywords))

    prepared.gemm.multiply = multiply_once
    with pytest.raises(torch.OutOfMemoryError):
        ops.all_gather_linear(*operands, context=context)
    for _ in range(2):
        (record,) = context.report()
        assert (record.calls, record.exposed_comm_us) == (2, before)
        kept = context.recorder.intervals()
        assert len(set(kept)) == len(kept)


# --- on GPUs ----------------------------------------------------------------------------------------------------------


class FakeDevice:
    """Stands for a GPU: its events are recorded at `now_us`; times between them are single floats of milliseconds."""

    def __init__(self, monkeypatch):
        self.now_us = 0.0
        device = self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self, stream=None):
                self.at_us = device.now_us

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return float(numpy.float32((other.at_us - self.at_us) / 1e3))

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "probe")
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def recorder(self):
        recorder = Recorder(torch.device("cuda", 0))
        recorder.begin_call("op")
        return recorder


class Arriving(Transfer):
    """A transfer that is done so long after its issue."""

    def __init__(self, device, communicators, us):
        self.communicators = communicators
        self._device, self._us = device, us

    def wait(self):
        self._device.now_us += self._us

    def is_complete(self):
        return True


@pytest.fixture
def fake_device(monkeypatch):
    return FakeDevice(monkeypatch)


def test_a_transfer_without_communicators_lasts_issue_to_end(fake_device):
    """Fails with `max(start_us, *())`: a plain collective, seen from outside, has none."""
    recorder = fake_device.recorder()
    fake_device.now_us = 125.0
    mark = recorder.now()
    fake_device.now_us = 250.0
    recorder.add_transfer("all-gather", mark, None)
    recorder.open_transfer("all-reduce", Arriving(fake_device, (), 125), None)
    found = [(i.name, i.track, i.start_us, i.end_us, i.row) for i in recorder.intervals()]
    assert found == [("all-gather", "transfer", 125, 250, ""), ("all-reduce", "transfer", 250, 375, "")]


def test_a_transfer_begins_when_those_before_it_are_done(fake_device):
    recorder = fake_device.recorder()
    for communicators, us in (((0,), 500), ((1,), 250), ((0, 1), 625), ((2,), 125)):
        fake_device.now_us = 125.0  # all issued at once
        recorder.open_transfer("x", Arriving(fake_device, communicators, us), None)
    found = [(i.start_us, i.end_us, i.row) for i in recorder.intervals()]
    assert found == [
        (125, 625, "communicator 0"),
        (125, 375, "communicator 1"),
        (625, 750, "communicator 0+1"),
        (125, 250, "communicator 2"),
    ]


def test_on_gpus_times_stay_fine_long_after_the_first_mark(fake_device):
    """Fails where all times are taken from the first mark: after an hour a single float leaves 250 us."""
    recorder = fake_device.recorder()
    for call in range(3):
        fake_device.now_us += 3600e6
        for start_us in range(0, 1000, 100):
            mark = recorder.now()
            fake_device.now_us += 40
            recorder.add_compute(f"{call} {start_us}", mark, None)
            fake_device.now_us += 60
    found = recorder.intervals()
    assert [i.duration_us for i in found] == pytest.approx([40] * 30, abs=0.1)
    for call in range(3):
        starts = [i.start_us for i in found if i.name.startswith(f"{call} ")]
        assert [start - starts[0] for start in starts] == pytest.approx(range(0, 1000, 100), abs=0.1)
        assert starts[0] == pytest.approx(3600e6 * (call + 1) + 1000 * call, abs=1000)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recording_changes_nothing_over_the_copy_engine(dtype, m, monkeypatch):
    """The same programs in the same mode, and an interval for every computation and every batch of each call."""
    emulate_copy_engine(monkeypatch)
    sliced = PassConfig(path="sliced", algorithm="direct", chunks_per_shard=m)
    config = OverlapConfig(
        linear=LinearConfig(fprop=sliced, dgrad=sliced), transport=TransportConfig(backend="copy_engine")
    )
    if dtype == torch.float32:  # what tapes do not serve
        config = dataclasses.replace(config, kernel=KernelConfig(gemm="torch"))
    group_size, calls = 3, 6

    def body(group, device):
        results, modes = [], []
        for is_recorded in (False, True):
            generator = torch.Generator().manual_seed(group.rank())
            x = torch.randint(-3, 4, (8, 2, 16), generator=generator).to(dtype)
            weight = torch.randint(-3, 4, (8, 16), generator=generator).to(dtype)
            with take_part(group), OverlapContext(group, dataclasses.replace(config, record=is_recorded)) as context:
                for _ in range(calls):
                    found = [t.clone().requires_grad_() for t in (x, weight)]
                    y = ops.all_gather_linear(*found, context=context)
                    z = ops.linear_reduce_scatter(y, found[1].new_ones(8, 8), context=context)
                    z.sum().backward()
                results.append([z.detach(), *(t.grad for t in found)])
                modes.append([sum(record.modes.values()) for record in context.report()])
                served = {mode for record in context.report() for mode, count in record.modes.items() if count}
                if dtype == torch.float32:
                    assert served == {"stepped"}
                else:
                    assert served == {"tape"} or (not is_recorded and served == {"tape", "graph"})
                if is_recorded:
                    _check_intervals(context, calls, group_size, m)
        assert modes[0] == modes[1]
        for first, second in zip(*results, strict=True):
            assert torch.equal(first, second)

    run_threads(group_size, body)


def _check_intervals(context, calls, group_size, m):
    recorded = context.recorder.calls_by_problem()
    assert len(recorded) == 4
    for problem, of_problem in recorded.items():
        assert len(of_problem) == calls
        names = [sorted(i.name for i in call if i.track == "compute") for call in of_problem]
        assert all(found == names[0] for found in names)
        assert sum("multiply" in name for name in names[0]) == group_size * m, problem
        gathers_again = problem.op == "all_gather_linear" and problem.pass_name == "backward"
        for call in of_problem:
            sent = [i for i in call if i.track == "transfer"]
            assert len(sent) == (group_size - 1) * m * (1 + gathers_again), problem
            assert all(i.end_us >= i.start_us for i in call)
