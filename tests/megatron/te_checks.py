"""Checks of Transformer Engine's linears, replaced in specs and built models. Each is run on both ranks of one spawn.

Transformer Engine computes on GPUs only, but its modules can be built on the CPU: names, checkpoints, hooks and reasons
are checked here; what such models compute, in `tests/gpu`.
"""

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import build_module
from torch.utils._pytree import tree_leaves

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import FallbackConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin import (
    CommFuseTEColumnParallelLinear,
    CommFuseTEDotProductAttention,
    CommFuseTELayerNormColumnParallelLinear,
    CommFuseTERowParallelLinear,
    apply_to_spec,
    convert_model,
    model_report,
)
from commfuse_megatron.plugin.compat import RowParallelLinear
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.spec import block_spec
from commfuse_megatron.plugin.support import unsupported_reason
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config
from tests.megatron import layers
from tests.megatron.layers import EPS, IN, OUT, Pair, StockNormAndLinear, assert_equal, assert_overlapped, config, run
from tests.megatron.models import differing_checkpoint_entries

OURS = {
    te.TELayerNormColumnParallelLinear: CommFuseTELayerNormColumnParallelLinear,
    te.TEColumnParallelLinear: CommFuseTEColumnParallelLinear,
    te.TERowParallelLinear: CommFuseTERowParallelLinear,
}
GPTS = (SmallGPT(dtype=torch.float64), SmallGPT.layer_norm_and_bias(dtype=torch.float64))


def on_the_cpu() -> Any:
    """Wall: Transformer Engine's constructors ask for a GPU, though with `use_cpu_initialization` they use none."""
    return mock.patch.object(torch.cuda, "is_available", return_value=True)


def te_gpt(gpt: SmallGPT, group_size: int, *, overlap: Any, seed: int = 7, **options: Any) -> Any:
    transformer = transformer_config(gpt, group_size, transformer_impl="transformer_engine", **options)
    with on_the_cpu():
        spec = block_spec(get_gpt_layer_with_transformer_engine_spec(), transformer)
        return build_gpt(gpt, transformer, overlap=overlap, spec=spec, seed=seed)


def kind_of(leaf: Any) -> str:
    return "row" if "Row" in (leaf.module if hasattr(leaf, "module") else leaf).__name__ else "column"


def te_layer(leaf: Any, transformer: Any, **options: Any) -> Any:
    """Built as Megatron builds it."""
    sides = {"column": {"gather_output": False}, "row": {"input_is_parallel": True}}[kind_of(leaf)]
    arguments: dict[str, Any] = {
        "config": transformer, "init_method": torch.nn.init.normal_, "bias": True, "skip_bias_add": False,
        "is_expert": False, **sides,
    }  # fmt: skip
    with on_the_cpu():
        return build_module(leaf, IN, OUT, **{**arguments, **options})


def example_input(leaf: Any, group_size: int, rows: int = layers.ROWS, dtype: torch.dtype = torch.float64) -> Any:
    return layers.example_input(kind_of(leaf), group_size, rows, dtype)


def types_of_linears(model: Any) -> list[type]:
    return [type(m) for name, m in model.named_modules() if "linear_" in name.rsplit(".", 1)[-1]]


def check_specs_name_our_classes(_: int) -> None:
    overlap = OverlapConfig(record=True)
    for stock, ours in OURS.items():
        assert apply_to_spec(stock) is ours
        assert apply_to_spec(apply_to_spec(stock)) is ours
        leaf = apply_to_spec(apply_to_spec(stock), overlap)
        assert (leaf.module, leaf.params) == (ours, {"overlap_config": overlap})
    stock_spec = get_gpt_layer_with_transformer_engine_spec()
    attention = apply_to_spec(stock_spec).submodules.self_attention.submodules
    assert attention.linear_qkv is CommFuseTELayerNormColumnParallelLinear
    assert attention.core_attention is CommFuseTEDotProductAttention
    assert stock_spec.submodules.self_attention.submodules.linear_qkv is te.TELayerNormColumnParallelLinear


