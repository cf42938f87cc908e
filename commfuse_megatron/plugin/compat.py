"""Everything that depends on which Megatron-Core, and which of its optional parts, is installed.

Read against 0.18.2 and 0.19.x. The rest of the plugin imports Megatron's names from here where they moved between
versions or may be missing. Knows nothing of our own classes.
"""

import functools
import inspect
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import FullyShardedDataParallel
from megatron.core.extensions import transformer_engine as _te
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import layers as _layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import get_tensor_model_parallel_group_if_none

__all__ = [
    "HAVE_FUSED_WEIGHT_GRADIENT",
    "HAVE_TRANSFORMER_ENGINE",
    "ColumnParallelLinear",
    "ModuleSpec",
    "RowParallelLinear",
    "TransformerBlockSubmodules",
    "TransformerLayer",
    "WrappedTorchNorm",
    "default_layer_spec",
    "ensure_metadata_has_dp_cp_group",
    "final_norm_class",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "inference_class",
    "is_transformer_engine_linear",
    "layers_of_stage",
    "megatron_groups",
    "tell_fsdp",
    "tensor_parallel_group",
    "training_arguments",
    "transformer_engine_class",
    "waits_for_gathered_parameters",
    "weight_rematerialisation_size",
]

#: Without Transformer Engine its classes exist too, but cannot be built.
HAVE_TRANSFORMER_ENGINE: bool = bool(_te.HAVE_TE)

#: Apex's kernel, without which Megatron's own linears cannot add weight gradients into `main_grad`.
HAVE_FUSED_WEIGHT_GRADIENT: bool = bool(getattr(_layers, "_grad_accum_fusion_available", False))


def transformer_engine_class(name: str) -> type | None:
    """Megatron's wrapper of that name around a Transformer Engine module; None where that is not installed.

    Without it Megatron derives its wrappers from a mock, so that the names exist but are no classes.
    """
    found = getattr(_te, name, None)
    return found if HAVE_TRANSFORMER_ENGINE and isinstance(found, type) else None


def inference_class(name: str) -> type | None:
    """Megatron's subclass for inference of a Transformer Engine linear; None where it is missing."""
    found = getattr(tensor_parallel, name, None)
    return found if HAVE_TRANSFORMER_ENGINE and isinstance(found, type) else None


def is_transformer_engine_linear(module: torch.nn.Module) -> bool:
    """Whether `module` is a linear of Transformer Engine, or one derived from it, grouped ones included."""
    return any("Linear" in cls.__name__ and cls.__module__ == _te.__name__ for cls in type(module).__mro__)


def tensor_parallel_group(group: dist.ProcessGroup | None, is_expert: bool) -> dist.ProcessGroup | None:
    """The group that Megatron's linears take when they are given `group`; None while Megatron has no groups."""
    return get_tensor_model_parallel_group_if_none(group, is_expert=is_expert, check_initialized=False)


def weight_rematerialisation_size(is_expert: bool) -> int:
    """Over how many ranks Megatron shards each weight itself (generalized tensor parallelism); 1 where it does not."""
    name = "get_expert_gtp_weight_remat_group" if is_expert else "get_gtp_weight_remat_group"
    get_group = getattr(parallel_state, name, None)
    group = None if get_group is None else get_group(check_initialized=False)
    return 1 if group is None else group.size()


def waits_for_gathered_parameters(module: torch.nn.Module) -> bool:
    """Whether Megatron's data-parallel wrapper has hooked `module` to wait for its parameters (overlap_param_gather).

    The wrapper remembers such modules by identity.
    """
    return any(
        getattr(hook, "__module__", None) == "megatron.core.distributed.distributed_data_parallel"
        for hook in module._forward_pre_hooks.values()
    )


def final_norm_class() -> type:
    """The norm that Megatron puts after the last layer when a spec describes a layer only."""
    return transformer_block.LayerNormImpl


def layers_of_stage(transformer_config: Any, vp_stage: int | None) -> int:
    """How many transformer layers this pipeline stage builds."""
    return get_num_layers_to_build(transformer_config, vp_stage=vp_stage)


def default_layer_spec(model_config: Any, vp_stage: int | None) -> Any:
    """The spec that `megatron.training` takes for a GPTModelConfig when the user names none.

    `megatron.training` is imported here and not above: it is large, and only scripts that use it come here.
    """
    from megatron.training.models.gpt import default_layer_spec as stock_default

    if "vp_stage" in inspect.signature(stock_default).parameters:
        return stock_default(model_config, vp_stage)
    return stock_default(model_config)


def megatron_groups() -> set[dist.ProcessGroup]:
    """The process groups that Megatron's `parallel_state` holds at the moment."""
    return {value for value in vars(parallel_state).values() if isinstance(value, dist.ProcessGroup)}


def tell_fsdp(kind: str, name: str) -> None:
    """Tell Megatron-FSDP the name of a class of ours; it knows by name which weights tensor parallelism has split.

    Args:
        kind: "column" or "row", or "norm and column": a column-parallel linear whose norm parameters are replicated.
    """
    registry = getattr(FullyShardedDataParallel, "_MODULE_TYPE_REGISTRY", {})
    registry.get("row" if kind == "row" else "column", set()).add(name)
    if kind == "norm and column":
        _detect_replicated_norm(name)


def _detect_replicated_norm(name: str) -> None:
    # The registry knows one kind per class. For the class that holds both kinds, Megatron's method compares the name
    # with Transformer Engine's, and there is no other place to say that ours is such a class too.
    detect = getattr(FullyShardedDataParallel, "_detect_parallelism_type", None)
    if detect is None:
        return

    @functools.wraps(detect)
    def with_ours(self: Any, param_name: str, module: torch.nn.Module) -> str | None:
        if type(module).__name__ == name and param_name.endswith(("layer_norm_weight", "layer_norm_bias")):
            return "replicated"
        return detect(self, param_name, module)

    FullyShardedDataParallel._detect_parallelism_type = with_ours


def training_arguments() -> Any | None:
    """The parsed command line of `megatron.training`, or None where that is not in use."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)
