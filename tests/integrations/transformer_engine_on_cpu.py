"""Transformer Engine's linears on the CPU: they construct there, and what they compute is written out in PyTorch.

What a linear returns, and which gradients meet where, follows the documented arguments (`return_bias`,
`return_layernorm_output`, `return_layernorm_output_gathered`). That is enough to run Megatron's wrappers, and whatever
has been put around them, as the stock side of a comparison; it says nothing about Transformer Engine's kernels, which
`tests/gpu` compares.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.nn import functional
from transformer_engine import pytorch as te_pytorch

from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.spec import block_spec, replace_in_spec

__all__ = ["can_be_built", "computes", "gpt_spec"]


@contextmanager
def can_be_built() -> Iterator[None]:
    """Its constructors ask for a GPU, though with `use_cpu_initialization` they use none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        yield


@contextmanager
def computes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(te_pytorch.Linear, "forward", _linear)
        patch.setattr(te_pytorch.LayerNormLinear, "forward", _norm_and_linear)
        # They stand for Transformer Engine's own, and are no reason to leave the overlapped path.
        patch.setattr(compat, "_TRANSFORMER_ENGINE_FUNCTIONS", compat._transformer_engine_functions())
        yield


def gpt_spec(config: Any) -> Any:
    """Megatron's block of Transformer Engine's linears, with attention and final norm that compute on the CPU."""
    layer = get_gpt_layer_with_transformer_engine_spec()
    layer = replace_in_spec(layer, {te.TEDotProductAttention: DotProductAttention})
    return block_spec(layer, config, with_torch_norm=True)


def _linear(self: Any, inp: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
    x = _gathered(self, inp) if self.parallel_mode == "column" else inp
    output = functional.linear(x, self.weight)
    if self.parallel_mode == "row":
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        output = reduce(output, group=self.tp_group)
    output = output + self.bias if self.apply_bias else output
    return (output, self.bias) if self.return_bias else output


def _norm_and_linear(self: Any, inp: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
    weight = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
    if self.normalization == "LayerNorm":
        normed = functional.layer_norm(inp, weight.shape, weight, self.layer_norm_bias, self.eps)
    else:
        normed = functional.rms_norm(inp, weight.shape, weight, self.eps)
    gathered = _gathered(self, normed)
    output = functional.linear(gathered, self.weight)
    output = output + self.bias if self.apply_bias else output
    results = (output, self.bias) if self.return_bias else (output,)
    if self.return_layernorm_output:
        results = (*results, gathered if self.return_layernorm_output_gathered else normed)
    return results if len(results) > 1 else output


def _gathered(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.sequence_parallel:
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=layer.tp_group)
    return copy_to_tensor_model_parallel_region(x, group=layer.tp_group)
