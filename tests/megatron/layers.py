"""Pairs of layers, stock and ours, with equal weights; what a call gives; what is compared."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.distributed import FullyShardedDataParallel
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, plugin
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear, gather_rows
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.stand_in import OURS
from commfuse_megatron.testing.gpt import SmallGPT, transformer_config

IN, OUT, BATCH, ROWS = 16, 24, 3, 4  # ROWS per rank
TOLERANCE = 1e-13
KINDS = ("column", "row")
STOCK = {"column": ColumnParallelLinear, "row": RowParallelLinear}
OUR = {"column": plugin.CommFuseColumnParallelLinear, "row": plugin.CommFuseRowParallelLinear}
_SIDES = {"column": {"gather_output": False}, "row": {"input_is_parallel": True}}


def config(group_size: int, **options: Any) -> Any:
    return transformer_config(SmallGPT(dtype=options.pop("dtype", torch.float64)), group_size, **options)


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def build(kind: str, cls: type, transformer: Any, **options: Any) -> Any:
    common = {"config": transformer, "init_method": torch.nn.init.normal_, "bias": True, "skip_bias_add": False}
    torch.manual_seed(3)
    layer = cls(IN, OUT, **{**common, **_SIDES[kind], **options})
    with torch.no_grad():
        layer.bias.copy_(torch.randn(OUT, dtype=torch.float64)[: layer.bias.numel()])
    return layer


def example_input(kind: str, group_size: int, rows: int = ROWS, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What this rank brings: all features of its rows to a column linear, its features of all rows to a row linear."""
    shape = (rows, BATCH, IN) if kind == "column" else (rows * group_size, BATCH, IN // group_size)
    return random(shape, 100 + dist.get_rank(), dtype)


def run(layer: Any, x: torch.Tensor, *, backward: Any = None, **call: Any) -> dict[str, torch.Tensor | None]:
    """All that one call returns, and every gradient; `backward(output)` replaces random gradients."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    returned = layer(x, **call)
    outputs, bias = {}, returned[1]
    if getattr(layer, "return_layernorm_output", False):
        outputs["output"], outputs["normed"] = returned[::2] if layer.te_return_bias else returned[0]
    else:
        outputs["output"] = returned[0]
    if backward is None:
        gradients = [random(each.shape, 200 + dist.get_rank(), each.dtype) for each in outputs.values()]
        torch.autograd.backward(list(outputs.values()), gradients)
    else:
        backward(outputs["output"])
    results = {name: each.detach() for name, each in outputs.items()}
    results |= {"returned bias": bias, "gradient of x": x.grad}
    return results | {f"gradient of {name}": p.grad for name, p in layer.named_parameters()}


def assert_equal(expected: dict, found: dict, tolerance: float = TOLERANCE) -> None:
    """tolerance: relative to the largest element of each tensor."""
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


def assert_stock(layer: Any, words: str) -> None:
    state = state_of(layer)
    assert state.overlapped_calls == 0
    (reason,) = state.stock_calls
    assert words in reason, reason


class Pair(NamedTuple):
    """A stock layer and ours with equal weights, and this rank's input."""

    stock: Any
    ours: Any
    x: torch.Tensor

    def set(self, **attributes: Any) -> "Pair":
        """Of both layers."""
        for layer in self[:2]:
            for name, value in attributes.items():
                setattr(layer, name, value)
        return self

    def train(self, is_trained: bool, *parameters: str) -> None:
        """Whether these parameters of both, or all, get gradients."""
        for layer in self[:2]:
            for name, parameter in layer.named_parameters():
                if not parameters or name in parameters:
                    parameter.requires_grad_(is_trained)

    def compare(self, tolerance: float = TOLERANCE, **call: Any) -> dict[str, torch.Tensor | None]:
        """What a call of ours gives: the same as one of stock."""
        expected, found = (run(layer, self.x, **call) for layer in self[:2])
        assert_equal(expected, found, tolerance)
        return found

    def assert_overlapped(self, tolerance: float = TOLERANCE, **call: Any) -> dict[str, torch.Tensor | None]:
        """Overlapped in its first call, which gives the same as one of stock."""
        found = self.compare(tolerance, **call)
        assert_overlapped(self.ours)
        return found

    def assert_stock(self, words: str) -> None:
        """Ours computes the same on Megatron's path, and says why."""
        self.compare()
        assert_stock(self.ours, words)

    def compare_outputs(self) -> None:
        assert_equal({"output": self.stock(self.x)[0]}, {"output": self.ours(self.x)[0]})


def pair(
    kind: str,
    group_size: int,
    *,
    rows: int = ROWS,
    dtype: torch.dtype = torch.float64,
    transformer: Any = None,
    overlap: OverlapConfig | None = None,
    **options: Any,
) -> Pair:
    """transformer: the configuration of both, each has its own by default. overlap: of ours."""
    stock = build(kind, STOCK[kind], transformer or config(group_size, dtype=dtype), **options)
    ours = build(kind, OUR[kind], transformer or config(group_size, dtype=dtype), overlap_config=overlap, **options)
    return Pair(stock, ours, example_input(kind, group_size, rows, dtype))


def count_batches(layer: Any, call: Callable[[], Any]) -> tuple[int, Any]:
    """How many transfer batches go through the layer's context during a call, and its result."""
    transport = state_of(layer).context.link.transport
    with mock.patch.object(transport, "exchange", wraps=transport.exchange) as exchange:
        result = call()
    return exchange.call_count, result


# --- norm and linear in one ---

EPS = 3e-3  # large enough to matter
VARIANTS = [
    {"normalization": normalization, "layernorm_zero_centered_gamma": is_zero_centered}
    for normalization in ("LayerNorm", "RMSNorm")
    for is_zero_centered in (False, True)
]


class StockNormAndLinear(ColumnParallelLinear):
    """The norm spelled out, then Megatron's own linear; what it returns as Transformer Engine's layer documents it."""

    return_layernorm_output = return_layernorm_output_gathered = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.config
        self.te_return_bias = self.skip_bias_add
        self.has_mean, self.offset = options.normalization == "LayerNorm", float(options.layernorm_zero_centered_gamma)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(IN, dtype=options.params_dtype))
        if self.has_mean:
            self.layer_norm_bias = torch.nn.Parameter(torch.empty(IN, dtype=options.params_dtype))

    def forward(self, x: torch.Tensor) -> Any:
        centered = x - x.mean(-1, keepdim=True) if self.has_mean else x
        y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + EPS)
        y = y * (self.layer_norm_weight + self.offset)
        normed = y + self.layer_norm_bias if self.has_mean else y
        output, bias = super().forward(normed)
        if not self.return_layernorm_output:
            return output, bias
        normed = gather_rows(normed, self.tp_group) if self.return_layernorm_output_gathered else normed
        return (output, bias, normed) if self.te_return_bias else ((output, normed), bias)


