"""Pairs of layers, stock and ours, with equal weights; what a call gives; what is compared."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import FullyShardedDataParallel
from torch import distributed as dist

from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseLayerNormColumnParallelLinear,
    CommFuseRowParallelLinear,
    apply_to_spec,
    convert_model,
)
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear, gather_rows
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.stand_in import OURS
from commfuse_megatron.testing.gpt import SmallGPT, transformer_config

IN, OUT, BATCH, ROWS = 16, 24, 3, 4  # ROWS per rank
TOLERANCE = 1e-13
KINDS = ("column", "row")


def config(group_size: int, **options: Any) -> Any:
    return transformer_config(SmallGPT(dtype=options.pop("dtype", torch.float64)), group_size, **options)


def build(kind: str, cls: type, transformer: Any, **options: Any) -> Any:
    common: dict[str, Any] = {"config": transformer, "init_method": torch.nn.init.normal_, "bias": True}
    specific = {
        "column": {"gather_output": False, "skip_bias_add": False},
        "row": {"input_is_parallel": True, "skip_bias_add": False},
    }[kind]
    torch.manual_seed(3)
    layer = cls(IN, OUT, **{**common, **specific, **options})
    with torch.no_grad():
        layer.bias.copy_(torch.randn(OUT, dtype=torch.float64)[: layer.bias.numel()])
    return layer


def pair(kind: str, group_size: int, transformer: Any = None, **options: Any) -> tuple[Any, Any]:
    """Stock and ours, each with a configuration of its own unless one is given."""
    classes = {
        "column": (ColumnParallelLinear, CommFuseColumnParallelLinear),
        "row": (RowParallelLinear, CommFuseRowParallelLinear),
    }[kind]
    stock, ours = (build(kind, cls, transformer or config(group_size), **options) for cls in classes)
    return stock, ours


def pair_and_input(
    kind: str, group_size: int, *, rows: int = ROWS, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, Any, torch.Tensor]:
    stock, ours = pair(kind, group_size, config(group_size, dtype=dtype) if dtype != torch.float64 else None, **options)
    return stock, ours, example_input(kind, group_size, rows, dtype)


def example_input(kind: str, group_size: int, rows: int = ROWS, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What this rank brings: all features of its rows to a column linear, its features of all rows to a row linear."""
    shape = (rows, BATCH, IN) if kind == "column" else (rows * group_size, BATCH, IN // group_size)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def run(layer: Any, x: torch.Tensor, *, backward: Any = None, **call: Any) -> dict[str, torch.Tensor | None]:
    """Output, returned bias and every gradient of one call; `backward(output)` replaces a random gradient."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    output, bias = layer(x, **call)
    if backward is None:
        generator = torch.Generator().manual_seed(200 + dist.get_rank())
        gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        output.backward(gradient)
    else:
        backward(output)
    results = {"output": output.detach(), "returned bias": bias, "gradient of x": x.grad}
    return results | {f"gradient of {name}": p.grad for name, p in layer.named_parameters()}


def assert_equal(expected: dict, found: dict, tolerance: float = TOLERANCE) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if value is None or found[name] is None:
            assert found[name] is value, f"{name}: one is None"
            continue
        assert value.shape == found[name].shape, name
        assert value.dtype == found[name].dtype, name
        error = ((value - found[name]).abs().max() / value.abs().max()).item()
        assert error <= tolerance, f"{name} differs by {error:.1e}"


def assert_overlapped(layer: Any, calls: int = 1) -> None:
    state = state_of(layer)
    assert (state.overlapped_calls, state.stock_calls) == (calls, {})


def assert_overlapped_as_stock(stock: Any, ours: Any, x: torch.Tensor) -> None:
    assert_equal(run(stock, x), run(ours, x))
    assert_overlapped(ours)


def assert_stock_as_stock(stock: Any, ours: Any, x: torch.Tensor, words: str) -> None:
    """Ours computes the same on Megatron's path, and says why."""
    assert_equal(run(stock, x), run(ours, x))
    assert_stock(ours, words)


def assert_stock(layer: Any, words: str) -> None:
    state = state_of(layer)
    assert state.overlapped_calls == 0
    (reason,) = state.stock_calls
    assert words in reason, reason


def count_batches(layer: Any) -> list[int]:
    """A one-element list that counts the transfer batches of the layer's context from now on."""
    transport = state_of(layer).context.link.transport
    count, exchange = [0], transport.exchange

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return exchange(*args, **kwargs)

    transport.exchange = counted
    return count


def stop_counting(layer: Any) -> None:
    del state_of(layer).context.link.transport.exchange


# --- norm and linear in one ---

EPS = 3e-3  # large enough to matter
VARIANTS = [
    {"normalization": normalization, "layernorm_zero_centered_gamma": is_zero_centered}
    for normalization in ("LayerNorm", "RMSNorm")
    for is_zero_centered in (False, True)
]


class StockNormAndLinear(ColumnParallelLinear):
    """The norm spelled out, then Megatron's own linear."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.config
        self.has_mean, self.offset = options.normalization == "LayerNorm", float(options.layernorm_zero_centered_gamma)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(IN, dtype=options.params_dtype))
        if self.has_mean:
            self.layer_norm_bias = torch.nn.Parameter(torch.empty(IN, dtype=options.params_dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        centered = x - x.mean(-1, keepdim=True) if self.has_mean else x
        y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + EPS)
        y = y * (self.layer_norm_weight + self.offset)
        self.normed = y + self.layer_norm_bias if self.has_mean else y
        return super().forward(self.normed)


def norm_pair(group_size: int, *, transformer: Any = None, **options: Any) -> tuple[Any, Any]:
    transformer = transformer or norm_config(group_size)
    options = {"is_expert": False, **options}
    ours = build("column", CommFuseLayerNormColumnParallelLinear, transformer, **options)
    without = {name: value for name, value in options.items() if name != "overlap_config"}
    fusion, transformer.gradient_accumulation_fusion = transformer.gradient_accumulation_fusion, False
    stock = build("column", StockNormAndLinear, transformer, **without)
    transformer.gradient_accumulation_fusion = fusion
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.startswith("layer_norm"):
                parameter.copy_(torch.randn(IN, generator=generator, dtype=torch.float64))
                getattr(stock, name).copy_(parameter)
    return stock, ours


def norm_config(group_size: int, **options: Any) -> Any:
    return config(group_size, layernorm_epsilon=EPS, **options)


def assert_norm_output(stock: Any, ours: Any, *, is_gathered: bool, is_overlapped: bool = True) -> None:
    """`ours` returns what `stock` has as `normed`, in all forms; with its gradient, all gradients are equal."""
    ours.return_layernorm_output, ours.return_layernorm_output_gathered = True, is_gathered
    x = example_input("column", ours.tp_size)

    def add_up(output: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(200 + dist.get_rank())
        weights = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in (output, normed)]
        return (output * weights[0]).sum() + (normed * weights[1]).sum()

    def expected_normed() -> torch.Tensor:
        return gather_rows(stock.normed, stock.tp_group) if is_gathered else stock.normed

    expected = run(stock, x, backward=lambda output: add_up(output, expected_normed()).backward())
    found = run_with_norm_output(ours, x, add_up)
    assert_equal(expected | {"normed": expected_normed().detach()}, found)
    if is_overlapped:
        assert_overlapped(ours)
    else:
        assert_stock(ours, "switched off")


def run_with_norm_output(layer: Any, x: torch.Tensor, add_up: Any) -> dict[str, torch.Tensor | None]:
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    returned = layer(x)
    if layer.te_return_bias:
        output, bias, normed = returned
    else:
        (output, normed), bias = returned
    add_up(output, normed).backward()
    results = {"output": output.detach(), "returned bias": bias, "gradient of x": x.grad, "normed": normed.detach()}
    return results | {f"gradient of {name}": p.grad for name, p in layer.named_parameters()}


# --- what others go by ---

MISSING = "missing"

#: What is known to be read of linears: by adapters, exporters, quantisers, Megatron-FSDP and Megatron's own code.
ATTRIBUTES = (
    *("in_features", "out_features", "input_size", "output_size"),
    *("input_size_per_partition", "output_size_per_partition", "num_embeddings", "embedding_dim"),
    *("parallel_mode", "tp_size", "tp_rank", "tp_group", "_tp_group", "sequence_parallel", "allreduce_dgrad"),
    *("gather_output", "input_is_parallel", "is_expert", "explicit_expert_comm", "expert_parallel"),
    *("use_bias", "apply_bias", "return_bias", "te_return_bias", "skip_bias_add", "bias", "weight"),
    *("fuse_wgrad_accumulation", "gradient_accumulation_fusion", "disable_grad_reduce", "wgrad_store"),
    *("eps", "zero_centered_gamma", "normalization", "layer_norm_weight", "layer_norm_bias"),
    *("return_layernorm_output", "return_layernorm_output_gathered", "ub_name", "ub_overlap_ag_fprop"),
    *("reduce_scatter_embeddings", "vocab_start_index", "vocab_end_index", "config", "is_first_microbatch"),
    *("tensor_model_parallel", "partition_dim", "stride", "te_quant_params", "fp8", "save_original_input"),
)
#: And of their parameters.
PARAMETER_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")

Make = Callable[[type | Any], Any]


def make_linear(kind: str, transformer: Any, **options: Any) -> Make:
    def make(leaf: Any) -> Any:
        module, parameters = (leaf.module, leaf.params) if hasattr(leaf, "params") else (leaf, {})
        return build(kind, module, transformer, **options, **parameters)

    return make


def make_embedding(transformer: Any) -> Make:
    return lambda cls: cls(
        64, IN, init_method=torch.nn.init.normal_, reduce_scatter_embeddings=True, config=transformer
    )


def assert_ours_pass_for(stock_class: type, make: Make, known_classes: tuple[type, ...], *, by_spec: bool) -> None:
    """Ours, converted and (for what specs name) built from one, are to all who ask what a built `stock_class` is."""
    stock = make(stock_class)
    assert type(stock) is stock_class
    converted = convert_model(torch.nn.ModuleList([make(stock_class)]))[0]
    for ours in [converted, make(apply_to_spec(stock_class))] if by_spec else [converted]:
        assert OURS[type(ours)] is stock_class
        assert type(ours).__name__ == stock_class.__name__
        assert type(ours).forward is stock_class.forward
        answers = {cls: isinstance(stock, cls) for cls in (*stock_class.__mro__, *known_classes)}
        assert {cls: isinstance(ours, cls) for cls in answers} == answers
        assert_same_values(_values(stock, ATTRIBUTES), _values(ours, ATTRIBUTES))
        assert list(ours.state_dict()) == list(stock.state_dict())
        for (name, expected), (found_name, found) in zip(
            stock.named_parameters(), ours.named_parameters(), strict=True
        ):
            assert found_name == name
            assert_same_values(_values(expected, PARAMETER_ATTRIBUTES), _values(found, PARAMETER_ATTRIBUTES))
            assert fsdp_takes_it_for(name, stock) in ("column", "row", "replicated")
            assert fsdp_takes_it_for(name, ours) == fsdp_takes_it_for(name, stock)


def assert_same_values(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(found[name], type(value)), name
            assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        elif type(value).__module__.startswith("transformer_engine"):
            assert type(found[name]) is type(value), name
        else:
            assert found[name] is value or found[name] == value, f"{name}: {found[name]}, stock has {value}"


def _values(of: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(of, name, MISSING) for name in names}


def fsdp_takes_it_for(parameter: str, layer: torch.nn.Module) -> str | None:
    """How Megatron-FSDP believes a parameter to be split; its method needs no instance, only the registry."""
    registry = SimpleNamespace(_MODULE_TYPE_REGISTRY=FullyShardedDataParallel._MODULE_TYPE_REGISTRY)
    return FullyShardedDataParallel._detect_parallelism_type(registry, parameter, layer)
