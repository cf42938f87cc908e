"""Transformer Engine's tensor-parallel linears, as Megatron wraps them, with their communication hidden.

Derived from Megatron's wrappers, so that parameters, checkpoints, hooks, FP8 state and attributes are theirs, and a
built layer becomes ours by setting its `__class__`. Only `forward` is overridden: what cannot be overlapped takes
Transformer Engine's, decided at every call. What the instance says counts, not its configuration: adapters set
`return_layernorm_output`, Megatron `parallel_mode`, after construction.

Where Transformer Engine is not installed, the classes are None.
"""

from collections.abc import Callable
from typing import Any

import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.ops.problems import linear_problems
from commfuse_megatron.ops.weight_grad import DeferredWeightGrad, WeightGrad, WeightGradQueue, WeightGradTarget
from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.capture import announce_saved
from commfuse_megatron.plugin.decision import (
    biases_of,
    computing_weight_once,
    count_call,
    dtype_of_operation,
    overlap_context,
    weight_grad_target,
)
from commfuse_megatron.plugin.linear import remember
from commfuse_megatron.plugin.norm_linear import normalized, with_norm_output
from commfuse_megatron.plugin.stand_in import stands_for
from commfuse_megatron.plugin.te_norm import te_normalized

__all__ = ["CommFuseTEColumnParallelLinear", "CommFuseTELayerNormColumnParallelLinear", "CommFuseTERowParallelLinear"]

_Column: Any = compat.transformer_engine_class("TEColumnParallelLinear")
_LayerNormColumn: Any = compat.transformer_engine_class("TELayerNormColumnParallelLinear")
_Row: Any = compat.transformer_engine_class("TERowParallelLinear")


class _OfTransformerEngine:
    """What the three share."""

    def __init__(self, *args: Any, config: Any, overlap_config: OverlapConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)  # type: ignore[call-arg]
        remember(self, config, overlap_config, kwargs)

    def _get_name(self) -> str:
        return type(self).__qualname__


def _context(layer: Any, op: str, input_: torch.Tensor) -> OverlapContext | None:
    weight = layer.weight
    return overlap_context(layer, input_, weight, lambda context: linear_problems(op, input_, weight, context))


def _run(layer: Any, operation: Any, input_: torch.Tensor, context: OverlapContext, **options: Any) -> Any:
    """What the operation gives, and the bias that is returned to the caller."""
    weight = layer.weight
    added, returned = biases_of(layer, input_)
    target = weight_grad_target(layer, weight)
    weight_grad: WeightGrad = target
    if layer.wgrad_store.delay_wgrad_compute():
        weight_grad = DeferredWeightGrad(_Delayed(layer.wgrad_store, weight, target), target)
    output = operation(
        input_,
        weight,
        added,
        context=context,
        weight_grad=weight_grad,
        **options,
    )
    count_call(layer, context)
    return output, returned


class _Delayed(WeightGradQueue):
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


if _Column is not None:

    @stands_for(_Column)
    class CommFuseTEColumnParallelLinear(_OfTransformerEngine, _Column):
        """`TEColumnParallelLinear` whose all-gather hides under its GEMMs: see CommFuseColumnParallelLinear.

        Args (beyond Megatron's):
            overlap_config: the OverlapConfig of this layer; None reads the flags.
        """

        @torch.compiler.disable
        @computing_weight_once
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            """The output [S, B, N/R] for the rows x [S/R, B, K], and the bias where it is left to the caller."""
            context = _context(self, "all_gather_linear", x)
            if context is None:
                return super().forward(x)
            return _run(self, ops.all_gather_linear, x, context)

    @stands_for(_LayerNormColumn)
    class CommFuseTELayerNormColumnParallelLinear(_OfTransformerEngine, _LayerNormColumn):
        """`TELayerNormColumnParallelLinear` whose all-gather hides under its GEMMs; the norm runs before it.

        The norm's output is returned, of the own rows or gathered, where the instance says so.

        Args (beyond Megatron's):
            overlap_config: the OverlapConfig of this layer; None reads the flags.
        """

        @torch.compiler.disable
        @computing_weight_once
        def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
            """As Transformer Engine's: the output [S, B, N/R] for the rows x [S/R, B, K] and what else is asked for."""
            context = _context(self, "all_gather_linear", x)
            if context is None:
                return super().forward(x)
            announce_saved(x)
            x = x.to(dtype_of_operation(x))
            normed = te_normalized(self, x)
            if normed is None:
                normed = normalized(
                    x,
                    self.layer_norm_weight,
                    self.layer_norm_bias,
                    self.eps,
                    self.normalization,
                    self.zero_centered_gamma,
                )
            if self.return_layernorm_output and self.return_layernorm_output_gathered:
                (output, normed), bias = _run(self, ops.all_gather_linear, normed, context, return_gathered=True)
            else:
                output, bias = _run(self, ops.all_gather_linear, normed, context)
            return with_norm_output(self, output, bias, normed)

    @stands_for(_Row)
    class CommFuseTERowParallelLinear(_OfTransformerEngine, _Row):
        """`TERowParallelLinear` whose reduce-scatter hides under its GEMMs: see CommFuseRowParallelLinear.

        Args (beyond Megatron's):
            overlap_config: the OverlapConfig of this layer; None reads the flags.
        """

        @torch.compiler.disable
        @computing_weight_once
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            """The output shard [S/R, B, N] for x [S, B, K/R], and the bias where it is left to the caller."""
            context = _context(self, "linear_reduce_scatter", x)
            if context is None:
                return super().forward(x)
            return _run(self, ops.linear_reduce_scatter, x, context)

else:
    CommFuseTEColumnParallelLinear = None  # type: ignore[assignment,misc]
    CommFuseTELayerNormColumnParallelLinear = None  # type: ignore[assignment,misc]
    CommFuseTERowParallelLinear = None  # type: ignore[assignment,misc]