def norm_config(group_size: int, **options: Any) -> Any:
    return config(group_size, layernorm_epsilon=EPS, **options)


def norm_pair(group_size: int, *, rows: int = ROWS, transformer: Any = None, **options: Any) -> Pair:
    """Both have one configuration; only ours may fuse gradients."""
    transformer = transformer or norm_config(group_size)
    options = {"is_expert": False, **options}
    ours = build("column", plugin.CommFuseLayerNormColumnParallelLinear, transformer, **options)
    fusion, transformer.gradient_accumulation_fusion = transformer.gradient_accumulation_fusion, False
    stock = build("column", StockNormAndLinear, transformer, **options)
    transformer.gradient_accumulation_fusion = fusion
    with torch.no_grad():
        for number, (name, parameter) in enumerate(ours.named_parameters()):
            if name.startswith("layer_norm"):
                parameter.copy_(random((IN,), 21 + number))
                getattr(stock, name).copy_(parameter)
    return Pair(stock, ours, example_input("column", group_size, rows, transformer.params_dtype))


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


def make_embedding(cls: type, transformer: Any, words: int = 64) -> Any:
    options = {"reduce_scatter_embeddings": True, "config": transformer}
    torch.manual_seed(3)
    return cls(words, IN, init_method=torch.nn.init.normal_, **options)


def assert_ours_pass_for(stock_class: type, make: Make, known_classes: tuple[type, ...], *, by_spec: bool) -> None:
    """Ours, converted and (for what specs name) built from one, are to all who ask what a built `stock_class` is."""
    stock = make(stock_class)
    assert type(stock) is stock_class
    converted = plugin.convert_model(torch.nn.ModuleList([make(stock_class)]))[0]
    for ours in [converted, make(plugin.apply_to_spec(stock_class))] if by_spec else [converted]:
        assert OURS[type(ours)] is stock_class
        assert type(ours).__name__ == stock_class.__name__
        assert type(ours).forward is stock_class.forward
        answers = {cls: isinstance(stock, cls) for cls in (*stock_class.__mro__, *known_classes)}
        assert {cls: isinstance(ours, cls) for cls in answers} == answers
        _assert_same_values(values_of(stock, ATTRIBUTES), values_of(ours, ATTRIBUTES))
        assert list(ours.state_dict()) == list(stock.state_dict())
        for (name, expected), (found_name, found) in zip(
            stock.named_parameters(), ours.named_parameters(), strict=True
        ):
            assert found_name == name
            _assert_same_values(values_of(expected, PARAMETER_ATTRIBUTES), values_of(found, PARAMETER_ATTRIBUTES))
            assert fsdp_takes_it_for(name, stock) in ("column", "row", "replicated")
            assert fsdp_takes_it_for(name, ours) == fsdp_takes_it_for(name, stock)


def _assert_same_values(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(found[name], type(value)), name
            assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        elif type(value).__module__.startswith("transformer_engine"):
            assert type(found[name]) is type(value), name
        else:
            assert found[name] is value or found[name] == value, f"{name}: {found[name]}, stock has {value}"


def values_of(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(owner, name, MISSING) for name in names}


def fsdp_takes_it_for(parameter: str, layer: torch.nn.Module) -> str | None:
    """How Megatron-FSDP believes a parameter to be split; its method needs no instance, only the registry."""
    registry = SimpleNamespace(_MODULE_TYPE_REGISTRY=FullyShardedDataParallel._MODULE_TYPE_REGISTRY)
    return FullyShardedDataParallel._detect_parallelism_type(registry, parameter, layer)
