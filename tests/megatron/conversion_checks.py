"""Models that are built already, converted in place: what becomes ours, and what stays with its reason."""

import functools
from typing import Any

import pytest
import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import AttentionConfig, FallbackConfig
from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    convert_model,
    model_report,
)
from commfuse_megatron.plugin.compat import RowParallelLinear
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from tests.megatron.layers import assert_equal

_FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def check_convert_model(group_size: int) -> None:
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    stock = build_gpt(gpt, transformer_config(gpt, group_size), overlap=False)
    expected = loss_of(stock, tokens)
    hooked: list[Any] = []
    stock.output_layer.register_forward_hook(lambda *_: hooked.append(1))
    parameters = dict(stock.named_parameters())
    overlap = OverlapConfig(record=True)
    assert convert_model(stock) is stock
    assert convert_model([stock], overlap)[0] is stock
    assert convert_model(stock) is stock
    assert type(stock.output_layer) is CommFuseColumnParallelLinear
    assert all(p is parameters[name] for name, p in stock.named_parameters())
    found = loss_of(stock, tokens)
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
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    stock, ours, off = (_gpt_with_adapters(group_size) for _ in range(3))
    strict = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
    with pytest.raises(UnsupportedError, match=r"embedding.*does not know: scale_of_words"):
        convert_model(ours, strict)
    assert not any(type(module).__qualname__.startswith("CommFuse") for module in ours.modules())
    off.config.commfuse = False
    convert_model(off, strict)
    convert_model(ours)
    assert type(ours.decoder.layers[0].mlp.linear_fc2) is RowParallelLinear
    losses = []
    for model in (stock, ours):
        losses.append(loss_of(model, tokens))
        losses[-1].backward()
    assert abs(losses[0] - losses[1]) <= 1e-13 * losses[0]
    for (name, expected), found in zip(stock.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-12, rtol=1e-12, msg=name)
    layers = {layer.name: layer for layer in model_report(ours).layers}
    kept = {
        "embedding.word_embeddings": "CommFuseVocabParallelEmbedding does not know: scale_of_words",
        "decoder.layers.0.mlp.linear_fc1": "CommFuseColumnParallelLinear does not know: calls",
        "decoder.layers.0.mlp.linear_fc2": "CommFuseRowParallelLinear does not know: adapter.weight",
    }
    for name, words in kept.items():
        assert layers[name].path == "stock"
        assert words in layers[name].reasons[0]
    assert {layer.path for name, layer in layers.items() if name not in kept} == {"overlapped"}


def check_conversion_keeps_layers_with_a_forward_of_the_instance(group_size: int) -> None:
    """Profilers wrap so. Fails without the look at it: such layers were re-classed, and Megatron's forward ran on."""
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    stock, ours = (build_gpt(gpt, transformer_config(gpt, group_size), overlap=False) for _ in range(2))
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
        convert_model(ours, OverlapConfig(attention=split, fallback=FallbackConfig(unsupported="raise")))
    convert_model(ours, OverlapConfig(attention=split))
    assert loss_of(ours, tokens) == loss_of(stock, tokens)
    report = model_report(ours)
    layers = {layer.name: layer for layer in (*report.layers, *report.attentions)}
    for name in wrapped:
        assert layers[name].path == "stock"
        assert "forward of its own in the instance" in layers[name].reasons[0]
    assert layers["output_layer"].path == "overlapped"


def _gpt_with_adapters(group_size: int) -> Any:
    """A stock model: a parameter, a buffer and a module were put into three of its layers, and hooks that use them."""
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=False)
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
    tokens = torch.randint(gpt.vocab_size, (1, 17), generator=torch.Generator().manual_seed(9))
    found = []
    for overlap in (False, True):
        for recompute in ({}, _FULL_RECOMPUTE):
            transformer = transformer_config(gpt, group_size, window_size=(3, 0), **recompute)
            model = build_gpt(gpt, transformer, overlap=overlap)
            loss_of(model, tokens, with_mask=False).backward()
            found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for others in found[1:]:
        assert_equal(found[0], others)
    model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=False)
    loss_of(model, tokens, with_mask=False).backward()
    name, parameter = next((n, p) for n, p in model.named_parameters() if "linear_qkv" in n)
    assert not torch.allclose(parameter.grad, found[0][name]), "the window changes nothing"
