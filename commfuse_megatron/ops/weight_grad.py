"""Where a weight gradient goes when not to autograd, and when it is computed: the seams for Megatron's `main_grad` and
for its `delay_wgrad_compute`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from commfuse_megatron.errors import CommFuseError
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.prepared import PreparedPass

__all__ = ["DeferredWeightGrad", "DueWeightGrad", "WeightGrad", "WeightGradQueue", "WeightGradTarget", "target_of"]


@dataclass(frozen=True, slots=True)
class WeightGradTarget:
    """Add the gradient into a tensor instead of returning it.

    accumulate: [N, K], in the dtype of the weight, fp32 or fp64; the gradient is added in place, with the product
    un-rounded where the GEMM can add on the way out.
    result: called afterwards; what autograd is given for the weight, often None.
    """

    accumulate: torch.Tensor
    result: Callable[[], torch.Tensor | None]


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


class DueWeightGrad:
    """The weight gradient that one backward pass owes: where its program leaves it, and what autograd is given.

    Args:
        like: a tensor of the dtype and device of the operands.
    """

    def __init__(self, p: PreparedPass, like: torch.Tensor, weight_grad: WeightGrad) -> None:
        self._p, self._like, self._weight_grad = p, like, weight_grad
        self.when: Literal["now", "later"] = "later" if isinstance(weight_grad, DeferredWeightGrad) else "now"
        self.accumulates = isinstance(weight_grad, WeightGradTarget)

    def operands(self, *, is_gathered: bool) -> dict[str, torch.Tensor]:
        """What the program gets for it by name: memory for the gradient, or for the gathered rows of a later one.

        is_gathered: whether the program gathers rows for it.
        """
        p = self._p
        if self.when == "now":
            target = self._weight_grad
            if isinstance(target, WeightGradTarget):
                return {"grad_weight": target.accumulate}
            return {"grad_weight": self._like.new_empty(p.problem.N, p.problem.K)}
        if not is_gathered:
            return {}
        return p.context.memory_for_gathered(self._like.new_empty(p.problem.M, p.wire_features))

    def finish(self, operands: dict[str, torch.Tensor], grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """What autograd is given once the program has run on `operands`.

        grad [M, N], x [M, K]: what a later gradient is made of, in memory that no other call uses.
        """
        if isinstance(self._weight_grad, DeferredWeightGrad):
            _defer(self._p.gemm, grad, x, self._weight_grad)
            return None
        return operands["grad_weight"] if self._weight_grad is None else self._weight_grad.result()

    def compute(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """The same without a program: now, or later from these operands."""
        if isinstance(self._weight_grad, DeferredWeightGrad):
            _defer(self._p.gemm, grad, x, self._weight_grad)
            return None
        return _multiply(self._p.gemm, grad, x, self._weight_grad)


def _defer(gemm: SliceGemm, grad: torch.Tensor, x: torch.Tensor, deferred: DeferredWeightGrad) -> None:
    grad, x = grad.detach(), x.detach()  # what they were made by need not live until then
    target, versions = deferred.target, (grad._version, x._version)

    @torch.no_grad()
    def compute() -> torch.Tensor | None:
        if (grad._version, x._version) != versions:  # autograd no longer looks
            which = "the output's gradient" if grad._version != versions[0] else "the input"
            raise CommFuseError(
                f"a deferred weight gradient: {which} was changed in place after the backward pass; "
                "change it once the gradient has been taken from the queue"
            )
        return _multiply(gemm, grad, x, target)

    deferred.queue.put(compute)


def _multiply(
    gemm: SliceGemm, grad: torch.Tensor, x: torch.Tensor, target: WeightGradTarget | None
) -> torch.Tensor | None:
    if target is not None:
        gemm.accumulate(grad.t(), x, target.accumulate)
        result = target.result()
    else:
        result = grad.new_empty(grad.size(1), x.size(1))
        gemm.multiply(grad.t(), x, result)
    gemm.join()
    return result
