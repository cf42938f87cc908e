"""Megatron's two tensor-parallel linears with their communication hidden under partial GEMMs.

Both inherit everything from Megatron's classes - parameters, their names and attributes, initialisation, checkpoints -
and override what communicates: `_forward_impl` of the column-parallel linear, `forward` of the row-parallel one, where
Megatron has no smaller seam. Gradient accumulation fusion works without Apex, see `main_grad`. A built Megatron layer
may be turned into ours by setting its `__class__`; so no constructor state may be relied upon, and everything is
decided at call time. Only where a spec named Transformer Engine's class is there a decision before, at construction
(`stock_class`).
"""

from typing import Any

import torch

from commfuse_megatron import OverlapConfig, ops
from commfuse_megatron.ops.stated import linear_problems
from commfuse_megatron.plugin import arguments as flags
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear, tell_fsdp
from commfuse_megatron.plugin.construction import kept_stock, without_fused_kernel
from commfuse_megatron.plugin.decision import count_call, overlap_context, state_of, weight_grad_target
from commfuse_megatron.plugin.main_grad import into_main_grad

__all__ = ["CommFuseColumnParallelLinear", "CommFuseRowParallelLinear"]


class _Constructed:
    """What both do when they are built: decide whether to be, and remember what was asked for."""

    def __new__(cls, *args: Any, stock_class: type | None = None, **kwargs: Any) -> Any:
        kept = kept_stock(stock_class, args, kwargs)
        return super().__new__(cls) if kept is None else kept

    def __init__(
        self,
        *args: Any,
        config: Any,
        overlap_config: OverlapConfig | None = None,
        stock_class: type | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, config=without_fused_kernel(config), **kwargs)  # type: ignore[call-arg]
        _remember(self, config, overlap_config, kwargs)


class CommFuseColumnParallelLinear(_Constructed, ColumnParallelLinear):
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
        stock_class: Transformer Engine's class where the spec named that; constructing ours gives an instance of it
            where the layer has to stay stock.

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
        output = ops.all_gather_linear(input, weight, kwargs.get("bias"), context=context, weight_grad=target)
        count_call(self, context)
        return output


class CommFuseRowParallelLinear(_Constructed, RowParallelLinear):
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
        stock_class: Transformer Engine's class where the spec named that; constructing ours gives an instance of it
            where the layer has to stay stock.

    Raises ConfigError for a configuration file with mistakes, unless switched off.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight, kwargs = into_main_grad(weight, kwargs)  # only on Megatron's own path
        return super()._forward_impl(input, weight, *args, **kwargs)

    @torch.compiler.disable
    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output shard [S/R, B, N], and the bias where `skip_bias_add` leaves it to the caller."""
        weight = self.weight
        context = overlap_context(
            self, input_, weight, lambda context: linear_problems("linear_reduce_scatter", input_, weight, context)
        )
        if context is None:
            return super().forward(input_)
        bias = None if self.skip_bias_add else self.bias
        target = weight_grad_target(self, weight)
        output = ops.linear_reduce_scatter(input_, weight, bias, context=context, weight_grad=target)
        count_call(self, context)
        return output, (self.bias if self.skip_bias_add else None)


def _remember(layer: Any, config: Any, overlap_config: OverlapConfig | None, arguments: dict[str, Any]) -> None:
    layer.config = config
    layer.gradient_accumulation_fusion = config.gradient_accumulation_fusion
    state = state_of(layer)
    state.overlap_config = overlap_config
    state.name = arguments.get("name") or arguments.get("tp_comm_buffer_name")
    flags.adopt_flags(layer.config)  # a ready spec object cannot: it does not meet the configuration
    state.require_valid_config(layer.config)


tell_fsdp("column", CommFuseColumnParallelLinear.__name__)
tell_fsdp("row", CommFuseRowParallelLinear.__name__)