def check_a_model_from_our_spec_is_laid_out_like_stock(group_size: int) -> None:
    for gpt in GPTS:
        stock, ours = te_gpt(gpt, group_size, overlap=False), te_gpt(gpt, group_size, overlap=True, seed=99)
        assert not set(types_of_linears(stock)) & set(OURS.values())
        assert [OURS[stock_type] for stock_type in types_of_linears(stock)] == types_of_linears(ours)
        _assert_same_parameters(stock, ours)
        assert list(stock.state_dict()) == list(ours.state_dict())
        assert differing_checkpoint_entries(stock, ours) == []
        ours.load_state_dict(stock.state_dict())
        again = te_gpt(gpt, group_size, overlap=False, seed=99)
        again.load_state_dict(ours.state_dict())
        for (name, a), b, c in zip(stock.named_parameters(), ours.parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b), name
            assert torch.equal(a, c), name


def _assert_same_parameters(stock: torch.nn.Module, ours: torch.nn.Module) -> None:
    def describe(model: torch.nn.Module) -> list[tuple]:
        attributes = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
        attributes |= {"sequence_parallel": False, "allreduce": True}
        return [
            (name, p.shape, p.dtype, *(getattr(p, a, default) for a, default in attributes.items()))
            for name, p in model.named_parameters()
        ]

    assert describe(stock) == describe(ours)


def check_reasons_to_take_transformer_engines_path(group_size: int) -> None:
    cases = (
        ("fp8", "hybrid", "config.fp8"), ("fp4", "e2m1", "config.fp4"), ("commfuse", False, "switched off"),
        ("transformer_impl", "inference_optimized", "inference_optimized"), ("cpu_offloading", True, "cpu_offloading"),
    )  # fmt: skip
    for stock, ours in OURS.items():
        layer = te_layer(apply_to_spec(stock), config(group_size))
        without = te_layer(apply_to_spec(stock), config(group_size, sequence_parallel=False))
        assert reason_before_calls(without) is None
        for name, value, words in cases:
            layer = te_layer(apply_to_spec(stock), config(group_size))
            setattr(layer.config, name, value)
            assert type(layer) is ours
            assert words in reason_before_calls(layer)
        layer = te_layer(apply_to_spec(stock), config(group_size))
        for name, value, words in (
            ("parallel_mode", None, "the caller communicates"),
            ("te_quant_params", object(), "quantisation recipe"),
        ):
            with mock.patch.object(layer, name, value):
                assert words in unsupported_reason(layer)
        assert unsupported_reason(layer) is None
        with mock.patch.object(te.FP8GlobalStateManager, "is_fp8_enabled", return_value=True):
            assert "fp8 is on around this call" in unsupported_reason(layer)
        state_of(layer).overlap_config = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
        layer.config.fp8 = "hybrid"
        with pytest.raises(UnsupportedError, match=r"config\.fp8"):
            layer(torch.zeros(4, 1, IN, dtype=torch.float64))
    expert = te_layer(apply_to_spec(te.TEColumnParallelLinear), config(group_size), is_expert=True, skip_bias_add=True)
    assert "expert" in unsupported_reason(expert)


def reason_before_calls(layer: Any) -> str | None:
    (report,) = model_report(torch.nn.ModuleList([layer])).layers
    assert (report.path, report.overlapped_calls) == ("not called yet", 0)
    return report.reasons[0] if report.reasons else None


def check_others_find_what_stock_has(group_size: int) -> None:
    """Fails for layers that were rebuilt: what was set on the instance was lost, and they were of no class of TE's."""
    for stock, ours in OURS.items():
        built, layer = (te_layer(stock, config(group_size), skip_bias_add=True) for _ in range(2))
        if hasattr(layer, "eps"):
            layer.eps, layer.zero_centered_gamma = 0.5, True
            layer.return_layernorm_output = layer.return_layernorm_output_gathered = True
        expected = {name: value for name, value in vars(layer).items() if name != "_forward_pre_hooks"}
        held = torch.nn.ModuleList([layer])
        assert convert_model(held)[0] is layer
        assert type(layer) is ours
        assert isinstance(layer, stock)
        assert type(layer).__name__ == stock.__name__
        assert ours.forward is stock.forward
        assert {name for name in dir(layer) if not name.startswith("_")} == {
            name for name in dir(built) if not name.startswith("_")
        }
        assert all(vars(layer)[name] is value for name, value in expected.items())
        assert str(layer).startswith(ours.__qualname__)


def check_ours_survive_copying(group_size: int) -> None:
    for stock, ours in OURS.items():
        layer = te_layer(apply_to_spec(stock), config(group_size))
        del layer.tp_group, layer._tp_group  # process groups cannot be copied
        assert type(copy.deepcopy(layer)) is ours


