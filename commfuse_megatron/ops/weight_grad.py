"""Where a weight gradient goes when not to autograd, and when it is computed: the seams for Megatron's `main_grad` and
for its `delay_wgrad_compute`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from commfuse_megatron.errors import CommFuseError

__all__ = ["DeferredWeightGrad", "WeightGrad", "WeightGradQueue", "WeightGradTarget", "target_of"]


@dataclass(frozen=True, slots=True)
class WeightGradTarget:
    """Add the gradient into a tensor instead of returning it.

    accumulate: [N, K], in the dtype of the weight, fp32 or fp64; the gradient is added in place, with the product
    un-rounded where the GEMM can add on the way out.
    result: called afterwards; what autograd is given for the weight, often None.
    name: what errors call that tensor.
    """

    accumulate: torch.Tensor
    result: Callable[[], torch.Tensor | None]
    name: str = "weight_grad.accumulate"


class WeightGradQueue:
    """Weight gradients of backward passes that have run, to be computed later: first in, first out.

    One queue per weight, usually. Each entry keeps its two operands, [M, N] and [M, K], alive until it is computed.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], torch.Tensor | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, compute: Callable[[], torch.Tensor | None]) -> None:
        """Called by backward passes whose weight gradient is due."""
        self._waiting.append(compute)

    def pop(self) -> Callable[[], torch.Tensor | None]:
        """Take out what computes the oldest gradient: to be called once, on its backward pass's stream or behind it.

        It runs one GEMM and sends nothing; returns the gradient [N, K], or, where it is added into a target, what the
        target's `result` gives.

        Raises CommFuseError if none is waiting; the computation does if an operand was changed in place since.
        """
        if not self._waiting:
            raise CommFuseError(
                "a weight gradient was asked of a queue in which none is waiting: there is one for each backward pass "
                "that the weight's gradient was due in; look at len(queue) first"
            )
        return self._waiting.popleft()


@dataclass(frozen=True, slots=True)
class DeferredWeightGrad:
    """Compute the gradient when it is taken from `queue`; autograd is given none. What other ranks send for it is
    gathered in the backward pass as ever, into memory of its own.

    target: where it is added then; None: what is taken from the queue returns it.
    """

    queue: WeightGradQueue
    target: WeightGradTarget | None = None


WeightGrad = WeightGradTarget | DeferredWeightGrad | None


def target_of(weight_grad: WeightGrad) -> WeightGradTarget | None:
    """Where the gradient is added, now or later; None if nowhere."""
    return weight_grad.target if isinstance(weight_grad, DeferredWeightGrad) else weight_grad
