"""Ours or Transformer Engine's own layer: decided when a spec's layer is built, from configuration and group.

A spec names one class for all layers, and what a layer may not overlap (fp8, experts, ...) is known only when it is
built. So constructing one of our linears with `stock_class` may give an instance of that class. The contract that
bites: the decision is the same on every rank of the group, and the layer that stays remembers why, for the report.
"""

import copy
import functools
import logging
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.decision import LayerState, state_of
from commfuse_megatron.plugin.support import SWITCHED_OFF, Prospect, reason_to_stay

__all__ = ["keep_stock", "kept_stock", "require_permission", "without_fused_kernel"]

logger = logging.getLogger(__name__)


def kept_stock(stock_class: type | None, args: tuple, kwargs: dict[str, Any]) -> Any | None:
    """The layer of `stock_class`, built from Megatron's arguments, where it has to stay stock; else None.

    Raises UnsupportedError instead where the configuration says so, and ConfigError for a file with mistakes, unless
    switched off.
    """
    if stock_class is None or "config" not in kwargs:  # the latter: an instance is being copied, not built
        return None
    config, is_expert = kwargs["config"], kwargs.get("is_expert", False)
    group = compat.tensor_parallel_group(kwargs.get("tp_group"), is_expert)
    reason = reason_to_stay(
        Prospect(
            config=config,
            tp_group=group,
            sequence_parallel=config.sequence_parallel,
            is_expert=is_expert,
            tp_comm_buffer_name=kwargs.get("tp_comm_buffer_name"),
        )
    )
    if reason is None:
        return None
    kwargs = dict(kwargs)
    wish = LayerState(kwargs.pop("overlap_config", None), kwargs.get("name") or kwargs.get("tp_comm_buffer_name"))
    require_permission(wish, config, stock_class, reason)
    layer = stock_class(*args, **kwargs)
    keep_stock(layer, wish, reason, group)
    return layer


def keep_stock(layer: torch.nn.Module, wish: LayerState, reason: str, group: dist.ProcessGroup | None) -> None:
    """Remember on `layer`, which is none of ours, what was asked for and why it stays what it is.

    Logged once per class and reason, by the first rank of the group.
    """
    state = state_of(layer)
    state.overlap_config, state.name = wish.overlap_config or state.overlap_config, wish.name or state.name
    state.kept_reason = reason
    if group is None or group.rank() == 0:
        _log_once(type(layer).__name__, reason)


def require_permission(wish: LayerState, config: Any, stock_class: type, reason: str) -> None:
    """Raise UnsupportedError where the configuration in force asks for that instead of stock layers."""
    if reason != SWITCHED_OFF and wish.config(config).fallback.unsupported == "raise":
        raise UnsupportedError(f"{wish.name or 'layer'} ({stock_class.__name__}): {reason}")


@functools.lru_cache(maxsize=64)
def _log_once(stock_class: str, reason: str) -> None:
    level = logging.INFO if reason == SWITCHED_OFF else logging.WARNING
    logger.log(level, "%s stays: %s", stock_class, reason)


def without_fused_kernel(config: Any) -> Any:
    """`config`, or without Apex a copy that does not ask for its kernel, for Megatron's constructors to read.

    They refuse gradient accumulation fusion without Apex. Our layers do without it: the overlapped path adds into
    `main_grad` in its own GEMMs, and Megatron's path is called with a weight that `into_main_grad` made.
    """
    if compat.HAVE_FUSED_WEIGHT_GRADIENT or not config.gradient_accumulation_fusion:
        return config
    unfused = copy.copy(config)
    unfused.gradient_accumulation_fusion = False
    return unfused