def check_converted_model_keeps_what_others_hold(group_size: int) -> None:
    for gpt in GPTS:
        _check_converted_model(gpt, group_size)


def _check_converted_model(gpt: SmallGPT, group_size: int) -> None:
    model = te_gpt(gpt, group_size, overlap=False)
    fc1 = model.decoder.layers[0].mlp.linear_fc1
    fc1.eval()
    before = dict(model.named_parameters())
    state = model.state_dict()
    for name in [name for name in state if "linear_" in name and name.endswith("_extra_state")]:
        del state[name]
    called: list[Any] = []
    handles = [
        fc1.register_forward_pre_hook(lambda module, _: called.append(module)),
        fc1.register_forward_hook(lambda module, args, kwargs, out: called.append(kwargs), with_kwargs=True),
        fc1.register_full_backward_hook(lambda *_: None),
        fc1.register_load_state_dict_pre_hook(lambda module, *_: called.append(module)),
    ]
    assert convert_model(model) is model
    ours = model.decoder.layers[0].mlp.linear_fc1
    assert ours is fc1
    assert type(ours) is CommFuseTELayerNormColumnParallelLinear
    assert not set(types_of_linears(model)) & set(OURS)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert not ours.training
    assert model.decoder.layers[1].mlp.linear_fc1.training
    assert state_of(ours).name == "decoder.layers.0.mlp.linear_fc1"
    assert ours._is_full_backward_hook
    model.load_state_dict(state, strict=False)
    assert called == [ours]
    x = torch.randn(4, 2, gpt.hidden_size, dtype=torch.float64)
    ours(x)
    assert called == [ours, ours, {}]
    for handle in handles:
        handle.remove()
    ours(x)
    assert len(called) == 3
    assert {layer.path for layer in model_report(model).layers} == {"not called yet", "overlapped"}
    assert convert_model(model) is model


def _local_and_converted(kind: str, transformer: Any, skip_bias_add: bool) -> Pair:
    """A local layer and one of Transformer Engine's that is ours, with equal random parameters."""
    local, stock = {
        "column": (StockNormAndLinear, te.TELayerNormColumnParallelLinear),
        "row": (RowParallelLinear, te.TERowParallelLinear),
    }[kind]
    built = te_layer(stock, transformer, skip_bias_add=skip_bias_add)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn_like(parameter))
    expected = layers.build(kind, local, transformer, skip_bias_add=skip_bias_add)
    expected.load_state_dict({k: v for k, v in built.state_dict().items() if k != "_extra_state"})
    ours = convert_model(torch.nn.ModuleList([built]))[0]
    return Pair(expected, ours, example_input(stock, transformer.tensor_model_parallel_size))


def check_converted_layers_compute_the_same(group_size: int, kind: str) -> None:
    for options in ({"normalization": "LayerNorm"}, {"layernorm_zero_centered_gamma": True}):
        for skip_bias_add in (False, True):
            transformer = config(group_size, layernorm_epsilon=EPS, **options)
            _local_and_converted(kind, transformer, skip_bias_add).assert_overlapped()


def check_converted_layers_without_sequence_parallelism(group_size: int, kind: str) -> None:
    for skip_bias_add, returns_norm in itertools.product(
        (False, True), (False, True) if kind == "column" else (False,)
    ):
        transformer = config(group_size, layernorm_epsilon=EPS, normalization="LayerNorm", sequence_parallel=False)
        layer = _local_and_converted(kind, transformer, skip_bias_add)
        if returns_norm:
            layer.set(return_layernorm_output=True)
        layer.assert_overlapped()


def check_converted_layers_return_the_norms_output(group_size: int) -> None:
    transformer = config(group_size, layernorm_epsilon=EPS, normalization="LayerNorm")
    for is_gathered, skip_bias_add in itertools.product((False, True), repeat=2):
        layer = _local_and_converted("column", transformer, skip_bias_add)
        layer.set(return_layernorm_output=True, return_layernorm_output_gathered=is_gathered).assert_overlapped()


def check_a_bias_of_another_dtype(group_size: int) -> None:
    """Fails without casting it: the operation takes one dtype for all."""
    for stock, skip_bias_add in itertools.product(OURS, (False, True)):
        layer = te_layer(apply_to_spec(stock), config(group_size, dtype=torch.bfloat16), skip_bias_add=skip_bias_add)
        x = example_input(stock, group_size, dtype=torch.bfloat16)
        values = torch.arange(layer.bias.numel()) / 4
        results = []
        for dtype in (torch.bfloat16, torch.float32):
            layer.bias = torch.nn.Parameter(values.to(dtype))
            results.append(run(layer, x))
            gradient = results[-1].pop("gradient of bias")
            assert gradient is None if skip_bias_add else gradient.dtype == dtype
        assert_equal(*results, tolerance=0)
        assert_overlapped(layer, calls=2)


