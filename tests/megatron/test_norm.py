"""The norm for sequence parallelism, and what a small GPT is made of."""

from typing import Any

import pytest
import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin import CommFuseNorm
from commfuse_megatron.testing.gpt import SmallGPT, transformer_config


def config(**options: Any) -> Any:
    return transformer_config(SmallGPT(), 2, **options)


@pytest.mark.parametrize(
    ("normalization", "cls", "names"),
    [("LayerNorm", torch.nn.LayerNorm, ["weight", "bias"]), ("RMSNorm", torch.nn.RMSNorm, ["weight"])],
)
@pytest.mark.parametrize("is_sequence_parallel", [True, False])
def test_norm(normalization: str, cls: type, names: list[str], is_sequence_parallel: bool) -> None:
    transformer = config(normalization=normalization, params_dtype=torch.bfloat16)
    transformer.sequence_parallel = is_sequence_parallel
    norm = CommFuseNorm(config=transformer, hidden_size=8, eps=1e-3)
    assert isinstance(norm, cls)
    assert norm.eps == 1e-3
    parameters = dict(norm.named_parameters())
    assert list(parameters) == names
    for parameter in parameters.values():
        assert parameter.dtype == torch.bfloat16
        assert parameter.sequence_parallel is is_sequence_parallel


@pytest.mark.parametrize(
    "option", ["layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm"]
)
def test_options_that_torch_lacks(option: str) -> None:
    transformer = config()
    setattr(transformer, option, True)
    with pytest.raises(UnsupportedError, match=option):
        CommFuseNorm(config=transformer, hidden_size=8)


def test_unknown_norm() -> None:
    transformer = config()
    transformer.normalization = "L2Norm"
    with pytest.raises(UnsupportedError, match="LayerNorm and RMSNorm"):
        CommFuseNorm(config=transformer, hidden_size=8)


def test_variants() -> None:
    gpt = SmallGPT.layer_norm_and_bias(hidden_size=32, dtype=torch.float64)
    transformer = transformer_config(gpt, 2, calculate_per_token_loss=True)
    assert (transformer.hidden_size, transformer.normalization, transformer.add_bias_linear) == (32, "LayerNorm", True)
    assert transformer.calculate_per_token_loss
    assert transformer.params_dtype == torch.float64
    assert transformer_config(SmallGPT(), 1).sequence_parallel is False
