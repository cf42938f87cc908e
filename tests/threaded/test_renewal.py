"""After an exception: who is told what, and when a program may go on with a context that is made anew."""

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import CommFuseError, TransportError, TransportTimeoutError
from commfuse_megatron.runtime import link, renewal
from tests.harness import on_ranks
from tests.harness.emulated_gpu import on_copy_engine
from tests.threaded.test_copy_engine_emulated import config_for

NOT_COMPARED = OverlapConfig(transport=TransportConfig(timeout_s=8.0), check_agreement=False)
COMPARED = OverlapConfig(transport=TransportConfig(timeout_s=8.0), check_agreement=True)


class NoMemoryError(Exception):
    """Raised in the middle of an operation."""


def gather(context, value, rows=1):
    """Each rank's value, by rank."""
    y = ops.all_gather_linear(torch.full((rows, 1, 5), float(value)), torch.ones(4, 5), context=context)
    return (y[::rows, 0, 0] / 5).tolist()


def end_operations(context, error):
    """The next operations on the context end by `error`, before they have sent anything."""

    def enter(problem):
        raise error

    context.enter = enter


def expect_end(context, error=None, rows=1):
    """One operation ends by an exception of its own."""
    error = NoMemoryError("no memory") if error is None else error
    end_operations(context, error)
    with pytest.raises(type(error)) as raised:
        gather(context, -1.0, rows)
    assert raised.value is error
    assert "make a new OverlapContext" in error.__notes__[-1]
    assert not context.is_usable


def expect_no_renewal(context, words="not known to be in step"):
    for _ in range(2):  # what was found out once is not asked again
        with pytest.raises(CommFuseError, match=words) as raised:
            context.renew()
        assert str(raised.value).endswith("begin with a forward pass.")
    with pytest.raises(CommFuseError, match="begin with a forward pass"):
        context.close()
    with pytest.raises(CommFuseError):
        context.renew()


@pytest.mark.parametrize("config", [NOT_COMPARED, COMPARED])
@pytest.mark.parametrize("group_size", [1, 2, 3])
@on_ranks("group_size")
def test_ranks_that_ended_in_one_operation_go_on_together(group, device, group_size, config):
    """Fails without: there was no way but to make a new context by hand."""
    context = OverlapContext(group, config)
    assert context.renew() is context
    for attempt in range(3):
        assert gather(context, group.rank()) == list(range(group_size))
        expect_end(context) if group_size > 1 else context.link.note_interruption("a call", NoMemoryError("none"))
        renewed = context.renew()
        assert renewed is not context
        with pytest.raises(TransportError, match="was interrupted by NoMemoryError"):
            gather(context, 0)
        context = renewed
        assert gather(context, 10 * attempt + group.rank()) == [10 * attempt + rank for rank in range(group_size)]
    assert OverlapContext(group, config).is_usable, "those that are made afterwards meet, too"
    context.close()


@pytest.fixture
def wait_s(request, monkeypatch):
    """How long renewal waits for other ranks."""
    monkeypatch.setattr(renewal, "_LONGEST_WAIT_S", request.param)


@pytest.mark.parametrize("odd", ["error", "operation", "problem"])
@pytest.mark.parametrize("wait_s", [4.0], indirect=True)
@on_ranks(2)
def test_other_kinds_operations_and_problems_are_in_doubt(group, device, odd, wait_s):
    """Another handler may catch another exception; a rank may be a call ahead: its values would be of another batch."""
    context, is_odd = OverlapContext(group, NOT_COMPARED), group.rank() == 1
    for rows in (1, 2):
        gather(context, 1, rows)
    if odd == "operation" and is_odd:
        next(iter(context._prepared.values())).calls += 1
    error = ValueError("odd") if odd == "error" and is_odd else None
    expect_end(context, error, rows=2 if odd == "problem" and is_odd else 1)
    expect_no_renewal(context, r"group rank 1: .*; [34] operations had begun, the last all_gather_linear fprop")


@pytest.mark.parametrize("is_interrupted", [True, False])
@pytest.mark.parametrize("wait_s", [0.5], indirect=True)
@on_ranks(2)
def test_a_rank_that_does_not_come_back_is_not_waited_for_long(group, device, is_interrupted, wait_s, event):
    context = OverlapContext(group, NOT_COMPARED)
    gather(context, 1)
    if group.rank() == 0:
        expect_end(context)
        expect_no_renewal(context, r"waited 0\.5 s for group ranks \[1\]")
        event.set()
        return
    assert event.wait(20.0)
    if is_interrupted:
        expect_end(context)
        expect_no_renewal(context, "came too late")
    else:
        with pytest.raises(TransportError, match="NoMemoryError: no memory"):
            gather(context, 2)
        expect_no_renewal(context)


@on_ranks(2, timeout_s=6.0)
def test_a_broken_transfer_leaves_ranks_in_doubt_at_once(group, device):
    context = OverlapContext(group, NOT_COMPARED)
    gather(context, 1)
    if group.rank() == 1:
        expect_end(context)
        expect_no_renewal(context, "(?s)group rank 0: error: .*was interrupted by .*NoMemoryError")
    else:
        with pytest.raises(TransportError):
            gather(context, 2)
        expect_no_renewal(context)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TransportTimeoutError("late")])
@on_ranks(2)
def test_what_may_come_anywhere_is_no_proof_of_being_in_step(group, device, error):
    context = OverlapContext(group, NOT_COMPARED)
    gather(context, 1)
    end_operations(context, error)
    with pytest.raises(type(error)):
        gather(context, 2)
    expect_no_renewal(context)


