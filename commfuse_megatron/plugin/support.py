"""Why a layer takes Megatron's own path: one function, one sentence per reason, for log, report and error alike.

Reads flags on every call, since Megatron changes some after construction (`sequence_parallel`, `explicit_expert_comm`).
Beware: the answer must be the same on every rank of the group, so it looks at configuration, shapes, dtypes and modes,
never at values, memory or timing.
"""

from collections.abc import Callable
from typing import Any

import torch

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.ops.kinds import OF_TORCH
from commfuse_megatron.plugin import arguments, compat
from commfuse_megatron.plugin.stand_in import reason_in_class

#: The only reason that was asked for.
SWITCHED_OFF = "config.commfuse is False: switched off"

#: Under context parallelism alone that of all linears.
ONE_RANK = "the tensor-parallel group has one rank: there is nothing to hide"

# Of a GEMM's output tile, of any kernel: fewer tokens than this on each rank fill one however they are cut.
_LEAST_TOKENS = 128

#: Without sequence parallelism, where the layer is not trained and no gradient is asked for.
DECODING = (
    f"sequence_parallel is off and inference brings fewer than {_LEAST_TOKENS} tokens per rank, as decoding does: too"
    " few to cut"
)

#: On GPUs, without sequence parallelism.
ALL_REDUCE_NOT_RUN = (
    "sequence_parallel is off, and all-reduces under GEMMs have not run on GPUs yet: linear.fprop.path or"
    " linear.dgrad.path: sliced asks for them"
)

_NOTHING_MISSED = frozenset({SWITCHED_OFF, ONE_RANK, DECODING})

#: How the reason begins for what the planner left to Megatron.
PLANNED = "planned as "

_GTP = "the weight is sharded over a weight-rematerialisation group (gtp_remat_size > 1)"
_FLOAT64_ON_GPU = "the tensors are torch.float64 on a GPU: float64 is overlapped on the CPU only"

