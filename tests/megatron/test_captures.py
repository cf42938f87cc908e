"""Layers while a CUDA graph is captured, which is pretended here; what closes contexts."""

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from megatron.core import parallel_state
from torch import distributed as dist
from torch.autograd.function import FunctionCtx

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import AttentionConfig, TransportConfig
from commfuse_megatron.errors import CommFuseError, TransportError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseNorm,
    capture,
    convert_model,
    model_report,
    reset_contexts,
)
from commfuse_megatron.plugin.compat import VocabParallelEmbedding
from commfuse_megatron.plugin.contexts import open_contexts
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, tensor_parallel, transformer_config
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import (
    KINDS,
    assert_equal,
    assert_overlapped,
    assert_stock,
    build,
    config,
    example_input,
    norm_pair,
    pair,
    pair_and_input,
    run,
)

QUERY_SPLIT = OverlapConfig(attention=AttentionConfig(path="query_split"))


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """What is called inside takes itself for part of a graph."""
    real = capture.is_capturing
    capture.is_capturing = lambda tensor: True
    try:
        yield
    finally:
        capture.is_capturing = real


def _make_context(group_size: int) -> None:
    """That of the group, by another layer's call."""
    for kind in KINDS:
        pair(kind, group_size)[1](example_input(kind, group_size))


def check_captured_after_both_passes_have_run(group_size: int, kind: str) -> None:
    _make_context(group_size)
    stock, ours, x = pair_and_input(kind, group_size, rows=11)
    expected = run(stock, x)
    with capturing():
        assert_equal(expected, run(ours, x))
    assert_stock(ours, "has not run before: ")
    (reason,) = state_of(ours).stock_calls
    assert f" fprop S={11 * group_size} " in reason, reason
    assert_equal(expected, run(ours, x))
    with capturing():
        assert_equal(expected, run(ours, x))
    assert state_of(ours).overlapped_calls == 2
    assert sum(state_of(ours).stock_calls.values()) == 1


def check_captured_backward_pass_that_never_ran(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size, rows=13)
    with torch.no_grad():
        ours(x)
    with capturing(), torch.no_grad():
        ours(x)
    assert_overlapped(ours, calls=2)
    with capturing():
        assert_equal(run(stock, x), run(ours, x))
    (reason,) = state_of(ours).stock_calls
    assert " backward " in reason
    assert reason.endswith("needs input+weight; run it once outside first"), reason
    run(ours, x)
    ours.weight.requires_grad_(False)  # another backward pass
    with capturing():
        ours(x.detach().requires_grad_())
    assert any("needs input; run it once" in reason for reason in state_of(ours).stock_calls)


def check_no_context_is_made_while_capturing(group_size: int, kind: str) -> None:
    alone = OverlapConfig(
        transport=TransportConfig(timeout_s={"column": 47.0, "row": 48.0}[kind]), check_decisions=True
    )
    stock, ours = pair(kind, group_size)
    state_of(ours).overlap_config = alone
    x = example_input(kind, group_size)
    number = len(open_contexts())
    with capturing():
        assert_equal(run(stock, x), run(ours, x))
    assert_stock(ours, "no layer of this group has been overlapped before")
    assert len(open_contexts()) == number
    run(ours, x)
    with capturing():
        assert_equal(run(stock, x), run(ours, x))
    assert state_of(ours).overlapped_calls == 2


