"""Checks of layers while a CUDA graph is captured, which is pretended here: who is overlapped, who says why not.

Each is run on every rank of one spawn. Sizes are those of no other check, since contexts are shared: a problem is new.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import AttentionConfig, TransportConfig
from commfuse_megatron.plugin import CommFuseNorm, capture, convert_model, model_report
from commfuse_megatron.plugin.compat import VocabParallelEmbedding
from commfuse_megatron.plugin.contexts import open_contexts
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from tests.megatron.layers import KINDS, assert_equal, assert_overlapped, assert_stock, config, example_input, pair, run
from tests.megatron.norm_linear_checks import norm_pair

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


def check_captured_after_both_passes_have_run(group_size: int) -> None:
    _make_context(group_size)
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size, rows=11)
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


def check_captured_backward_pass_that_never_ran(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size, rows=13)
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


def check_no_context_is_made_while_capturing(group_size: int) -> None:
    alone = OverlapConfig(transport=TransportConfig(timeout_s=47.0), check_decisions=True)
    for kind in KINDS:
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
        alone = OverlapConfig(transport=TransportConfig(timeout_s=48.0), check_decisions=True)


def check_captured_autocast(group_size: int) -> None:
    for kind in KINDS:
        _, ours = pair(kind, group_size, config(group_size, dtype=torch.float32))
        x = example_input(kind, group_size, rows=5, dtype=torch.float32)
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
