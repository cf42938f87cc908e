"""Turns the linears, the embedding and the attention of a built model into ours, in place.

Reaches what specs cannot: embedding, output layer, the down-projections of latent attention, multi-token prediction.
A local layer is re-classed, so parameters, hooks, names, the optimizer's references and the data-parallel wrapper stay
as they are; one of Transformer Engine is replaced in the module that holds it (see `takeover`).
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import arguments
from commfuse_megatron.plugin.classes import ATTENTIONS, LOCAL, TRANSFORMER_ENGINE, is_ours
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

    A Transformer Engine linear that has to stay (fp8, experts, ...) keeps its place; `model_report` says why.

    Raises, before anything is converted: ConfigError where a configuration file that the flags name has mistakes;
    UnsupportedError where a Transformer Engine linear has to stay and the configuration asks to raise then.
    """
    chunks = model if isinstance(model, list | tuple) else [model]
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise ConfigError(f"convert_model takes a torch module or a list of them, got a {type(chunk).__name__}")
    if config is None:
        _require_valid_files(chunks)
    places = [place for chunk in chunks for place in _transformer_engine_places(chunk)]
    kept = [(place.layer, LayerState(config, place.name), place.reason) for place in places if place.reason is not None]
    for layer, wish, reason in kept:
        require_permission(wish, layer.config, type(layer), reason)
    for layer, wish, reason in kept:
        keep_stock(layer, wish, reason, layer._tp_group)
    replaced = _replace([place for place in places if place.reason is None], config)
    converted = sum(_convert_local(chunk, config) for chunk in chunks)
    logger.info("convert_model: %d local layers converted, %d of Transformer Engine replaced", converted, replaced)
    return model


def _convert_local(chunk: torch.nn.Module, config: OverlapConfig | None) -> int:
    converted = 0
    for name, module in chunk.named_modules():
        if type(module) in LOCAL:
            module.__class__ = LOCAL[type(module)]
            converted += 1
        if is_ours(module):
            state = state_of(module)
            state.name = name or state.name
            state.overlap_config = config or state.overlap_config
            _follow_fusion(module)
        if type(module) in ATTENTIONS:
            module.__class__ = ATTENTIONS[type(module)]
        if type(module) in ATTENTIONS.values():
            state_of(module).name = name or state_of(module).name
    return converted


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a Transformer Engine linear is held, and why it stays there, if it does."""

    layer: Any
    parent: torch.nn.Module | None
    child_name: str
    name: str
    reason: str | None


def _transformer_engine_places(chunk: torch.nn.Module) -> list[_Place]:
    places = []
    if type(chunk) in TRANSFORMER_ENGINE:
        places.append(_Place(chunk, None, "", "", reason_to_keep(chunk, None, "")))
    for prefix, parent in chunk.named_modules():
        for child_name, layer in parent._modules.items():  # under every name, which named_children would not give
            if type(layer) in TRANSFORMER_ENGINE:
                name = f"{prefix}.{child_name}" if prefix else child_name
                places.append(_Place(layer, parent, child_name, name, reason_to_keep(layer, parent, child_name)))
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
