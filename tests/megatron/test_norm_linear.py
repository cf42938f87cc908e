"""The fused norm and linear against a norm spelled out and Megatron's linear, in float64 on the CPU; its rounding."""

import pytest
import torch
from megatron.core import parallel_state

from commfuse_megatron.plugin.norm_linear import normalized
from commfuse_megatron.testing.gpt import tensor_parallel
from tests.megatron import checkpoint_checks, norm_linear_checks
from tests.megatron.harness import names_of_checks, run_checks

WORLD_SIZE = 4
NORM_CHECKS = names_of_checks(norm_linear_checks)
CHECKPOINT_CHECKS = names_of_checks(checkpoint_checks)


def check_all_at_two_ranks(group_size: int) -> None:
    """In two groups of two; ends with the groups that it found."""
    parallel_state.destroy_model_parallel()
    with tensor_parallel(2):
        for name in NORM_CHECKS:
            getattr(norm_linear_checks, name)(2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=group_size)


CHECKS = [
    *((norm_linear_checks.__name__, name) for name in NORM_CHECKS),
    (__name__, check_all_at_two_ranks.__name__),
    *((checkpoint_checks.__name__, name) for name in CHECKPOINT_CHECKS),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_checks(WORLD_SIZE, CHECKS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for _, name in CHECKS])
def test_on_four_ranks(outcomes: dict[str, str | None], name: str) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centered_weights_are_not_rounded_away(normalization: str, dtype: torch.dtype) -> None:
    # One plus a weight this small is one in bfloat16; the result must be the fp64 one rounded once.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator).to(dtype)
    weight = (torch.randn(32, generator=generator) * 2**-8).to(dtype)
    bias = torch.randn(32, generator=generator).to(dtype) if normalization == "LayerNorm" else None
    found = normalized(x, weight, bias, 1e-5, normalization, is_zero_centered=True)
    wide = x.double()
    centered = wide if bias is None else wide - wide.mean(-1, keepdim=True)
    exact = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5) * (1 + weight.double())
    exact = exact if bias is None else exact + bias.double()
    assert found.dtype == dtype
    half_unit = exact.abs() * torch.finfo(dtype).eps / 2
    # fp32 arithmetic adds a few units of 1.2e-7 to the rounding of the result
    assert ((found.double() - exact).abs() <= 1.01 * half_unit + 2e-6).all()


def test_mixed_dtypes_are_computed_in_the_wider_one() -> None:
    x, weight = torch.randn(8, 16).bfloat16(), torch.randn(16)
    found = normalized(x, weight, None, 1e-5, "RMSNorm", is_zero_centered=False)
    exact = normalized(x.float(), weight, None, 1e-5, "RMSNorm", is_zero_centered=False)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())
