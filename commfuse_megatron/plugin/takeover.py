"""One of our linears in the place of a built Transformer Engine linear, with everything that others hold of it.

Such a layer cannot be re-classed: the classes share no ancestor. So ours is built beside it and takes over the
Parameter objects, the dictionaries of hooks (handles given out before still remove them) and the training flag. The
contract that bites: whoever kept the old module itself, not its parameters, goes on with a layer that nobody calls.
"""

import copy
from typing import Any

import torch
from torch import nn

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.classes import TRANSFORMER_ENGINE, reason_in_tensors
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.linear import CommFuseRowParallelLinear
from commfuse_megatron.plugin.support import Prospect, reason_to_stay

__all__ = ["reason_to_keep", "taking_over"]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def reason_to_keep(layer: Any, parent: nn.Module | None, child_name: str) -> str | None:
    """Why the built Transformer Engine linear that `parent` holds as `child_name` stays; None if it need not."""
    reason = reason_to_stay(
        Prospect(
            config=layer.config,
            tp_group=layer._tp_group,
            sequence_parallel=layer.sequence_parallel,
            # Megatron switches communication off inside Transformer Engine by this, for experts and shared experts.
            explicit_expert_comm=layer.parallel_mode is None,
            tp_comm_buffer_name=child_name.removeprefix("linear_"),
        )
    )
    return reason or _reason_in_surroundings(layer, parent) or _reason_in_contents(layer)


def _reason_in_surroundings(layer: nn.Module, parent: nn.Module | None) -> str | None:
    if parent is None:
        return "the layer is the model itself: convert_model replaces layers in the modules that hold them"
    if compat.waits_for_gathered_parameters(layer):
        return "the data-parallel wrapper (overlap_param_gather) knows the module itself: convert before wrapping"
    if type(parent).__name__.startswith("TEFusedMLP"):
        return f"{type(parent).__name__} takes the layer's parameters into a fused operation of its own"
    return None


def _reason_in_contents(layer: Any) -> str | None:
    if getattr(layer, "te_quant_params", None) is not None:
        return "the layer has a quantisation recipe of its own"
    if type(layer.weight) is not nn.Parameter:
        return f"the weight is a {type(layer.weight).__name__}: only plain tensors are overlapped"
    if hasattr(layer.weight, "__fsdp_param__"):
        return "the weight belongs to Megatron-FSDP, which knows the module itself: convert before wrapping"
    if layer._modules or "forward" in vars(layer):
        return "something was built around the layer: it has submodules or a forward of its own"
    return reason_in_tensors(layer, TRANSFORMER_ENGINE[type(layer)])


def taking_over(layer: Any, overlap_config: OverlapConfig | None, name: str) -> Any:
    """Our linear for the built Transformer Engine linear `layer`, to be put in its place."""
    ours = _empty_twin(layer)
    for parameter in list(ours._parameters):
        ours._parameters[parameter] = layer._parameters.get(parameter)
    _take_hooks(layer, ours)
    ours.training = layer.training
    state = state_of(ours)
    state.overlap_config, state.name = overlap_config or state_of(layer).overlap_config, name
    return ours


def _empty_twin(layer: Any) -> Any:
    ours_class = TRANSFORMER_ENGINE[type(layer)]
    config = copy.copy(layer.config)
    config.use_cpu_initialization, config.perform_initialization = True, False
    is_row = ours_class is CommFuseRowParallelLinear
    sides = {"input_is_parallel": True} if is_row else {"gather_output": False, "stride": layer.stride}
    group_size = layer._tp_group.size()
    ours: Any = ours_class.__new__(ours_class)
    with torch.device("meta"):  # neither memory nor random numbers are taken
        ours.__init__(
            layer.in_features * group_size if is_row else layer.in_features,
            layer.out_features if is_row else layer.out_features * group_size,
            config=config,
            init_method=None,
            bias=layer.use_bias,
            skip_bias_add=layer.te_return_bias,
            is_expert=False,
            tp_comm_buffer_name=layer.ub_name,
            tp_group=layer._tp_group,
            **sides,
        )
    ours.config = layer.config
    ours.gradient_accumulation_fusion = layer.fuse_wgrad_accumulation
    return ours


def _take_hooks(layer: Any, ours: Any) -> None:
    for hooks in _HOOKS:
        setattr(ours, hooks, getattr(layer, hooks))
    before_load, own = layer._load_state_dict_pre_hooks, ours._load_state_dict_pre_hooks
    for key, wrapped in before_load.items():
        if wrapped.with_module:  # bound to the old module, weakly
            before_load[key] = type(wrapped)(wrapped.hook, ours)
    before_load.update(own)
    ours._load_state_dict_pre_hooks = before_load
