"""Inputs, expected results and one comparison for both linears: shared by the threaded, spawned and GPU tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.problem import shard_range

OPS = ("all_gather_linear", "linear_reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one problem; `exact` draws small integers, whose sums are exact in every dtype."""

    op: str
    rows: int
    batch: int = 2
    N: int = 6
    K: int = 5
    dtype: torch.dtype = torch.float32
    has_bias: bool = True
    exact: bool = True
    seed: int = 0


@dataclass
class Operands:
    """One rank's inputs, leaves that require gradients, and the gradient that arrives at the output."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad_y: torch.Tensor

    def copies(self) -> "Operands":
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (self.x, self.weight, self.bias)]
        return Operands(*leaves, self.grad_y)


def draw(case: Case, rank: int, group_size: int, device: torch.device) -> Operands:
    """This rank's operands; every rank draws its own, from the case's seed and its rank."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)

    def tensor(*shape: int) -> torch.Tensor:
        if case.exact:
            return torch.randint(-2, 3, shape, generator=generator).to(device, case.dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, case.dtype)

    own_rows = shard_range(case.rows, group_size, rank).size
    gathers = case.op == "all_gather_linear"
    x = tensor(own_rows if gathers else case.rows, case.batch, case.K)
    grad_y = tensor(case.rows if gathers else own_rows, case.batch, case.N)
    return Operands(x, tensor(case.N, case.K), tensor(case.N) if case.has_bias else None, grad_y)


def run_op(
    case: Case, operands: Operands, call: Callable[..., torch.Tensor], **where: Any
) -> dict[str, torch.Tensor | None]:
    """Forward and backward; the results by name."""
    leaves = operands.copies()
    extra = {"total_rows": case.rows} if case.op == "all_gather_linear" else {}
    y = call(leaves.x, leaves.weight, leaves.bias, **extra, **where)
    y.backward(operands.grad_y)
    return {
        "y": y.detach(),
        "x.grad": leaves.x.grad,
        "weight.grad": leaves.weight.grad,
        "bias.grad": None if leaves.bias is None else leaves.bias.grad,
    }


def overlapped(case: Case, operands: Operands, context: OverlapContext) -> dict[str, torch.Tensor | None]:
    return run_op(case, operands, getattr(ops, case.op), context=context)


def reference(case: Case, operands: Operands, group: dist.ProcessGroup) -> dict[str, torch.Tensor | None]:
    return run_op(case, operands, getattr(ops.reference, case.op), group=group)


def assert_equal(found: dict, expected: dict, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], value, atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
            )
