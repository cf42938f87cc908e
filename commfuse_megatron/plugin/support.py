"""Why a layer takes Megatron's own path: one function, one sentence per reason, for log, report and error alike.

Reads flags on every call, since Megatron changes some after construction (`sequence_parallel`, `explicit_expert_comm`).
The contract that bites: the answer must be the same on every rank of the group, so it looks at configuration, shapes,
dtypes and modes, never at values, memory or timing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.plugin import arguments, compat

__all__ = ["SWITCHED_OFF", "Prospect", "reason_to_stay", "unsupported_reason"]

#: The only reason that was asked for; it is never an error.
SWITCHED_OFF = "config.commfuse is False: switched off"

_ONE_RANK = "the tensor-parallel group has one rank: there is nothing to hide"
_GTP = "the weight is sharded over a weight-rematerialisation group (gtp_remat_size > 1)"
_FLOAT64_ON_GPU = "the tensors are torch.float64 on a GPU: float64 is overlapped on the CPU only"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: Attribute of the TransformerConfig -> why a layer under it stays stock when the attribute is set.
_SETTINGS = {
    "fp8": "config.fp8 is set: quantised GEMMs are Transformer Engine's own",
    "fp4": "config.fp4 is set: quantised GEMMs are Transformer Engine's own",
    "tp_comm_overlap": "config.tp_comm_overlap is on: Transformer Engine's userbuffers already own the communication",
    "delay_wgrad_compute": "config.delay_wgrad_compute is on: the weight gradient is not computed in the backward pass",
    "batch_invariant_mode": "config.batch_invariant_mode is on: partial GEMMs may round differently from whole ones",
    "symmetric_ar_type": "config.symmetric_ar_type is set: it replaces the all-reduce of linears",
    "cpu_offloading": "config.cpu_offloading is on: offloading tags activations inside Megatron's own forward",
}

#: The same for what only Transformer Engine's own layers do, decided before a layer is built or replaced.
_SETTINGS_THAT_KEEP = {
    "quant_recipe": "config.quant_recipe is set: quantised GEMMs are Transformer Engine's own",
    "init_model_with_meta_device": "config.init_model_with_meta_device is on: Megatron's local linears, from which ours"
    " inherit, cannot be built on the meta device",
}


def unsupported_reason(
    layer: torch.nn.Module,
    input_: torch.Tensor | None = None,
    *,
    weight: torch.Tensor | None = None,
    grad_output_buffer: list | None = None,
) -> str | None:
    """Why `layer` runs Megatron's own path, as a sentence, or None where its communication is overlapped.

    While a CUDA graph is captured there is one more reason, see `capture`.

    Args:
        layer: a column- or row-parallel linear, or a vocabulary-parallel embedding.
        input_: the input of a call; without it, only what the layer and its configuration say is judged.
        weight: the weight of that call where it is not the layer's own (tied embeddings).
        grad_output_buffer: what Megatron passes for a deferred weight gradient.
    """
    weight = getattr(layer, "weight", None) if weight is None else weight
    if isinstance(layer, compat.VocabParallelEmbedding):
        return _reason_in_embedding(layer, input_, weight)
    reason = _reason_in_config(layer.config) or _reason_in_layer(layer)
    if reason is None and input_ is not None:
        reason = _reason_in_input(layer, input_)
        if reason is None and weight is not None:
            reason = _reason_in_weight(layer, input_, weight)
    if reason is None and grad_output_buffer is not None:
        reason = "the weight gradient of the output layer is deferred (config.defer_embedding_wgrad_compute)"
    return reason


def _reason_in_embedding(layer: Any, ids: torch.Tensor | None, weight: Any) -> str | None:
    if not arguments.is_switched_on(layer.config):
        return SWITCHED_OFF
    group_size = layer.tp_group.size()
    if group_size == 1:
        return _ONE_RANK
    if not layer.reduce_scatter_embeddings:
        return "the embedding all-reduces (no sequence parallelism, or positions are added first): not overlapped"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return _GTP
    if getattr(layer, "use_inference_optimized_reduce_scatter", False) and not layer.training:
        return "transformer_impl is inference_optimized: it has a reduce-scatter of its own"
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return f"the weight is a {type(weight).__name__}: only plain tensors are overlapped"
    if ids is None:
        return None
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        return f"the input is {ids.dtype} of {ids.dim()} dimensions: only integers [batch, sequence] are overlapped"
    if ids.numel() == 0:
        return "the input is empty"
    if ids.size(1) % group_size:
        return _not_divisible(ids.size(1), group_size)
    if weight.is_cuda and weight.dtype == torch.float64:
        return _FLOAT64_ON_GPU
    return None


def _not_divisible(length: int, group_size: int) -> str:
    return (
        f"the sequence length {length} is not divisible by the {group_size} ranks of the tensor-parallel group:"
        " Megatron itself raises"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What is known of a linear before ours takes the place of Transformer Engine's, named as in built layers.

    tp_comm_buffer_name: which linear of a transformer layer it is, as far as Megatron says so.
    """

    config: Any
    tp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    is_expert: bool = False
    explicit_expert_comm: bool = False
    tp_comm_buffer_name: str | None = None

    @property
    def gtp_remat_size(self) -> int:
        """As in Megatron's layers: over how many ranks the weight is sharded for rematerialisation."""
        return compat.weight_rematerialisation_size(self.is_expert)