def check_dtypes_under_autocast(group_size: int) -> None:
    """Fails without casts: all that is returned has the dtype that the linear computes in."""
    for stock, skip_bias_add, is_gathered in itertools.product(OURS, (False, True), (False, True)):
        layer = te_layer(apply_to_spec(stock), config(group_size, dtype=torch.float32), skip_bias_add=skip_bias_add)
        has_norm = hasattr(layer, "return_layernorm_output")
        if has_norm:
            layer.return_layernorm_output, layer.return_layernorm_output_gathered = True, is_gathered
        x = example_input(stock, group_size, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            returned = [found for found in tree_leaves(layer(x)) if found is not None]
        assert [found.dtype for found in returned] == [torch.bfloat16] * (1 + skip_bias_add + has_norm)
        assert_overlapped(layer)


def check_delayed_weight_gradients(group_size: int) -> None:
    """Megatron's contract of `delay_wgrad_compute`: `backward_dw` computes the gradients of two micro-batches."""
    for stock, is_fused in itertools.product(OURS, (False, True)):
        plain = te_layer(apply_to_spec(stock), config(group_size))
        transformer = config(group_size, gradient_accumulation_fusion=is_fused)
        transformer.delay_wgrad_compute = True
        delayed = te_layer(apply_to_spec(stock), transformer)
        delayed.load_state_dict(plain.state_dict())
        batches = [example_input(stock, group_size, rows) for rows in (4, 3)]
        total = torch.zeros_like(plain.weight)
        for layer in (plain, delayed):
            layer.weight.main_grad = torch.zeros_like(layer.weight)
            layer.weight.grad_added_to_main_grad = False
        expected = [run(plain, x) for x in batches]
        triggered: list[Any] = []
        delayed.register_wgrad_accumulation_and_reduce_hooks(lambda found=triggered: found.append(1))
        found = [run(delayed, x) for x in batches]
        for one, other in zip(expected, found, strict=True):
            total += one.pop("gradient of weight")
            assert other.pop("gradient of weight") is None
            assert_equal(one, other)
        for index in range(2):
            delayed.weight.grad = None
            delayed.backward_dw()
            assert len(triggered) == index + 1
            if is_fused:
                assert delayed.weight.grad_added_to_main_grad
                assert delayed.weight.grad is not None, "the hooks of the data-parallel wrapper ask for it"
            else:
                delayed.weight.main_grad += delayed.weight.grad
        assert_equal({"weight": total}, {"weight": delayed.weight.main_grad})
        assert_overlapped(delayed, calls=2)


def check_adapters_keep_their_layer(group_size: int) -> None:
    """Fails without the look at names: what the tensors were there for would be passed by."""
    for stock in OURS:
        held = torch.nn.ModuleDict({"parameter": te_layer(stock, config(group_size))})
        held["buffer"] = te_layer(stock, config(group_size))
        held["parameter"].register_parameter("lora_a", torch.nn.Parameter(torch.zeros(2)))
        held["buffer"].register_buffer("steps", torch.zeros(()))
        state = list(held.state_dict())
        convert_model(held)
        assert list(held.state_dict()) == state
        assert [type(layer) for layer in held.values()] == [stock, stock]
        reasons = [layer.reasons[0] for layer in model_report(held).layers]
        for reason, name in zip(reasons, ("lora_a", "steps"), strict=True):
            assert reason.endswith(f"{OURS[stock].__qualname__} does not know: {name}")


def check_conversion_within_the_data_parallel_wrapper(group_size: int) -> None:
    model = te_gpt(GPTS[0], group_size, overlap=False)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    convert_model(wrapped)
    assert set(types_of_linears(model)) <= set(OURS.values())
    layer = te_layer(te.TERowParallelLinear, config(group_size))
    assert type(convert_model(layer)) is CommFuseTERowParallelLinear
    shared = te_layer(te.TERowParallelLinear, config(group_size))
    held = convert_model(torch.nn.ModuleDict({"a": shared, "b": shared}))
    assert held["b"] is held["a"] is shared
