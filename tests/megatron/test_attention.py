"""Attentions that are split or stay Megatron's own: reasons, what others put around their parts, lost placeholders."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.nn.modules import module as of_all_modules

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import AttentionConfig, FallbackConfig
from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.plugin import (
    CommFuseMLASelfAttention,
    CommFuseSelfAttention,
    convert_model,
    model_report,
    unsupported_reason,
)
from commfuse_megatron.plugin.attention import _QuerySplit, attention_unsupported_reason
from commfuse_megatron.plugin.attention_calls import arguments_of
from commfuse_megatron.plugin.compat import (
    ColumnParallelLinear,
    DotProductAttention,
    MLASelfAttention,
    RowParallelLinear,
    SelfAttention,
    VocabParallelEmbedding,
)
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from commfuse_megatron.tools.verify.megatron_cases import FULL
from tests.megatron import layers
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import random
from tests.megatron.models import QUERY_SPLIT, ROW_PARALLEL, build_latent, draw_tokens, loss_and_gradients, tiny_gpt

AUTO = OverlapConfig()
TOKENS = draw_tokens()
DDP = "megatron.core.distributed.distributed_data_parallel"


def build(group_size: int, overlap: OverlapConfig | bool = QUERY_SPLIT, **options: Any) -> Any:
    return tiny_gpt(group_size, overlap, **options)


def attentions_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, SelfAttention | MLASelfAttention)]


def attention_of(model: Any) -> Any:
    (attention,) = attentions_of(model)
    return attention


def run(model: Any, *, with_mask: bool = False) -> dict[str, torch.Tensor | None]:
    return loss_and_gradients(model, TOKENS, with_mask=with_mask)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    layers.assert_equal(expected, found, tolerance=1e-12)


def assert_stays(words: str, model: Any, stock: Any, *, with_mask: bool = False) -> Any:
    """The model runs as stock does, and says why no attention of it is split; all projections are overlapped still."""
    assert_equal(run(model, with_mask=with_mask), run(stock, with_mask=with_mask))
    report = model_report(model)
    assert len(report.attentions) == len(attentions_of(stock)) > 0
    for each in report.attentions:
        assert (each.path, each.overlapped_calls) == ("stock", 0)
        assert all(words in reason for reason in each.reasons), each.reasons
    assert {layer.path for layer in report.layers if layer.name.endswith("linear_proj")} == {"overlapped"}
    return report


def assert_tiny_stays(
    group_size: int, words: str, overlap: OverlapConfig = QUERY_SPLIT, *, with_mask: bool = False, **options: Any
) -> Any:
    models = build(group_size, overlap, **options), build(group_size, False, **options)
    return assert_stays(words, *models, with_mask=with_mask)


def check_attention_is_megatrons_if_asked_for(group_size: int) -> None:
    """And nothing of ours is planned or made ready for it."""
    report = assert_tiny_stays(group_size, "attention.path is row_parallel", ROW_PARALLEL)
    assert {layer.path for layer in report.layers} == {"overlapped"}
    assert "query_split_attention" not in {record.op for record in report.ops}
    words, _, reason = report.lines()[1].partition("; ")
    assert words == "0 of 1 self-attentions query-split, in 0 forward passes"
    assert reason.startswith("Megatron's own: attention.path is row_parallel")


def check_planned_attention_is_megatrons_on_the_cpu(group_size: int) -> None:
    report = assert_tiny_stays(group_size, "planned as row_parallel: default on the CPU", AUTO)
    assert {layer.path for layer in report.layers} == {"overlapped"}
    (record,) = [record for record in report.ops if record.op == "query_split_attention"]
    assert (record.path, record.calls) == ("row_parallel", 0)


def check_selective_recompute_of_core_attention(group_size: int) -> None:
    options = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    assert_tiny_stays(group_size, "recomputed by itself", with_mask=True, **options)


def check_an_output_gate(group_size: int) -> None:
    assert_tiny_stays(group_size, "attention_output_gate", attention_output_gate=True)


def check_learnable_softmax_offset(group_size: int) -> None:
    assert_tiny_stays(group_size, "softmax_type is off-by-one", softmax_type="off-by-one")


def check_without_overlap_nothing_is_split(group_size: int) -> None:
    model = build(group_size)
    model.config.commfuse = False
    assert_equal(run(model), run(build(group_size, False)))
    assert model_report(model).attentions[0].reasons == ("config.commfuse is False: switched off",)


def check_unsupported_reason_answers_for_every_module(group_size: int) -> None:
    """Fails without: an AttributeError of attentions, and of whatever else is no linear."""
    linears = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for model in (build(group_size), build(group_size, False)):
        for module in model.modules():
            if isinstance(module, linears):
                assert unsupported_reason(module) is None
            elif isinstance(module, DotProductAttention):
                assert "there is nothing to exchange" in unsupported_reason(module)
            elif isinstance(module, SelfAttention):
                assert unsupported_reason(module) == attention_unsupported_reason(module)
            else:
                name = type(module).__name__
                with pytest.raises(ConfigError, match=f"knows nothing of a {name}; it answers for Column"):
                    unsupported_reason(module)


def check_flags_that_say_no(group_size: int) -> None:
    model = build(group_size)
    attention = attention_of(model)
    expected = run(build(group_size, False))
    attention.offload_core_attention = True
    # Offloading itself needs a GPU: evaluated, Megatron does not do it, and we must not look at that.
    attention.eval()
    assert_equal(run(model), expected)
    attention.train()
    assert "are offloaded" in model_report(model).attentions[0].reasons[0]
    attention.offload_core_attention, attention.offload_attn_proj = False, True
    assert "are offloaded" in model_report(model).attentions[0].reasons[0]


def check_arguments_that_say_no(group_size: int) -> None:
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
            hidden = random((8, 2, 64), 5, dtype)
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
    assert_tiny_stays(group_size, "flash attention runs on CUDA devices", overlap)


def check_raising_instead(group_size: int) -> None:
    overlap = OverlapConfig(attention=QUERY_SPLIT.attention, fallback=FallbackConfig(unsupported="raise"))
    model = build(group_size, overlap, attention_output_gate=True)
    with pytest.raises(UnsupportedError, match="attention_output_gate"):
        run(model)
    for asked, words in ((AUTO, "planned as row_parallel"), (ROW_PARALLEL, "attention.path is")):
        assert_tiny_stays(group_size, words, OverlapConfig(attention=asked.attention, fallback=overlap.fallback))


def check_a_lost_placeholder_is_an_error(group_size: int) -> None:
    model = build(group_size)
    attention = attention_of(model)
    seen: list[torch.Tensor] = []

    def copies(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch.nn.Module.__call__(module, *args, **kwargs))
        return seen[-1] * 1.0

    core = type(attention.core_attention)  # where no attention looks
    with mock.patch.object(core, "__call__", copies), pytest.raises(UnsupportedError, match="placeholder"):
        run(model)
    assert torch.isnan(seen[0]).all()
    assert "forward" not in vars(attention.core_attention)
    assert "forward" not in vars(attention.linear_proj)
    assert_equal(run(model), run(build(group_size, False)))

    def bypass(*_: Any) -> None:
        raise RuntimeError("somebody's hook")

    bypass.__module__ = DDP
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

    hook.__module__ = DDP
    for module in (attention.core_attention, attention.linear_proj):
        module.register_forward_pre_hook(hook)
    run(model)
    assert called == ["CommFuseDotProductAttention", "CommFuseRowParallelLinear"]
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
    assert_equal(run(model), expected)
    assert model_report(model).attentions[0].path == "overlapped"
    assert state_of(attention).name.endswith("self_attention")
    convert_model(model, ROW_PARALLEL)
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
    with mock.patch.object(OverlapContext, "transport_name", "nccl"):
        model = build(group_size)
        run(model)
    (attention, *_) = model_report(model).attentions
    assert (attention.path, attention.reasons) == ("overlapped", ()), attention
    assert model_report(model).lines()[1] == "1 of 1 self-attentions query-split, in 1 forward passes"


def check_dropout_is_repeated_when_recomputed(group_size: int) -> None:
    """With another mask in the recomputed pass, gradients would differ by order 1."""
    results = []
    for options in ({}, FULL):
        model = build(group_size, attention_dropout=0.3, **options)
        model_parallel_cuda_manual_seed(3)  # layers under sequence parallelism draw from Megatron's own states
        results.append(run(model))
        assert model_report(model).attentions[0].path == "overlapped"
    assert_equal(*results)
    assert abs(results[0]["loss"] - run(build(group_size))["loss"]) > 1e-6


FACTOR = 1.5  # what a change multiplies by, in one pass or the other: passed by, it would be seen


class Scaled(torch.nn.Module):
    """As adapters wrap a layer: no more attributes than a module has, and a parameter of its own."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.factor = torch.nn.Parameter(torch.tensor(FACTOR, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.base(*args, **kwargs), self.factor)


