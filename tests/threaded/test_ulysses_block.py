"""Attention between its projections, in parts, against the reference: results, every gradient, what is interrupted."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import CommFuseError, ShapeError, UnsupportedError
from commfuse_megatron.ops import WeightGradTarget
from commfuse_megatron.problem import shard_range
from tests.harness import on_ranks, run_threads
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.threaded.test_query_split_attention import MASKS, assert_close
from tests.threaded.test_ulysses import ulysses_config

NAMES = ("x", "qkv_weight", "out_weight", "qkv_bias")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one call, and its keywords."""

    rows: int = 24
    batch: int = 2
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 4
    value_dim: int = 4
    features: int = 10
    has_bias: bool = True
    dtype: torch.dtype = torch.float64
    seed: int = 0
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, Any]:
        """Keywords that say how the weight's rows are to be read."""
        return {"heads": self.heads, "kv_heads": self.kv_heads, "total_rows": self.rows, **self.keywords}


def draw(case: Case, rank: int, group_size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """x, both weights, the bias, and the gradient of the result. Weights are equal on all ranks."""
    own = shard_range(case.rows, group_size, rank).size

    def tensor(seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * case.seed + seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    per_kv_head = (case.heads // case.kv_heads + 1) * case.head_dim + case.value_dim
    operands = [
        tensor(rank, own, case.batch, case.features),
        tensor(100, case.kv_heads * per_kv_head, case.features) / 3,
        tensor(101, 7, case.heads * case.value_dim) / 3,
    ]
    if case.has_bias:
        operands.append(tensor(102, case.kv_heads * per_kv_head))
    return operands, tensor(200 + rank, own, case.batch, 7)


def turn(q, k, v, angle):
    """What comes between projection and attention: rotations and a norm with a weight, which has gradients too."""
    cos, sin = angle.cos(), angle.sin()

    def turned(part):
        if part is None:
            return None
        halves = part.unflatten(-1, (2, -1))
        first, second = halves[..., 0, :], halves[..., 1, :]
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    return turned(q), turned(k), v


def run(operands, grad_y, call, *, is_fused, **where) -> dict[str, torch.Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in operands]
    angle = torch.full((), 0.3, dtype=leaves[0].dtype, requires_grad=True)

    def to_heads(*given):
        parts = (given[0].q, given[0].k, given[0].v) if is_fused else given
        return turn(*parts, angle)

    y = call(*leaves, to_heads=to_heads, **where)
    y.backward(grad_y)
    found = {f"{name}.grad": leaf.grad for name, leaf in zip(NAMES, leaves, strict=False)}
    return {"y": y.detach(), "angle.grad": angle.grad, **found}


def check(case: Case, group, context: OverlapContext) -> dict[str, torch.Tensor]:
    operands, grad_y = draw(case, group.rank(), group.size())
    value_dim = {"value_dim": case.value_dim}
    found = run(operands, grad_y, ops.ulysses_block, is_fused=True, context=context, **value_dim, **case.sizes)
    where = {"group": group, "head_dim": case.head_dim, **case.sizes}
    assert_close(found, run(operands, grad_y, ops.reference.ulysses_block, is_fused=False, **where))
    return found


PATHS = [("overlapped", 1), ("overlapped", 2), ("overlapped", 4), ("sequential", None), ("auto", None)]


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("path", "head_groups"), PATHS)
def test_block_and_every_gradient_equal_the_reference(group_size, path, head_groups, order):
    def body(group, device):
        with OverlapContext(group, ulysses_config(path, head_groups)) as context:
            for number, keywords in enumerate(MASKS.values()):
                kv_heads = (12, 1, group_size, 12)[number % 4]
                rows = 17 if order == "contiguous" and kv_heads > 1 else 24
                keywords = {"order": order, **keywords}
                check(Case(rows=rows, kv_heads=kv_heads, has_bias=number % 2 == 0, keywords=keywords), group, context)
            return context.report()

    for records in run_threads(group_size, body):
        expected = "local" if group_size == 1 else "overlapped" if path == "auto" else path
        assert {(record.op, record.path) for record in records} == {("ulysses_attention", expected)}
        assert all(record.modes.keys() <= {"stepped"} for record in records)
