"""Contexts: agreement among ranks, timeouts, failure, closing, the report, groups inside groups."""

import functools
import gc
import importlib
import os
import signal
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.errors import ConfigError, ShapeError, TransportError, TransportTimeoutError
from commfuse_megatron.runtime import hardware, shutdown
from commfuse_megatron.transport.gloo import GlooTransport
from commfuse_megatron.transport.select import create_transport
from tests.harness import make_groups, on_ranks, run_threads
from tests.harness.contexts import in_context
from tests.harness.linear_cases import OPS, Case, check_linear


def quick(timeout_s=1.0, **others) -> OverlapConfig:
    return OverlapConfig(transport=TransportConfig(timeout_s=timeout_s), **others)


def call(op, context, rows=4, value=1.0, features=5):
    return getattr(ops, op)(torch.full((rows, 1, features), value), torch.ones(4, 5), context=context)


def gather(context, **others):
    return call("all_gather_linear", context, **others)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_ranks_with_different_shapes_raise_before_they_send(group, device, op):
    with pytest.raises(ShapeError, match="do not agree"), OverlapContext(group, quick()) as context:
        call(op, context, rows=8 - 2 * group.rank())


@pytest.mark.parametrize("config", ["x", 3, {}])
@on_ranks(2)
def test_what_is_no_configuration_is_refused(group, device, config):
    with pytest.raises(ConfigError, match="OverlapContext takes an OverlapConfig, got"):
        OverlapContext(group, config)


LATE = r"waited 0\.5 s for group ranks"


@on_ranks(2)
def test_a_rank_that_makes_its_context_too_late_is_told_so(group, device):
    """It was told that configurations, or calls, differ, which were the same."""
    time.sleep(1.5 * group.rank())  # the delay under test, as below
    with pytest.raises(TransportTimeoutError, match=LATE):
        OverlapContext(group, quick(timeout_s=0.5))


@on_ranks(2)
def test_a_rank_that_calls_too_late_is_told_so(group, device):
    context = OverlapContext(group, quick(timeout_s=0.5))
    time.sleep(1.5 * group.rank())
    with pytest.raises(TransportTimeoutError, match=LATE):
        call("linear_reduce_scatter", context)
    with pytest.raises(KeyError):
        leave_by_error(context)


def leave_by_error(context, kind=KeyError):
    """As a program does by an error of its own, so that nobody waits."""
    with context:
        raise kind("the parent's")


@in_context(3, quick())
def test_a_wrong_dtype_on_one_rank_raises_everywhere(group, context):
    x = torch.zeros(4, 2, 5, dtype=torch.float64 if group.rank() == 1 else torch.float32)
    with pytest.raises(ShapeError, match=r"one dtype|do not agree"):
        ops.all_gather_linear(x, torch.zeros(4, 5), context=context)
    y = ops.all_gather_linear(x.float(), torch.ones(4, 5), context=context)
    assert y.shape == (12, 2, 4)


@pytest.mark.parametrize(("arguments", "match"), [
    ({"x": torch.zeros(5)}, r"at least two dimensions"),
    ({"weight": torch.zeros(4, 5, 1)}, r"weight must be \[N, K\]"),
    ({"x": torch.zeros(4, 2, 6)}, r"x has 6 input features .* has 5"),
    ({"bias": torch.zeros(5)}, r"bias must be \[4\]"),
    ({"bias": torch.zeros(4, dtype=torch.float64)}, r"one dtype, got x float32, weight float32, bias float64"),
    ({"x": torch.zeros(4, 2, 5, device="meta")}, r"x is on meta, but this context uses transport gloo"),
    ({"total_rows": 9}, r"must bring [45] rows .*, x has 3"), ({"total_rows": -1}, r"total_rows must not be negative"),
    ({"total_rows": 6.0}, r"total_rows must be an integer or None, got 6\.0"),
    ({"x": torch.zeros(3, 2, 5).int(), "weight": torch.zeros(4, 5).int()}, r"int32 is not supported"),
])  # fmt: skip
@on_ranks(2)
def test_bad_arguments_are_named(group, device, arguments, match):
    given = {"x": torch.zeros(3, 2, 5), "weight": torch.zeros(4, 5)} | arguments
    with pytest.raises(ShapeError, match=match), OverlapContext(group, quick()) as context:
        ops.all_gather_linear(**given, context=context)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("none", [None, object()])
def test_no_context_is_said_by_name(op, none):
    """Fails without the check, with an AttributeError."""
    with pytest.raises(ConfigError, match=rf"{op}: context must be an OverlapContext, .*; got "):
        call(op, none)


@pytest.mark.parametrize("none", [None, dist.GroupMember.NON_GROUP_MEMBER])
def test_no_group_is_said_by_name(none):
    """Fails without the check, with an AttributeError. Who is no member gets such a value from new_group."""
    with pytest.raises(ConfigError, match=f"process group that this rank belongs to, got {none!r}"):
        OverlapContext(none)


