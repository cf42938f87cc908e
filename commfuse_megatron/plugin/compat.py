"""Everything that depends on which Megatron-Core, and which of its optional parts, is installed.

Read against 0.18.2 and 0.19.x; `compat_training` has what depends on `megatron.training`. The rest of the plugin
imports Megatron's names from here where they moved between versions or may be missing. Knows nothing of our classes.
"""
# ruff: noqa: F401  (some are for others only)

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as _te
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers as _layers
from megatron.core.tensor_parallel import mappings as _mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import transformer_block
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

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


def _those_of_transformer_engine(*names: str) -> tuple[type, ...]:
    return tuple(found for name in names if (found := transformer_engine_class(name)))


#: Megatron's wrappers of Transformer Engine's linears; those among all linears that split their input.
TRANSFORMER_ENGINE_LINEARS = _those_of_transformer_engine("TELinear", "TELayerNormColumnParallelLinear")
ROW_PARALLEL_LINEARS = (RowParallelLinear, *_those_of_transformer_engine("TERowParallelLinear"))

#: What Megatron's specs put in for attention itself, local and Transformer Engine's.
CORE_ATTENTIONS = (DotProductAttention, *_those_of_transformer_engine("TEDotProductAttention"))


def group_of(layer: Any) -> dist.ProcessGroup:
    """The group that a built layer communicates over, local or Transformer Engine's: of a linear or embedding the
    tensor-parallel one, of a core attention under context parallelism that one."""
    if isinstance(layer, CORE_ATTENTIONS):
        group = context_parallel_group(layer)
        assert group is not None
        return group
    return vars(layer).get("_tp_group") or layer.tp_group


def context_parallel_group(core: Any) -> dist.ProcessGroup | None:
    """The ranks that share the sequences of a built core attention; None where each has whole ones.

    Of `cp_comm_type` a2a+p2p, which has several groups, the first of more than one rank.
    """
    if not isinstance(core, DotProductAttention):  # what the instance says counts: it may be given another group
        groups = core.cp_group if isinstance(core.cp_group, list | tuple) else [core.cp_group]
        return next((group for group in groups if group is not None and group.size() > 1), None)
    if core.config.context_parallel_size == 1:  # as of an encoder beside a decoder that has it
        return None
    group = getattr(core.pg_collection, "cp", None) or parallel_state.get_context_parallel_group(False)
    return group if group is not None and group.size() > 1 else None


@functools.cache
def transformer_engines_attention(backend: str) -> str:
    """What Transformer Engine's core attention is called in plans: what its time depends on beside sizes."""
    import transformer_engine

    version = transformer_engine.__version__
    return f"Transformer Engine {version}" + (f" {backend}" if backend != "auto" else "")


@contextlib.contextmanager
def unchanged_random_states(device: torch.device) -> Iterator[None]:
    """PyTorch's random states, of the CPU and of `device`, and Megatron's are afterwards what they were before."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    # Those that CUDA graphs may use are generators, which others hold as well.
    shared = {name: state.get_state() for name, state in states.items() if isinstance(state, torch.Generator)}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for name, state in shared.items():
        states[name].set_state(state)
    tracker.set_states(states)


def attention_groups() -> ProcessGroupCollection:
    """The groups that an attention takes from Megatron's parallel state where it is given none."""
    return ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])


def fuses_weight_gradient(layer: Any) -> bool:
    """Whether the built linear adds its weight gradient to `main_grad`."""
    own = vars(layer)
    return own["fuse_wgrad_accumulation"] if "fuse_wgrad_accumulation" in own else own["gradient_accumulation_fusion"]


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S/R, B, K] -> [S, B, K] by Megatron's collective; the gradient, a part of a sum, is reduce-scattered."""
    return gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True, group=group)


#: (attributes of the holder, its name, name, function) of what Megatron's forward and backward are and call, and ours
#: pass by. Quantisers put others in their place for the time of a call. None: none of its own, or not its own.
_Watched = tuple[tuple[Mapping[str, Any], str, str, Any], ...]


def _watch(holder: Any, *names: str, origins: tuple[str, ...] = ("megatron.", "torch.")) -> _Watched:
    """origins: how the modules begin whose functions may have been there before; ("",) takes any."""
    attributes = vars(holder)
    found = [(name, attributes.get(name)) for name in names]
    return tuple(
        (attributes, holder.__name__, name, own if str(getattr(own, "__module__", "")).startswith(origins) else None)
        for name, own in found
    )


def _watch_autograd(holder: Any, *names: str) -> _Watched:
    """Autograd functions: the classes, and what they do; `apply` is inherited."""
    functions = [_watch(vars(holder)[name], "forward", "backward", "apply") for name in names]
    return sum(functions, _watch(holder, *names))


