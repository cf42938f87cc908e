"""Transformer Engine's layers in specs and models, where Transformer Engine is installed; no GPU is needed."""

from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin.compat import HAVE_TRANSFORMER_ENGINE
from commfuse_megatron.plugin.decision import biases_of
from tests.megatron.harness import checks_of_module, make_cpu_test

TE_CHECKS = checks_of_module("tests.megatron.te_checks", 2) | checks_of_module("tests.megatron.te_exchange_checks", 2)


test_transformer_engines_classes = pytest.mark.skipif(not HAVE_TRANSFORMER_ENGINE, reason="it is not installed")(
    make_cpu_test(2, TE_CHECKS, without_shims=("transformer_engine",))
)


@pytest.mark.skipif(HAVE_TRANSFORMER_ENGINE, reason="Transformer Engine is installed")
def test_the_ready_spec_says_what_is_missing() -> None:
    from megatron.core.transformer.spec_utils import build_module

    from commfuse_megatron.plugin.spec import gpt_layer_spec_te

    with pytest.raises(UnsupportedError, match="not installed"):
        build_module(gpt_layer_spec_te)


@pytest.mark.parametrize("is_returned", [False, True])
@pytest.mark.parametrize(("dtype", "is_cast"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_bias_is_cast_to_what_the_linear_computes_in(dtype: torch.dtype, is_cast: bool, is_returned: bool) -> None:
    """Fails without the cast, of what is added and of what is returned."""
    layer = SimpleNamespace(te_return_bias=is_returned, use_bias=True, bias=torch.ones(4))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        biases = biases_of(layer, torch.ones(2, dtype=dtype))
    assert [bias is not None and bias.dtype for bias in biases] == (
        [False, torch.bfloat16] if is_returned else [torch.bfloat16, False]
    )
