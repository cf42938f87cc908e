"""Turns the linears, the embedding and the attention of a built model into ours, in place.

Reaches what specs cannot: embedding, output layer, the down-projections of latent attention, multi-token prediction.
A local layer is re-classed, so parameters, hooks, names, the optimizer's references and the data-parallel wrapper stay
as they are; one of Transformer Engine is replaced in the module that holds it (see `takeover`). The contract that
bites: a layer that somebody has given tensors of his own is no longer what its class says, and stays.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import arguments
from commfuse_megatron.plugin.classes import ATTENTIONS, LOCAL, TRANSFORMER_ENGINE, is_ours, reason_to_keep_local
from commfuse_megatron.plugin.construction import keep_stock, require_permission
from commfuse_megatron.plugin.decision import LayerState, state_of
from commfuse_megatron.plugin.takeover import reason_to_keep, taking_over

__all__ = ["convert_model"]

logger = logging.getLogger(__name__)


def convert_model(model: Any, config: OverlapConfig | None = None) -> Any:
    """Convert `model` (or a list of model chunks, as Megatron's `pre_wrap_hooks` pass it) and return it.

    May be called again: layers that are ours already only take over `config`, where one is given. Linears follow their
    TransformerConfig's `gradient_accumulation_fusion`: without Apex, build the model with it off, set it, convert.

    Args:
        config: for every layer; None leaves what a layer was built with, else the flags.

    What has to stay keeps its place, and `model_report` says why: a linear of Transformer Engine under fp8, an expert,
    any layer with parameters or buffers that ours does not know.

    Raises, before anything is converted: ConfigError where a configuration file that the flags name has mistakes;
    UnsupportedError where a layer has to stay and the configuration asks to raise then.
    """
    chunks = model if isinstance(model, list | tuple) else [model]
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise ConfigError(f"convert_model takes a torch module or a list of them, got a {type(chunk).__name__}")
    if config is None:
        _require_valid_files(chunks)
    places = [place for chunk in chunks for place in _transformer_engine_places(chunk)]
    kept = [_Kept(p.layer, p.name, p.layer._tp_group, p.reason) for p in places if p.reason is not None]
    kept += [each for chunk in chunks for each in _changed_local(chunk)]
    for layer, name, _, reason in kept:
        if arguments.is_switched_on(layer.config):
            require_permission(LayerState(config, name), layer.config, type(layer), reason)
    for layer, name, group, reason in kept:
        keep_stock(layer, LayerState(config, name), reason, group)
    replaced = _replace([place for place in places if place.reason is None], config)
    converted = sum(_convert_local(chunk, config) for chunk in chunks)
    logger.info("convert_model: %d local layers converted, %d of Transformer Engine replaced", converted, replaced)
    return model


def _convert_local(chunk: torch.nn.Module, config: OverlapConfig | None) -> int:
    converted = 0
    for name, module in chunk.named_modules():
        if type(module) in LOCAL and reason_to_keep_local(module, LOCAL[type(module)]) is None:
            module.__class__ = LOCAL[type(module)]
            converted += 1
        if is_ours(module):
            state = state_of(module)
            state.name = name or state.name
            state.overlap_config = config or state.overlap_config
            _follow_fusion(module)
        if type(module) in ATTENTIONS and "forward" not in vars(module):
            module.__class__ = ATTENTIONS[type(module)]
        if type(module) in ATTENTIONS.values():
            state_of(module).name = name or state_of(module).name
    return converted


class _Kept(NamedTuple):
    """A layer that stays, and why."""

    layer: Any
    name: str
    group: dist.ProcessGroup
    reason: str


def _changed_local(chunk: torch.nn.Module) -> Iterator[_Kept]:
    """The local layers of Megatron that somebody has added tensors or a forward of the instance to."""
    for name, module in chunk.named_modules():
        if type(module) in LOCAL:
            layer: Any = module
            reason = reason_to_keep_local(layer, LOCAL[type(layer)])
            if reason is not None:
                yield _Kept(layer, name, layer.tp_group, reason)


class _Place(NamedTuple):
    """Where a Transformer Engine linear is held, and why it stays there, if it does."""

    layer: Any
    name: str
    parent: torch.nn.Module | None
    child_name: str
    reason: str | None


def _transformer_engine_places(chunk: torch.nn.Module) -> list[_Place]:
    places = []
    if type(chunk) in TRANSFORMER_ENGINE:
        places.append(_Place(chunk, "", None, "", reason_to_keep(chunk, None, "")))
    for prefix, parent in chunk.named_modules():
        for child_name, layer in parent._modules.items():  # under every name, which named_children would not give
            if type(layer) in TRANSFORMER_ENGINE:
                name = f"{prefix}.{child_name}" if prefix else child_name
                places.append(_Place(layer, name, parent, child_name, reason_to_keep(layer, parent, child_name)))
    return places


def _replace(places: list[_Place], config: OverlapConfig | None) -> int:
    ours: dict[int, torch.nn.Module] = {}
    for place in places:
        if id(place.layer) not in ours:  # a layer held in two places stays one
            ours[id(place.layer)] = taking_over(place.layer, config, place.name)
        setattr(place.parent, place.child_name, ours[id(place.layer)])
    return len(ours)


def _follow_fusion(module: Any) -> None:
    if hasattr(module, "gradient_accumulation_fusion") and module.config.gradient_accumulation_fusion:
        module.gradient_accumulation_fusion = True


def _require_valid_files(chunks: Iterable[torch.nn.Module]) -> None:
    known = {*LOCAL, *TRANSFORMER_ENGINE}
    linears = (module for chunk in chunks for module in chunk.modules() if type(module) in known)
    for file in {arguments.config_file(linear.config) for linear in linears if arguments.is_switched_on(linear.config)}:
        arguments.read_config(file)
