"""Checks of Transformer Engine's linears, replaced in specs and built models. Each is run on both ranks of one spawn.

Transformer Engine computes on GPUs only, but its modules can be built on the CPU: names, checkpoints, hooks and reasons
are checked here; what such models compute, in `tests/gpu`.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import InferenceRowParallelLinear
from megatron.core.transformer.spec_utils import build_module

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import FallbackConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseLayerNormColumnParallelLinear,
    CommFuseRowParallelLinear,
    apply_to_spec,
    convert_model,
    model_report,
)
from commfuse_megatron.plugin.compat import RowParallelLinear
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.spec import block_spec
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config
from tests.megatron.gpt_bodies import differing_checkpoint_entries
from tests.megatron.layers import IN, OUT, assert_equal, assert_overlapped, config, example_input, run
from tests.megatron.norm_linear_checks import EPS, StockNormAndLinear

OURS = {
    te.TELayerNormColumnParallelLinear: CommFuseLayerNormColumnParallelLinear,
    te.TEColumnParallelLinear: CommFuseColumnParallelLinear,
    te.TERowParallelLinear: CommFuseRowParallelLinear,
}
GPTS = (SmallGPT(dtype=torch.float64), SmallGPT.layer_norm_and_bias(dtype=torch.float64))


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Wall: Transformer Engine's constructors ask for a GPU, though with `use_cpu_initialization` they use none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        yield


def te_gpt(gpt: SmallGPT, group_size: int, *, overlap: Any, seed: int = 7, **options: Any) -> Any:
    transformer = transformer_config(gpt, group_size, transformer_impl="transformer_engine", **options)
    with on_the_cpu():
        spec = block_spec(get_gpt_layer_with_transformer_engine_spec(), transformer)
        return build_gpt(gpt, transformer, overlap=overlap, spec=spec, seed=seed)


def te_layer(leaf: Any, transformer: Any, **options: Any) -> Any:
    is_row = "Row" in (leaf.module if hasattr(leaf, "module") else leaf).__name__
    sides = {"input_is_parallel": True} if is_row else {"gather_output": False}
    arguments: dict[str, Any] = {
        "config": transformer,
        "init_method": torch.nn.init.normal_,
        "bias": True,
        "skip_bias_add": False,
        "is_expert": False,
        **sides,
    }
    with on_the_cpu():
        return build_module(leaf, IN, OUT, **{**arguments, **options})


def types_of_linears(model: Any) -> list[type]:
    return [type(m) for name, m in model.named_modules() if "linear_" in name.rsplit(".", 1)[-1]]


def check_specs_name_our_classes(_: int) -> None:
    overlap = OverlapConfig(record=True)
    for stock, ours in OURS.items():
        for leaf in (apply_to_spec(stock), apply_to_spec(apply_to_spec(stock))):
            assert (leaf.module, leaf.params) == (ours, {"stock_class": stock})
        leaf = apply_to_spec(apply_to_spec(stock), overlap)
        assert leaf.params == {"stock_class": stock, "overlap_config": overlap}
    stock_spec = get_gpt_layer_with_transformer_engine_spec()
    attention = apply_to_spec(stock_spec).submodules.self_attention.submodules
    assert attention.linear_qkv.module is CommFuseLayerNormColumnParallelLinear
    assert attention.core_attention is te.TEDotProductAttention
    assert stock_spec.submodules.self_attention.submodules.linear_qkv is te.TELayerNormColumnParallelLinear
    leaf = apply_to_spec(InferenceRowParallelLinear)
    assert (leaf.module, leaf.params) == (CommFuseRowParallelLinear, {"stock_class": InferenceRowParallelLinear})


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


def check_what_has_to_stay_is_transformer_engines(group_size: int) -> None:
    off = config(group_size)
    off.commfuse = False
    fp8, fp4, inference, fuser, offloading = (config(group_size) for _ in range(5))
    fp8.fp8, fp4.fp4, offloading.cpu_offloading = "hybrid", "e2m1", True
    inference.transformer_impl = "inference_optimized"
    fuser.use_transformer_engine_op_fuser = True
    without = config(group_size, sequence_parallel=False)
    for stock in OURS:
        overlap = OverlapConfig(record=True)
        leaf = apply_to_spec(stock, overlap)
        cases = [(fp8, "config.fp8"), (fp4, "config.fp4"), (without, "sequence_parallel is off"), (off, "switched off")]
        cases += [(inference, "inference_optimized"), (offloading, "cpu_offloading")]
        for transformer, words in cases:
            layer = te_layer(leaf, transformer)
            assert type(layer) is stock, words
            (report,) = model_report(torch.nn.ModuleList([layer])).layers
            assert (report.path, report.overlapped_calls) == ("stock", 0)
            assert words in report.reasons[0]
            assert words in copy.deepcopy(state_of(layer)).kept_reason
            assert state_of(layer).overlap_config is overlap
        assert type(te_layer(leaf, config(group_size))) is OURS[stock]
        assert type(te_layer(leaf, fuser, tp_comm_buffer_name="fc1")) is stock
        assert type(te_layer(leaf, fuser, tp_comm_buffer_name="qkv")) is OURS[stock]
    expert = te_layer(apply_to_spec(te.TEColumnParallelLinear), config(group_size), is_expert=True, skip_bias_add=True)
    assert type(expert) is te.TEColumnParallelLinear
    assert "expert" in state_of(expert).kept_reason
    strict = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
    for stock in OURS:
        with pytest.raises(UnsupportedError, match=r"config\.fp8"):
            te_layer(apply_to_spec(stock, strict), fp8)
        assert type(te_layer(apply_to_spec(stock, strict), off)) is stock, "switched off is no error"


def check_ours_survive_copying(group_size: int) -> None:
    for stock, ours in OURS.items():
        layer = te_layer(apply_to_spec(stock), config(group_size))
        del layer.tp_group  # process groups cannot be copied
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
    assert type(ours) is CommFuseLayerNormColumnParallelLinear
    assert not set(types_of_linears(model)) & set(OURS)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert not ours.training
    assert model.decoder.layers[1].mlp.linear_fc1.training
    assert state_of(ours).name == "decoder.layers.0.mlp.linear_fc1"
    assert ours._is_full_backward_hook
    model.load_state_dict(state)  # without the extra states: our own hook must be there too
    assert called == [ours]
    x = torch.randn(4, 2, gpt.hidden_size, dtype=torch.float64)
    ours(x)
    assert called == [ours, ours, {}]
    for handle in handles:
        handle.remove()
    ours(x)
    assert len(called) == 3
    assert {layer.path for layer in model_report(model).layers} == {"not called", "overlapped"}
    assert convert_model(model) is model


def check_converted_layers_compute_the_same(group_size: int) -> None:
    for options in ({"normalization": "LayerNorm"}, {"layernorm_zero_centered_gamma": True}):
        transformer = config(group_size, layernorm_epsilon=EPS, **options)
        for skip_bias_add in (False, True):
            stocks = {
                "column": (StockNormAndLinear, te.TELayerNormColumnParallelLinear, {"gather_output": False}),
                "row": (RowParallelLinear, te.TERowParallelLinear, {"input_is_parallel": True}),
            }
            for kind, (local, stock, sides) in stocks.items():
                built = te_layer(stock, transformer, skip_bias_add=skip_bias_add)
                with torch.no_grad():
                    for parameter in built.parameters():
                        parameter.copy_(torch.randn_like(parameter))
                expected = local(
                    IN, OUT, config=transformer, init_method=torch.nn.init.normal_, bias=True,
                    skip_bias_add=skip_bias_add, **sides,
                )  # fmt: skip
                expected.load_state_dict({k: v for k, v in built.state_dict().items() if k != "_extra_state"})
                ours = convert_model(torch.nn.ModuleList([built]))[0]
                x = example_input(kind, group_size)
                assert_equal(run(expected, x), run(ours, x))
                assert_overlapped(ours)


def _check_adapters_keep(group_size: int) -> None:
    """Fails without the look at names: the tensors were lost with the layer that held them."""
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
            assert reason.endswith(f"{OURS[stock].__name__} does not know: {name}")


def check_conversion_keeps_with_a_reason(group_size: int) -> None:
    model = te_gpt(GPTS[0], group_size, overlap=False)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)
    wrapped = DistributedDataParallel(model.config, ddp, model)
    before = types_of_linears(model)
    convert_model(wrapped)
    assert types_of_linears(model) == before
    reports = [report for report in model_report(wrapped).layers if report.layer.startswith("TE")]
    assert len(reports) == 8
    assert all("overlap_param_gather" in report.reasons[0] for report in reports)
    wrapped.disable_forward_pre_hook(param_sync=False)
    convert_model(wrapped)
    assert not set(types_of_linears(model)) & set(before)
    wrapped.enable_forward_pre_hook()
    wrapped.disable_forward_pre_hook(param_sync=False)

    fp8 = config(group_size)
    layer = te_layer(te.TERowParallelLinear, fp8)
    held = torch.nn.ModuleDict({"a": layer, "b": layer})
    fp8.fp8 = "hybrid"
    strict = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
    with pytest.raises(UnsupportedError, match=r"a \(TERowParallelLinear\): config\.fp8"):
        convert_model(held, strict)
    convert_model(held)
    assert "config.fp8" in model_report(held).layers[0].reasons[0]
    fp8.fp8 = None
    convert_model(layer)
    assert "the model itself" in model_report(layer).layers[0].reasons[0]
    convert_model(held)
    assert type(held["a"]) is CommFuseRowParallelLinear
    assert held["b"] is held["a"]
    _check_adapters_keep(group_size)
    experts = torch.nn.ModuleList([te_layer(te.TEColumnParallelLinear, config(group_size), is_expert=True)])
    convert_model(experts)
    assert "communicates" in model_report(experts).layers[0].reasons[0]
