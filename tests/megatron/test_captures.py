"""Layers while a CUDA graph is captured, which is pretended here; what closes contexts."""

import importlib
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from torch import distributed as dist
from torch.autograd.function import FunctionCtx

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import CommFuseError, TransportError, TransportTimeoutError
from commfuse_megatron.plugin import CommFuseNorm, capture, contexts, convert_model, model_report, reset_contexts
from commfuse_megatron.plugin.compat import VocabParallelEmbedding
from commfuse_megatron.plugin.contexts import open_contexts
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import tensor_parallel
from tests.megatron import layers
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import KINDS, Pair, assert_equal, assert_overlapped, assert_stock, norm_pair, pair, run
from tests.megatron.models import QUERY_SPLIT, draw_tokens, loss_and_gradients, tiny_gpt


def capturing() -> Any:
    """What is called inside takes itself for part of a graph."""
    return mock.patch.object(capture, "is_capturing", return_value=True)


def _make_context(group_size: int) -> None:
    """That of the group, by another layer's call."""
    for kind in KINDS:
        _, ours, x = pair(kind, group_size)
        ours(x)


def check_captured_after_both_passes_have_run(group_size: int, kind: str) -> None:
    _make_context(group_size)
    layer = pair(kind, group_size, rows=11)
    with capturing():
        layer.assert_stock("has not run before: ")
    (reason,) = state_of(layer.ours).stock_calls
    assert f" fprop S={11 * group_size} " in reason, reason
    layer.compare()
    with capturing():
        layer.compare()
    assert state_of(layer.ours).overlapped_calls == 2
    assert sum(state_of(layer.ours).stock_calls.values()) == 1


def check_captured_backward_pass_that_never_ran(group_size: int, kind: str) -> None:
    layer = pair(kind, group_size, rows=13)
    _, ours, x = layer
    with torch.no_grad():
        ours(x)
        with capturing():
            ours(x)
    assert_overlapped(ours, calls=2)
    with capturing():
        layer.compare()
    (reason,) = state_of(ours).stock_calls
    assert " backward " in reason
    assert reason.endswith("needs input+weight; run it once outside first"), reason
    run(ours, x)
    ours.weight.requires_grad_(False)  # another backward pass
    with capturing():
        ours(x.detach().requires_grad_())
    assert any("needs input; run it once" in reason for reason in state_of(ours).stock_calls)


def check_no_context_is_made_while_capturing(group_size: int, kind: str) -> None:
    alone = TransportConfig(timeout_s={"column": 47.0, "row": 48.0}[kind])
    layer = pair(kind, group_size, overlap=OverlapConfig(transport=alone, check_decisions=True))
    number = len(open_contexts())
    with capturing():
        layer.assert_stock("no layer of this group has been overlapped before")
    assert len(open_contexts()) == number
    run(layer.ours, layer.x)
    with capturing():
        layer.compare()
    assert state_of(layer.ours).overlapped_calls == 2


