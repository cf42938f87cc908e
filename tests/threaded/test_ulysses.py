"""Attention over a split sequence against the reference on ranks as threads: forward, every gradient, masks, sizes."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import UlyssesConfig
from commfuse_megatron.problem import shard_range
from tests.harness import run_threads
from tests.threaded.test_query_split_attention import MASKS, assert_close

NAMES = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one call, and its keywords."""

    rows: int = 24
    batch: int = 2
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 6
    value_dim: int = 6
    dtype: torch.dtype = torch.float64
    seed: int = 0
    keywords: dict[str, Any] = field(default_factory=dict)


def ulysses_config(path="overlapped", head_groups=None, **others) -> OverlapConfig:
    return OverlapConfig(ulysses=UlyssesConfig(path=path, head_groups=head_groups), **others)


def draw(case: Case, rank: int, group_size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    own = shard_range(case.rows, group_size, rank).size

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn((own, case.batch, *shape), generator=generator, dtype=torch.float64).to(case.dtype)

    sizes = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim))
    return [tensor(*size) for size in sizes], tensor(case.heads * case.value_dim)


def run(operands, grad_y, call, view=lambda tensor: tensor, **where) -> dict[str, torch.Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in operands]
    y = call(*map(view, leaves), **where)
    y.backward(grad_y)
    return {"y": y.detach(), **{f"{name}.grad": leaf.grad for name, leaf in zip(NAMES, leaves, strict=True)}}


def check(case: Case, group, context: OverlapContext, view=lambda tensor: tensor) -> dict[str, torch.Tensor]:
    operands, grad_y = draw(case, group.rank(), group.size())
    keywords = {"total_rows": case.rows, **case.keywords}
    found = run(operands, grad_y, ops.ulysses_attention, view, context=context, **keywords)
    assert_close(found, run(operands, grad_y, ops.reference.ulysses_attention, view, group=group, **keywords))
    return found


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("path", "head_groups"), [
    ("overlapped", 1), ("overlapped", 2), ("overlapped", 4), ("sequential", None), ("auto", None),
])  # fmt: skip
def test_forward_and_every_gradient_equal_the_reference(group_size, path, head_groups, order):
    def body(group, device):
        with OverlapContext(group, ulysses_config(path, head_groups)) as context:
            for keywords, kv_heads in zip(MASKS.values(), itertools.cycle((12, 1, group_size)), strict=False):
                rows = 17 if order == "contiguous" and kv_heads > 1 else 24
                check(Case(rows=rows, kv_heads=kv_heads, keywords={"order": order, **keywords}), group, context)
            return context.report()

    for records in run_threads(group_size, body):
        expected = "local" if group_size == 1 else "overlapped" if path == "auto" else path
        assert {(record.op, record.path) for record in records} == {("ulysses_attention", expected)}
        assert {record.pass_name for record in records} == {"fprop", "backward"}
        assert all(record.calls and record.attention == "math" for record in records)