@on_ranks(3)
def test_different_configurations_raise_everywhere(group, device):
    """Fails where the whole configurations are said: which key differs was for the reader to find."""
    data = quick(check_agreement=group.rank() != 1).to_dict()
    data["linear"]["fprop"]["chunks_per_shard"] = (None, 2, 4)[group.rank()]
    said = (
        r"^the configurations differ between ranks: linear\.fprop\.chunks_per_shard is null on group rank 0 and 2 on"
        r" group rank 1 and 4 on group rank 2; check_agreement is true on group ranks 0, 2 and false on group rank 1;"
        r" give all ranks of the group the same one$"
    )
    with pytest.raises(ConfigError, match=said):
        OverlapContext(group, OverlapConfig.from_dict(data))


def test_a_context_is_made_when_all_ranks_are_connected(monkeypatch):
    connected = set()

    def create_slowly(backend, group, *others):
        transport = create_transport(backend, group, *others)
        time.sleep(0.2 * group.rank())  # the delay under test, not a synchronisation
        connected.add(group.rank())
        return transport

    monkeypatch.setattr(hardware.current, "create_transport", create_slowly)

    def body(group, device):
        with OverlapContext(group):
            assert connected == {0, 1}

    run_threads(2, body)


@pytest.fixture
def one_cannot_connect(monkeypatch):
    def create(backend, group, *others):
        if group.rank() == 1:
            raise TransportError("no such interface")
        return GlooTransport(dist.HashStore(), 0, 1, 1.0)

    monkeypatch.setattr(hardware.current, "create_transport", create)


@pytest.mark.usefixtures("one_cannot_connect")
@on_ranks(2)
def test_a_rank_that_cannot_connect_is_named_everywhere(group, device):
    with pytest.raises(TransportError, match="no such interface"):
        OverlapContext(group, quick(5.0))


@pytest.mark.parametrize("kind", [ConfigError, RuntimeError, KeyError])
def test_a_rank_that_finds_no_transport_is_not_waited_for(kind, monkeypatch):
    """Fails where nobody asks between choosing a transport and connecting it: the others wait 20 s to connect."""

    def choose(group, config, exchange):
        if group.rank() == 1:
            raise kind("the driver is not there")
        return "gloo"

    monkeypatch.setattr(hardware.current, "choose_backend", choose)

    def body(group, device):
        with pytest.raises(kind if group.rank() == 1 else ShapeError, match="the driver is not there"):
            OverlapContext(group, quick(20.0))

    started_s = time.monotonic()
    run_threads(2, body)
    assert time.monotonic() - started_s < 10.0


def expect_again(first, use):
    """`use` raises what was raised before, and says how to go on."""
    with pytest.raises(type(first.value)) as later:
        use()
    said, advice = str(later.value).rsplit("\n", 1)
    assert (type(later.value), said) == (type(first.value), str(first.value))
    assert "all ranks make a new OverlapContext" in advice


@on_ranks(2)
def test_after_giving_up_on_a_late_rank_its_call_is_not_met(group, device, event):
    context = OverlapContext(group, quick(1.5))  # the first call is to succeed on a loaded machine
    gather(context, value=0.0)
    if group.rank() == 0:
        with pytest.raises(TransportTimeoutError, match=r"for group ranks \[1\]") as first:
            gather(context, value=1.0)
        event.set()
        expect_again(first, lambda: gather(context, value=2.0))
    else:
        assert event.wait(10)
        late = r"all_gather_linear fprop .*: group rank 1 came too late, the others have given up"
        with pytest.raises(TransportTimeoutError, match=late):  # fails without the operation's name
            gather(context, value=1.0)


@on_ranks(2)
def test_an_interrupt_while_waiting_for_others_fails_the_context(group, device):
    context = OverlapContext(group, quick(0.5))
    if group.rank() == 0:
        store = context.consensus._agreement._store
        context.consensus._agreement._store = SimpleNamespace(set=store.set, wait=interrupt)
        with pytest.raises(KeyboardInterrupt):
            gather(context)
        with pytest.raises(TransportError, match="interrupted by KeyboardInterrupt"):
            gather(context)


@on_ranks(2)
def test_a_call_out_of_memory_before_it_sends_fails_its_context(group, device, monkeypatch):
    def run_out_of_memory(tensor):
        raise torch.OutOfMemoryError("no memory")

    context = OverlapContext(group, quick(5.0))
    gather(context)
    group.barrier().wait()
    if group.rank() == 0:
        module = importlib.import_module("commfuse_megatron.ops.all_gather_linear")
        monkeypatch.setattr(module, "with_unit_stride", run_out_of_memory)
    group.barrier().wait()
    with pytest.raises(torch.OutOfMemoryError):
        gather(context)
    assert not context.is_usable
    with pytest.raises(KeyError):
        leave_by_error(context)


