"""Models that are built already, converted in place; layers that others derive from, wrap, or know by their class."""

import functools
import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel import mappings as megatron_mappings
from torch import distributed as dist
from torch.nn.utils import parametrize

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import AttentionConfig, FallbackConfig
from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseLayerNormColumnParallelLinear,
    CommFuseRowParallelLinear,
    apply_to_spec,
    convert,
    convert_model,
    model_report,
    unsupported_reason,
)
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from commfuse_megatron.tools.verify.megatron_cases import FULL
from tests.megatron import layers
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import IN, KINDS, OUT, Pair, assert_equal, config, fsdp_takes_it_for, make_embedding, pair
from tests.megatron.models import draw_tokens, loss_and_gradients, tiny_gpt

TOKENS = draw_tokens()
STRICT = FallbackConfig(unsupported="raise")


def check_convert_model(group_size: int) -> None:
    stock = tiny_gpt(group_size, False)
    expected = loss_of(stock, TOKENS)
    hooked: list[Any] = []
    stock.output_layer.register_forward_hook(lambda *_: hooked.append(1))
    parameters = dict(stock.named_parameters())
    overlap = OverlapConfig(record=True)
    assert convert_model(stock) is stock
    assert convert_model([stock], overlap)[0] is stock
    assert convert_model(stock) is stock
    assert type(stock.output_layer) is CommFuseColumnParallelLinear
    assert all(p is parameters[name] for name, p in stock.named_parameters())
    found = loss_of(stock, TOKENS)
    assert abs(found - expected) <= 1e-13 * abs(expected)
    report = model_report(stock)
    assert [layer.path for layer in report.layers] == ["overlapped"] * 6
    assert hooked == [1]
    assert state_of(stock.output_layer).context.config == overlap
    assert state_of(stock.output_layer).name == "output_layer"
    with pytest.raises(ConfigError, match="torch module"):
        convert_model("model")


def check_conversion_keeps_layers_with_tensors_of_somebody_else(group_size: int) -> None:
    """Fails without the look at names: such layers were re-classed, and nothing said so."""
    stock, ours, off = (_gpt_with_adapters(group_size) for _ in range(3))
    strict = OverlapConfig(fallback=STRICT)
    with pytest.raises(UnsupportedError, match=r"embedding.*does not know: scale_of_words"):
        convert_model(ours, strict)
    assert not any(type(module).__qualname__.startswith("CommFuse") for module in ours.modules())
    off.config.commfuse = False
    convert_model(off, strict)
    convert_model(ours)
    assert type(ours.decoder.layers[0].mlp.linear_fc2) is RowParallelLinear
    assert_equal(*(loss_and_gradients(model, TOKENS, with_mask=True) for model in (stock, ours)))
    found = {layer.name: layer for layer in model_report(ours).layers}
    kept = {
        "embedding.word_embeddings": "CommFuseVocabParallelEmbedding does not know: scale_of_words",
        "decoder.layers.0.mlp.linear_fc1": "CommFuseColumnParallelLinear does not know: calls",
        "decoder.layers.0.mlp.linear_fc2": "CommFuseRowParallelLinear does not know: adapter.weight",
    }
    for name, words in kept.items():
        assert found[name].path == "stock"
        assert words in found[name].reasons[0]
    assert {layer.path for name, layer in found.items() if name not in kept} == {"overlapped"}


def check_conversion_keeps_layers_with_a_forward_of_the_instance(group_size: int) -> None:
    """Profilers wrap so. Fails without the look at it: such layers were re-classed, and Megatron's forward ran on."""
    stock, ours = (tiny_gpt(group_size, False) for _ in range(2))
    layer = ours.decoder.layers[0]
    wrapped = {
        "embedding.word_embeddings": ours.embedding.word_embeddings,
        "decoder.layers.0.self_attention": layer.self_attention,
        "decoder.layers.0.mlp.linear_fc1": layer.mlp.linear_fc1,
        "decoder.layers.0.mlp.linear_fc2": layer.mlp.linear_fc2,
    }
    for module in wrapped.values():
        module.forward = functools.partial(module.forward)
    split = AttentionConfig(path="query_split")
    with pytest.raises(UnsupportedError, match=r"embedding.*forward of its own in the instance"):
        convert_model(ours, OverlapConfig(attention=split, fallback=STRICT))
    convert_model(ours, OverlapConfig(attention=split))
    assert loss_of(ours, TOKENS) == loss_of(stock, TOKENS)
    report = model_report(ours)
    found = {layer.name: layer for layer in (*report.layers, *report.attentions)}
    for name in wrapped:
        assert found[name].path == "stock"
        assert "forward of its own in the instance" in found[name].reasons[0]
    assert found["output_layer"].path == "overlapped"


