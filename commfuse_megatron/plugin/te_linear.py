"""Transformer Engine's tensor-parallel linears, as Megatron wraps them, with their communication hidden.

Derived from Megatron's wrappers, so that parameters, checkpoints, hooks, FP8 state and attributes are theirs, and a
built layer becomes ours by setting its `__class__`. Only `forward` is overridden: what cannot be overlapped takes
Transformer Engine's, decided at every call. What the instance says counts, not its configuration: adapters set
`return_layernorm_output`, Megatron `parallel_mode`, after construction.

Where Transformer Engine is not installed, the classes are None.
"""

from typing import Any

import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.capture import announce_saved
from commfuse_megatron.plugin.decision import computing_weight_once, dtype_of_operation, run_with_own_bias
from commfuse_megatron.plugin.linear import choose_operation, remember
from commfuse_megatron.plugin.norm_linear import normalized, with_norm_output
from commfuse_megatron.plugin.stand_in import stands_for
from commfuse_megatron.plugin.te_norm import te_normalized

_Column: Any = compat.transformer_engine_class("TEColumnParallelLinear")
_LayerNormColumn: Any = compat.transformer_engine_class("TELayerNormColumnParallelLinear")
_Row: Any = compat.transformer_engine_class("TERowParallelLinear")


class _OfTransformerEngine:
    """What the three share, beyond Megatron's.

    overlap_config: the OverlapConfig of this layer; None reads the flags.
    """

    def __init__(self, *args: Any, config: Any, overlap_config: OverlapConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)  # type: ignore[call-arg]
        remember(self, config, overlap_config, kwargs)


if _Column is not None:

    @stands_for(_Column)
    class CommFuseTEColumnParallelLinear(_OfTransformerEngine, _Column):
        """`TEColumnParallelLinear` whose communication hides under its GEMMs: see CommFuseColumnParallelLinear."""

        @torch.compiler.disable
        @computing_weight_once
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            """The output [S, B, N/R] for the rows x [S/R, B, K], and the bias where it is left to the caller."""
            operation, context = choose_operation(self, x, self.weight)
            if context is None:
                return super().forward(x)
            return run_with_own_bias(self, operation, (x,), self.weight, context)

    @stands_for(_LayerNormColumn)
    class CommFuseTELayerNormColumnParallelLinear(_OfTransformerEngine, _LayerNormColumn):
        """`TELayerNormColumnParallelLinear` whose communication hides under its GEMMs; the norm runs before it.

        The norm's output is returned, of the own rows or gathered, where the instance says so.
        """

        @torch.compiler.disable
        @computing_weight_once
        def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
            """As Transformer Engine's: the output [S, B, N/R] for the rows x [S/R, B, K] and what else is asked for."""
            operation, context = choose_operation(self, x, self.weight)
            if context is None:
                return super().forward(x)
            announce_saved(x)
            normed = self.norm_output(x)
            is_wanted = self.return_layernorm_output and self.return_layernorm_output_gathered
            wanted = {"return_gathered": True} if is_wanted and self.sequence_parallel else {}
            output, bias = run_with_own_bias(self, operation, (normed,), self.weight, context, **wanted)
            if wanted:
                output, normed = output
            return with_norm_output(self, output, bias, normed)

        def norm_output(self, x: torch.Tensor) -> torch.Tensor:
            """What the linear multiplies."""
            x = x.to(dtype_of_operation(x))
            normed = te_normalized(self, x)
            if normed is None:
                weight, bias = self.layer_norm_weight, self.layer_norm_bias
                normed = normalized(x, weight, bias, self.eps, self.normalization, self.zero_centered_gamma)
            return normed

    @stands_for(_Row)
    class CommFuseTERowParallelLinear(_OfTransformerEngine, _Row):
        """`TERowParallelLinear` whose communication hides under its GEMMs: see CommFuseRowParallelLinear."""

        @torch.compiler.disable
        @computing_weight_once
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            """The output shard [S/R, B, N], or all rows of it, for x [S, B, K/R], and the bias where it is left to the
            caller."""
            operation, context = choose_operation(self, x, self.weight)
            if context is None:
                return super().forward(x)
            return run_with_own_bias(self, operation, (x,), self.weight, context)

else:
    CommFuseTEColumnParallelLinear = None  # type: ignore[assignment,misc]
    CommFuseTELayerNormColumnParallelLinear = None  # type: ignore[assignment,misc]
    CommFuseTERowParallelLinear = None  # type: ignore[assignment,misc]
