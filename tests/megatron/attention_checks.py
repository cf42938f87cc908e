"""Checks of attentions that stay Megatron's own, and of placeholders that get lost. Each is run on every rank."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import AttentionConfig, FallbackConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin import CommFuseSelfAttention, convert_model, model_report
from commfuse_megatron.plugin.compat import SelfAttention
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from tests.megatron import layers

QUERY_SPLIT = OverlapConfig(attention=AttentionConfig(path="query_split"))
AUTO = OverlapConfig()
TOKENS = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))


def build(group_size: int, overlap: OverlapConfig | bool = QUERY_SPLIT, **options: Any) -> Any:
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    return build_gpt(gpt, transformer_config(gpt, group_size, **options), overlap=overlap)


def attention_of(model: Any) -> Any:
    (attention,) = [module for module in model.modules() if isinstance(module, SelfAttention)]
    return attention


def run(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    loss = loss_of(model, TOKENS, **{"with_mask": False, **options})
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def assert_stays(
    group_size: int, words: str, overlap: OverlapConfig = QUERY_SPLIT, *, with_mask: bool = False, **options: Any
) -> Any:
    """The model runs as stock does, and says why its attention is not split; the projection is overlapped still."""
    model = build(group_size, overlap, **options)
    assert_equal(run(model, with_mask=with_mask), run(build(group_size, False, **options), with_mask=with_mask))
    (report,) = model_report(model).attentions
    assert (report.path, report.overlapped_calls) == ("stock", 0)
    assert all(words in reason for reason in report.reasons), report.reasons
    return model


def check_attention_is_megatrons_if_asked_for(group_size: int) -> None:
    """And nothing of ours is planned or made ready for it."""
    row_parallel = OverlapConfig(attention=AttentionConfig(path="row_parallel"))
    model = assert_stays(group_size, "attention.path is row_parallel", row_parallel)
    report = model_report(model)
    assert {layer.path for layer in report.layers} == {"overlapped"}
    assert "query_split_attention" not in {record.op for record in report.ops}
    words, _, reason = report.lines()[1].partition("; ")
    assert words == "0 of 1 self-attentions query-split, in 0 forward passes"
    assert reason.startswith("Megatron's own: attention.path is row_parallel")


def check_planned_attention_is_megatrons_on_the_cpu(group_size: int) -> None:
    model = assert_stays(group_size, "planned as row_parallel: default on the CPU", AUTO)
    report = model_report(model)
    assert {layer.path for layer in report.layers} == {"overlapped"}
    (record,) = [record for record in report.ops if record.op == "query_split_attention"]
    assert (record.path, record.calls) == ("row_parallel", 0)


def check_selective_recompute_of_core_attention(group_size: int) -> None:
    options = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    assert_stays(group_size, "recomputed by itself", with_mask=True, **options)


def check_an_output_gate(group_size: int) -> None:
    assert_stays(group_size, "attention_output_gate", attention_output_gate=True)


def check_learnable_softmax_offset(group_size: int) -> None:
    assert_stays(group_size, "softmax_type is off-by-one", softmax_type="off-by-one")


def check_without_overlap_nothing_is_split(group_size: int) -> None:
    model = build(group_size)
    model.config.commfuse = False
    assert_equal(run(model), run(build(group_size, False)))
    assert model_report(model).attentions[0].reasons == ("config.commfuse is False: switched off",)


def check_flags_that_say_no(group_size: int) -> None:
    model = build(group_size)
    attention = attention_of(model)
    expected = run(build(group_size, False))
    for name in ("offload_core_attention", "offload_attn_proj"):
        setattr(attention, name, True)
        before = attention.training
        # Offloading itself needs a GPU: evaluated, Megatron does not do it, and we must not look at that.
        attention.eval() if name == "offload_core_attention" else None
        if name == "offload_core_attention":
            model.zero_grad(set_to_none=True)
            assert_equal(run(model), expected)
        attention.train(before)
        assert "are offloaded" in model_report(model).attentions[0].reasons[0]
        setattr(attention, name, False)


def check_arguments_that_say_no(group_size: int) -> None:
    from commfuse_megatron.plugin.attention import attention_unsupported_reason

    attention = attention_of(build(group_size))
    assert attention_unsupported_reason(attention) is None
    for name in ("inference_context", "inference_params", "packed_seq_params", "attention_bias", "key_value_states"):
        assert attention_unsupported_reason(attention, {name: object()}) is not None
        assert attention_unsupported_reason(attention, {name: None}) is None
    attention.config = copy.copy(attention.config)
    attention.config.context_parallel_size = 2
    assert "context parallelism" in attention_unsupported_reason(attention)


def check_an_attention_bias_reaches_megatron(group_size: int) -> None:
    attention = attention_of(build(group_size))
    hidden = torch.zeros(16 // group_size, 2, 64, dtype=torch.float64)
    with pytest.raises(AssertionError, match="Attention bias is not supported"):  # as stock's local attention says
        attention(hidden, None, attention_bias=torch.zeros(1, dtype=torch.float64))
    assert "attention bias" in next(iter(state_of(attention).stock_calls))


def check_what_does_not_fit_together_is_a_reason(group_size: int) -> None:
    """Fails without the look at the operands before planning: that refused them, and the context with them."""
    model = build(group_size)
    attention = attention_of(model)
    expected = run(build(group_size, False))

    def narrow(_: Any, inputs: tuple) -> tuple:
        return inputs[0], inputs[1].float(), *inputs[2:]

    hook = attention.core_attention.register_forward_pre_hook(narrow)
    with pytest.raises(RuntimeError, match=r"scalar type|dtype"):  # as stock's local attention says
        run(model)
    hook.remove()
    (reason,) = state_of(attention).stock_calls
    assert "one dtype" in reason
    model.zero_grad(set_to_none=True)
    assert_equal(run(model), expected)
    assert model_report(model).attentions[0].path == "mixed"


def check_a_bias_of_another_dtype(group_size: int) -> None:
    """Fails without adding such a bias afterwards: our operation refuses it, or casts it under autocast."""
    cases = [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)]
    for (dtype, is_cast), is_added in itertools.product(cases, (True, False)):
        results = []
        for overlap in (False, QUERY_SPLIT):
            model = build(group_size, overlap, params_dtype=dtype, add_bias_linear=True, add_qkv_bias=True)
            attention = attention_of(model)
            projection = attention.linear_proj
            projection.skip_bias_add = not is_added
            projection.bias = torch.nn.Parameter(torch.linspace(-1, 1, projection.bias.numel()))
            hidden = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                if dtype == torch.float32:  # stock's backward pass refuses
                    results.append(dict(zip(("output", "bias"), attention(hidden, None), strict=True)))
                else:
                    results.append(layers.run(attention, hidden, attention_mask=None))
        assert results[0]["output"].dtype == (torch.float32 if is_added else torch.bfloat16)
        layers.assert_equal(*results, tolerance=2**-6)
        assert (state_of(attention).overlapped_calls, state_of(attention).stock_calls) == (1, {})


def check_a_kernel_that_cannot_is_a_reason(group_size: int) -> None:
    overlap = OverlapConfig(attention=AttentionConfig(path="query_split", kernel="flash"))
    assert_stays(group_size, "flash attention runs on CUDA devices", overlap)


def check_raising_instead(group_size: int) -> None:
    overlap = OverlapConfig(attention=QUERY_SPLIT.attention, fallback=FallbackConfig(unsupported="raise"))
    model = build(group_size, overlap, attention_output_gate=True)
    with pytest.raises(UnsupportedError, match="attention_output_gate"):
        run(model)
    row_parallel = AttentionConfig(path="row_parallel")
    for attention, words in ((AUTO.attention, "planned as row_parallel"), (row_parallel, "attention.path is")):
        assert_stays(group_size, words, OverlapConfig(attention=attention, fallback=overlap.fallback))


def check_a_lost_placeholder_is_an_error(group_size: int) -> None:
    model = build(group_size)
    attention = attention_of(model)
    seen: list[torch.Tensor] = []

    def copies(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch.nn.Module.__call__(module, *args, **kwargs))
        return seen[-1] * 1.0

    with pytest.MonkeyPatch.context() as patch:  # where no attention looks
        patch.setattr(type(attention.core_attention), "__call__", copies)
        with pytest.raises(UnsupportedError, match="placeholder"):
            run(model)
    assert torch.isnan(seen[0]).all()
    assert "forward" not in vars(attention.core_attention)
    assert "forward" not in vars(attention.linear_proj)
    model.zero_grad(set_to_none=True)
    assert_equal(run(model), run(build(group_size, False)))

    def bypass(*_: Any) -> None:
        raise RuntimeError("somebody's hook")

    bypass.__module__ = "megatron.core.distributed.distributed_data_parallel"
    hook = attention.linear_proj.register_forward_pre_hook(bypass)
    with pytest.raises(RuntimeError, match="somebody's hook"):
        run(model)
    hook.remove()
    assert "forward" not in vars(attention.linear_proj)


def check_hooks_of_both_modules_run(group_size: int) -> None:
    model = build(group_size)
    attention = attention_of(model)
    called: list[str] = []

    def hook(module: Any, _: Any) -> None:
        called.append(type(module).__qualname__)

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    for module in (attention.core_attention, attention.linear_proj):
        module.register_forward_pre_hook(hook)
    run(model)
    assert called == ["DotProductAttention", "CommFuseRowParallelLinear"]
    assert state_of(attention).overlapped_calls == 1


def check_converted_models(group_size: int) -> None:
    model = build(group_size, False)
    expected = run(model)
    assert type(attention_of(model)) is SelfAttention
    (report,) = model_report(model).attentions
    assert report.path == "stock"
    assert "converted" in report.reasons[0]
    convert_model(model, QUERY_SPLIT)
    attention = attention_of(model)
    assert type(attention) is CommFuseSelfAttention
    assert model_report(model).attentions[0].path == "not called yet"
    model.zero_grad(set_to_none=True)
    assert_equal(run(model), expected)
    assert model_report(model).attentions[0].path == "overlapped"
    assert state_of(attention).name.endswith("self_attention")
    convert_model(model, OverlapConfig(attention=AttentionConfig(path="row_parallel")))
    model.zero_grad(set_to_none=True)
    assert_equal(run(model), expected)
    assert model_report(model).attentions[0].path == "mixed"
    assert pickle.loads(pickle.dumps(state_of(attention))).overlapped_calls == 0


def check_evaluation_is_split_too(group_size: int) -> None:
    stock, ours = (build(group_size, each).eval() for each in (False, QUERY_SPLIT))
    with torch.no_grad():
        losses = [loss_of(model, TOKENS, with_mask=False) for model in (stock, ours)]
    assert abs(losses[1] - losses[0]) <= 1e-12
    assert model_report(ours).attentions[0].path == "overlapped"


def check_queries_are_split_over_nccl_outside_of_captures(group_size: int) -> None:
    """What layers over NCCL say while a graph is captured was said of every call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlapContext, "transport_name", property(lambda context: "nccl"))
        model = build(group_size)
        run(model)
    (attention, *_) = model_report(model).attentions
    assert (attention.path, attention.reasons) == ("overlapped", ()), attention
    assert model_report(model).lines()[1] == "1 of 1 self-attentions query-split, in 1 forward passes"


def check_dropout_is_repeated_when_recomputed(group_size: int) -> None:
    """With another mask in the recomputed pass, gradients would differ by order 1."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    results = []
    for options in ({}, full):
        model = build(group_size, attention_dropout=0.3, **options)
        model_parallel_cuda_manual_seed(3)  # layers under sequence parallelism draw from Megatron's own states
        results.append(run(model))
        assert model_report(model).attentions[0].path == "overlapped"
    assert_equal(*results)
    assert abs(results[0]["loss"] - run(build(group_size))["loss"]) > 1e-6
