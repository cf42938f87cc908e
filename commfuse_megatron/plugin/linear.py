"""Megatron's two tensor-parallel linears with their communication hidden under partial GEMMs.

Both inherit everything from Megatron's classes - parameters, their names and attributes, initialisation, checkpoints -
and override what communicates: `_forward_impl` of the column-parallel linear, `forward` of the row-parallel one, where
Megatron has no smaller seam. Whether that is an all-gather and a reduce-scatter or, without sequence parallelism, an
all-reduce, the instance says at every call. Gradient accumulation fusion works without Apex, see `main_grad`. A built
Megatron layer may be turned into ours by setting its `__class__`; so no constructor state may be relied upon, and
everything is decided at call time.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.ops.problems import linear_problems
from commfuse_megatron.plugin import arguments as flags
from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear
from commfuse_megatron.plugin.decision import (
    computing_weight_once,
    overlap_context,
    run_operation,
    run_with_own_bias,
    state_of,
)
from commfuse_megatron.plugin.main_grad import into_main_grad
from commfuse_megatron.plugin.stand_in import stands_for


class _Local:
    """What both do beside their GEMMs."""

    def __init__(self, *args: Any, config: Any, overlap_config: OverlapConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, config=_without_fused_kernel(config), **kwargs)  # type: ignore[call-arg]
        self.config = config
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        remember(self, config, overlap_config, kwargs)


@stands_for(ColumnParallelLinear)
class CommFuseColumnParallelLinear(_Local, ColumnParallelLinear):
    """`ColumnParallelLinear` whose all-gather (and reduce-scatter in the backward pass) hides under its GEMMs; without
    sequence parallelism, the all-reduce of its input's gradient.

    | pass  | computes                                     | communicates meanwhile                           |
    |-------|----------------------------------------------|--------------------------------------------------|
    | fprop | y [S, B, N/R] = x @ weight.T + bias          | all-gather of x [S/R, B, K]                      |
    | dgrad | dx [S, B, K] partial = dy @ weight           | re-gather of x; reduce-scatter to dx [S/R, B, K] |
    | wgrad | dweight [N/R, K] = dy.T @ x; dbias = dy.sum  | the end of that reduce-scatter                   |
    |       | without sequence parallelism, all of x [S, B, K]:                                               |
    | fprop | the same                                     | nothing                                          |
    | dgrad | dx [S, B, K] partial = dy @ weight           | reduce-scatter of dx, and its sums to all        |
    | wgrad | the same                                     | the end of that                                  |

    Everything around the GEMM is Megatron's: external `weight`, `skip_bias_add`, `gather_output`,
    `runtime_gather_output`. A frozen weight costs no re-gather. Unlike Megatron's path for frozen weights, a bias that
    is not frozen gets its gradient.

    Args (beyond Megatron's):
        overlap_config: the OverlapConfig of this layer; None reads the flags.

    Raises ConfigError for a configuration file with mistakes, unless switched off.
    """

    @torch.compiler.disable  # what is decided and counted per call is Python, not a graph
    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer = kwargs.get("grad_output_buffer")
        operation, context = choose_operation(self, input, weight, grad_output_buffer=buffer)
        if context is None:
            stock_weight, kwargs = into_main_grad(weight, kwargs)
            return super()._forward_impl(input, stock_weight, *args, **kwargs)
        state, bias = state_of(self), kwargs.get("bias")
        wanted = {"return_gathered": True} if state.wants_gathered else {}
        found = run_operation(self, operation, (input,), weight, bias, context, **wanted)
        if wanted:
            found, state.gathered = found
        return found


@stands_for(RowParallelLinear)
class CommFuseRowParallelLinear(_Local, RowParallelLinear):
    """`RowParallelLinear` whose reduce-scatter (and all-gather in the backward pass) hides under its GEMMs; without
    sequence parallelism, the all-reduce of its output.

    | pass  | computes                                     | communicates meanwhile                           |
    |-------|----------------------------------------------|--------------------------------------------------|
    | fprop | y [S, B, N] partial = x [S, B, K/R] @ weight.T | reduce-scatter to y [S/R, B, N]                |
    | dgrad | dx [S, B, K/R] = dy @ weight                 | all-gather of dy [S/R, B, N]                     |
    | wgrad | dweight [N, K/R] = dy.T @ x                  | nothing is left                                  |
    |       | without sequence parallelism, all of y [S, B, N]:                                               |
    | fprop | the same                                     | reduce-scatter of y, and its sums to all         |
    | dgrad, wgrad | the same                              | nothing                                          |

    The bias is added once, after the sum, or returned whole with `skip_bias_add`; under sequence parallelism its
    gradient is that of this rank's rows, and `finalize_model_grads` sums it over the group (`bias.sequence_parallel`).

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
        """The output shard [S/R, B, N], or all of it, and the bias where `skip_bias_add` leaves it to the caller."""
        weight = self.weight
        operation, context = choose_operation(self, input_, weight)
        if context is None:
            return super().forward(input_)
        return run_with_own_bias(self, operation, (input_,), weight, context)


#: By (is it row-parallel, is it sequence-parallel).
_OPERATIONS = {
    (False, True): "all_gather_linear",
    (True, True): "linear_reduce_scatter",
    (False, False): "linear_grad_all_reduce",
    (True, False): "linear_all_reduce",
}


def choose_operation(
    layer: Any, input_: torch.Tensor, weight: torch.Tensor, **options: Any
) -> tuple[Callable[..., Any], OverlapContext | None]:
    """What a linear runs in this call, and with which context: see `overlap_context`."""
    is_row = isinstance(layer, compat.ROW_PARALLEL_LINEARS)
    name = _OPERATIONS[is_row, bool(layer.sequence_parallel)]
    context = overlap_context(
        layer, input_, weight, lambda found: linear_problems(name, input_, weight, found), **options
    )
    return getattr(ops, name), context


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
    if flags.is_switched_on(config):
        state.config(config)
