"""What makes a class of ours stand in for one of Megatron's, for all who look at classes and not at what they do.

Adapter libraries, quantisers, exporters and Megatron itself ask a layer for its class (`isinstance`), for the name of
the class, or whether its `forward` is the one that they know. So our classes derive from what they stand for, and

    Ours.__name__       is the stock class's name; `Ours.__qualname__` is our own, by which copies and pickles find it
    Ours.forward        is the stock class's function, where that computes the same; `layer.forward` is ours

Whoever derives from ours has put something around Megatron's own computation, which ours would pass by; so a layer of a
derived class takes Megatron's path (`reason_in_class`).
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn.utils import parametrize

from commfuse_megatron.plugin import compat

#: Our class -> Megatron's, or Transformer Engine's, that it stands for.
OURS: dict[type, type] = {}
_FORWARDS: dict[type, object] = {}


class _Forward:
    """`forward` of a class of ours: asked for by a layer, what ours computes; by the class, the stock function."""

    def __init__(self, ours: Callable, stock: Callable) -> None:
        self._ours, self._stock = ours, stock
        self.__doc__ = ours.__doc__

    def __get__(self, layer: torch.nn.Module | None, owner: type | None = None) -> Callable:
        return self._stock if layer is None else MethodType(self._ours, layer)


def stands_for[T: type](stock: type, name: str | None = None) -> Callable[[T], T]:
    """Decorates a class of ours that derives from `stock`: it goes by that name, and has that `forward`.

    name: of the class that it stands for, where that is another one, which may not be installed. Its `forward` is ours
        then, also of the class: that of `stock` would leave out what ours adds.
    """

    def decorate(ours: T) -> T:
        if "forward" in vars(ours) and name is None:
            ours.forward = _Forward(vars(ours)["forward"], stock.forward)  # type: ignore[attr-defined]
        ours.__name__ = name or stock.__name__
        ours._get_name = _own_name  # type: ignore[attr-defined]  # which torch prints
        OURS[ours], _FORWARDS[ours] = stock, vars(ours).get("forward")
        return ours

    return decorate


def _own_name(layer: torch.nn.Module) -> str:
    return type(layer).__qualname__


def class_name(module: torch.nn.Module) -> str:
    """How reports and log lines call the class of `module`: ours by our own names."""
    return type(module).__qualname__ if type(module) in OURS else type(module).__name__


def reason_in_class(layer: Any) -> str | None:
    """Why a layer that is ours, or derives from ours, takes Megatron's path, as far as classes and functions tell."""
    found = type(layer)
    base = None if found in OURS else next((cls for cls in found.__mro__ if cls in OURS), None)
    if base is not None and not _is_parametrized(layer, found):
        return (
            f"{found.__name__} derives from {base.__qualname__}: what it does around Megatron's own computation would"
            " be passed by"
        )
    if found in OURS and vars(found).get("forward") is not _FORWARDS[found]:
        return f"{found.__qualname__}.forward is replaced by something else"
    return compat.reason_in_functions(layer)


def _is_parametrized(layer: torch.nn.Module, found: type) -> bool:
    """Whether the class is the one that torch makes for a parametrization, which changes what `layer.weight` gives."""
    return len(found.__bases__) == 1 and found.__bases__[0] in OURS and parametrize.is_parametrized(layer)