@on_ranks(2)
def test_a_closed_context_is_not_renewed(group, device):
    with OverlapContext(group, NOT_COMPARED) as context:
        pass
    with pytest.raises(TransportError, match=r"is closed.*make a new OverlapContext"):
        context.renew()


@pytest.mark.parametrize("config", [NOT_COMPARED, COMPARED])
@pytest.mark.parametrize("stage", ["halfway", "between calls"])
@on_ranks(2, timeout_s=5.0)
def test_peers_are_told_the_cause(group, device, config, stage):
    """Fails without: "Connection closed by peer" was all; where calls are compared, after the whole time limit."""

    def interrupt(*_):
        raise MemoryError("no memory")

    context = OverlapContext(group, config)
    gather(context, 1)
    if group.rank() == 1:
        if stage == "halfway":
            next(iter(context._prepared.values())).gemm.multiply = interrupt
        else:
            context.link.note_interruption("a call", MemoryError("no memory"))
        with pytest.raises((MemoryError, TransportError), match="no memory"):
            gather(context, 2)
        with pytest.raises(TransportError, match="was interrupted by MemoryError: no memory"):
            gather(context, 3)
        return
    with pytest.raises(TransportError, match=r"group rank 1.*was interrupted by MemoryError: no memory"):
        [gather(context, value) for value in (2, 3)]


@pytest.mark.parametrize("config", [NOT_COMPARED, COMPARED])
@on_ranks(2, timeout_s=5.0)
def test_peers_are_told_of_an_error_beside_the_operations(group, device, config):
    def leave():
        with OverlapContext(group, config) as context:
            gather(context, 1)
            if group.rank() == 1:
                raise ValueError("the loss is not finite")
            gather(context, 2)

    with pytest.raises(
        ValueError if group.rank() == 1 else TransportError, match=r"ValueError: the loss|^the loss is not finite"
    ):
        leave()


@on_copy_engine(2)
def test_over_the_copy_engine_a_context_is_renewed(group, device):
    context = OverlapContext(group, config_for("sliced", "direct", 1))
    for value in range(3):
        assert gather(context, value + group.rank()) == [value, value + 1]
        expect_end(context)
        context = context.renew()
    gather(context, 1)
    context.link._has_begun = True  # something of the operation was sent
    expect_end(context)
    expect_no_renewal(context)


@on_copy_engine(2)
def test_a_context_in_a_cuda_graph_is_not_renewed(group, device):
    """Nobody counts the replays of a graph, and its copies go to the old windows."""
    context = OverlapContext(group, config_for("sliced", "direct", 1))
    for _ in range(3):
        gather(context, 1)
    context.slots.note_capture()
    expect_end(context)
    expect_no_renewal(context)


@on_ranks(2)
def test_what_hooks_raise_on_all_ranks_is_an_exception(group, device):
    """Where calls are not compared, it fails the context."""

    def refuse(packed):
        raise ValueError("not there any more")

    context = OverlapContext(group, NOT_COMPARED)
    gather(context, 1)
    x = torch.ones(1, 1, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, refuse):
        y = ops.all_gather_linear(x, torch.ones(4, 5), context=context)
    with pytest.raises(ValueError, match="not there any more"):
        y.sum().backward()
    context = context.renew()
    assert gather(context, group.rank()) == [0, 1]
    context.close()


class Watchdog:
    """Of a stream whose transfers end after some looks."""

    def __init__(self, looks):
        self.looks = looks

    @property
    def is_idle(self):
        self.looks -= 1
        return self.looks < 0

    def watch(self, *_): ...

    def stop(self): ...


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(link, "_LAST_TRANSFERS_S", 0.2)


@pytest.mark.parametrize("looks", [3, 10**9])
@pytest.mark.usefixtures("hasty")
@on_ranks(2)
def test_transfers_of_earlier_operations_are_waited_for(group, device, looks):
    """What a stream still sends or receives for them would be lost with the transport: their results, too."""
    context = OverlapContext(group, NOT_COMPARED)
    gather(context, 1)
    context.link._watchdog = Watchdog(looks)
    expect_end(context)
    if looks > 3:
        expect_no_renewal(context)
        return
    context = context.renew()
    assert gather(context, group.rank()) == [0, 1]
    context.close()


@on_ranks(2, timeout_s=3.0)
def test_who_waits_learns_that_a_rank_goes_no_further(group, device):
    """Fails without: closing waited for the whole time limit, 8 s here."""
    context = OverlapContext(group, NOT_COMPARED)
    gather(context, 1)
    if group.rank() == 1:
        return expect_end(context)
    context.link._watchdog = Watchdog(10**9)
    with pytest.raises(TransportError, match=r"group rank 1 .*was interrupted by NoMemoryError: no memory"):
        context.close()
    assert context.link.is_left_by_peer
    return None


@on_ranks(2)
def test_the_watchdog_names_what_the_missing_rank_has_told(group, device, event):
    context = OverlapContext(group, NOT_COMPARED)
    gather(context, 1)
    if group.rank() == 1:
        expect_end(context)
        event.set()
        return
    assert event.wait(20.0)
    context.link._overdue(1)
    said = r"(?s)waited 8\.0 s for group rank 1.*NoMemoryError: no memory"
    with pytest.raises(TransportTimeoutError, match=said):
        gather(context, 2)
