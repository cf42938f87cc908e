"""What ends in the midst of what all ranks do fails its context; what only looks like it does not.

Its next call would meet the others' present one: of a problem that nobody compares again, it would give wrong numbers.
"""

import dataclasses
import importlib
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import PlanConfig, TransportConfig
from commfuse_megatron.errors import ShapeError, TransportError, TransportTimeoutError, UnsupportedError
from commfuse_megatron.runtime import calibrate
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.tools.verify.calls import AttentionCall, EmbeddingCall
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from tests.harness import on_ranks, run_threads
from tests.harness.contexts import in_context
from tests.harness.emulated_gpu import on_copy_engine
from tests.harness.linear_cases import ALL_REDUCES, OPS, Case, draw_own
from tests.threaded.test_copy_engine_emulated import config_for
from tests.threaded.test_planning import TRIAL, MadeUpTimes, plan_by_cost

# Of the linears that all-reduce one; the other's forward pass sends nothing, in which nobody could notice anything.
LINEARS = [Case(op=op, rows=8) for op in (*OPS, ALL_REDUCES[0])]
CALLS = {call.op: call for call in (*LINEARS, EmbeddingCall(rows=8), AttentionCall(rows=8, heads=2, head_dim=8))}
QUICK = OverlapConfig(transport=TransportConfig(timeout_s=8.0), check_agreement=False)


def operands_of(name, group):
    """Leaves, and the call of what is made of them."""
    case = CALLS[name]
    leaves = draw_own(case, group).copies(case.needs)

    def call(context):
        made = dataclasses.replace(leaves, x=1 * leaves.x, weight=1 * leaves.weight)
        return case.forward(getattr(ops, name), made, context=context)

    return [leaf for leaf in leaves.leaves.values() if leaf.requires_grad], call


@pytest.mark.parametrize("is_compared", [True, False])
@pytest.mark.parametrize("name", CALLS)
@in_context(2, lambda is_compared: OverlapConfig(check_agreement=is_compared))
def test_a_checkpoint_that_stops_early_is_no_interruption(group, context, name):
    """It raises out of what autograd does after our forward pass has returned, as soon as all is there again."""
    found = []
    for is_checkpointed in (False, True):
        leaves, call = operands_of(name, group)
        for _ in range(2):
            y = checkpoint(call, context, use_reentrant=False) if is_checkpointed else call(context)
            y.square().sum().backward()
        assert context.is_usable
        found.append([leaf.grad for leaf in leaves])
    for expected, gradient in zip(*found, strict=True):
        assert torch.equal(expected, gradient)


_this_rank = threading.local()


def end_where_told(monkeypatch, owner, attribute, error):
    """Let `owner.attribute` raise in threads that have set `_this_rank.ends`."""
    whole = getattr(owner, attribute)

    def here(*arguments, **keywords):
        if getattr(_this_rank, "ends", False):
            raise error
        return whole(*arguments, **keywords)

    monkeypatch.setattr(owner, attribute, here)


def expect_failed(context, error, run, call):
    """`run` ends by `error` on this rank, and `call`, a problem that is known, says so."""
    _this_rank.ends = True
    with pytest.raises(error):
        run()
    _this_rank.ends = False
    assert not context.is_usable
    with pytest.raises(TransportError, match=f"was interrupted by {error.__name__}"):
        call()


@pytest.fixture
def ends(monkeypatch, name, is_forward, place, error):
    """Where told: before it is the context's turn, or there."""
    if place != "before":
        end_where_told(monkeypatch, OverlapContext, place, error)
        return
    special = {("embedding_reduce_scatter", True): "_localize", ("query_split_attention", False): "_prepare_backward"}
    function = special.get((name, is_forward), "cast_for_autocast" if is_forward else "prepare_backward")
    module = importlib.import_module(f"commfuse_megatron.ops.{'linear' if name in (*OPS, *ALL_REDUCES) else name}")
    end_where_told(monkeypatch, module, function, error)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize("place", ["before", "enter", "leave"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("ends")
@on_ranks(2)
def test_a_call_that_ends_early_on_one_rank_fails_its_context(group, device, name, place, is_forward, error):
    context = OverlapContext(group, QUICK)
    _, call = operands_of(name, group)
    call(context).sum().backward()
    y = None if is_forward else call(context)

    def run():
        return call(context) if is_forward else y.sum().backward()

    def run_and_call():
        run()
        call(context)

    if group.rank() == 1:
        with pytest.raises((TransportError, TransportTimeoutError)):
            run_and_call()
    else:
        expect_failed(context, error, run, lambda: call(context))


@pytest.mark.parametrize("where", ["calibration", "trial", "trial, in the use of buffers"])
def test_planning_that_ends_early_on_one_rank_fails_its_context(where, monkeypatch):
    """The next call of a known problem took the rows of the others' trial."""

    class Stopwatch(MadeUpTimes):
        def burst_us(self, *burst):
            if getattr(_this_rank, "ends", False) and where == "trial":
                raise KeyboardInterrupt
            return super().burst_us(*burst)

    monkeypatch.setattr(TRIAL, lambda device: Stopwatch(lambda rank, name: 1.0))
    end_where_told(monkeypatch, calibrate, "_shortest_us" if where == "calibration" else "_Scratch", KeyboardInterrupt)
    if where == "trial, in the use of buffers":
        end_where_told(monkeypatch, OverlapContext, "leave", KeyboardInterrupt)

    def body(group, device):
        config = dataclasses.replace(QUICK, plan=PlanConfig(measure="always"))
        context = OverlapContext(group, config)
        known, new = torch.ones(4, 64), torch.ones(16, 64)
        x = torch.full((4, 1, 64), float(group.rank() + 1))
        ops.all_gather_linear(x, known, context=context)
        if where == "calibration":
            context.planner.default_reason = None
        else:
            plan_by_cost(context)

        def calls():
            ops.all_gather_linear(x, new, context=context)
            ops.all_gather_linear(x, known, context=context)

        if group.rank() == 1:  # in a trial also where the group's own collectives carry the call
            with pytest.raises((RuntimeError, TransportTimeoutError)):
                calls()
            return
        expect_failed(context, KeyboardInterrupt, calls, lambda: ops.all_gather_linear(x, known, context=context))

    run_threads(2, body, timeout_s=6.0)


@on_copy_engine(2)
def test_a_call_whose_context_is_closed_meanwhile_says_so(group, device):
    context = OverlapContext(group, config_for("sliced", "direct", 1))
    transport = context.link.transport
    replay = transport.replay

    def close_first(*arguments, **keywords):  # as another thread may
        context.close()
        return replay(*arguments, **keywords)

    transport.replay = close_first
    with pytest.raises(TransportError, match="was closed in another thread"):
        ops.all_gather_linear(torch.ones(4, 1, 8), torch.ones(8, 8), context=context)


@pytest.fixture
def nobody_gives_up(monkeypatch):
    given_up = []
    monkeypatch.setattr(CopyEngineTransport, "abort", lambda transport: given_up.append(transport))
    yield
    assert given_up == []


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("nobody_gives_up")
@on_copy_engine(2)
def test_a_closed_context_that_is_used_has_not_failed(group, device, name):
    """What it left in flight was given up then, and with it what the peers still worked on."""
    _, call = operands_of(name, group)
    with OverlapContext(group, config_for("sliced", "direct", 1)) as context:
        y = call(context)
    for use in (lambda: call(context), lambda: y.sum().backward()):
        with pytest.raises(TransportError, match="is closed"):
            use()
    assert context.link.failure is None


@on_ranks(2)
def test_an_error_is_marked_for_the_context_whose_ranks_raise_it(group, device):
    """Not for another one, in whose call it was raised: its ranks may go on with that."""
    with OverlapContext(group) as first:
        second = OverlapContext(group)

        def raise_in_both():
            with second.guard("a call"):
                first.consensus.refuse(ShapeError("wrong operands"), topic="a call")

        with pytest.raises(ShapeError, match="wrong operands"):
            raise_in_both()
        assert first.is_usable
        assert not second.is_usable
        with pytest.raises(ShapeError) as again:
            second.link.raise_failure()
        assert not vars(again.value)


@pytest.fixture
def no_float64(monkeypatch):
    def make(config, transport, channels, device, dtype, **others):
        if dtype is torch.float64:
            raise UnsupportedError("the persistent GEMM takes no float64")
        return SliceGemm(config, transport, channels, device, dtype, **others)

    monkeypatch.setattr("commfuse_megatron.runtime.prepared.SliceGemm", make)


def gather(context, dtype=torch.float32):
    return ops.all_gather_linear(torch.ones(4, 1, 5, dtype=dtype), torch.ones(4, 5, dtype=dtype), context=context)


@pytest.mark.usefixtures("no_float64")
@in_context(2, QUICK)
def test_a_dtype_the_gemm_refuses_leaves_the_context_to_others(group, context):
    for _ in range(2):
        assert (gather(context) == 5).all()
        with pytest.raises(UnsupportedError, match="takes no float64"):
            gather(context, torch.float64)
    assert (gather(context) == 5).all()


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("is_compared", [True, False])
@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_what_a_hook_of_saved_tensors_raises_fails_the_context(group, device, name, is_compared, error):
    """Memory runs out there on one rank, say: nobody would see that its next call meets the others' present one."""
    config = OverlapConfig(transport=TransportConfig(timeout_s=8.0), check_agreement=is_compared)
    context = OverlapContext(group, config)
    leaves, call = operands_of(name, group)

    def refuse(packed):
        raise error("not there any more")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, refuse):
        y = call(context)
    with pytest.raises(error, match="not there any more"):
        y.sum().backward()
    assert context.is_usable == is_compared
    if not is_compared:
        with pytest.raises(TransportError, match=f"the backward pass of {name}"):
            call(context)
        return
    call(context).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)
    context.close()


@in_context(1)
def test_a_group_of_one_cannot_be_out_of_step(group, context, monkeypatch):
    module = importlib.import_module("commfuse_megatron.ops.all_gather_linear")
    end_where_told(monkeypatch, module, "with_unit_stride", torch.OutOfMemoryError)
    _this_rank.ends = True
    with pytest.raises(torch.OutOfMemoryError):
        gather(context)
    _this_rank.ends = False
    assert (gather(context) == 5).all()


class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        raise TypeError("does nothing")


@pytest.mark.parametrize("odd", [{0}, {0, 1}])
@in_context(2)
def test_what_autocast_cannot_cast_is_refused_on_all_ranks(group, context, odd):
    with torch.autocast("cpu"):
        x = torch.ones(4, 1, 5)
        given = torch.Tensor._make_subclass(Odd, x) if group.rank() in odd else x
        with pytest.raises(ShapeError):
            ops.all_gather_linear(given, torch.ones(4, 5), context=context)
        assert context.is_usable
        assert (gather(context) == 5).all()
