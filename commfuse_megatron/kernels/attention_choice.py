"""Which kernel computes an attention: the first that can, with the reason why others cannot.

A kernel that is left out for want of a package or a GPU may differ between ranks, which is harmless: every rank
computes its own heads.
"""

import dataclasses
from typing import NamedTuple

import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels.attention import AttentionKernel, MathAttention
from commfuse_megatron.kernels.attention_cudnn import CudnnAttention, cudnn_attention_unavailable_reason
from commfuse_megatron.kernels.attention_flash import FlashAttention, flash_attention_unavailable_reason
from commfuse_megatron.problem import AttentionProblem

# Sequence lengths that vary from call to call must not fill the memory.
_MOST_CHOICES = 1024

_ORDER = ("cudnn", "flash", "math")


class _Choice(NamedTuple):
    kernel: AttentionKernel
    passed_over: str  # why none of those that come first


class AttentionKernels:
    """The kernels of one device, each made when first chosen and kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, AttentionKernel] = {}
        self._chosen: dict[tuple[AttentionProblem, str], _Choice] = {}

    def choose(self, problem: AttentionProblem, wanted: str) -> AttentionKernel:
        """The kernel for `problem`. wanted: "auto", or one by name.

        Raises UnsupportedError where the one that is wanted cannot.
        """
        return self._choose(problem, wanted).kernel

    def passed_over_reason(self, problem: AttentionProblem, wanted: str) -> str:
        """Why kernels that "auto" would rather take cannot compute `problem`; "" if the first one can."""
        return self._choose(problem, wanted).passed_over

    def _choose(self, problem: AttentionProblem, wanted: str) -> _Choice:
        # Both passes, and whatever gradients are due, take the same.
        key = (dataclasses.replace(problem, pass_name="fprop", needs=""), wanted)
        if key not in self._chosen:
            if len(self._chosen) >= _MOST_CHOICES:
                self._chosen.clear()
            self._chosen[key] = self._find(problem, wanted)
        return self._chosen[key]

    def unavailable_reason(self, name: str, problem: AttentionProblem) -> str | None:
        """Why the kernel of that name cannot compute `problem`, None if it can."""
        if name == "cudnn":
            reason = cudnn_attention_unavailable_reason(problem, self._device)
            if reason is None:
                kernel = self._make(name)
                assert isinstance(kernel, CudnnAttention)
                reason = kernel.probe(problem)
            return reason
        return flash_attention_unavailable_reason(problem, self._device) if name == "flash" else None

    def _find(self, problem: AttentionProblem, wanted: str) -> _Choice:
        reasons: list[str] = []
        for name in _ORDER if wanted == "auto" else (wanted,):
            reason = self.unavailable_reason(name, problem)
            if reason is None:
                return _Choice(self._make(name), "; ".join(reasons))
            reasons.append(reason)
        raise UnsupportedError(f"attention.kernel is {wanted!r}, but {'; '.join(reasons)}")

    def _make(self, name: str) -> AttentionKernel:
        if name not in self._made and name == "cudnn":
            self._made[name] = CudnnAttention(self._device)
        elif name not in self._made:
            self._made[name] = FlashAttention() if name == "flash" else MathAttention()
        return self._made[name]