def scaled(output: Any, factor: Any = FACTOR) -> Any:
    """The output of core attention, or of a projection with its bias."""
    return (output[0] * factor, output[1]) if isinstance(output, tuple) else output * factor


def patch_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: scaled(forward(*args, **kwargs))


def derive(module: Any) -> None:
    base = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scaled(base.forward(self, *args, **kwargs))

    module.__class__ = type("Derived", (base,), {"forward": forward})


def hook(register: str, function: Callable[..., Any]) -> Callable[[Any], None]:
    """What registers a hook with a module."""
    return lambda module: getattr(module, register)(function)


def scale_gradients(_: Any, *gradients: Any) -> tuple:
    return tuple(None if gradient is None else gradient * FACTOR for gradient in gradients[0])


def wait_for_parameters(*_: Any) -> None:
    """As Megatron's data-parallel wrapper does, which does not look at the input."""


wait_for_parameters.__module__ = DDP

hook_backward = hook("register_full_backward_hook", scale_gradients)
hook_before_backward = hook("register_full_backward_pre_hook", scale_gradients)
hook_before_forward = hook("register_forward_pre_hook", lambda _, inputs: (inputs[0] * FACTOR, *inputs[1:]))
hook_forward = hook("register_forward_hook", lambda _, __, output: scaled(output))
#: As an adapter that adds something of its own to what the projection makes of its input.
adapt_by_hook = hook("register_forward_hook", lambda _, inputs, output: (output[0] + 0 * inputs[0].sum(), output[1]))


