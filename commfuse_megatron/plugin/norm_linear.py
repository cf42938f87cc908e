"""A norm and a column-parallel linear in one module, laid out like Transformer Engine's fused one.

The norm runs on this rank's rows, before the all-gather, in torch's kernels; the rest is what the column-parallel
linear does. Parameters have Transformer Engine's names, order and attributes, so that state dicts and checkpoints go
both ways, and those of the norm carry `sequence_parallel`, without which their gradients stay partial.
"""

from operator import attrgetter
from typing import Any

import torch
from torch.nn import functional

from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.capture import announce_saved
from commfuse_megatron.plugin.compat import ColumnParallelLinear, gather_rows
from commfuse_megatron.plugin.decision import dtype_of_operation, state_of
from commfuse_megatron.plugin.linear import CommFuseColumnParallelLinear
from commfuse_megatron.plugin.stand_in import stands_for

_NORMS = ("LayerNorm", "RMSNorm")


@stands_for(ColumnParallelLinear, name="TELayerNormColumnParallelLinear")
class CommFuseLayerNormColumnParallelLinear(CommFuseColumnParallelLinear):
    """Megatron's norm and `ColumnParallelLinear` in one module, as Transformer Engine has them, without that.

    | parameter         | shape    | across ranks                                                              |
    |-------------------|----------|---------------------------------------------------------------------------|
    | layer_norm_weight | [K]      | replicated; gradient partial, summed by `finalize_model_grads`            |
    | layer_norm_bias   | [K]      | likewise; None with RMSNorm                                               |
    | weight, bias      | [N/R, K] | split along N                                                             |

    `config` says which norm, `layernorm_epsilon` and `layernorm_zero_centered_gamma`. The attributes that others read
    from Transformer Engine's class are here under the same names, except those of its FP8 state. So adapters find the
    norm's output as they do there:

        return_layernorm_output            forward returns ((y, normed), None), or (y, bias, normed) where it returns
                                           a bias; normed [S/R, B, K]
        return_layernorm_output_gathered   and then normed [S, B, K], of all ranks, whose gradient may be partial

    Args (beyond Megatron's): as in CommFuseColumnParallelLinear.

    Raises ConfigError for what Transformer Engine's class refuses too, UnsupportedError for an unknown norm.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        for refused in ("gather_output", "is_expert", "skip_weight_param_allocation"):
            if kwargs.get(refused):
                raise ConfigError(f"{self._get_name()}: {refused}=True is not supported, nor by Transformer Engine")
        if config.normalization not in _NORMS:
            raise UnsupportedError(
                f"{self._get_name()} offers {' and '.join(_NORMS)}; config.normalization is {config.normalization!r}"
            )
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.normalization = config.normalization
        self.eps = config.layernorm_epsilon
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.return_layernorm_output = self.return_layernorm_output_gathered = False
        self.stride = kwargs.get("stride", 1)
        self.ub_name = kwargs.get("tp_comm_buffer_name")
        self._add_norm_parameters()

    def _add_norm_parameters(self) -> None:
        # Before the others, as in Transformer Engine: optimizers and gradient buffers go by the order of parameters.
        linear = {name: self._parameters.pop(name) for name in ("weight", "bias")}
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        like = {"device": device, "dtype": self.config.params_dtype}
        make = torch.zeros if self.zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(make(self.input_size, **like))
        bias = torch.nn.Parameter(torch.zeros(self.input_size, **like)) if self.normalization == "LayerNorm" else None
        self.register_parameter("layer_norm_bias", bias)
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[union-attr]
        self._parameters.update(linear)

    # Under the names of Transformer Engine; out_features are those of this rank.
    in_features = property(attrgetter("input_size"))
    out_features = property(attrgetter("output_size_per_partition"))
    tp_size = property(lambda self: self.tp_group.size())
    tp_rank = property(lambda self: self.tp_group.rank())
    use_bias = property(lambda self: self.bias is not None)
    te_return_bias = property(lambda self: self.skip_bias_add and self.use_bias)
    fuse_wgrad_accumulation = property(attrgetter("gradient_accumulation_fusion"))

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        """The output [S, B, N/R] for the rows x [S/R, B, K], the bias where `skip_bias_add` leaves it, and the norm's
        output where that is asked for."""
        announce_saved(x)
        normed = self.norm_output(x)
        state = state_of(self)
        is_gathered = self.return_layernorm_output and self.return_layernorm_output_gathered and self.sequence_parallel
        state.wants_gathered = is_gathered
        try:
            output, bias = super().forward(normed)
            gathered = state.gathered
        finally:
            state.wants_gathered, state.gathered = False, None
        if is_gathered:  # on Megatron's path nobody has gathered it for us
            normed = gather_rows(normed, self.tp_group) if gathered is None else gathered
        return with_norm_output(self, output, bias, normed.to(dtype_of_operation(x)))

    def norm_output(self, x: torch.Tensor) -> torch.Tensor:
        """What the linear multiplies."""
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return normalized(x, weight, bias, self.eps, self.normalization, self.zero_centered_gamma)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """As Transformer Engine's: the linear split along N, the norm replicated."""
        return super().sharded_state_dict(prefix, sharded_offsets, compat.ensure_metadata_has_dp_cp_group(metadata))


def normalized(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    normalization: str,
    is_zero_centered: bool,
) -> torch.Tensor:
    """LayerNorm or RMSNorm of the last dimension, computed in fp32 or wider and rounded once to the dtype of `x`.

    Torch's kernels do so by themselves where all dtypes agree. One plus a zero-centered weight would be rounded to the
    weight's dtype there, which loses the small weights that zero-centering is for; so it is added in fp32 and the norm
    computed in fp32 outside the kernel, at the cost of keeping x in fp32 for the backward pass.
    """
    dtype, shape = x.dtype, weight.shape
    if is_zero_centered or weight.dtype != dtype:
        wide = torch.promote_types(torch.promote_types(dtype, weight.dtype), torch.float32)
        x, weight = x.to(wide), weight.to(wide)
        weight = weight + 1 if is_zero_centered else weight
        bias = None if bias is None else bias.to(wide)
    if normalization == "LayerNorm":
        return functional.layer_norm(x, shape, weight, bias, eps).to(dtype)
    return functional.rms_norm(x, shape, weight, eps).to(dtype)


def with_norm_output(
    layer: Any, output: torch.Tensor, bias: torch.Tensor | None, normed: torch.Tensor
) -> tuple[Any, ...]:
    """What the forward pass of a layer returns, in the forms that Megatron's wrapper of Transformer Engine's has."""
    if not layer.return_layernorm_output:
        return output, bias
    return ((output, normed), None) if bias is None else (output, bias, normed)
