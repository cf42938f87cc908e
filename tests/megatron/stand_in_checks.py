"""Checks that whoever goes by class, name or attribute finds on our layers what Megatron's have.

Exporters choose a mapping by the name of the class, quantisers by its `forward`, adapters by `isinstance` and then read
sizes; Megatron-FSDP goes by name, Megatron's resharding by attributes of parameters. Each is run on every rank.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import FullyShardedDataParallel

from commfuse_megatron.plugin import CommFuseLayerNormColumnParallelLinear, apply_to_spec, convert_model
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from commfuse_megatron.plugin.stand_in import OURS
from tests.megatron.layers import IN, OUT, build, config

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


def check_local_layers_pass_for_megatrons(group_size: int) -> None:
    known = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, torch.nn.Linear)
    for skip_bias_add in (False, True):
        for kind, stock in (("column", ColumnParallelLinear), ("row", RowParallelLinear)):
            make = make_linear(kind, config(group_size), skip_bias_add=skip_bias_add)
            assert_ours_pass_for(stock, make, known, by_spec=True)
    assert_ours_pass_for(VocabParallelEmbedding, make_embedding(config(group_size)), known, by_spec=False)


def check_the_fused_layer_has_what_is_read_of_transformer_engines(group_size: int) -> None:
    """Where that is not installed there is nothing to compare with: names and values as its documentation has them."""
    for is_zero_centered in (False, True):
        for normalization in ("RMSNorm", "LayerNorm"):
            transformer = config(
                group_size,
                normalization=normalization,
                layernorm_epsilon=3e-3,
                layernorm_zero_centered_gamma=is_zero_centered,
            )
            layer = build("column", CommFuseLayerNormColumnParallelLinear, transformer, skip_bias_add=True)
            expected = {
                "in_features": IN,
                "out_features": OUT // group_size,
                "tp_size": group_size,
                "tp_rank": torch.distributed.get_rank(),
                "use_bias": True,
                "te_return_bias": True,
                "fuse_wgrad_accumulation": False,
                "eps": 3e-3,
                "zero_centered_gamma": is_zero_centered,
                "normalization": normalization,
                "return_layernorm_output": False,
                "return_layernorm_output_gathered": False,
            }
            assert _values(layer, tuple(expected)) == expected
            assert type(layer).__name__ == "TELayerNormColumnParallelLinear"
            assert isinstance(layer, ColumnParallelLinear)
            split = {name: fsdp_takes_it_for(name, layer) for name, _ in layer.named_parameters()}
            norm = {name: "replicated" for name in split if name.startswith("layer_norm")}
            assert split == {**norm, "weight": "column", "bias": "column"}
            assert len(norm) == (2 if normalization == "LayerNorm" else 1)