class Change(NamedTuple):
    """What is done to which part of an attention, and why its calls are not split then; None: they are."""

    part: str
    change: Callable[[Any], None] | type[Scaled]
    words: str | None


CORE, PROJECTION = "core_attention", "linear_proj"
CHANGES = (
    Change(CORE, patch_forward, "core attention has a forward of its own"),
    Change(CORE, derive, "core attention is a Derived"),
    Change(CORE, hook_backward, "core attention has backward hooks"),
    Change(CORE, hook_before_backward, "core attention has backward hooks"),
    Change(CORE, Scaled, "core attention is a Scaled"),
    Change(CORE, hook_before_forward, None),
    Change(CORE, hook_forward, "core attention has forward hooks"),
    Change(PROJECTION, patch_forward, "linear_proj has a forward of its own"),
    Change(PROJECTION, derive, "linear_proj is a Derived"),
    Change(PROJECTION, hook_backward, "linear_proj has backward hooks"),
    Change(PROJECTION, hook_before_backward, "linear_proj has backward hooks"),
    Change(PROJECTION, Scaled, "linear_proj is a Scaled"),
    Change(PROJECTION, hook_forward, "linear_proj has forward hooks"),
    Change(PROJECTION, hook_before_forward, "linear_proj has forward pre-hooks"),
    Change(PROJECTION, adapt_by_hook, "linear_proj has forward hooks"),
    Change(PROJECTION, hook("register_forward_pre_hook", wait_for_parameters), None),
)


def build_changed(group_size: int, overlap: OverlapConfig | bool) -> Any:
    gpt = SmallGPT(dtype=torch.float64, num_layers=len(CHANGES))
    model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=overlap)
    for layer, (part, change, _) in zip(model.decoder.layers, CHANGES, strict=True):
        attention = layer.self_attention
        if change is Scaled:
            setattr(attention, part, Scaled(getattr(attention, part)))
        else:
            change(getattr(attention, part))
    return model


def check_what_is_put_around_parts_of_an_attention_counts(group_size: int) -> None:
    """Fails for every change whose reason is left out: our operation would pass by what was put there."""
    stock, ours = (build_changed(group_size, each) for each in (False, QUERY_SPLIT))
    expected, found = run(stock), run(ours)
    assert_equal(found, expected)
    report = model_report(ours)
    for change, attention in zip(CHANGES, report.attentions, strict=True):
        if change.words is None:
            assert (attention.path, attention.overlapped_calls, attention.reasons) == ("overlapped", 1, ())
        else:
            assert (attention.path, attention.overlapped_calls, attention.stock_calls) == ("stock", 0, 1)
            assert len(attention.reasons) == 1
            assert change.words in attention.reasons[0], attention.reasons
    # Whatever becomes of the attention, what is left of our projection is overlapped, unless its class is another one.
    projections = [layer for layer in report.layers if PROJECTION in layer.name]
    for change, layer in zip(CHANGES, projections, strict=True):
        is_derived = change.part == PROJECTION and change.change is derive
        assert (layer.path, layer.overlapped_calls) == (("stock", 0) if is_derived else ("overlapped", 1))


