"""Mapping of spec trees: classes by identity, on a copy, sharing kept."""

import copy
import functools
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseDotProductAttention,
    CommFuseNorm,
    CommFuseRowParallelLinear,
    CommFuseSpecProvider,
    apply_to_spec,
    compat,
)
from commfuse_megatron.plugin.compat import DotProductAttention
from commfuse_megatron.plugin.spec import gpt_layer_spec, gpt_layer_spec_local
from commfuse_megatron.testing.gpt import (
    SmallGPT,
    missing_transformer_engine,
    transformer_config,
)
from tests.megatron.models import with_attention_and_norm


def leaves(node: Any) -> list[type]:
    """Every class in a spec tree, by an own walk."""
    if isinstance(node, type):
        return [node]
    if isinstance(node, functools.partial):
        return [c for value in (node.func, *node.args, *node.keywords.values()) for c in leaves(value)]
    if isinstance(node, dict):
        return [c for value in node.values() for c in leaves(value)]
    if isinstance(node, list | tuple):
        return [c for value in node for c in leaves(value)]
    if hasattr(node, "__dataclass_fields__"):
        return [c for name in node.__dataclass_fields__ for c in leaves(getattr(node, name))]
    return []


def test_dense_layer() -> None:
    stock = get_gpt_layer_local_spec()
    before = leaves(stock)
    mapped = leaves(apply_to_spec(stock))
    assert len(mapped) == len(before)
    assert mapped.count(CommFuseColumnParallelLinear) == before.count(ColumnParallelLinear) == 2
    assert mapped.count(CommFuseRowParallelLinear) == before.count(RowParallelLinear) == 2
    assert mapped.count(CommFuseNorm) == before.count(WrappedTorchNorm) == 2
    assert not {ColumnParallelLinear, RowParallelLinear, WrappedTorchNorm} & set(mapped)


@pytest.mark.parametrize(
    "options", [{}, {"num_experts": 4}, {"multi_latent_attention": True}, {"qk_layernorm": True}], ids=str
)
def test_the_spec_handed_in_is_not_changed(options: dict) -> None:
    stock = get_gpt_layer_local_spec(**options)
    before = leaves(stock)
    apply_to_spec(stock, OverlapConfig())
    assert leaves(stock) == before
    assert not any(c.__qualname__.startswith("CommFuse") for c in before)


def test_experts_inside_partials_are_reached() -> None:
    mapped = leaves(apply_to_spec(get_gpt_layer_local_spec(num_experts=4)))
    assert not {ColumnParallelLinear, RowParallelLinear} & set(mapped)


