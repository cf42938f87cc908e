"""Transformer Engine's linears in specs and models, where Transformer Engine is installed; no GPU is needed."""

import importlib
import traceback
from typing import Any

import pytest
from torch import distributed as dist

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin.compat import HAVE_TRANSFORMER_ENGINE
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