def check_hooks_of_all_modules_see_no_placeholder(group_size: int) -> None:
    """Fails without the look at them: they were shown NaN."""

    def look(_: Any, __: Any, output: Any) -> Any:
        given = output if isinstance(output, tuple) else (output,)
        seen.extend(torch.isnan(each).any().item() for each in given if isinstance(each, torch.Tensor))
        return output

    seen: list[bool] = []
    model = build(group_size)
    handle = of_all_modules.register_module_forward_hook(look)
    try:
        assert_equal(run(model), run(build(group_size, False)))
    finally:
        handle.remove()
    assert seen
    assert not any(seen)
    (attention,) = model_report(model).attentions
    assert (attention.path, attention.overlapped_calls) == ("stock", 0)
    assert "hooks of all modules" in attention.reasons[0]
    run(model)
    assert state_of(attention_of(model)).overlapped_calls == 1
    for register in (
        of_all_modules.register_module_forward_pre_hook,
        of_all_modules.register_module_full_backward_hook,
        of_all_modules.register_module_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert "hooks of all modules" in str(attention_unsupported_reason(attention_of(model)))
        handle.remove()
    assert attention_unsupported_reason(attention_of(model)) is None


def assert_latent_stays(group_size: int, words: str, overlap: OverlapConfig = QUERY_SPLIT, **options: Any) -> None:
    models = (build_latent(group_size, each, **options) for each in (overlap, None))
    report = assert_stays(words, *models, with_mask=True)
    assert [each.layer for each in report.attentions] == ["CommFuseMLASelfAttention"] * 2


def check_latent_attention_as_planned_and_as_asked_for(group_size: int) -> None:
    assert_latent_stays(group_size, "attention.path is row_parallel", ROW_PARALLEL)
    assert_latent_stays(group_size, "planned as row_parallel: default on the CPU", AUTO)


def check_latent_attention_with_recomputed_parts(group_size: int) -> None:
    """Fails without the reason for up-projections: Megatron frees query, key and value before the projection."""
    for part, words in (("mla_up_proj", "recompute_modules has mla_up_proj"), ("core_attn", "recomputed by itself")):
        assert_latent_stays(group_size, words, recompute_granularity="selective", recompute_modules=[part])


def check_calls_of_latent_attention_that_say_no(group_size: int) -> None:
    attention = attentions_of(build_latent(group_size, QUERY_SPLIT))[0]
    assert attention_unsupported_reason(attention) is None
    for name, words in (("inference_context", "inference"), ("packed_seq_params", "packed")):
        assert words in str(attention_unsupported_reason(attention, {name: object()}))
    attention.cache_mla_latents = True
    assert "latents are cached" in str(attention_unsupported_reason(attention))


def check_arguments_by_position_have_latent_attentions_names(group_size: int) -> None:
    attention = attentions_of(build_latent(group_size, QUERY_SPLIT))[0]
    given = arguments_of(super(_QuerySplit, attention).forward, (1, *[None] * 8, 2), {})
    assert {name: value for name, value in given.items() if value is not None} == {
        "hidden_states": 1,
        "packed_seq_params": 2,
    }


def check_converted_latent_attention(group_size: int) -> None:
    model = build_latent(group_size, None)
    expected = run(model)
    assert all("converted" in each.reasons[0] for each in model_report(model).attentions)
    convert_model(model, QUERY_SPLIT)
    assert {type(each) for each in attentions_of(model)} == {CommFuseMLASelfAttention}
    assert_equal(run(model), expected)
    assert {each.path for each in model_report(model).attentions} == {"overlapped"}


def check_somebody_elses_latent_attention(group_size: int) -> None:
    model = build_latent(group_size, None)
    for each in attentions_of(model):
        each.__class__ = type("OtherAttention", (MLASelfAttention,), {})
    convert_model(model, QUERY_SPLIT)
    for each in model_report(model).attentions:
        assert each.path == "stock"
        assert "OtherAttention is not among the attentions" in each.reasons[0]


test_attention = make_cpu_test(2, checks_of_module(__name__, 2))
