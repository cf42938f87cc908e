"""Tensors that are negative, or zero, by a mark beside their memory, which kernels and transports do not look at.

Operands of a call are refused so, which its caller can change; gradients, and what hooks give back, are taken.
"""

import torch


def without_marks(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy whose memory holds its numbers. Complex ones, which could be conjugated by a mark, no
    operation takes."""
    return tensor.clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor
