"""When ranks are in step after an error, so that a context may go on: else one rank's next call meets another's."""

from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import AttentionConfig, TransportConfig
from commfuse_megatron.errors import ShapeError, TransportError, TransportTimeoutError, UnsupportedError
from tests.harness import on_ranks
from tests.harness.contexts import in_context

EVERY_CALL = OverlapConfig(transport=TransportConfig(timeout_s=4.0), check_agreement=True)
QUICK = OverlapConfig(transport=TransportConfig(timeout_s=1.5), check_agreement=True)


def gather(context, value, features=5):
    """Each rank's value, by rank."""
    y = ops.all_gather_linear(torch.full((1, 1, features), float(value)), torch.ones(4, 5), context=context)
    return (y[:, 0, 0] / 5).tolist()


def interrupt(*_):
    raise KeyboardInterrupt


@on_ranks(2)
def test_ctrl_c_while_a_refusal_is_told_fails_the_context(group, device, event):
    """Its next call took the others' present one for its own: gathered were values of two calls, on all ranks."""
    context = OverlapContext(group, EVERY_CALL)
    gather(context, 1)
    if group.rank() == 1:
        assert event.wait(20.0)
        with pytest.raises(ShapeError, match="error: "):
            gather(context, 2)
        return
    agreement = context.consensus._agreement
    store = agreement._store
    agreement._store = SimpleNamespace(set=store.set, wait=interrupt)
    with pytest.raises(KeyboardInterrupt):
        gather(context, 2, features=6)
    agreement._store = store
    with pytest.raises(TransportError, match="interrupted by KeyboardInterrupt"):
        gather(context, 3)
    event.set()


@on_ranks(2)
def test_a_rank_that_left_out_a_pass_is_not_in_step(group, device):
    """Its program raised between both passes, on this rank alone: every later call would be a batch ahead."""
    context = OverlapContext(group, EVERY_CALL)
    outcomes = []
    for batch in range(1, 6):
        x = torch.full((1, 1, 5), float(batch), requires_grad=True)
        try:
            y = ops.all_gather_linear(x, torch.ones(4, 5), context=context)
            assert (y == 5.0 * batch).all(), "rows of another batch"
            if group.rank() == 0 and batch == 2:
                raise FloatingPointError("the loss is not finite")
            y.sum().backward()
            outcomes.append("good")
        except (FloatingPointError, ShapeError) as error:
            outcomes.append(type(error).__name__)
    assert not context.is_usable
    first = "FloatingPointError" if group.rank() == 0 else "ShapeError"
    assert outcomes == ["good", first, *["ShapeError"] * 3]


QUESTIONS = {
    "exchange": lambda consensus: consensus.exchange("mine", topic="a question"),
    "first_reason": lambda consensus: consensus.first_reason("attention", None),
    "make_together": lambda consensus: consensus.make_together(lambda: "made", "a thing"),
}


@pytest.mark.parametrize("asks", QUESTIONS)
@on_ranks(2)
def test_a_question_is_not_answered_by_a_call(group, device, asks):
    context = OverlapContext(group, EVERY_CALL)
    with pytest.raises(ShapeError, match="all_gather_linear fprop"):
        QUESTIONS[asks](context.consensus) if group.rank() == 0 else gather(context, 1)
    assert not context.is_usable


@in_context(2, EVERY_CALL)
def test_what_one_rank_cannot_make_is_an_error_of_all(group, context):
    def make():
        if group.rank() == 1:
            raise RuntimeError("cuBLAS has no handle")
        return "made"

    with pytest.raises(RuntimeError if group.rank() == 1 else ShapeError, match="cuBLAS has no handle"):
        context.consensus.make_together(make, "a thing")
    for value in (1, 2):
        assert gather(context, value) == [value, value]


@pytest.mark.parametrize("refusing", [{0}, {0, 1}])
@on_ranks(2)
def test_a_kernel_that_is_refused_leaves_ranks_in_step(group, device, refusing):
    """The refusing rank's context failed, for linears, too, and the others waited for it in the next call."""
    config = OverlapConfig(transport=TransportConfig(timeout_s=4.0), attention=AttentionConfig(path="query_split"))

    def refuse(problem, wanted):
        raise UnsupportedError("no such kernel on this rank")

    heads = [torch.ones(8, 1, 2, 8) for _ in range(3)]
    with OverlapContext(group, config) as context:
        if group.rank() in refusing:
            context.attention_kernels.choose = refuse
        with pytest.raises(UnsupportedError if group.rank() in refusing else ShapeError, match="no such kernel"):
            ops.query_split_attention(*heads, torch.ones(16, 16), context=context)
        assert gather(context, 3) == [3, 3]


@pytest.mark.parametrize("is_known", [True, False])
@on_ranks(2)
def test_ranks_that_differ_at_one_place_are_in_step(group, device, is_known):
    context = OverlapContext(group, EVERY_CALL)
    place = f"layer 1, call {1 if is_known else group.rank()}"
    with pytest.raises(ShapeError, match=r"group rank 1: stock"):
        context.consensus.agree(["overlapped", "stock"][group.rank()], topic=place, is_place=True)
    assert context.is_usable == is_known
    if is_known:
        assert gather(context, 3) == [3, 3]
        context.close()


@on_ranks(2)
def test_a_refusal_of_another_call_is_not_of_this_one(group, device):
    """A rank left out a backward pass, and refused its next forward pass: it was a batch ahead ever after."""
    context = OverlapContext(group, EVERY_CALL)
    x = torch.ones(1, 1, 5, requires_grad=True)
    y = ops.all_gather_linear(x, torch.ones(4, 5), context=context)
    with pytest.raises(ShapeError, match="6 input features"):
        gather(context, 2, features=6) if group.rank() == 0 else y.sum().backward()
    assert not context.is_usable


@on_ranks(2)
def test_an_answer_to_another_question_is_none(group, device):
    context = OverlapContext(group, EVERY_CALL)
    questions = {
        0: lambda: context.consensus.first_reason("attention", "it is not installed"),
        1: lambda: context.consensus.make_together(lambda: 42, "a thing"),
    }
    with pytest.raises(ShapeError, match="the reason for attention: it is not installed"):
        questions[group.rank()]()
    assert not context.is_usable


@on_ranks(2)
def test_who_refuses_and_comes_too_late_says_what_it_refused(group, device, event):
    context = OverlapContext(group, QUICK)
    gather(context, 1)
    if group.rank() == 1:
        with pytest.raises(TransportTimeoutError, match=r"waited 1\.5 s for group ranks \[0\]"):
            gather(context, 2)
        event.set()
        return
    assert event.wait(20.0)
    with pytest.raises(ShapeError, match="6 input features") as raised:
        gather(context, 2, features=6)
    assert "came too late" in raised.value.__notes__[0]
    assert not context.is_usable
