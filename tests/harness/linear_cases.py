"""Calls of both linears as `commfuse verify` draws and compares them, for all tests; and a comparison that asserts."""

import torch

from commfuse_megatron.tools.verify.calls import OPS, Operands, overlapped, reference
from commfuse_megatron.tools.verify.calls import LinearCall as Case
from commfuse_megatron.tools.verify.calls import run as run_op

__all__ = ["OPS", "Case", "Operands", "assert_equal", "draw", "overlapped", "reference", "run_op"]

draw = Case.draw


def assert_equal(found: dict, expected: dict, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], value, atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
            )
