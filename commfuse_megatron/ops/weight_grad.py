"""Where a weight gradient goes when not to autograd: the seam for Megatron's `main_grad`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["WeightGradTarget"]


@dataclass(frozen=True, slots=True)
class WeightGradTarget:
    """Add the gradient into a tensor instead of returning it.

    accumulate: [N, K], in the dtype of the weight, fp32 or fp64; the gradient is added in place, with the product
    un-rounded where the GEMM can add on the way out.
    result: called afterwards; what autograd is given for the weight, often None.
    """

    accumulate: torch.Tensor
    result: Callable[[], torch.Tensor | None]
