"""Stand-ins for FlashAttention-3 and -4, activated in PyTorch as the real ones are; they compute on the CPU.

They refuse what PyTorch's wrappers of the real ones refuse: a call that should not have come fails here too.
"""

from typing import Any

import pytest
import torch
from torch.nn import attention

from commfuse_megatron.kernels.attention import MathAttention, SplitMask
from commfuse_megatron.problem import RowRange, VisibleKeys

__all__ = ["StandIn", "register_stand_ins"]


class StandIn:
    """One implementation. calls: keywords of the calls of its forward and backward operators."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[dict[str, Any]] = []
        self._library: torch.library.Library | None = None

    def register(self) -> "StandIn":
        """What activation calls; the handle that restoring calls."""
        self._library = torch.library.Library("aten", "IMPL", "CPU")
        self._library.impl("_flash_attention_forward", self._forward)
        self._library.impl("_flash_attention_backward", self._backward)
        return self

    def remove(self) -> None:
        """Restore what was there before."""
        assert self._library is not None
        self._library._destroy()

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cum_q: None,
        cum_k: None,
        max_q: int,
        max_k: int,
        dropout: float,
        is_causal: bool,
        return_debug_mask: bool,
        **keywords: Any,
    ) -> tuple[torch.Tensor, ...]:
        self._check(q, k, max_q, max_k, dropout, keywords)
        out = torch.empty(*q.shape[:3], v.size(3), dtype=q.dtype)
        given = [tensor.transpose(0, 1) for tensor in (q, k, v, out)]
        MathAttention().forward(*given, _mask(k, is_causal, keywords), keywords["scale"], None)
        logsumexp = torch.zeros(q.size(0), q.size(2), q.size(1))
        unused = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), torch.empty(0))
        return out, logsumexp, *unused

    def _backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_q: None,
        cum_k: None,
        max_q: int,
        max_k: int,
        dropout: float,
        is_causal: bool,
        rng_state: torch.Tensor,
        unused: torch.Tensor,
        **keywords: Any,
    ) -> tuple[torch.Tensor, ...]:
        self._check(q, k, max_q, max_k, dropout, keywords)
        grad, *operands = (tensor.transpose(0, 1) for tensor in (grad_out, q, k, v, out))
        mask = _mask(k, is_causal, keywords)
        gradients = MathAttention().backward(grad, tuple(operands), (), mask, keywords["scale"], None)
        return tuple(gradient.transpose(0, 1).contiguous() for gradient in gradients)

    def _check(
        self, q: torch.Tensor, k: torch.Tensor, max_q: int, max_k: int, dropout: float, keywords: dict[str, Any]
    ) -> None:
        self.calls.append(keywords)
        assert (max_q, max_k) == (q.size(1), k.size(1))
        if dropout:
            raise RuntimeError("dropout_p must be 0")
        if self.name == "FA4" and any(keywords.get(f"window_size_{side}") is not None for side in ("left", "right")):
            raise RuntimeError("windowed attention not supported")


def register_stand_ins(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, StandIn]:
    """Stand-ins by name, registered until the test ends; none is active."""
    monkeypatch.setattr(attention._registry, "_FLASH_ATTENTION_IMPLS", {})
    stand_ins = {name: StandIn(name) for name in names}
    for name, stand_in in stand_ins.items():
        attention.register_flash_attention_impl(name, register_fn=stand_in.register)
    return stand_ins


def _mask(k: torch.Tensor, is_causal: bool, keywords: dict[str, Any]) -> SplitMask:
    left, right = (
        None if bound is None or bound < 0 else bound
        for bound in (keywords.get("window_size_left"), keywords.get("window_size_right"))
    )
    return SplitMask(VisibleKeys(RowRange(0, k.size(1)), left, 0 if is_causal else right))
