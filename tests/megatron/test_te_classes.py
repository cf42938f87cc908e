"""Transformer Engine's linears in specs and models, where Transformer Engine is installed; no GPU is needed."""

import importlib
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin.compat import HAVE_TRANSFORMER_ENGINE
from commfuse_megatron.plugin.decision import biases_of
from tests.harness import run_spawned

MODULE = "tests.megatron.te_checks"


def _enter(group: dist.ProcessGroup, _: Any) -> dict[str, str]:
    from commfuse_megatron.testing import cpu_megatron

    with cpu_megatron(without=["transformer_engine"]):
        from commfuse_megatron.testing.gpt import tensor_parallel
        from tests.megatron.harness import names_of_checks

        checks = importlib.import_module(MODULE)
        outcomes = {}
        with tensor_parallel(group.size()):
            for name in names_of_checks(checks):
                try:
                    getattr(checks, name)(group.size())
                except Exception:
                    outcomes[name] = traceback.format_exc()
                failed: list[Any] = [None] * group.size()
                dist.all_gather_object(failed, name in outcomes)
                if any(failed):
                    break
        return outcomes


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not HAVE_TRANSFORMER_ENGINE, reason="Transformer Engine is not installed")
def test_transformer_engines_classes() -> None:
    for rank, outcomes in enumerate(run_spawned(2, _enter)):
        assert outcomes == {}, f"rank {rank}:\n" + "\n".join(outcomes.values())


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
