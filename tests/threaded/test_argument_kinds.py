"""One rank brings an argument of a wrong kind: every rank raises at once, and says which rank brought what."""

import inspect
import re
import time
import typing
from typing import Any

import numpy as np
import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.errors import ShapeError
from commfuse_megatron.ops import WeightGradTarget
from tests.harness import run_threads

# Waiting for a rank that does not come takes as long as this; an error takes milliseconds.
TIMEOUT_S, SOON_S = 20.0, 5.0
TOKENS, FEATURES = 12, 4

OPS = {
    op.__name__: op
    for op in (
        ops.all_gather_linear,
        ops.linear_reduce_scatter,
        ops.query_split_attention,
        ops.embedding_reduce_scatter,
    )
}
ARRAY = np.zeros((TOKENS, 1, FEATURES), dtype=np.float32)
TENSOR = torch.ones(FEATURES, FEATURES)
#: By what a signature says.
WRONG: dict[Any, list[Any]] = {
    torch.Tensor: [None, 5, "a", [TENSOR], ARRAY, object()],
    torch.Tensor | None: [5, "b", [1], ARRAY, object()],
    int: [None, float(FEATURES), "7", [7], TENSOR],
    int | None: [float(TOKENS), "7", [7], TENSOR],
    bool: [None, "yes", [True], TENSOR],
    float: [None, "a", 1j, [0.5], TENSOR],
    float | None: ["a", 1j, [0.5], TENSOR],
    tuple[int, int] | None: [5, "ab", {1, 2}, {1: 2}, TENSOR],
    WeightGradTarget | None: [TENSOR, 5, WeightGradTarget(None, lambda: None), WeightGradTarget(ARRAY, lambda: None)],
}


def kinds_of(op: str) -> dict[str, Any]:
    hints = typing.get_type_hints(inspect.unwrap(OPS[op]))
    return {name: hint for name, hint in hints.items() if name not in ("context", "return")}


def good(op: str, group_rank: int, group_size: int) -> dict[str, Any]:
    if op == "embedding_reduce_scatter":
        ids = torch.arange(TOKENS).view(1, TOKENS)
        return {"ids": ids, "weight": torch.ones(FEATURES, FEATURES), "first_id": FEATURES * group_rank}
    if op == "query_split_attention":
        heads = torch.ones(TOKENS, 1, 2, FEATURES // 2)
        return {"q": heads, "k": heads, "v": heads, "out_weight": torch.ones(3, FEATURES), "out_bias": torch.ones(3)}
    rows = TOKENS if op == "linear_reduce_scatter" else TOKENS // group_size
    return {"x": torch.ones(rows, 1, FEATURES), "weight": torch.ones(FEATURES, FEATURES), "bias": torch.ones(FEATURES)}


def config(**others: Any) -> OverlapConfig:
    attention = {"path": "query_split"}
    return OverlapConfig.from_dict({"transport": {"timeout_s": TIMEOUT_S}, "attention": attention, **others})


def expect_refusal(op: str, name: str, arguments: dict[str, Any], bad_rank: int, context: OverlapContext) -> None:
    start = time.monotonic()
    with pytest.raises(ShapeError, match=rf"{op}, group rank {bad_rank}: {re.escape(name)}[. ].*"):
        OPS[op](**arguments, context=context)
    assert time.monotonic() - start < SOON_S


def check_still_right(op: str, group: Any, context: OverlapContext) -> None:
    arguments = good(op, group.rank(), group.size())
    found = OPS[op](**arguments, context=context)
    torch.testing.assert_close(found, getattr(ops.reference, op)(**arguments, group=group))


@pytest.mark.parametrize(("group_size", "bad_rank"), [(2, 0), (3, 1)])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in kinds_of(op)])
def test_every_rank_raises_soon(op: str, name: str, group_size: int, bad_rank: int) -> None:
    """Fails without the kinds among what ranks agree on: one rank alone raised, the others waited for it."""

    def body(group: Any, device: torch.device) -> None:
        arguments = good(op, group.rank(), group.size())
        with OverlapContext(group, config()) as context:
            for is_known in (False, True):  # a call like a good one before is not looked at again
                for value in WRONG[kinds_of(op)[name]]:
                    given = {**arguments, name: value} if group.rank() == bad_rank else arguments
                    expect_refusal(op, name, given, bad_rank, context)
                if not is_known:
                    check_still_right(op, group, context)
            check_still_right(op, group, context)

    run_threads(group_size, body)


@pytest.mark.parametrize(
    ("op", "name"),
    [("all_gather_linear", "bias"), ("linear_reduce_scatter", "x"), ("query_split_attention", "k")],
)
def test_under_autocast(op: str, name: str) -> None:
    """Which casts before anything is compared."""

    def body(group: Any, device: torch.device) -> None:
        arguments = good(op, group.rank(), group.size())
        with OverlapContext(group, config()) as context, torch.autocast("cpu", torch.bfloat16):
            for value in (5, [TENSOR], ARRAY):
                expect_refusal(op, name, {**arguments, name: value} if group.rank() else arguments, 1, context)
            assert OPS[op](**arguments, context=context).dtype == torch.bfloat16

    run_threads(2, body)


@pytest.mark.parametrize("op", OPS)
def test_where_ranks_compare_new_calls_only(op: str) -> None:
    """A new call is refused everywhere; nobody knows at which call the others are then, so the context has failed."""

    def body(group: Any, device: torch.device) -> None:
        arguments = good(op, group.rank(), group.size())
        name = next(iter(arguments))
        context = OverlapContext(group, config(check_agreement=False))
        expect_refusal(op, name, {**arguments, name: None} if group.rank() else arguments, 1, context)
        with pytest.raises(ShapeError):
            OPS[op](**arguments, context=context)
        with pytest.raises(ShapeError):
            context.close()

    run_threads(2, body)


def test_what_does_as_well_is_taken() -> None:
    def body(group: Any, device: torch.device) -> None:
        with OverlapContext(group, config()) as context:
            embedding = good("embedding_reduce_scatter", group.rank(), group.size())
            for first in (np.int64(embedding["first_id"]), embedding["first_id"]):
                ops.embedding_reduce_scatter(**{**embedding, "first_id": first}, context=context)
            attention = good("query_split_attention", group.rank(), group.size())
            results = [
                ops.query_split_attention(**attention, **numbers, context=context)
                for numbers in (
                    {"causal": True, "window": (3, 0), "scale": 1.0, "dropout": 0.0},
                    {"causal": 1, "window": [3, 0], "scale": np.float32(1), "dropout": 0},
                )
            ]
            assert torch.equal(*results)

    run_threads(2, body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_grad", WeightGradTarget(torch.zeros(FEATURES, FEATURES), None)),
        ("x", torch.zeros(TOKENS // 2, 1, FEATURES).to_sparse()),
        ("weight", torch.zeros(FEATURES, FEATURES).to_sparse()),
    ],
)
def test_what_shows_in_new_calls_only(name: str, value: Any) -> None:
    def body(group: Any, device: torch.device) -> None:
        arguments = good("all_gather_linear", group.rank(), group.size())
        with OverlapContext(group, config()) as context:
            given = {**arguments, name: value} if group.rank() else arguments
            expect_refusal("all_gather_linear", name, given, 1, context)
            check_still_right("all_gather_linear", group, context)

    run_threads(2, body)
