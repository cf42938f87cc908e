"""Adapters, quantisers and exporters of others on our layers, where they are installed; no GPU is needed.

`docs/support.md` lists what is checked, and in which order of adapting and converting.
"""

import pytest

from tests.integrations.harness import names_of_checks, needs, run_module


def _outcomes(module: str, *, with_transformer_engine: bool):
    @pytest.fixture(scope="module")
    def outcomes() -> dict[str, str | None]:
        return run_module(module, with_transformer_engine=with_transformer_engine)

    return outcomes


transformer_engine_outcomes = _outcomes("transformer_engine_checks", with_transformer_engine=True)
modelopt_outcomes = _outcomes("modelopt_checks", with_transformer_engine=False)
modelopt_te_outcomes = _outcomes("modelopt_te_checks", with_transformer_engine=True)
bridge_outcomes = _outcomes("bridge_checks", with_transformer_engine=True)
mcore_bridge_outcomes = _outcomes("mcore_bridge_checks", with_transformer_engine=True)


@pytest.mark.timeout(400)
@needs("transformer_engine")
@pytest.mark.parametrize("name", names_of_checks("transformer_engine_checks"))
def test_transformer_engine(transformer_engine_outcomes: dict[str, str | None], name: str) -> None:
    assert transformer_engine_outcomes[name] is None, transformer_engine_outcomes[name]


@pytest.mark.timeout(400)
@needs("modelopt")
@pytest.mark.parametrize("name", names_of_checks("modelopt_checks"))
def test_modelopt(modelopt_outcomes: dict[str, str | None], name: str) -> None:
    assert modelopt_outcomes[name] is None, modelopt_outcomes[name]


@pytest.mark.timeout(400)
@needs("modelopt", "transformer_engine")
@pytest.mark.parametrize("name", names_of_checks("modelopt_te_checks"))
def test_modelopt_with_transformer_engine(modelopt_te_outcomes: dict[str, str | None], name: str) -> None:
    assert modelopt_te_outcomes[name] is None, modelopt_te_outcomes[name]


@pytest.mark.timeout(400)
@needs("megatron.bridge", "transformer_engine")
@pytest.mark.parametrize("name", names_of_checks("bridge_checks"))
def test_megatron_bridge(bridge_outcomes: dict[str, str | None], name: str) -> None:
    assert bridge_outcomes[name] is None, bridge_outcomes[name]


@pytest.mark.timeout(400)
@needs("mcore_bridge", "peft", "transformer_engine")
@pytest.mark.parametrize("name", names_of_checks("mcore_bridge_checks"))
def test_mcore_bridge(mcore_bridge_outcomes: dict[str, str | None], name: str) -> None:
    assert mcore_bridge_outcomes[name] is None, mcore_bridge_outcomes[name]
