"""A LayerNorm or RMSNorm that works under sequence parallelism without Apex and Transformer Engine.

Megatron's own `WrappedTorchNorm` refuses sequence parallelism because it does not mark its parameters. The mark is all
that is missing: each rank sees its own rows only, so `finalize_model_grads` must sum the gradients of the norm over the
tensor-parallel group, and it does so for parameters whose `sequence_parallel` is true. Forgetting it is silent: ranks
drift apart.
"""

from typing import Any

import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin.capture import announce_saved


class _LayerNorm(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        announce_saved(input)
        return super().forward(input)


class _RMSNorm(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        announce_saved(x)
        return super().forward(x)


_CLASSES: dict[str, type[torch.nn.Module]] = {"LayerNorm": _LayerNorm, "RMSNorm": _RMSNorm}


class CommFuseNorm:
    """Builds the torch norm that `config.normalization` names; a drop-in for Megatron's `WrappedTorchNorm`.

    The result is a `torch.nn.LayerNorm` (parameters `weight`, `bias`) or `torch.nn.RMSNorm` (`weight`), in
    `config.params_dtype`, on the device where Megatron's linears put their weights.

    Raises UnsupportedError for options that torch's norms do not have.
    """

    def __new__(  # type: ignore[misc]  # like WrappedTorchNorm, calling the class yields a torch module
        cls,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> torch.nn.Module:
        """Build the norm; the last three arguments are taken for compatibility, the configuration decides."""
        for option in ("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm"):
            if getattr(config, option, False):
                raise UnsupportedError(f"CommFuseNorm wraps torch's norms, which have no {option}; switch it off")
        if config.normalization not in _CLASSES:
            raise UnsupportedError(
                f"CommFuseNorm offers {' and '.join(_CLASSES)}; config.normalization is {config.normalization!r}"
            )
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        norm = _CLASSES[config.normalization](hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