def _gpt_with_adapters(group_size: int) -> Any:
    """A stock model: a parameter, a buffer and a module were put into three of its layers, and hooks that use them."""
    model = tiny_gpt(group_size, False)
    words, mlp = model.embedding.word_embeddings, model.decoder.layers[0].mlp
    words.scale_of_words = torch.nn.Parameter(torch.full((), 1.5, dtype=torch.float64))
    words.register_forward_hook(lambda module, _, output: output * module.scale_of_words)
    mlp.linear_fc1.register_buffer("calls", torch.zeros(()))

    def count(module: Any, _: Any) -> None:
        module.calls += 1

    mlp.linear_fc1.register_forward_pre_hook(count)
    features = mlp.linear_fc2.weight.size(1)
    torch.manual_seed(5)
    mlp.linear_fc2.adapter = torch.nn.Linear(features, features, bias=False, dtype=torch.float64)
    mlp.linear_fc2.register_forward_pre_hook(lambda module, inputs: (module.adapter(inputs[0]),))
    return model


def check_sliding_windows_are_masked_in_recomputed_layers(group_size: int) -> None:
    # Fails without a shim around autograd's engine: Megatron makes that mask on "cuda", in the recomputation, too.
    gpt = SmallGPT(dtype=torch.float64)

    def gradients(*, overlap: bool, **options: Any) -> dict[str, Any]:
        model = build_gpt(gpt, transformer_config(gpt, group_size, **options), overlap=overlap)
        return loss_and_gradients(model, draw_tokens(1, seed=9))

    expected = gradients(overlap=False, window_size=(3, 0))
    for overlap, recompute in ((False, FULL), (True, {}), (True, FULL)):
        assert_equal(expected, gradients(overlap=overlap, window_size=(3, 0), **recompute))
    name = next(each for each in expected if "linear_qkv" in each)
    without = gradients(overlap=False)
    assert not torch.allclose(without[name], expected[name]), "the window changes nothing"


FUNCTIONS = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")


def quantised(layer: Any, calls: list[str]) -> None:
    """Do to `layer` as quantisers do: another class, whose forward replaces Megatron's functions meanwhile."""
    base = type(layer)

    class Quantised(base):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                for name in FUNCTIONS:
                    patch.setattr(megatron_layers, name, _halving(getattr(megatron_layers, name), calls))
                return super().forward(*args, **kwargs)

    layer.__class__ = Quantised