_COLLECTIVES = ("dist_all_gather_func", "dist_reduce_scatter_func")
_LOCAL_FUNCTIONS: _Watched = (
    *_watch(
        _layers,
        "linear_with_grad_accumulation_and_async_allreduce",
        "linear_with_frozen_weight",
        "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "prepare_input_tensors_for_wgrad_compute",
        *_COLLECTIVES,
    ),
    *_watch(_mappings, "_gather_along_first_dim", "_reduce_scatter_along_first_dim", *_COLLECTIVES),
    *_watch_autograd(_layers, "LinearWithFrozenWeight", "LinearWithGradAccumulationAndAsyncCommunication"),
    *_watch_autograd(_mappings, "_GatherFromSequenceParallelRegion", "_ReduceScatterToSequenceParallelRegion"),
    *_watch(ColumnParallelLinear, "forward", "_forward_impl"),
    *_watch(RowParallelLinear, "forward", "_forward_impl"),
    *_watch(VocabParallelEmbedding, "forward"),
)


def _transformer_engine_functions() -> _Watched:
    if not HAVE_TRANSFORMER_ENGINE:
        return ()
    from transformer_engine.pytorch.module import layernorm_linear, linear

    modules = [linear.Linear, layernorm_linear.LayerNormLinear, *TRANSFORMER_ENGINE_LINEARS]
    modules += _those_of_transformer_engine("TEColumnParallelLinear", "TERowParallelLinear")
    functions = (linear._Linear, layernorm_linear._LayerNormLinear)
    watched = [_watch(function, "forward", "backward", "apply", origins=("",)) for function in functions]
    return sum((*watched, *(_watch(module, "forward", origins=("",)) for module in modules)), ())


_TRANSFORMER_ENGINE_FUNCTIONS = _transformer_engine_functions()
_CORE_ATTENTION_FUNCTIONS: _Watched = sum((_watch(cls, "forward", origins=("",)) for cls in CORE_ATTENTIONS), ())


def reason_in_functions(layer: torch.nn.Module) -> str | None:
    """Why the built layer takes Megatron's path: somebody replaced a function that Megatron's forward is or calls."""
    if isinstance(layer, CORE_ATTENTIONS):
        return reason_in_core_attention()
    if "_forward_impl" in vars(layer):
        return "the layer has a _forward_impl of its own in the instance, which ours would pass by"
    is_local = not isinstance(layer, TRANSFORMER_ENGINE_LINEARS)
    return _first_replaced(_LOCAL_FUNCTIONS if is_local else _TRANSFORMER_ENGINE_FUNCTIONS)


def reason_in_core_attention() -> str | None:
    """Why attention stays Megatron's: somebody replaced the forward of a class of core attention."""
    return _first_replaced(_CORE_ATTENTION_FUNCTIONS)


def _first_replaced(watched: _Watched) -> str | None:
    for attributes, holder, name, own in watched:
        found = attributes.get(name)
        if found is not own and getattr(found, "observes", None) is not own:  # as our own traces do, and change nothing
            return f"{name} of {holder} is replaced by something else, which ours would pass by"
    return None


def reason_in_precision() -> str | None:
    """Why a linear of Transformer Engine takes its own path in this call, beside what the configuration says."""
    if _te.FP8GlobalStateManager.is_fp8_enabled():
        return "fp8 is on around this call: quantised GEMMs are Transformer Engine's own"
    if _debug_state is not None and _debug_state.debug_enabled:
        return "Transformer Engine's debug tools are on: they look at its own GEMMs"
    return None


def reason_in_attention_precision() -> str | None:
    """Why a core attention of Transformer Engine takes its own path in this call; fp8 linears around it are none."""
    if not HAVE_TRANSFORMER_ENGINE:
        return None
    state = _te.FP8GlobalStateManager
    recipe = state.get_fp8_recipe() if state.is_fp8_enabled() else None
    if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        return "attention is computed in fp8 around this call: it is Transformer Engine's own"
    return None


_debug_state: Any = None
if HAVE_TRANSFORMER_ENGINE:
    with contextlib.suppress(ImportError):  # older releases have none
        from transformer_engine.debug.pytorch.debug_state import TEDebugState as _debug_state  # type: ignore[no-redef]


def is_transformer_engine_linear(module: torch.nn.Module) -> bool:
    """Whether `module` is a linear of Transformer Engine, or one derived from it, grouped ones included."""
    return any("Linear" in cls.__name__ and cls.__module__ == _te.__name__ for cls in type(module).__mro__)


def megatron_groups() -> tuple[dist.ProcessGroup, ...]:
    """The process groups that Megatron's `parallel_state` holds at the moment, each once, in an order that is the same
    on all ranks: that of its variables."""
    found: dict[dist.ProcessGroup, None] = {}
    for value in vars(parallel_state).values():
        held = value if isinstance(value, list | tuple) else [value]
        found.update(dict.fromkeys(each for each in held if isinstance(each, dist.ProcessGroup)))
    return tuple(found)
