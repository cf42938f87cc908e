"""Single layers against stock Megatron's, two ranks on the CPU in float64: one spawn makes all checks."""

import pytest

from tests.megatron import layer_checks
from tests.megatron.harness import names_of_checks, run_checks


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    selected = [item.callspec.params["name"] for item in request.session.items if item.module is request.module]
    return run_checks(2, layer_checks.__name__, selected)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", names_of_checks(layer_checks))
def test_layer(outcomes: dict[str, str | None], name: str) -> None:
    assert outcomes[name] is None, outcomes[name]