def check_captured_autocast(group_size: int, kind: str) -> None:
    _, ours, x = pair(kind, group_size, rows=5, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            ours(x)[0].sum().backward()
            with capturing():
                ours(x)
    assert_overlapped(ours, calls=4)


def check_captured_norm_and_linear(group_size: int) -> None:
    _make_context(group_size)
    layer = norm_pair(group_size, rows=3)
    with capturing():
        layer.assert_stock("has not run before")
    run(layer.ours, layer.x)
    with capturing():
        layer.compare()
    assert state_of(layer.ours).overlapped_calls == 2


def check_captured_model(group_size: int) -> None:
    """Embedding, attention and output layer too."""
    tokens, ours = draw_tokens(3, 24), tiny_gpt(group_size, QUERY_SPLIT)
    loss_and_gradients(ours, tokens[:2])  # of another shape
    with capturing():
        expected = loss_and_gradients(tiny_gpt(group_size, False), tokens)
        assert_equal(expected, loss_and_gradients(ours, tokens))
    report = model_report(ours)
    for layer in report.layers:
        assert (layer.overlapped_calls, layer.stock_calls) == (1, 1), layer
        assert any("a CUDA graph is being captured" in reason for reason in layer.reasons), layer
    assert [(each.overlapped_calls, each.stock_calls) for each in report.attentions] == [(1, 1)]
    assert_equal(expected, loss_and_gradients(ours, tokens))
    with capturing():
        assert_equal(expected, loss_and_gradients(ours, tokens))
    for layer in [*model_report(ours).layers, *model_report(ours).attentions]:
        assert (layer.overlapped_calls, layer.stock_calls) == (3, 1), layer


def check_planned_attention_is_no_reason_to_leave_the_projection(group_size: int) -> None:
    tokens, ours = draw_tokens(5, 24), tiny_gpt(group_size, OverlapConfig())
    expected = loss_and_gradients(ours, tokens)
    with capturing():
        assert_equal(expected, loss_and_gradients(ours, tokens))
    report = model_report(ours)
    assert {layer.overlapped_calls for layer in report.layers} == {2}
    assert all("planned as row_parallel" in reason for each in report.attentions for reason in each.reasons)


def check_attention_dropout_under_graphs_stays(group_size: int) -> None:
    tokens, ours = draw_tokens(2, 24), tiny_gpt(group_size, QUERY_SPLIT, attention_dropout=0.1)
    loss_and_gradients(ours, tokens)
    for module in ours.modules():
        if hasattr(module, "config"):
            module.config.cuda_graph_impl = "local"  # after construction: managers of graphs need a GPU
    loss_and_gradients(ours, tokens)
    (attention,) = model_report(ours).attentions
    assert attention.overlapped_calls == 1
    assert attention.reasons == (capture.REPEATED_DROPOUT,)
    assert {layer.overlapped_calls for layer in model_report(ours).layers} == {2}


def check_what_norms_save_is_announced(group_size: int) -> None:
    """As Megatron's recording of graphs looks for it."""
    fused = norm_pair(group_size)
    norms = [CommFuseNorm(layers.config(group_size, normalization=name), 16) for name in ("LayerNorm", "RMSNorm")]
    x, save = fused.x.requires_grad_(), FunctionCtx.save_for_backward
    for module in (fused.ours, *norms):
        with mock.patch.object(FunctionCtx, "save_for_backward", autospec=True, side_effect=save) as announced:
            module(x)
        assert any(tensor is x for call in announced.call_args_list for tensor in call.args), module


def check_captured_embedding(group_size: int) -> None:
    _make_context(group_size)
    model = layers.make_embedding(VocabParallelEmbedding, layers.config(group_size))
    ids = torch.randint(64, (3, 8 * group_size), generator=torch.Generator().manual_seed(2))
    expected = model(ids).detach()
    model = convert_model(model)
    with capturing():
        assert torch.equal(expected, model(ids))
    assert_stock(model, "has not run before: embedding_reduce_scatter fprop")
    model(ids).sum().backward()
    with capturing():
        assert torch.equal(expected, model(ids))
    assert state_of(model).overlapped_calls == 2


def check_reset_contexts(group_size: int) -> None:
    _, ours, x = pair("row", group_size)
    ours(x)
    context = state_of(ours).context
    reset_contexts()
    assert open_contexts() == []
    assert not context.is_usable
    ours(x)
    assert state_of(ours).context is not context


def _breakable(group_size: int, **options: bool) -> Pair:
    """Stock and ours, whose context a check may break: nobody else's has this time limit."""
    return pair("column", group_size, overlap=OverlapConfig(transport=TransportConfig(timeout_s=12.5), **options))


def _end_in_call(layer: Pair, error: Exception) -> None:
    """A call of ours ends by `error`, which another call may not see."""
    module = importlib.import_module("commfuse_megatron.ops.linear")
    with mock.patch.object(module, "cast_for_autocast", side_effect=error), pytest.raises(type(error)) as raised:
        layer.ours(layer.x)
    assert raised.value is error
    assert any("commfuse_megatron.plugin.reset_contexts()" in note for note in error.__notes__)


def check_what_fails_in_one_call_on_all_ranks_is_tried_again(group_size: int) -> None:
    # Fails without renewal: every call afterwards raised, whatever the program did.
    for check_agreement in (True, False):
        layer = _breakable(group_size, check_agreement=check_agreement)
        for _ in range(2):
            layer.compare()
            old = state_of(layer.ours).context
            output = layer.ours(layer.x)[0]
            _end_in_call(layer, torch.OutOfMemoryError("no memory"))
            with pytest.raises(TransportError, match=r"OutOfMemoryError: no memory\n.*reset_contexts\(\)"):
                output.sum().backward()
            layer.compare()
            assert state_of(layer.ours).context is not old
            assert open_contexts().count(state_of(layer.ours).context) == 1
            assert old not in open_contexts()


def check_what_fails_on_one_rank_says_the_way_out(group_size: int) -> None:
    # Fails without: the message did not name it.
    for check_agreement in (True, False):
        layer = _breakable(group_size, check_agreement=check_agreement)
        layer.compare()
        cause = "ValueError: only here"
        if dist.get_rank() == 1:
            _end_in_call(layer, ValueError("only here"))
        else:
            with pytest.raises(TransportError, match=rf"group rank 1.*{cause}") as raised:
                layer.ours(layer.x)
            assert "reset_contexts()" in raised.value.__notes__[-1]
        for _ in range(2):
            with pytest.raises(CommFuseError, match=rf"(?s){cause}.*not known to be in step.*reset_contexts\(\)"):
                layer.ours(layer.x)
        reset_contexts()
        assert open_contexts() == []
        layer.compare()


def check_decisions_are_compared_anew_after_a_reset(group_size: int) -> None:
    # Fails where what a layer remembers outlives its context: one rank was interrupted in a comparison that another
    # passed, and ever after they brought different words for the same call.
    layer = _breakable(group_size, check_decisions=True)
    layer.compare()
    agreement = state_of(layer.ours).context.consensus._agreement
    agree = agreement.agree

    def interrupt(*args: Any, **kwargs: Any) -> None:
        agree(*args, **kwargs)
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        agreement.agree = interrupt
    with pytest.raises(KeyboardInterrupt if dist.get_rank() == 1 else TransportError):
        layer.ours(layer.x)
    reset_contexts()
    layer.compare()


def check_groups_destroyed_and_made_again(group_size: int) -> None:
    layer = pair("row", group_size)
    layer.compare()
    old = state_of(layer.ours).context
    parallel_state.destroy_model_parallel()
    with tensor_parallel(group_size):
        layer = pair("row", group_size)
        layer.compare()
        new = state_of(layer.ours).context
        assert new is not old
        assert not old.is_usable, "a context whose group Megatron has dropped is closed"
        assert open_contexts() == [new]
        assert new.group is parallel_state.get_tensor_model_parallel_group()


def check_groups_are_destroyed_in_one_order(group_size: int) -> None:
    parallel_state.destroy_model_parallel()
    destroyed: list[str] = []

    def destroy(group: dist.ProcessGroup) -> None:
        destroyed.append(group.group_name)
        destroy_process_group(group)

    destroy_process_group = dist.destroy_process_group
    with mock.patch.object(dist, "destroy_process_group", destroy):
        with tensor_parallel(group_size):
            pass
        orders: list[list[str]] = [[] for _ in range(group_size)]
        dist.all_gather_object(orders, destroyed)
        shared = set.intersection(*map(set, orders))  # ranks have groups of their own, too
        assert len(shared) > 3, orders
        assert len({tuple(name for name in order if name in shared) for order in orders}) == 1, orders
        del destroyed[:]
        with suppress(KeyError), tensor_parallel(group_size):
            name = parallel_state.get_tensor_model_parallel_group().group_name
            raise KeyError("what went wrong")
        assert name not in destroyed, "with NCCL this would wait for ranks that wait elsewhere"


def check_group_destroyed_in_torch(group_size: int) -> None:
    groups = [dist.new_group(list(range(group_size))) for _ in range(2)]
    _, ours, x = pair("row", group_size, tp_group=groups[0])
    ours(x)
    first = state_of(ours).context
    dist.destroy_process_group(groups[0])
    _, ours, x = pair("row", group_size, tp_group=groups[1])
    ours(x)
    assert not first.is_usable
    assert state_of(ours).context.is_usable


test_captures = make_cpu_test(2, checks_of_module(__name__, 2))


class Group:
    """Something that can be referred to weakly."""


def test_all_contexts_are_closed_though_one_cannot_be(monkeypatch):
    closed = []

    def entry(name, error=None, *, is_usable=True, is_left=False):
        def close():
            closed.append(name)
            if error is not None:
                raise error

        link = SimpleNamespace(is_left_by_peer=is_left)
        return contexts._Entry(SimpleNamespace(is_usable=is_usable, close=close, link=link), False, False)

    groups = Group(), Group()
    late, failed = TransportTimeoutError("a rank did not come"), TransportError("failed before")
    known = {
        groups[0]: {1: entry("first", late), 2: entry("second")},
        groups[1]: {1: entry("third", failed, is_usable=False), 2: entry("fourth", failed, is_left=True)},
    }
    monkeypatch.setattr(contexts, "_CONTEXTS", known)
    with pytest.raises(TransportTimeoutError, match="did not come"):
        contexts.reset_contexts()
    assert sorted(closed) == ["first", "fourth", "second", "third"]
    contexts.reset_contexts()
    assert len(closed) == 4
