"""Turns the linears of a built model into ours, in place.

Reaches what specs cannot: the output layer, the down-projections of latent attention, multi-token prediction. A layer
is re-classed, so parameters, hooks, names, the optimizer's references and the data-parallel wrapper stay as they are.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import arguments, compat
from commfuse_megatron.plugin.attention import CommFuseSelfAttention
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.linear import CommFuseColumnParallelLinear, CommFuseRowParallelLinear

__all__ = ["ATTENTIONS", "CONVERSIONS", "convert_model"]

logger = logging.getLogger(__name__)

#: Exact class of a built layer -> the class it is given.
CONVERSIONS: dict[type, type] = {
    compat.ColumnParallelLinear: CommFuseColumnParallelLinear,
    compat.RowParallelLinear: CommFuseRowParallelLinear,
}

#: The same for attention, which is configured by its projection.
ATTENTIONS: dict[type, type] = {compat.SelfAttention: CommFuseSelfAttention}


def convert_model(model: Any, config: OverlapConfig | None = None) -> Any:
    """Convert `model` (or a list of model chunks, as Megatron's `pre_wrap_hooks` pass it) and return it.

    May be called again: layers that are ours already only take over `config`, where one is given.

    Args:
        config: for every linear; None leaves what a layer was built with, else the flags.

    Raises ConfigError, before anything is converted, where a configuration file that the flags name has mistakes.
    """
    chunks = model if isinstance(model, list | tuple) else [model]
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise ConfigError(f"convert_model takes a torch module or a list of them, got a {type(chunk).__name__}")
    if config is None:
        _require_valid_files(chunks)
    converted = 0
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if type(module) in CONVERSIONS:
                module.__class__ = CONVERSIONS[type(module)]
                converted += 1
            if type(module) in CONVERSIONS.values():
                state = state_of(module)
                state.name = name or state.name
                state.overlap_config = config or state.overlap_config
            if type(module) in ATTENTIONS:
                module.__class__ = ATTENTIONS[type(module)]
            if type(module) in ATTENTIONS.values():
                state_of(module).name = name or state_of(module).name
    logger.info("convert_model: %d linears converted", converted)
    return model


def _require_valid_files(chunks: Iterable[torch.nn.Module]) -> None:
    linears = (module for chunk in chunks for module in chunk.modules() if type(module) in CONVERSIONS)
    for file in {arguments.config_file(linear.config) for linear in linears if arguments.is_switched_on(linear.config)}:
        arguments.read_config(file)
