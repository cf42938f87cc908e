"""Where a weight gradient goes when not to autograd, and when it is computed: the seams for Megatron's `main_grad` and
for its `delay_wgrad_compute`.
"""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from commfuse_megatron.errors import CommFuseError
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.schedule.lower_linear import Asked


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


class DueWeightGrad:
    """The weight gradient that one backward pass must produce: where its program leaves it, and what autograd is given.

    Args:
        like: a tensor of the dtype and device of the operands.
        is_gathered: whether the program gathers rows for it.

    memory: what the program gets for it by name: for the gradient, or for the rows that a later one is made of.
    """

    __slots__ = ("_p", "_weight_grad", "accumulates", "memory", "when")

    def __init__(self, p: PreparedPass, like: torch.Tensor, weight_grad: WeightGrad, *, is_gathered: bool) -> None:
        self._p, self._weight_grad = p, weight_grad
        self.when: Literal["now", "later"] = "now"
        self.accumulates = False
        self.memory: dict[str, torch.Tensor] = {}
        if weight_grad is None:
            self.memory["grad_weight"] = like.new_empty(p.problem.N, p.problem.K)
        elif isinstance(weight_grad, WeightGradTarget):
            self.memory["grad_weight"] = weight_grad.accumulate
            self.accumulates = True
        else:
            self.when = "later"
            if is_gathered:
                self.memory = p.context.memory_for_gathered(like.new_empty(p.problem.M, p.wire_features))

    def finish(self, grad: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor | None:
        """What autograd is given once the program has run; a later gradient is left to the queue.

        grad [M, N], x [M, K]: what a later one is made of, in memory that no other call uses; None: what was gathered.
        """
        if self._weight_grad is None:
            return self.memory["grad_weight"]
        if isinstance(self._weight_grad, WeightGradTarget):
            return self._weight_grad.result()
        gathered = next(iter(self.memory.values()), None)
        grad, x = gathered if grad is None else grad, gathered if x is None else x
        assert grad is not None
        assert x is not None
        _defer(self._p.gemm, grad, x, self._weight_grad)
        return None


def compute_weight_gradient(
    p: PreparedPass, grad: torch.Tensor, x: torch.Tensor, weight_grad: WeightGrad
) -> torch.Tensor | None:
    """grad [M, N] transposed @ x [M, K] where `weight_grad` says, and when; what autograd is given."""
    if isinstance(weight_grad, DeferredWeightGrad):
        _defer(p.gemm, grad, x, weight_grad)
        return None
    return _multiply(p.gemm, grad, x, weight_grad)


def ask_backward(
    due: DueWeightGrad | None,
    has_product: bool = True,
    is_bulk: bool = False,
    has_x: bool = False,
    has_addend: bool = False,
    attends: bool = False,
) -> Asked:
    """What a backward pass asks of its program: see `Asked`. due: the weight's gradient, if one is."""
    if due is None:
        return _ask(True, has_product, "none", False, is_bulk, has_x, False, False, has_addend, attends)
    return _ask(True, has_product, due.when, due.accumulates, is_bulk, has_x, False, False, has_addend, attends)


_ask = functools.cache(Asked)  # made at every backward call


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
