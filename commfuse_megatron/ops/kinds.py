"""Whether what a call brings is of the kinds that the operation's own signature names.

Knows no operation: the annotations are the table. Runs where a call is new, never where one is repeated.
"""

import collections.abc
import dataclasses
import functools
import inspect
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

#: Types that do nothing of their own.
OF_TORCH = (torch.Tensor, torch.nn.Parameter)


def find_kind_complaint(signature: Callable[..., object], given: Mapping[str, object]) -> str | None:
    """Which of the arguments `given`, by name, is of a kind that `signature` does not take, in one sentence; else None.

    Fields of dataclasses count as arguments, named "argument.field". What tuples hold is not looked at.
    """
    kinds = _kinds_of(signature)
    complaints = (_complain(name, kinds[name], value) for name, value in given.items())
    return next((complaint for complaint in complaints if complaint is not None), None)


def stands_for_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own that kernels and transports could use: nested ones, and those that
    compute by a dispatch of their own (DTensor, FakeTensor ...), are functional, or are zero by a mark."""
    if type(tensor) not in OF_TORCH and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return True
    return tensor._is_zerotensor() or tensor.is_nested or torch._is_functional_tensor(tensor)


@functools.cache
def _kinds_of(signature: Callable[..., object]) -> dict[str, Any]:
    return typing.get_type_hints(inspect.unwrap(signature))


def _complain(name: str, annotation: Any, value: object) -> str | None:
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for kind in kinds:
        if not _is_of(value, kind):
            continue
        if not dataclasses.is_dataclass(kind):
            return None
        fields = typing.get_type_hints(kind)
        complaints = (_complain(f"{name}.{part}", fields[part], getattr(value, part)) for part in fields)
        return next((complaint for complaint in complaints if complaint is not None), None)
    found = "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"
    return f"{name} must be {' or '.join(map(_say, kinds))}, got {found}"


def _is_of(value: object, kind: Any) -> bool:
    if kind is torch.Tensor:
        return isinstance(value, kind) and value.layout == torch.strided and not stands_for_others(value)
    if kind is bool and isinstance(value, numbers.Integral):
        return value in (0, 1)
    kind = typing.get_origin(kind) or kind
    return isinstance(value, _WIDER.get(kind, kind))


def _say(kind: Any) -> str:
    kind = typing.get_origin(kind) or kind
    return _WORDS.get(kind) or f"a {kind.__name__}"


# What does as well as what is annotated: the numbers of numpy, 0 and 1, and lists, which files give.
_WIDER: dict[Any, Any] = {
    bool: (numbers.Integral, np.bool_),
    int: numbers.Integral,
    float: numbers.Real,
    tuple: (tuple, list),
}
_WORDS: dict[Any, str] = {
    torch.Tensor: "a dense tensor with memory of its own",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    collections.abc.Callable: "callable",
    types.NoneType: "None",
}