_LINEARS_AND_EMBEDDING: tuple[type, ...] = (
    compat.ColumnParallelLinear,
    compat.RowParallelLinear,
    *compat.TRANSFORMER_ENGINE_LINEARS,
    compat.VocabParallelEmbedding,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: Attribute of the TransformerConfig -> why a layer under it stays stock when the attribute is set.
_SETTINGS = {
    "fp8": "config.fp8 is set: quantised GEMMs are Transformer Engine's own",
    "fp4": "config.fp4 is set: quantised GEMMs are Transformer Engine's own",
    "tp_comm_overlap": "config.tp_comm_overlap is on: Transformer Engine's userbuffers already own the communication",
    "batch_invariant_mode": "config.batch_invariant_mode is on: partial GEMMs may round differently from whole ones",
    "symmetric_ar_type": "config.symmetric_ar_type is set: it replaces the all-reduce of linears",
    "cpu_offloading": "config.cpu_offloading is on: offloading tags activations inside Megatron's own forward",
}

#: Megatron's classes beside linears and the embedding -> what judges them.
_JUDGES: dict[tuple[type, ...], Callable[[Any], str | None]] = {}


def misses_nothing(reason: str) -> bool:
    """Whether Megatron's own path is as good as ours for this reason: never an error, nor worth a warning."""
    return reason in _NOTHING_MISSED or reason.startswith(PLANNED)


def judges[F: Callable[..., str | None]](*stock: type) -> Callable[[F], F]:
    """Decorates what says, of built modules of these classes of Megatron's, why they take Megatron's own path."""

    def decorate(judge: F) -> F:
        _JUDGES[stock] = judge
        return judge

    return decorate


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
        layer: a column- or row-parallel linear, a vocabulary-parallel embedding, a self-attention (whether its queries
            are split; its linears are asked for themselves) or a core attention (the exchange of context parallelism).
        input_: the input of a call; without it, only what the layer and its configuration say is judged.
        weight: the weight of that call; without it, the one that the layer holds. One that is computed at every access
            (a parametrization) is not computed for the question.
        grad_output_buffer: what Megatron passes for a deferred weight gradient.

    Raises ConfigError for a module of another kind, of which it knows nothing.
    """
    if not isinstance(layer, _LINEARS_AND_EMBEDDING):
        answer = next((judge for stock, judge in _JUDGES.items() if isinstance(layer, stock)), None)
        if answer is None:
            known = ", ".join(each.__name__ for each in (*_LINEARS_AND_EMBEDDING, *sum(_JUDGES, ())))
            raise ConfigError(f"unsupported_reason knows nothing of a {type(layer).__name__}; it answers for {known}")
        return answer(layer)
    weight = _held_by(layer, "weight") if weight is None else weight
    if isinstance(layer, compat.VocabParallelEmbedding):
        return _reason_in_embedding(layer, input_, weight)
    reason = _reason_in_linear(layer, weight) or _reason_in_layer(layer, weight)
    reason = reason or _reason_in_operands(layer, input_, weight)
    if reason is None and grad_output_buffer is not None:
        reason = "the weight gradient of the output layer is deferred (config.defer_embedding_wgrad_compute)"
    return reason


def reason_in_projection(layer: Any, input_: torch.Tensor) -> str | None:
    """Why a linear of a tensor-parallel group of one rank does not become part of another operation of ours."""
    weight = _held_by(layer, "weight")
    reason = _reason_in_linear(layer, weight)
    if reason is None and compat.group_of(layer).size() > 1:
        reason = (
            f"the tensor-parallel group has {compat.group_of(layer).size()} ranks, over which it communicates itself"
        )
    if reason is None and getattr(weight, "gtp_remat_size", 1) > 1:
        reason = _GTP
    if reason is None and weight is None:
        reason = "its weight is computed at every access"
    return reason or _reason_in_operands(layer, input_, weight)


def _reason_in_linear(layer: Any, weight: Any) -> str | None:
    is_transformer_engines = isinstance(layer, compat.TRANSFORMER_ENGINE_LINEARS)
    judge = _reason_in_transformer_engine_layer if is_transformer_engines else _reason_in_local_layer
    return _reason_in_config(layer.config) or reason_in_class(layer) or judge(layer, weight)


def _reason_in_operands(layer: Any, input_: torch.Tensor | None, weight: Any) -> str | None:
    reason = _reason_in_type("bias", _held_by(layer, "bias"))
    if reason is None and input_ is not None:
        reason = _reason_in_input(layer, input_)
        if reason is None and weight is not None:
            reason = _reason_in_weight(layer, input_, weight)
    return reason


def _reason_in_embedding(layer: Any, ids: torch.Tensor | None, weight: Any) -> str | None:
    if not arguments.is_switched_on(layer.config):
        return SWITCHED_OFF
    reason = reason_in_class(layer)
    if reason is not None:
        return reason
    group_size = layer.tp_group.size()
    if group_size == 1:
        return ONE_RANK
    if not layer.reduce_scatter_embeddings:
        return "the embedding all-reduces (no sequence parallelism, or positions are added first): not overlapped"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return _GTP
    if getattr(layer, "use_inference_optimized_reduce_scatter", False) and not layer.training:
        return "transformer_impl is inference_optimized: it has a reduce-scatter of its own"
    reason = _reason_in_type("weight", weight) or _reason_in_type("input", ids)
    if reason is not None or ids is None:
        return reason
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        return f"the input is {ids.dtype} of {ids.dim()} dimensions: only integers [batch, sequence] are overlapped"
    if ids.numel() == 0:
        return "the input is empty"
    if ids.size(1) % group_size:
        return _not_divisible(ids.size(1), group_size)
    if weight is not None and weight.is_cuda and weight.dtype == torch.float64:
        return _FLOAT64_ON_GPU
    return None


def _held_by(layer: Any, name: str) -> Any:
    """The tensor that the layer has under `name`; None for one that its class computes at every access."""
    own = vars(layer)
    for tensors in (own["_parameters"], own, own["_buffers"]):
        if name in tensors:
            return tensors[name]
    return None


def _reason_in_type(what: str, tensor: torch.Tensor | None) -> str | None:
    """What tensors of other classes do of their own, ours would pass by."""
    if tensor is None or type(tensor) in OF_TORCH:
        return None
    return f"the {what} is a {type(tensor).__name__}: only plain tensors are overlapped"


def _not_divisible(length: int, group_size: int) -> str:
    return (
        f"the sequence length {length} is not divisible by the {group_size} ranks of the tensor-parallel group:"
        " Megatron itself raises"
    )


def _is_row(layer: Any) -> bool:
    return isinstance(layer, compat.ROW_PARALLEL_LINEARS)


def _reason_in_config(config: Any) -> str | None:
    if not arguments.is_switched_on(config):
        return SWITCHED_OFF
    for name, reason in _SETTINGS.items():
        if getattr(config, name, None):
            return reason
    return None


def _reason_in_layer(layer: Any, weight: Any) -> str | None:
    if compat.group_of(layer).size() == 1:
        return ONE_RANK
    # Transformer Engine's have no such switch.
    if not (layer.sequence_parallel or _is_row(layer) or getattr(layer, "allreduce_dgrad", True)):
        return (
            "sequence_parallel and allreduce_dgrad are off: the layer reduces the input gradient outside of its GEMMs"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1 or getattr(weight, "gtp_remat_size", 1) > 1:
        return _GTP
    return None


def _reason_in_local_layer(layer: Any, _: Any) -> str | None:
    if layer.is_expert:
        return "the layer belongs to an expert: the token dispatcher communicates for it"
    if layer.explicit_expert_comm:
        return "explicit_expert_comm is set: the caller communicates for this layer"
    if getattr(layer, "disable_grad_reduce", False):
        return "disable_grad_reduce is set: the caller reduces the input gradient"
    if _is_row(layer) and not layer.input_is_parallel:
        return "input_is_parallel is False: the layer splits its input itself"
    return None


def _reason_in_transformer_engine_layer(layer: Any, weight: Any) -> str | None:
    if layer.parallel_mode is None:
        return "parallel_mode is None: the caller communicates for this layer, of an expert or of shared experts"
    if layer.te_quant_params is not None:
        return "the layer has a quantisation recipe of its own (config.quant_recipe)"
    if getattr(layer.config, "transformer_impl", None) == "inference_optimized":
        return "config.transformer_impl is inference_optimized: Megatron's inference steers its own layers"
    if getattr(weight, "overwrite_main_grad", False):
        return "weight.overwrite_main_grad is set: Transformer Engine writes the gradient over what is there"
    return compat.reason_in_precision()


def reason_in_tensors(**inputs: torch.Tensor) -> str | None:
    """Why activations of such a kind are left to Megatron, by the name of the first that is."""
    for name, tensor in inputs.items():
        reason = _reason_in_type(name, tensor)
        if reason is not None:
            return reason
        if tensor.numel() == 0:
            return f"the {name} is empty"
        if tensor.dtype not in _DTYPES:
            return f"the {name} is {tensor.dtype}: overlapped are {', '.join(map(str, _DTYPES))}"
        if tensor.is_cuda and tensor.dtype == torch.float64:
            return _FLOAT64_ON_GPU
    return None


def _reason_in_input(layer: Any, input_: torch.Tensor) -> str | None:
    if input_.dim() != 3 and type(input_) in OF_TORCH:
        return f"the input has {input_.dim()} dimensions: only [sequence, batch, features] is overlapped"
    reason = reason_in_tensors(input=input_)
    if reason is not None:
        return reason
    group_size = compat.group_of(layer).size()
    if layer.sequence_parallel:
        uneven = _is_row(layer) and input_.size(0) % group_size
        return _not_divisible(input_.size(0), group_size) if uneven else None
    is_small = input_.size(0) * input_.size(1) < _LEAST_TOKENS * group_size
    # Training under full recompute asks for no gradients the first time.
    return DECODING if is_small and not (layer.training or torch.is_grad_enabled()) else None


def _reason_in_weight(layer: Any, input_: torch.Tensor, weight: torch.Tensor) -> str | None:
    reason = _reason_in_type("weight", weight)
    if reason is not None:
        return reason
    if weight.dtype != input_.dtype and not torch.is_autocast_enabled(input_.device.type):
        return f"the weight is {weight.dtype} but the input {input_.dtype}: Megatron itself raises"
    if not (compat.fuses_weight_gradient(layer) and weight.requires_grad and torch.is_grad_enabled()):
        return None
    if hasattr(weight, "__fsdp_param__"):
        return "the weight belongs to Megatron-FSDP, which makes main_grad inside Megatron's own backward"
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return "gradient_accumulation_fusion is on but the weight has no main_grad"
    if main_grad.dtype not in (torch.float32, weight.dtype):
        return f"main_grad is {main_grad.dtype}: gradients are added into torch.float32 or the weight's {weight.dtype}"
    return None
