"""Everything that depends on which Megatron-Core, and which of its optional parts, is installed.

Read against 0.18.2 and 0.19.x. The rest of the plugin imports Megatron's names from here where they moved between
versions or may be missing. Knows nothing of our own classes.
"""

import inspect
import sys
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import FullyShardedDataParallel
from megatron.core.extensions import transformer_engine as _te
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

__all__ = [
    "HAVE_TRANSFORMER_ENGINE",
    "AttnMaskType",
    "ColumnParallelLinear",
    "DotProductAttention",
    "ModuleSpec",
    "RowParallelLinear",
    "SelfAttention",
    "TransformerBlockSubmodules",
    "WrappedTorchNorm",
    "default_layer_spec",
    "final_norm_class",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "layers_of_stage",
    "megatron_groups",
    "tell_fsdp",
    "training_arguments",
]

#: Without Transformer Engine its classes exist too, but cannot be built.
HAVE_TRANSFORMER_ENGINE: bool = bool(_te.HAVE_TE)


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


def tell_fsdp(column: str, row: str) -> None:
    """Tell Megatron-FSDP the names of our classes; it knows by name which weights tensor parallelism has split."""
    registry = getattr(FullyShardedDataParallel, "_MODULE_TYPE_REGISTRY", {})
    registry.get("column", set()).add(column)
    registry.get("row", set()).add(row)


def training_arguments() -> Any | None:
    """The parsed command line of `megatron.training`, or None where that is not in use."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)
