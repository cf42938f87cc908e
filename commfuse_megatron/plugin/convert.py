"""Turns the linears, the embedding and the attentions of a built model into ours, in place.

Reaches what specs cannot: embedding, output layer, the down-projections of latent attention, multi-token prediction. A
layer is re-classed, so the module, its parameters, hooks, names, attributes, the optimizer's references and the
data-parallel wrapper stay as they are. A layer that somebody has given tensors of his own is no longer what its class
says, and stays.
"""

import functools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin import arguments
from commfuse_megatron.plugin.arguments import checked_config, checked_model
from commfuse_megatron.plugin.classes import ATTENTIONS, CORE_ATTENTIONS, LINEARS_AND_EMBEDDING, is_ours, reason_to_keep
from commfuse_megatron.plugin.compat import group_of
from commfuse_megatron.plugin.decision import LayerState, state_of

logger = logging.getLogger(__name__)


def convert_model(model: Any, config: OverlapConfig | str | Path | None = None) -> Any:
    """Convert `model` (or a list of model chunks, as Megatron's `pre_wrap_hooks` pass it) and return it.

    May be called again: layers that are ours already only take over `config`, where one is given. Local linears follow
    their TransformerConfig's `gradient_accumulation_fusion`: without Apex, build a model with it off, set it, convert.

    Args:
        config: for every layer, or the YAML file that it is read from; None leaves what a layer was built with, else
            the flags.

    What has to stay keeps its class, and `model_report` says why: any layer with parameters, buffers or a forward that
    ours does not know. What ours cannot overlap (fp8, experts, ...) it leaves to Megatron's own forward, call by call.

    Raises, before anything is converted: ConfigError for a model that is none, for a configuration that is none, or a
    configuration file with mistakes; UnsupportedError where a layer has to stay and the configuration asks to raise
    then.
    """
    config = checked_config(config, "convert_model")
    chunks = checked_model(model, "convert_model")
    if config is None:
        _require_valid_files(chunks)
    kept = [each for chunk in chunks for each in _kept(chunk)]
    for name, layer, reason in kept:
        wish = LayerState(config, name)
        is_error = wish.config(layer.config).fallback.unsupported == "raise"
        if arguments.is_switched_on(layer.config) and is_error:
            raise UnsupportedError(f"{name or 'layer'} ({type(layer).__name__}): {reason}")
    for name, layer, reason in kept:
        _tell(layer, name, config)
        state_of(layer).kept_reason = reason
        if group_of(layer).rank() == 0:
            _log_once(f"{type(layer).__name__} stays: {reason}")
    converted = sum(_convert(chunk, config) for chunk in chunks)
    logger.info("convert_model: %d layers converted", converted)
    has_none = not kept and not any(is_ours(module) for chunk in chunks for module in chunk.modules())
    if has_none and (not dist.is_initialized() or dist.get_rank() == 0):
        _log_once("convert_model: nothing was converted, model_report lists what linears there are, and why they stay")
    return model


def _convert(chunk: torch.nn.Module, config: OverlapConfig | None) -> int:
    converted = 0
    for name, module in chunk.named_modules():
        ours = LINEARS_AND_EMBEDDING.get(type(module))
        if ours is not None and reason_to_keep(module, ours) is None:
            module.__class__ = ours
            converted += 1
        if type(module) in CORE_ATTENTIONS and "forward" not in vars(module):
            module.__class__ = CORE_ATTENTIONS[type(module)]
        if is_ours(module):
            _tell(module, name, config)
            _follow_fusion(module)
        if type(module) in ATTENTIONS and "forward" not in vars(module):
            module.__class__ = ATTENTIONS[type(module)]
        if type(module) in ATTENTIONS.values():
            _tell(module, name, None)
    return converted


def _tell(layer: torch.nn.Module, name: str, config: OverlapConfig | None) -> None:
    state = state_of(layer)
    state.overlap_config, state.name = config or state.overlap_config, name or state.name


def _kept(chunk: torch.nn.Module) -> Iterator[tuple[str, Any, str]]:
    """(name, layer, why it stays): those that somebody has added tensors or a forward of the instance to."""
    for name, module in chunk.named_modules():
        ours = LINEARS_AND_EMBEDDING.get(type(module))
        reason = None if ours is None else reason_to_keep(module, ours)
        if reason is not None:
            yield name, module, reason


@functools.lru_cache(maxsize=64)
def _log_once(message: str) -> None:
    logger.warning("%s", message)


def _follow_fusion(module: Any) -> None:
    if hasattr(module, "gradient_accumulation_fusion") and module.config.gradient_accumulation_fusion:
        module.gradient_accumulation_fusion = True


def _require_valid_files(chunks: Iterable[torch.nn.Module]) -> None:
    linears = (module for chunk in chunks for module in chunk.modules() if type(module) in LINEARS_AND_EMBEDDING)
    for file in {arguments.config_file(linear.config) for linear in linears if arguments.is_switched_on(linear.config)}:
        arguments.read_config(file)
