"""Megatron's two tensor-parallel linears with their communication hidden under partial GEMMs.

Both inherit everything from Megatron's classes - parameters, their names and attributes, initialisation, checkpoints -
and override what communicates: `_forward_impl` of the column-parallel linear, `forward` of the row-parallel one, where
Megatron has no smaller seam. Gradient accumulation fusion works without Apex, see `main_grad`. A built Megatron layer
may be turned into ours by setting its `__class__`; so no constructor state may be relied upon, and everything is
decided at call time.
"""

import copy
from typing import Any

import torch

from commfuse_megatron import OverlapConfig, ops
from commfuse_megatron.ops.problems import linear_problems
from commfuse_megatron.plugin import arguments as flags
from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear
from commfuse_megatron.plugin.decision import (
    biases_of,
    computing_weight_once,
    count_call,
    dtype_of_operation,
    overlap_context,
    state_of,
    weight_grad_target,
)
from commfuse_megatron.plugin.main_grad import into_main_grad
from commfuse_megatron.plugin.stand_in import stands_for

__all__ = ["CommFuseColumnParallelLinear", "CommFuseRowParallelLinear", "divided_bias", "remember"]


class _Local:
    """What both do beside their GEMMs."""

    def __init__(self, *args: Any, config: Any, overlap_config: OverlapConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, config=_without_fused_kernel(config), **kwargs)  # type: ignore[call-arg]
        self.config = config
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        remember(self, config, overlap_config, kwargs)

    def _get_name(self) -> str:
        return type(self).__qualname__


@stands_for(ColumnParallelLinear)
class CommFuseColumnParallelLinear(_Local, ColumnParallelLinear):
    """`ColumnParallelLinear` whose all-gather (and reduce-scatter in the backward pass) hides under its GEMMs.

    | pass  | computes                                     | communicates meanwhile                           |
    |-------|----------------------------------------------|--------------------------------------------------|
    | fprop | y [S, B, N/R] = x @ weight.T + bias          | all-gather of x [S/R, B, K]                      |
    | dgrad | dx [S, B, K] partial = dy @ weight           | re-gather of x; reduce-scatter to dx [S/R, B, K] |
    | wgrad | dweight [N/R, K] = dy.T @ x; dbias = dy.sum  | the end of that reduce-scatter                   |

    Everything around the GEMM is Megatron's: external `weight`, `skip_bias_add`, `gather_output`,
    `runtime_gather_output`. A frozen weight costs no re-gather. Unlike Megatron's path for frozen weights, a bias that
    is not frozen gets its gradient.

    Args (beyond Megatron's):
        overlap_config: the OverlapConfig of this layer; None reads the flags.

    Raises ConfigError for a configuration file with mistakes, unless switched off.
    """

    @torch.compiler.disable  # what is decided and counted per call is Python, not a graph
    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        context = overlap_context(
            self,
            input,
            weight,
            lambda context: linear_problems("all_gather_linear", input, weight, context),
            grad_output_buffer=kwargs.get("grad_output_buffer"),
        )
        if context is None:
            stock_weight, kwargs = into_main_grad(weight, kwargs)
            return super()._forward_impl(input, stock_weight, *args, **kwargs)
        target = weight_grad_target(self, weight)
        inside, outside = divided_bias(kwargs.get("bias"), input)
        state = state_of(self)
        if state.wants_gathered:
            output, state.gathered = ops.all_gather_linear(
                input, weight, inside, context=context, weight_grad=target, return_gathered=True
            )
        else:
            output = ops.all_gather_linear(input, weight, inside, context=context, weight_grad=target)
        count_call(self, context)
        return output if outside is None else output + outside


@stands_for(RowParallelLinear)
class CommFuseRowParallelLinear(_Local, RowParallelLinear):
    """`RowParallelLinear` whose reduce-scatter (and all-gather in the backward pass) hides under its GEMMs.

    | pass  | computes                                     | communicates meanwhile                           |
    |-------|----------------------------------------------|--------------------------------------------------|
    | fprop | y [S, B, N] partial = x [S, B, K/R] @ weight.T | reduce-scatter to y [S/R, B, N]                |
    | dgrad | dx [S, B, K/R] = dy @ weight                 | all-gather of dy [S/R, B, N]                     |
    | wgrad | dweight [N, K/R] = dy.T @ x                  | nothing is left                                  |

    The bias is added once, after the sum, or returned whole with `skip_bias_add`; its gradient is that of this rank's
    rows, and `finalize_model_grads` sums it over the group (`bias.sequence_parallel`).

    Args (beyond Megatron's):
        overlap_config: the OverlapConfig of this layer; None reads the flags.

    Raises ConfigError for a configuration file with mistakes, unless switched off.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight, kwargs = into_main_grad(weight, kwargs)  # only on Megatron's own path
        return super()._forward_impl(input, weight, *args, **kwargs)

    @torch.compiler.disable
    @computing_weight_once
    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output shard [S/R, B, N], and the bias where `skip_bias_add` leaves it to the caller."""
        weight = self.weight
        context = overlap_context(
            self, input_, weight, lambda context: linear_problems("linear_reduce_scatter", input_, weight, context)
        )
        if context is None:
            return super().forward(input_)
        added, returned = biases_of(self, input_)
        inside, outside = divided_bias(added, input_)
        target = weight_grad_target(self, weight)
        output = ops.linear_reduce_scatter(input_, weight, inside, context=context, weight_grad=target)
        count_call(self, context)
        return output if outside is None else output + outside, returned


def divided_bias(bias: torch.Tensor | None, input_: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What the operation adds, and what is added to its output afterwards.

    Megatron adds the bias to the output, so one of a wider dtype (an adapter's, or any under autocast) gives an output
    of that dtype; the operation has one dtype for all.
    """
    if bias is None:
        return None, None
    return (bias, None) if bias.dtype == dtype_of_operation(input_) else (None, bias)


def _without_fused_kernel(config: Any) -> Any:
    """`config`, or without Apex a copy that does not ask for its kernel, for Megatron's constructors to read.

    They refuse gradient accumulation fusion without Apex. Our layers do without it: the overlapped path adds into
    `main_grad` in its own GEMMs, and Megatron's path is called with a weight that `into_main_grad` made.
    """
    if compat.HAVE_FUSED_WEIGHT_GRADIENT or not config.gradient_accumulation_fusion:
        return config
    unfused = copy.copy(config)
    unfused.gradient_accumulation_fusion = False
    return unfused


def remember(layer: Any, config: Any, overlap_config: OverlapConfig | None, arguments: dict[str, Any]) -> None:
    """Keep what a layer was built with; raises ConfigError for a configuration with mistakes."""
    state = state_of(layer)
    state.overlap_config = overlap_config
    state.name = arguments.get("name") or arguments.get("tp_comm_buffer_name")
    flags.adopt_flags(config)  # a ready spec object cannot: it does not meet the configuration
    state.require_valid_config(config)