def check_captured_autocast(group_size: int, kind: str) -> None:
    _, ours, x = pair_and_input(kind, group_size, rows=5, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            ours(x)[0].sum().backward()
            with capturing():
                ours(x)
    assert_overlapped(ours, calls=4)


def check_captured_norm_and_linear(group_size: int) -> None:
    _make_context(group_size)
    stock, ours = norm_pair(group_size)
    x = example_input("column", group_size, rows=3)
    with capturing():
        assert_equal(run(stock, x), run(ours, x))
    assert_stock(ours, "has not run before")
    run(ours, x)
    with capturing():
        assert_equal(run(stock, x), run(ours, x))
    assert state_of(ours).overlapped_calls == 2


def check_captured_model(group_size: int) -> None:
    """Embedding, attention and output layer too."""
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    tokens = torch.randint(256, (3, 25), generator=torch.Generator().manual_seed(1))
    ours = build_gpt(gpt, transformer_config(gpt, group_size), overlap=QUERY_SPLIT)
    expected = _gradients(ours, tokens[:2])  # of another shape
    with capturing():
        expected = _gradients(build_gpt(gpt, transformer_config(gpt, group_size), overlap=False), tokens)
        assert_equal(expected, _gradients(ours, tokens))
    report = model_report(ours)
    for layer in report.layers:
        assert (layer.overlapped_calls, layer.stock_calls) == (1, 1), layer
        assert any("a CUDA graph is being captured" in reason for reason in layer.reasons), layer
    assert [(each.overlapped_calls, each.stock_calls) for each in report.attentions] == [(1, 1)]
    assert_equal(expected, _gradients(ours, tokens))
    with capturing():
        assert_equal(expected, _gradients(ours, tokens))
    for layer in [*model_report(ours).layers, *model_report(ours).attentions]:
        assert (layer.overlapped_calls, layer.stock_calls) == (3, 1), layer


def check_planned_attention_is_no_reason_to_leave_the_projection(group_size: int) -> None:
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    tokens = torch.randint(256, (5, 25), generator=torch.Generator().manual_seed(1))
    auto = OverlapConfig()
    ours = build_gpt(gpt, transformer_config(gpt, group_size), overlap=auto)
    expected = _gradients(ours, tokens)
    with capturing():
        assert_equal(expected, _gradients(ours, tokens))
    report = model_report(ours)
    assert {layer.overlapped_calls for layer in report.layers} == {2}
    assert all("planned as row_parallel" in reason for each in report.attentions for reason in each.reasons)


def check_attention_dropout_under_graphs_stays(group_size: int) -> None:
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    tokens = torch.randint(256, (2, 25), generator=torch.Generator().manual_seed(1))
    ours = build_gpt(gpt, transformer_config(gpt, group_size, attention_dropout=0.1), overlap=QUERY_SPLIT)
    loss_of(ours, tokens, with_mask=False)
    for module in ours.modules():
        if hasattr(module, "config"):
            module.config.cuda_graph_impl = "local"  # after construction: managers of graphs need a GPU
    loss_of(ours, tokens, with_mask=False)
    (attention,) = model_report(ours).attentions
    assert attention.overlapped_calls == 1
    assert attention.reasons == (capture.REPEATED_DROPOUT,)
    assert {layer.overlapped_calls for layer in model_report(ours).layers} == {2}


def check_what_norms_save_is_announced(group_size: int) -> None:
    """As Megatron's recording of graphs looks for it."""
    announced: list[Any] = []
    real = FunctionCtx.save_for_backward
    _, fused = norm_pair(group_size)
    norms = [CommFuseNorm(config(group_size, normalization=name), 16) for name in ("LayerNorm", "RMSNorm")]
    x = example_input("column", group_size).requires_grad_()

    def observe(ctx: Any, *tensors: torch.Tensor) -> None:
        announced.extend(tensors)
        real(ctx, *tensors)

    FunctionCtx.save_for_backward = observe
    try:
        for module in (fused, *norms):
            announced.clear()
            module(x)
            assert any(tensor is x for tensor in announced), module
    finally:
        FunctionCtx.save_for_backward = real


def check_captured_embedding(group_size: int) -> None:
    _make_context(group_size)
    transformer = config(group_size)
    model = torch.nn.ModuleList(
        [
            VocabParallelEmbedding(
                64, 16, init_method=torch.nn.init.normal_, reduce_scatter_embeddings=True, config=transformer
            )
        ]
    )
    ids = torch.randint(64, (3, 8 * group_size), generator=torch.Generator().manual_seed(2))
    expected = model[0](ids).detach()
    model = convert_model(model)
    with capturing():
        assert torch.equal(expected, model[0](ids))
    assert_stock(model[0], "has not run before: embedding_reduce_scatter fprop")
    model[0](ids).sum().backward()
    with capturing():
        assert torch.equal(expected, model[0](ids))
    assert state_of(model[0]).overlapped_calls == 2


def _gradients(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, tokens, with_mask=False)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def check_reset_contexts(group_size: int) -> None:
    _, ours, x = pair_and_input("row", group_size)
    ours(x)
    context = state_of(ours).context
    reset_contexts()
    assert open_contexts() == []
    assert not context.is_usable
    ours(x)
    assert state_of(ours).context is not context


def _breakable(group_size: int, **options: bool) -> tuple[Any, Any]:
    """Stock and ours, whose context a check may break: nobody else's has this time limit."""
    stock, _ = pair("column", group_size)
    overlap = OverlapConfig(transport=TransportConfig(timeout_s=12.5), **options)
    return stock, build("column", CommFuseColumnParallelLinear, config(group_size), overlap_config=overlap)


def _end_in_call(ours: Any, x: torch.Tensor, error: Exception) -> None:
    """A call of `ours` ends by `error`, which another call may not see."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("commfuse_megatron.ops.linear")
        patch.setattr(module, "cast_for_autocast", Mock(side_effect=error))
        with pytest.raises(type(error)) as raised:
            ours(x)
    assert raised.value is error
    assert any("commfuse_megatron.plugin.reset_contexts()" in note for note in error.__notes__)


def check_what_fails_in_one_call_on_all_ranks_is_tried_again(group_size: int) -> None:
    # Fails without renewal: every call afterwards raised, whatever the program did.
    for check_agreement in (True, False):
        stock, ours = _breakable(group_size, check_agreement=check_agreement)
        x = example_input("column", group_size)
        for _ in range(2):
            assert_equal(run(stock, x), run(ours, x))
            old = state_of(ours).context
            output = ours(x)[0]
            _end_in_call(ours, x, torch.OutOfMemoryError("no memory"))
            with pytest.raises(TransportError, match=r"OutOfMemoryError: no memory\n.*reset_contexts\(\)"):
                output.sum().backward()
            assert_equal(run(stock, x), run(ours, x))
            assert state_of(ours).context is not old
            assert open_contexts().count(state_of(ours).context) == 1
            assert old not in open_contexts()


def check_what_fails_on_one_rank_says_the_way_out(group_size: int) -> None:
    # Fails without: the message did not name it.
    for check_agreement in (True, False):
        stock, ours = _breakable(group_size, check_agreement=check_agreement)
        x = example_input("column", group_size)
        expected = run(stock, x)
        assert_equal(expected, run(ours, x))
        cause = "ValueError: only here"
        if dist.get_rank() == 1:
            _end_in_call(ours, x, ValueError("only here"))
        else:
            with pytest.raises(TransportError, match=rf"group rank 1.*{cause}") as raised:
                ours(x)
            assert "reset_contexts()" in raised.value.__notes__[-1]
        for _ in range(2):
            with pytest.raises(CommFuseError, match=rf"(?s){cause}.*not known to be in step.*reset_contexts\(\)"):
                ours(x)
        reset_contexts()
        assert open_contexts() == []
        assert_equal(expected, run(ours, x))


def check_decisions_are_compared_anew_after_a_reset(group_size: int) -> None:
    # Fails where what a layer remembers outlives its context: one rank was interrupted in a comparison that another
    # passed, and ever after they brought different words for the same call.
    stock, ours = _breakable(group_size, check_decisions=True)
    x = example_input("column", group_size)
    expected = run(stock, x)
    assert_equal(expected, run(ours, x))
    agreement = state_of(ours).context.consensus._agreement
    agree = agreement.agree

    def interrupt(*args: Any, **kwargs: Any) -> None:
        agree(*args, **kwargs)
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        agreement.agree = interrupt
    with pytest.raises(KeyboardInterrupt if dist.get_rank() == 1 else TransportError):
        ours(x)
    reset_contexts()
    assert_equal(expected, run(ours, x))


def check_groups_destroyed_and_made_again(group_size: int) -> None:
    x = example_input("row", group_size)
    stock, ours = pair("row", group_size)
    expected = run(stock, x)
    assert_equal(expected, run(ours, x))
    old = state_of(ours).context
    parallel_state.destroy_model_parallel()
    with tensor_parallel(group_size):
        stock, ours = pair("row", group_size)
        assert_equal(expected, run(ours, x))
        new = state_of(ours).context
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", destroy)
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
    x = example_input("row", group_size)
    groups = [dist.new_group(list(range(group_size))) for _ in range(2)]
    _, ours = pair("row", group_size, tp_group=groups[0])
    ours(x)
    first = state_of(ours).context
    dist.destroy_process_group(groups[0])
    _, ours = pair("row", group_size, tp_group=groups[1])
    ours(x)
    assert not first.is_usable
    assert state_of(ours).context.is_usable


test_captures = make_cpu_test(2, checks_of_module(__name__, 2))
