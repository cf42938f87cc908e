"""Calls of both linears as `commfuse verify` draws and compares them, for all tests; and a comparison that asserts."""

import torch

from commfuse_megatron.config import LinearConfig, OverlapConfig, PassConfig, WgradConfig
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.tools.verify.calls import ALL_REDUCES, LINEARS, OPS, Operands, overlapped, reference
from commfuse_megatron.tools.verify.calls import LinearCall as Case
from commfuse_megatron.tools.verify.calls import run as run_op

__all__ = [
    "ALL_REDUCES", "LINEARS", "OPS", "Case", "Operands", "assert_equal", "check_linear", "draw", "draw_own", "drawn",
    "linear_config", "overlapped", "reference", "run_op",
]  # fmt: skip

_CPU = torch.device("cpu")

draw = Case.draw


def draw_own(case: Case, group) -> Operands:
    """This rank's operands, on the CPU."""
    return case.draw(group.rank(), group.size(), _CPU)


def drawn(case: Case, group, device=_CPU) -> tuple[Operands, dict]:
    """This rank's operands, and what the reference makes of all."""
    operands = case.draw(group.rank(), group.size(), device)
    return operands, reference(case, operands, group)


def linear_config(algorithm="direct", m=1, path="sliced", **wgrad) -> OverlapConfig:
    chosen = PassConfig(path=path, algorithm=algorithm, chunks_per_shard=m)
    return OverlapConfig(linear=LinearConfig(fprop=chosen, dgrad=chosen, wgrad=WgradConfig(**wgrad)))


def check_linear(case: Case, group, context: OverlapContext) -> None:
    """Forward and every gradient are the reference's to the bit."""
    operands, expected = drawn(case, group, context.device)
    assert_equal(overlapped(case, operands, context), expected)


def assert_equal(found: dict, expected: dict, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], value, atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
            )
