"""Single layers against stock Megatron's, two ranks on the CPU in float64: one spawn makes all checks."""

import pytest

from tests.megatron import (
    capture_checks,
    conversion_checks,
    derived_checks,
    fallback_checks,
    layer_checks,
    lifetime_checks,
    model_checks,
    stand_in_checks,
)
from tests.megatron.harness import names_of_checks, run_checks

#: In the order in which they run: the last ones destroy.
MODULES = (
    layer_checks,
    fallback_checks,
    model_checks,
    conversion_checks,
    derived_checks,
    stand_in_checks,
    capture_checks,
    lifetime_checks,
)
CHECKS = [(module.__name__, name) for module in MODULES for name in names_of_checks(module)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str | None]:
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    selected = {item.callspec.params["name"] for item in items}
    return run_checks(2, [check for check in CHECKS if check[1] in selected])


def test_names_are_given_once() -> None:
    assert len({name for _, name in CHECKS}) == len(CHECKS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for _, name in CHECKS])
def test_layer(outcomes: dict[str, str | None], name: str) -> None:
    assert outcomes[name] is None, outcomes[name]
