"""Megatron's contract for weight gradients that are added straight into `weight.main_grad`.

With gradient accumulation fusion the backward pass adds the weight gradient to `main_grad` itself and hands autograd at
most a dummy, whose only purpose is to make the data-parallel hooks fire. The contract that bites: where the wrapper put
`grad_added_to_main_grad` on the weight, the dummy must not be None and the flag must be raised, else the hook either
fails or adds a second time.
"""

from typing import Any

import torch

from commfuse_megatron.ops import WeightGradTarget

__all__ = ["adding_to_main_grad", "main_grad_target"]


def main_grad_target(weight: Any) -> WeightGradTarget:
    """Where one call's weight gradient goes: into `weight.main_grad`.

    `main_grad` is taken when the forward pass runs and bound again in the backward pass, since a weight used twice
    (tied embeddings, several prediction heads) may have had it replaced in between.
    """
    main_grad = weight.main_grad

    def result() -> torch.Tensor | None:
        weight.main_grad = main_grad
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return make(main_grad.shape, dtype=weight.dtype, device=weight.device)

    return WeightGradTarget(main_grad, result)


class _AddToMainGrad(torch.autograd.Function):
    """The weight, with a backward pass that ends in `main_grad` instead of `grad`."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.target = main_grad_target(weight)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        ctx.target.accumulate.add_(grad)
        return ctx.target.result()


def adding_to_main_grad(weight: torch.Tensor) -> torch.Tensor:
    """A view of `weight` for one call without gradient accumulation fusion; its gradient is added to `main_grad`.

    For Megatron's own path without Apex, whose kernel it needs for the fusion. Leaving the gradient to autograd would
    not do: once another call has raised `grad_added_to_main_grad`, the data-parallel hooks drop what autograd brings.
    """
    return _AddToMainGrad.apply(weight)