def _halving(function: Any, calls: list[str]) -> Any:
    @functools.wraps(function)  # Megatron keeps an attribute on it
    def with_half_the_weight(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(function.__name__)
        return function(input, 0.5 * weight, *args, **kwargs)

    return with_half_the_weight


def check_quantised_layers_are_not_passed_by(group_size: int, kind: str) -> None:
    for is_converted_first in (True, False):
        layer = pair(kind, group_size)
        stock, ours, _ = layer
        if not is_converted_first:
            ours.__class__ = type(stock)
        calls: list[str] = []
        for each in (stock, ours):
            quantised(each, calls)
        convert_model(torch.nn.ModuleList([ours]))
        layer.compare()
        assert calls == [FUNCTIONS[0]] * 2
        report = model_report(torch.nn.ModuleList([ours])).layers[0]
        assert (report.path, report.overlapped_calls) == ("stock", 0)
        words = "derives from CommFuse" if is_converted_first else "not among the classes that are replaced"
        assert words in report.reasons[0]


def check_replaced_functions_are_not_passed_by(group_size: int) -> None:
    """Fails without the look at them: quantisers of weights and compressors of messages were passed by in silence."""

    linear = megatron_layers.LinearWithGradAccumulationAndAsyncCommunication
    frozen = megatron_layers.LinearWithFrozenWeight
    scatter, gather = "_ReduceScatterToSequenceParallelRegion", "_GatherFromSequenceParallelRegion"
    for is_frozen, kinds, holder, name in (
        (False, KINDS, megatron_layers, FUNCTIONS[0]),
        (True, KINDS, megatron_layers, FUNCTIONS[1]),
        (False, ("column",), ColumnParallelLinear, "_forward_impl"),
        (False, ("column",), ColumnParallelLinear, "forward"),
        (False, ("row",), RowParallelLinear, "_forward_impl"),
        (False, ("row",), RowParallelLinear, "forward"),
        (False, ("row",), megatron_layers, "reduce_scatter_to_sequence_parallel_region"),
        (False, KINDS, megatron_layers, linear.__name__),
        (True, KINDS, megatron_layers, frozen.__name__),
        (False, KINDS, linear, "forward"),
        (False, KINDS, linear, "backward"),
        (True, KINDS, frozen, "forward"),
        (False, ("column",), megatron_layers, "dist_all_gather_func"),
        (False, ("column",), megatron_layers, "dist_reduce_scatter_func"),
        (True, ("column",), megatron_layers, "gather_from_sequence_parallel_region"),
        (False, ("row",), megatron_mappings, "_reduce_scatter_along_first_dim"),
        (False, ("row",), megatron_mappings, "_gather_along_first_dim"),
        (False, ("row",), megatron_mappings, "dist_reduce_scatter_func"),
        (False, ("row",), getattr(megatron_mappings, scatter), "forward"),
        (True, ("column",), getattr(megatron_mappings, gather), "forward"),
    ):
        for kind in kinds:
            layer = pair(kind, group_size)
            layer.train(not is_frozen, "weight")
            calls: list[str] = []
            with mock.patch.object(holder, name, _counting(vars(holder)[name], calls)):
                layer.assert_stock(f"{name} of {holder.__name__} is replaced")
            assert len(calls) >= 2, "by stock and by ours"
            assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
            if not is_frozen:  # by a frozen weight Megatron gives the bias no gradient, either
                layer.compare()


def _counting(found: Any, calls: list[str]) -> Any:
    """The same function, or a class derived from the same class, that writes down that it was called."""
    if isinstance(found, type):
        return type(found.__name__, (found,), {"forward": _counting(vars(found)["forward"], calls)})
    function = getattr(found, "__func__", found)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return staticmethod(counted) if isinstance(found, staticmethod) else counted


def check_functions_of_ours_by_their_class(group_size: int) -> None:
    """Of a fused norm and linear, the class's forward includes the norm."""
    _, fused, x = layers.norm_pair(group_size)
    assert torch.equal(type(fused).forward(fused, x)[0], fused(x)[0])
    _, ours, x = pair("row", group_size)
    expected = ours(x)[0]
    forward = CommFuseRowParallelLinear.forward
    with mock.patch.object(CommFuseRowParallelLinear, "forward", lambda layer, x: forward(layer, x)):
        assert (ours(x)[0] - expected).abs().max() < 1e-13
        assert "forward is replaced" in unsupported_reason(ours)


def check_parametrized_layers_are_overlapped(group_size: int) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    for kind in KINDS:
        layer = pair(kind, group_size)
        for each in layer[:2]:
            parametrize.register_parametrization(each, "weight", Doubled())
        layer.assert_overlapped()


class Counted(torch.nn.Module):
    """A parametrization that is another one each time, as a spectral norm is."""

    calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight * (1 + 1 / self.calls)


def check_parametrized_weights_are_computed_as_often_as_in_stock(group_size: int) -> None:
    """Fails with a second look at the weight: a spectral norm's state went on twice per call, and losses differed."""
    ids = torch.arange(2 * group_size).view(1, -1)
    for change in ({}, {"commfuse": False}, {"cpu_offloading": True}):
        for kind in (*KINDS, "embedding"):
            if kind == "embedding":
                made = [make_embedding(VocabParallelEmbedding, config(group_size), 8 * group_size) for _ in range(2)]
                layer = Pair(made[0], convert_model(made[1]), ids)
            else:
                layer = pair(kind, group_size)
            for name, value in change.items():
                setattr(layer.ours.config, name, value)
            counted = [Counted(), Counted()]
            for each, weight in zip(layer[:2], counted, strict=True):
                parametrize.register_parametrization(each, "weight", weight)
                weight.calls = 0  # registering tries it out
            model_report(torch.nn.ModuleList([layer.ours]))
            assert counted[1].calls == 0
            for _ in range(3):
                outputs = [each(layer.x) if kind == "embedding" else each(layer.x)[0] for each in layer[:2]]
            assert_equal(*({"output": output} for output in outputs))
            assert counted[0].calls == counted[1].calls > 0
            if kind != "embedding" or not change.get("cpu_offloading"):  # embeddings may stay overlapped
                assert bool(state_of(layer.ours).stock_calls) == bool(change)


class Tagged(torch.Tensor):
    """A tensor that does something of its own whenever it is used."""


def check_tensors_of_other_classes_are_not_passed_by(group_size: int, kind: str) -> None:
    """Fails without the look at input and bias: what their class does was passed by, and the output had another."""
    for what in ("input", "bias"):
        stock, ours, x = pair(kind, group_size)
        for layer in (stock, ours):
            if what == "bias":
                layer.bias = torch.nn.Parameter(layer.bias.detach().as_subclass(Tagged))
        x = x.as_subclass(Tagged) if what == "input" else x
        (expected, _), (found, _) = stock(x), ours(x)
        assert type(found) is type(expected)
        assert torch.equal(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
        layers.assert_stock(ours, f"the {what} is a Tagged: only plain tensors are overlapped")


def check_arguments_that_are_none(group_size: int) -> None:
    """Fails without the check: the layers were converted, and the first forward pass failed."""
    stock = pair("row", group_size).stock
    held = torch.nn.ModuleList([stock])
    for wrong in ({}, {"linear": {}}, OverlapConfig().linear, 3, object):
        for call in (convert_model, apply_to_spec):
            with pytest.raises(ConfigError, match=f"{call.__name__} takes an OverlapConfig"):
                call(held if call is convert_model else RowParallelLinear, wrong)
    for wrong in (3, "spec", held, get_gpt_layer_local_spec, OverlapConfig()):
        with pytest.raises(ConfigError, match="apply_to_spec takes a ModuleSpec"):
            apply_to_spec(wrong)
    for wrong in (None, "model", {}, [None], SimpleNamespace()):
        for call in (convert_model, model_report):
            with pytest.raises(ConfigError, match="takes a torch module"):
                call(wrong)
    with pytest.raises(ConfigError, match="cannot be read"):
        convert_model(held, "there is no such file.yaml")
    with pytest.raises(ConfigError, match=r"takes an OverlapConfig.*got a str: ''"):
        convert_model(held, "")
    for wrong in ([held], [stock.config], stock.config):
        with pytest.raises(ConfigError, match="apply_to_spec takes a ModuleSpec"):
            apply_to_spec(wrong)
    for call in (convert_model, apply_to_spec):
        with pytest.raises(ConfigError, match=r"the (configuration|model) is|a model is the first argument") as raised:
            call(OverlapConfig(), held)
        assert "\n" not in str(raised.value), "a model is named, not printed"


def check_nothing_converted_is_said(_: int) -> None:
    """Fails without the warning: a list that was empty by mistake trained stock layers in silence."""
    convert._log_once.cache_clear()
    with mock.patch.object(logging.getLogger("commfuse_megatron.plugin.convert"), "handle") as handle:
        for model in ([], torch.nn.Linear(2, 2), []):
            assert convert_model(model) is model
    records = [call.args[0] for call in handle.call_args_list]
    said = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    assert len(said) == (dist.get_rank() == 0)
    assert all("nothing was converted" in text for text in said)


def check_conversion_of_a_file(group_size: int) -> None:
    stock = pair("row", group_size).stock
    held = torch.nn.ModuleList([stock])
    assert type(stock) is RowParallelLinear
    convert_model(held, "configs/default.yaml")
    assert type(stock) is CommFuseRowParallelLinear


def check_local_layers_pass_for_megatrons(group_size: int) -> None:
    known = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, torch.nn.Linear)
    for skip_bias_add in (False, True):
        for kind, stock in (("column", ColumnParallelLinear), ("row", RowParallelLinear)):
            make = layers.make_linear(kind, config(group_size), skip_bias_add=skip_bias_add)
            layers.assert_ours_pass_for(stock, make, known, by_spec=True)
    make = functools.partial(make_embedding, transformer=config(group_size))
    layers.assert_ours_pass_for(VocabParallelEmbedding, make, known, by_spec=False)


def check_the_fused_layer_has_what_is_read_of_the_stock_one(group_size: int) -> None:
    """Where that is not installed there is nothing to compare with: names and values as its documentation has them."""
    for variant in layers.VARIANTS:
        normalization, is_zero_centered = variant.values()
        transformer = layers.norm_config(group_size, **variant)
        layer = layers.build("column", CommFuseLayerNormColumnParallelLinear, transformer, skip_bias_add=True)
        expected = {
            "in_features": IN, "out_features": OUT // group_size, "tp_size": group_size,
            "tp_rank": dist.get_rank(), "use_bias": True, "te_return_bias": True,
            "fuse_wgrad_accumulation": False, "eps": layers.EPS, "zero_centered_gamma": is_zero_centered,
            "normalization": normalization, "return_layernorm_output": False,
            "return_layernorm_output_gathered": False,
        }  # fmt: skip
        assert layers.values_of(layer, tuple(expected)) == expected
        assert type(layer).__name__ == "TELayerNormColumnParallelLinear"
        assert isinstance(layer, ColumnParallelLinear)
        split = {name: fsdp_takes_it_for(name, layer) for name, _ in layer.named_parameters()}
        norm = {name: "replicated" for name in split if name.startswith("layer_norm")}
        assert split == {**norm, "weight": "column", "bias": "column"}
        assert len(norm) == (2 if normalization == "LayerNorm" else 1)


test_conversion = make_cpu_test(2, checks_of_module(__name__, 2))
