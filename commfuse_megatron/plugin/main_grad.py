"""Megatron's contract for weight gradients that are added straight into `weight.main_grad`.

With gradient accumulation fusion the backward pass adds the weight gradient to `main_grad` itself and hands autograd at
most a dummy, whose only purpose is to make the data-parallel hooks fire. Beware: where the wrapper put
`grad_added_to_main_grad` on the weight, the dummy must not be None and the flag must be raised, else the hook either
fails or adds a second time.

Without Apex, Megatron's linears refuse the fusion. Ours do not: the overlapped ops add by themselves, and calls on
Megatron's own path take the weight through `into_main_grad`.
"""

from collections.abc import Callable
from typing import Any

import torch

from commfuse_megatron.ops import WeightGradQueue, WeightGradTarget
from commfuse_megatron.plugin import compat


def main_grad_target(weight: Any, name: str = "main_grad") -> WeightGradTarget:
    """Where one call's weight gradient goes: into `weight.main_grad`, which errors call `name`.

    `main_grad` is taken when the forward pass runs and bound again in the backward pass, since a weight used twice
    (tied embeddings, several prediction heads) may have had it replaced in between.
    """
    main_grad = weight.main_grad

    def result() -> torch.Tensor | None:
        weight.main_grad = main_grad
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros if getattr(weight, "zero_out_wgrad", False) or _is_looked_at() else torch.empty
        return make(main_grad.shape, dtype=weight.dtype, device=weight.device)

    return WeightGradTarget(main_grad, result, name)


def _is_looked_at() -> bool:
    """Whether someone looks at dummies, where memory that nobody filled may read as NaN, or is filled with it."""
    if torch.is_anomaly_enabled():
        return True
    is_filled: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return is_filled and torch.are_deterministic_algorithms_enabled()


def into_main_grad(weight: torch.Tensor, arguments: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Weight and arguments for Megatron's own linear: where it lacks the kernel, autograd adds into `main_grad`.

    A weight that is used several times may be overlapped in one call and not in another, so no call may leave its
    gradient to autograd alone: the hook would take it for part of the dummy.
    """
    is_left_alone = compat.HAVE_FUSED_WEIGHT_GRADIENT or hasattr(weight, "__fsdp_param__")
    if is_left_alone or not arguments.get("gradient_accumulation_fusion"):
        return weight, arguments
    has_target = weight.requires_grad and torch.is_grad_enabled() and getattr(weight, "main_grad", None) is not None
    into = _IntoMainGrad.apply(weight, main_grad_target(weight)) if has_target else weight
    return into, {**arguments, "gradient_accumulation_fusion": False}


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, target: WeightGradTarget) -> torch.Tensor:
        ctx.target = target
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        ctx.target.accumulate.add_(grad)
        return ctx.target.result(), None


class DelayedWeightGrads(WeightGradQueue):
    """Puts weight gradients where Transformer Engine's `backward_dw` takes them from (`delay_wgrad_compute`)."""

    def __init__(self, store: Any, weight: Any, target: WeightGradTarget | None) -> None:
        super().__init__()
        self._store, self._weight, self._target = store, weight, target

    def put(self, compute: Callable[[], torch.Tensor | None]) -> None:
        """Called by a backward pass."""

        def run() -> tuple[torch.Tensor | None, None]:
            grad = compute()  # the gradient, or what tells the data-parallel hooks that it is in `main_grad`
            if self._target is not None and self._weight.grad is None:
                self._weight.grad = grad
            return grad, None  # autograd has given the bias its own

        self._store.put([], run)