def test_latent_attention_keeps_what_megatron_checks_by_class(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        spec = apply_to_spec(get_gpt_layer_local_spec(multi_latent_attention=True))
    attention = spec.submodules.self_attention.submodules
    assert attention.linear_q_down_proj is attention.linear_kv_down_proj is ColumnParallelLinear
    assert attention.linear_q_up_proj is attention.linear_kv_up_proj is CommFuseColumnParallelLinear
    assert attention.linear_proj is CommFuseRowParallelLinear
    assert "convert_model reaches it later" in caplog.text


def test_only_attention_and_norms_are_others() -> None:
    """As where Transformer Engine's stand beside local linears."""
    attention, norm = (type(name, (), {}) for name in ("TEDotProductAttention", "TENorm"))
    config, options = transformer_config(SmallGPT(), 1), {"use_transformer_engine": False, "pp_rank": 0}
    stock = get_gpt_decoder_block_spec(config, normalization=config.normalization, **options)
    mixed = apply_to_spec(with_attention_and_norm(stock, attention, norm))
    assert mixed.layer_norm is norm
    assert len(mixed.layer_specs) == 2
    for layer in (spec.submodules for spec in mixed.layer_specs):
        parts, mlp = layer.self_attention.submodules, layer.mlp.keywords["submodules"]
        assert parts.core_attention is attention
        assert (layer.input_layernorm, layer.pre_mlp_layernorm) == (norm, norm)
        assert parts.linear_qkv is mlp.linear_fc1 is CommFuseColumnParallelLinear
        assert parts.linear_proj is mlp.linear_fc2 is CommFuseRowParallelLinear
    assert stock.layer_specs[0].submodules.self_attention.submodules.core_attention is DotProductAttention


def test_block_shares_layers_as_before() -> None:
    layer = get_gpt_layer_local_spec()
    other = get_gpt_layer_local_spec()
    block = TransformerBlockSubmodules(layer_specs=[layer, layer, other], layer_norm=WrappedTorchNorm)
    mapped = apply_to_spec(block)
    assert isinstance(mapped, TransformerBlockSubmodules)
    assert mapped.layer_norm is CommFuseNorm
    assert mapped.layer_specs[0] is mapped.layer_specs[1]
    assert mapped.layer_specs[0] is not mapped.layer_specs[2]
    assert block.layer_norm is WrappedTorchNorm


def test_subclasses_are_left_alone() -> None:
    class Theirs(RowParallelLinear):
        pass

    assert apply_to_spec(Theirs) is Theirs
    assert apply_to_spec(ModuleSpec(module=Theirs)).module is Theirs


def test_other_nodes() -> None:
    @dataclass(frozen=True)
    class Frozen:
        leaf: type
        inner: dict = field(default_factory=dict)

    spec = Frozen(RowParallelLinear, {"a": [ColumnParallelLinear, 3, "text"], "b": (RowParallelLinear, None)})
    mapped = apply_to_spec(spec)
    assert mapped.leaf is CommFuseRowParallelLinear
    assert mapped.inner == {"a": [CommFuseColumnParallelLinear, 3, "text"], "b": (CommFuseRowParallelLinear, None)}
    assert spec.leaf is RowParallelLinear
    function = lambda: None  # noqa: E731
    assert apply_to_spec([function]) == [function]
    assert apply_to_spec(None) is None


@pytest.mark.parametrize("leaf", [RowParallelLinear, ModuleSpec(module=RowParallelLinear, params={"stride": 2})])
def test_config_reaches_the_constructor(leaf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[str, Any] = {}
    monkeypatch.setattr(CommFuseRowParallelLinear, "__init__", lambda _, *args, **kwargs: received.update(kwargs))
    config = OverlapConfig(record=True)
    kept = copy.deepcopy(leaf) if isinstance(leaf, ModuleSpec) else leaf
    mapped = apply_to_spec(leaf, config)
    for make in (lambda: build_module(mapped, bias=False), lambda: mapped(bias=False)):
        received.clear()
        make()
        assert received.pop("overlap_config") is config
        assert received == {"bias": False, **(leaf.params if isinstance(leaf, ModuleSpec) else {})}
    assert kept == leaf


def test_mapping_twice_changes_nothing_more() -> None:
    once = apply_to_spec(get_gpt_layer_local_spec())
    assert leaves(apply_to_spec(once)) == leaves(once)


def test_transformer_engine_stays_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    stands_for = type("TERowParallelLinear", (), {"__module__": "megatron.core.extensions.transformer_engine"})
    spec = [stands_for, ModuleSpec(module=stands_for), {"again": stands_for}]
    assert apply_to_spec(spec) == spec
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "TERowParallelLinear" in caplog.text


def test_ready_object() -> None:
    assert isinstance(gpt_layer_spec_local, ModuleSpec)
    found = leaves(gpt_layer_spec_local)
    assert found.count(CommFuseColumnParallelLinear) == found.count(CommFuseRowParallelLinear) == 2
    assert gpt_layer_spec_local.submodules.input_layernorm is CommFuseNorm


def test_provider() -> None:
    provider = CommFuseSpecProvider(LocalSpecProvider())
    assert provider.column_parallel_linear() is CommFuseColumnParallelLinear
    assert provider.row_parallel_linear() is CommFuseRowParallelLinear
    assert provider.layer_norm(rms_norm=False, for_qk=True) is CommFuseNorm
    assert provider.core_attention() is CommFuseDotProductAttention
    assert provider.fuse_layernorm_and_linear() is LocalSpecProvider().fuse_layernorm_and_linear()
    mlp = leaves(get_mlp_module_spec_for_backend(backend=provider))
    assert mlp == [CommFuseColumnParallelLinear, CommFuseRowParallelLinear]
    with pytest.raises(AttributeError):
        provider.does_not_exist()


def test_a_provider_can_be_derived_from() -> None:
    class Own(CommFuseSpecProvider):
        def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
            return super().layer_norm(*args, **kwargs)

    assert Own(LocalSpecProvider()).layer_norm(rms_norm=False) is CommFuseNorm


def test_the_default_spec_says_transformer_engine_is_missing(monkeypatch):
    monkeypatch.setattr(compat, "HAVE_TRANSFORMER_ENGINE", False)
    transformer = SimpleNamespace(transformer_impl="transformer_engine")
    with pytest.raises(UnsupportedError, match="pass --transformer-impl local"):
        gpt_layer_spec(SimpleNamespace(transformer=transformer))


def test_the_default_spec_reads_the_file_before_it_builds(monkeypatch, tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text("liner: {}\n")
    monkeypatch.setenv("COMMFUSE_CONFIG", str(file))
    with pytest.raises(ConfigError, match='unknown key "liner"'):
        gpt_layer_spec(SimpleNamespace(transformer=SimpleNamespace(transformer_impl="local")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device may have Transformer Engine beside it")
def test_without_transformer_engine_the_reason_is_given() -> None:
    assert "Transformer Engine needs a CUDA device" in str(missing_transformer_engine())


def test_variants_of_small_models() -> None:
    gpt = SmallGPT.layer_norm_and_bias(hidden_size=32, dtype=torch.float64)
    transformer = transformer_config(gpt, 2, calculate_per_token_loss=True)
    assert (transformer.hidden_size, transformer.normalization, transformer.add_bias_linear) == (32, "LayerNorm", True)
    assert transformer.calculate_per_token_loss
    assert transformer.params_dtype == torch.float64
    assert transformer_config(SmallGPT(), 1).sequence_parallel is False