@on_ranks(2)
def test_after_an_uncompared_refusal_its_call_is_not_met(group, device, event):
    context = OverlapContext(group, quick(0.5, check_agreement=False))
    if group.rank() == 0:
        for features in (6, 5):
            with pytest.raises(ShapeError, match="6 input features"):
                gather(context, features=features)
        event.set()
    else:
        assert event.wait(10)
        with pytest.raises(ShapeError, match=r"group rank 0: error: .* 6 input features"):
            gather(context)


@on_ranks(3)
def test_a_rank_that_never_makes_its_context_is_named(group, device):
    if group.rank() != 1:
        with pytest.raises(TransportTimeoutError, match=r"for group ranks \[1\]"):
            OverlapContext(group, quick(0.5))


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_a_missing_peer_times_out_and_is_named(group, device, op):
    # The first call is to succeed on a loaded machine.
    context = OverlapContext(group, quick(2.0, check_agreement=False))
    call(op, context)
    if group.rank() == 0:
        label = "all-gather" if op == "all_gather_linear" else "reduce-scatter"
        expected = (
            rf"{label}, step \d of 2: group rank 0 \(global rank 0\) got nothing from group rank 1 "
            rf"\(global rank 1\) for 2\.0 s\. Schedule:\n"
        )
        with pytest.raises(TransportTimeoutError, match=expected) as first:
            call(op, context)
        assert not context.is_usable
        for again in (lambda: call(op, context), context.close, context.synchronize):
            expect_again(first, again)
        context.close()  # closed by now: nothing more to say


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_outgrown_buffers_are_freed_and_closing_frees_all(group, device, op):
    context = OverlapContext(group)
    weight = torch.zeros(4, 5, requires_grad=True)
    buffers = []
    for rows in range(400, 800, 40):  # each is larger than the one before
        x = torch.zeros(rows, 1, 5, requires_grad=True)
        getattr(ops, op)(x, weight, context=context).sum().backward()
        buffers += [StorageWeakRef(buffer.tensor.untyped_storage()) for buffer in context.slots._buffers.values()]
    in_use = {buffer.cdata for buffer in buffers if not buffer.expired()}
    assert len(in_use) == len(context.slots._buffers)
    context.close()
    assert context.buffer_bytes == 0
    assert all(buffer.expired() for buffer in buffers)


@pytest.fixture
def few_known_calls(monkeypatch):
    monkeypatch.setattr("commfuse_megatron.ops.arguments._MOST_KNOWN_CALLS", 10)


@pytest.mark.usefixtures("few_known_calls")
@in_context(2)
def test_ever_new_sizes_keep_a_bounded_number_of_programs(group, context):
    for K in [*range(1, 16)] * 2:
        check_linear(Case(op=OPS[K % 2], rows=6, K=K, seed=K), group, context)
    assert sum(bool(p._programs) for p in context._prepared.values()) <= 10
    assert [record.calls for record in context.report()] == [2] * 30


@on_ranks(2)
def test_an_unchecked_mismatch_of_sizes_times_out(group, device):
    context = OverlapContext(group, quick(2.0, check_agreement=False))
    for rows in (4, 6):  # both sizes are known on both ranks, so neither is compared again
        gather(context, rows=rows)
    with pytest.raises((TransportTimeoutError, TransportError), match=f"group rank {1 - group.rank()}"):
        gather(context, rows=4 + 2 * group.rank())


@on_ranks(2)
def test_a_closed_context_refuses_and_may_be_closed_again(group, device):
    context = OverlapContext(group)
    context.close()
    context.close()
    assert not context.is_usable
    with pytest.raises(TransportError, match="closed"):
        gather(context)


HUNDRED = PassConfig(path="sliced", chunks_per_shard=100)


@pytest.mark.parametrize("op", OPS)
@in_context(3, OverlapConfig(linear=LinearConfig(fprop=HUNDRED, dgrad=HUNDRED)))
def test_more_than_256_chunks(group, context, op):
    check_linear(Case(op=op, rows=320, batch=1), group, context)


def test_sub_groups_make_their_contexts_alone(event):
    # Members are listed so that group ranks differ from global ranks, and group [1, 3] starts when [2, 0] is done.
    groups_of = make_groups([[2, 0], [1, 3]])

    def body(everyone, device):
        (group,) = groups_of(everyone.rank())
        if everyone.rank() in (1, 3):
            assert event.wait(30)
        for op in OPS:
            with OverlapContext(group) as context:
                check_linear(Case(op=op, rows=7, seed=everyone.rank() % 2), group, context)
        if everyone.rank() == 0:
            event.set()

    run_threads(4, body)


