"""Which kernel computes an attention: the first that can, with the reason why others cannot.

The contract that bites: a kernel that is left out for want of a package or a GPU may differ between ranks, which is
harmless: every rank computes its own heads.
"""

import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels.attention import AttentionKernel, MathAttention
from commfuse_megatron.problem import AttentionProblem

__all__ = ["attention_kernel_unavailable_reason", "choose_attention_kernel"]

_ORDER = ("math",)


def choose_attention_kernel(problem: AttentionProblem, device: torch.device, wanted: str) -> AttentionKernel:
    """The kernel for `problem`. wanted: "auto", or one by name. Raises UnsupportedError where that cannot."""
    names = _ORDER if wanted == "auto" else (wanted,)
    reasons = {}
    for name in names:
        reason = attention_kernel_unavailable_reason(name, problem, device)
        if reason is None:
            return _make(name, device)
        reasons[name] = reason
    raise UnsupportedError(f"attention.kernel is {wanted!r}, but {'; '.join(reasons.values())}")


def attention_kernel_unavailable_reason(name: str, problem: AttentionProblem, device: torch.device) -> str | None:
    """Why the kernel of that name cannot compute `problem`, None if it can."""
    return None if name == "math" else f"{name} attention runs on CUDA devices, this is {device}"


def _make(name: str, device: torch.device) -> AttentionKernel:
    return MathAttention()
