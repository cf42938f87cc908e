"""What Megatron's self-attention is called with, and what is around its modules that ours would pass by.

For those of ours that give its core attention or its projections another `forward` for one call.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Attribute of the attention -> why it stays Megatron's own where that is set.
FLAGS = {
    "checkpoint_core_attention": "core attention is recomputed by itself (recompute_modules has core_attn)",
    "offload_core_attention": "core attention's activations are offloaded (offload_modules has core_attn)",
    "offload_attn_proj": "the projection's activations are offloaded (offload_modules has attn_proj)",
    # Of latent attention. The first frees query, key and value before the projection is called.
    "recompute_up_proj": "what the up-projections give is recomputed (recompute_modules has mla_up_proj)",
    "cache_mla_latents": "latents are cached (cache_mla_latents): decoding projects the values after attention",
}

#: Argument of a call -> the same.
ARGUMENTS = {
    "inference_context": "an inference context is given: keys come from its cache",
    "inference_params": "inference parameters are given: keys come from their cache",
    "packed_seq_params": "sequences are packed: their bounds are not those of the splits",
    "attention_bias": "an attention bias is given: no kernel takes one",
    "key_value_states": "keys and values come from another sequence",
}


def reason_in_hooks(modules: Mapping[str, Any]) -> str | None:
    """Why none of these modules of an attention, by what they are called, may be given a placeholder, or give one."""
    if torch.nn.modules.module._has_any_global_hook():
        return "hooks of all modules are registered, which would be shown what stands for core attention's output"
    for what, module in modules.items():
        # What somebody put around it would be passed by.
        if "forward" in vars(module):
            return f"{what} has a forward of its own in the instance"
        if module._backward_hooks or module._backward_pre_hooks:
            return f"{what} has backward hooks"
        # They would be shown the placeholder: what core attention returns, and the projection is given.
        if module._forward_hooks:
            return f"{what} has forward hooks"
    return None


def only_megatrons_pre_hooks(module: Any) -> bool:
    """Whether its forward pre-hooks only wait for gathered parameters, whatever the inputs are."""
    return all(map(_is_of_megatrons_wrapper, module._forward_pre_hooks.values()))


def _is_of_megatrons_wrapper(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("megatron.core.distributed.")


@functools.cache
def _signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward)


def arguments_of(stock: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the bound method `stock`, by name; one by position is the hidden states."""
    if len(args) == 1:
        return {"hidden_states": args[0], **kwargs}
    found = dict(_signature(stock.__func__).bind(stock.__self__, *args, **kwargs).arguments)
    found.pop("self")
    return found