@in_context(2, OverlapConfig(record=True))
def test_the_report_counts_and_explains(group, context):
    x, weight = torch.ones(4, 2, 5, requires_grad=True), torch.ones(6, 5, requires_grad=True)
    for _ in range(3):
        ops.all_gather_linear(x, weight, context=context).sum().backward()
    forward, backward = context.report()
    assert (forward.op, forward.pass_name, forward.calls) == ("all_gather_linear", "fprop", 3)
    assert (forward.M, forward.N, forward.K, forward.dtype) == (16, 6, 5, "float32")
    assert (backward.pass_name, backward.calls) == ("backward", 3)
    assert (forward.path, forward.transport, forward.algorithm) == ("sliced", "gloo", "direct")
    assert forward.reason
    assert forward.exposed_comm_us >= 0
    intervals = context.recorder.intervals()
    assert {interval.track for interval in intervals} == {"compute", "transfer"}
    assert all(interval.end_us >= interval.start_us for interval in intervals)
    assert {interval.op for interval in intervals} == {"all_gather_linear.fprop", "all_gather_linear.backward"}


@on_ranks(2)
def test_a_context_is_released_with_its_last_reference(group, device):
    context = OverlapContext(group)
    link, finalizer = context.link, context._finalizer
    del context
    gc.collect()
    assert not finalizer.alive
    assert link.failure is None


def test_a_failed_context_that_is_dropped_is_released():
    """What made it fail kept it: the traceback's frames hold the context, and the link holds what made it fail."""
    found = []

    def use(group):
        context = OverlapContext(group, quick(2.0))
        gather(context, rows=200)
        found.extend((weakref.ref(context), weakref.ref(context.slots)))
        for _ in range(3 if group.rank() == 0 else 0):
            with pytest.raises(TransportTimeoutError):
                gather(context, rows=200)

    def body(group, device):
        use(group)
        group.barrier().wait()

    run_threads(2, body)
    gc.collect()
    shutdown.release_what_is_done()
    assert [reference() for reference in found] == [None] * 4


@on_ranks(1)
def test_a_failure_raised_again_has_no_frames_of_earlier_calls(group, device):
    context = OverlapContext(group)
    try:
        raise TransportError("first") from ValueError("a cause")
    except TransportError as error:
        context.link.fail(error)
    depths = []
    for _ in range(3):
        with pytest.raises(TransportError, match="first") as raised:
            gather(context)
        assert raised.value.__cause__ is None
        depths.append(len(raised.traceback))
    assert depths[0] == depths[2]


@on_ranks(2)
def test_a_call_whose_context_is_closed_meanwhile_says_so(group, device):
    context = OverlapContext(group)
    exchange = context.link.transport.exchange

    def close_first(*arguments):  # as another thread may
        context.close()
        return exchange(*arguments)

    context.link.transport.exchange = close_first
    with pytest.raises(TransportError, match="closed, or failed, in another thread"):
        gather(context)


LEAVE = functools.partial(leave_by_error, kind=TransportError)


@pytest.mark.parametrize("use", [gather, OverlapContext.close, LEAVE], ids=["calls", "closes", "leaves"])
@in_context(1)
def test_a_forked_child_cannot_use_its_parents_context(group, context, use):
    """It shares the parent's connections: what it sent there broke the parent's calls, and closing hung."""
    gather(context)
    child = os.fork()
    if child == 0:
        try:
            use(context)
        except TransportError as error:
            os._exit(0 if "parent's" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    assert status_of(child) == 0
    gather(context)


def status_of(child):
    """How the process ends, within a limit."""
    deadline = time.monotonic() + 20.0
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return ended[1]


@on_ranks(1)
def test_a_forked_child_may_drop_its_parents_context(group, device):
    """As garbage collection in a worker does. Closing the connections would wait for threads that are the parent's."""
    gc.collect()
    kept = [OverlapContext(group)]
    gather(kept[0])
    child = os.fork()
    if child == 0:
        kept.clear()
        gc.collect()
        os._exit(len(shutdown._of_the_parent) - 1)
    assert status_of(child) == 0
    kept[0].close()


def test_a_context_that_is_interrupted_in_its_making_is_released(monkeypatch):
    """Its watchdog and its connections were there to the end of the process."""
    links = []

    def interrupt_planner(context):
        links.append(context.link)
        raise KeyboardInterrupt

    monkeypatch.setattr("commfuse_megatron.runtime.context.Planner", interrupt_planner)

    def body(group, device):
        with pytest.raises(KeyboardInterrupt):
            OverlapContext(group)

    run_threads(2, body)
    gc.collect()
    shutdown.release_what_is_done()
    assert [link.transport._group for link in links] == [None, None]