def reason_to_stay(prospect: Prospect) -> str | None:
    """Why Transformer Engine's own layer is built, or stays, as a sentence; None where ours takes its place."""
    config = prospect.config
    if prospect.tp_group is None:
        return "Megatron's parallel state is not initialised: there is no tensor-parallel group to communicate in"
    reason = _reason_in_config(config) or _reason_in_layer(prospect)
    if reason is not None:
        return reason
    for name, reason in _SETTINGS_THAT_KEEP.items():
        if getattr(config, name, None):
            return reason
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        return "config.transformer_impl is inference_optimized: Megatron's inference steers its own layers"
    if getattr(config, "use_transformer_engine_op_fuser", False) and prospect.tp_comm_buffer_name in ("fc1", "fc2"):
        return "config.use_transformer_engine_op_fuser is on: one fused operation takes the parameters of fc1 and fc2"
    return None


def _is_row(layer: Any) -> bool:
    return isinstance(layer, compat.RowParallelLinear)


def _reason_in_config(config: Any) -> str | None:
    if not arguments.is_switched_on(config):
        return SWITCHED_OFF
    for name, reason in _SETTINGS.items():
        if getattr(config, name, None):
            return reason
    return None


def _reason_in_layer(layer: Any) -> str | None:
    if layer.is_expert:
        return "the layer belongs to an expert: the token dispatcher communicates for it"
    if layer.explicit_expert_comm:
        return "explicit_expert_comm is set: the caller communicates for this layer"
    if layer.tp_group.size() == 1:
        return _ONE_RANK
    if not layer.sequence_parallel:
        return "sequence_parallel is off: the layer all-reduces, and only all-gather and reduce-scatter are overlapped"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return _GTP
    if getattr(layer, "disable_grad_reduce", False):
        return "disable_grad_reduce is set: the caller reduces the input gradient"
    if _is_row(layer) and not layer.input_is_parallel:
        return "input_is_parallel is False: the layer splits its input itself"
    return None


def _reason_in_input(layer: Any, input_: torch.Tensor) -> str | None:
    if input_.dim() != 3:
        return f"the input has {input_.dim()} dimensions: only [sequence, batch, features] is overlapped"
    if input_.numel() == 0:
        return "the input is empty"
    if input_.dtype not in _DTYPES:
        return f"the input is {input_.dtype}: overlapped are {', '.join(map(str, _DTYPES))}"
    if input_.is_cuda and input_.dtype == torch.float64:
        return _FLOAT64_ON_GPU
    group_size = layer.tp_group.size()
    if _is_row(layer) and input_.size(0) % group_size:
        return _not_divisible(input_.size(0), group_size)
    return None


def _reason_in_weight(layer: Any, input_: torch.Tensor, weight: torch.Tensor) -> str | None:
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return f"the weight is a {type(weight).__name__}: only plain tensors are overlapped"
    if weight.dtype != input_.dtype and not torch.is_autocast_enabled(input_.device.type):
        return f"the weight is {weight.dtype} but the input {input_.dtype}: Megatron itself raises"
    if not (layer.gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled()):
        return None
    if hasattr(weight, "__fsdp_param__"):
        return "the weight belongs to Megatron-FSDP, which makes main_grad inside Megatron's own backward"
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return "gradient_accumulation_fusion is on but the weight has no main_grad"
    if main_grad.dtype not in (torch.float32, weight.dtype):
        return f"main_grad is {main_grad.dtype}: gradients are added into torch.float32 or the weight's {weight.dtype}"
    return None
