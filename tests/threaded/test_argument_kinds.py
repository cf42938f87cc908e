"""One rank brings an argument of a wrong kind: every rank raises at once, and says which rank brought what."""

import fractions
import inspect
import re
import time
import types
import typing
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.errors import ShapeError
from commfuse_megatron.ops import DeferredWeightGrad, WeightGradQueue, WeightGradTarget
from commfuse_megatron.ops.weight_grad import WeightGrad
from tests.harness import on_ranks
from tests.harness.contexts import in_context

# Waiting for a rank that does not come takes as long as this; an error takes milliseconds.
TIMEOUT_S, SOON_S = 20.0, 5.0
TOKENS, FEATURES = 12, 4

OPS = {
    op.__name__: op
    for op in (
        ops.all_gather_linear,
        ops.linear_reduce_scatter,
        ops.linear_all_reduce,
        ops.linear_grad_all_reduce,
        ops.query_split_attention,
        ops.embedding_reduce_scatter,
        ops.ulysses_attention,
    )
}


class Wrapper(torch.Tensor):
    """Stands for a tensor and computes by a dispatch of its own, as DTensor does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = tree_map(lambda value: value.inner if isinstance(value, cls) else value, args)
        return function(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A type of somebody's own that computes as any tensor."""


ARRAY = np.zeros((TOKENS, 1, FEATURES), dtype=np.float32)
TENSOR = torch.ones(FEATURES, FEATURES)
with warnings.catch_warnings(action="ignore"):
    FOREIGN = [
        torch.nested.nested_tensor([TENSOR, TENSOR]), torch._efficientzerotensor((FEATURES, FEATURES)),
        torch._to_functional_tensor(TENSOR), FakeTensorMode().from_tensor(TENSOR), Wrapper(TENSOR),
    ]  # fmt: skip
#: By what a signature says.
WRONG: dict[Any, list[Any]] = {
    torch.Tensor: [None, 5, "a", [TENSOR], ARRAY, object(), *FOREIGN],
    torch.Tensor | None: [5, "b", [1], ARRAY, object()], int: [None, float(FEATURES), "7", [7], TENSOR],
    int | None: [float(TOKENS), "7", [7], TENSOR], bool: [None, 2, "yes", [True], TENSOR],
    float: [None, "a", 1j, [0.5], TENSOR], float | None: ["a", 1j, [0.5], TENSOR],
    str: [None, 5, ["zigzag"], TENSOR],
    tuple[int, int] | None: [5, "ab", {1, 2}, {1: 2}, TENSOR],
    WeightGrad: [TENSOR, 5, WeightGradTarget(None, lambda: None), WeightGradTarget(ARRAY, lambda: None),
     WeightGradTarget(FOREIGN[1], lambda: None), DeferredWeightGrad([]), DeferredWeightGrad(WeightGradQueue(),
      TENSOR), DeferredWeightGrad(WeightGradQueue(), WeightGradTarget(ARRAY, lambda: None))],
}  # fmt: skip


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
    if op == "ulysses_attention":
        heads = torch.ones(TOKENS // group_size, 1, 2 * group_size, FEATURES)
        return {"q": heads, "k": heads, "v": heads}
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
@in_context("group_size", config())
def test_every_rank_raises_soon(group, context, op, name, bad_rank):
    """Fails without the kinds among what ranks agree on: one rank alone raised, the others waited for it."""
    arguments = good(op, group.rank(), group.size())
    for is_known in (False, True):  # a call like a good one before is not looked at again
        for value in WRONG[kinds_of(op)[name]]:
            given = {**arguments, name: value} if group.rank() == bad_rank else arguments
            expect_refusal(op, name, given, bad_rank, context)
        if not is_known:
            check_still_right(op, group, context)
    check_still_right(op, group, context)


@pytest.mark.parametrize(
    ("op", "name"), [("all_gather_linear", "bias"), ("linear_reduce_scatter", "x"), ("query_split_attention", "k")]
)
@in_context(2, config())
def test_under_autocast(group, context, op, name) -> None:
    """Which casts before anything is compared."""
    arguments = good(op, group.rank(), group.size())
    with torch.autocast("cpu", torch.bfloat16):
        for value in (5, [TENSOR], ARRAY):
            expect_refusal(op, name, {**arguments, name: value} if group.rank() else arguments, 1, context)
        assert OPS[op](**arguments, context=context).dtype == torch.bfloat16


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_where_ranks_compare_new_calls_only(group, device, op: str) -> None:
    """A new call is refused everywhere; nobody knows at which call the others are then, so the context has failed."""
    arguments = good(op, group.rank(), group.size())
    name = next(iter(arguments))
    context = OverlapContext(group, config(check_agreement=False))
    expect_refusal(op, name, {**arguments, name: None} if group.rank() else arguments, 1, context)
    with pytest.raises(ShapeError):
        OPS[op](**arguments, context=context)
    with pytest.raises(ShapeError):
        context.close()


@in_context(2, config())
def test_what_does_as_well_is_taken(group, context):
    embedding = good("embedding_reduce_scatter", group.rank(), group.size())
    for first in (np.int64(embedding["first_id"]), embedding["first_id"]):
        ops.embedding_reduce_scatter(**{**embedding, "first_id": first}, context=context)
    linear = good("linear_reduce_scatter", group.rank(), group.size())
    of_another_type = {name: tensor.as_subclass(Marked) for name, tensor in linear.items()}
    found = [ops.linear_reduce_scatter(**each, context=context) for each in (linear, of_another_type)]
    assert torch.equal(*found)
    attention = good("query_split_attention", group.rank(), group.size())
    results = [
        ops.query_split_attention(**attention, **numbers, context=context)
        for numbers in (
            {"causal": True, "window": (3, 0), "scale": 1.0, "dropout": 0.0},
            {"causal": 1, "window": [3, 0], "scale": np.float32(1), "dropout": 0},
        )
    ]
    assert torch.equal(*results)


ROWS = TOKENS // 2


@pytest.mark.parametrize(("op", "good_ones", "bad_ones", "name"), [
    (ops.ulysses_attention, {"window": (1, 1)}, {"window": (1.0, 1.0)}, "window"),
    (ops.ulysses_attention, {"total_rows": TOKENS}, {"total_rows": float(TOKENS)}, "total_rows"),
    (ops.ulysses_attention, {"causal": True}, {"causal": 1.0}, "causal"),
    (ops.query_split_attention, {"window": (1, 1)}, {"window": (1.0, 1)}, "window"),
    (ops.query_split_attention, {"causal": False}, {"causal": 0.0}, "causal"),
    (ops.all_gather_linear, {"total_rows": TOKENS}, {"total_rows": float(TOKENS)}, "total_rows"),
    (ops.all_gather_linear, {"return_gathered": True}, {"return_gathered": 1.0}, "return_gathered"),
])  # fmt: skip
@in_context(2, config())
def test_equal_values_of_another_type_get_one_answer(group, context, op, good_ones, bad_ones, name):
    """Fails with keys of known calls in which 1.0 equals 1: refused at first, taken after the other."""
    heads = torch.ones(ROWS, 1, 2, FEATURES // 2)
    operands = {"q": heads, "k": heads, "v": heads}
    if op is not ops.ulysses_attention:
        operands = good(op.__name__, group.rank(), 2)
    for _ in range(2):
        with pytest.raises(ShapeError, match=rf"group rank \d: {name} must be"):
            op(**operands, **bad_ones, context=context)
        op(**operands, **good_ones, context=context)


def target(**accumulate: Any) -> WeightGradTarget:
    return WeightGradTarget(torch.zeros(FEATURES, FEATURES, **accumulate), lambda: None)


def made_in_inference_mode(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(shape)


GATHER, ATTENTION, EMBEDDING = "all_gather_linear", "query_split_attention", "embedding_reduce_scatter"


@pytest.mark.parametrize("needs_gradients", [False, True])
@pytest.mark.parametrize(("op", "name", "value"), [
    (GATHER, "weight_grad", WeightGradTarget(torch.zeros(FEATURES, FEATURES), None)),  # type: ignore[arg-type]
    (GATHER, "weight_grad", types.SimpleNamespace(accumulate=torch.zeros(FEATURES, FEATURES))),
    (GATHER, "weight_grad", target(dtype=torch.int64)), (GATHER, "weight_grad", target(dtype=torch.bfloat16)),
    (GATHER, "weight_grad", WeightGradTarget(torch.zeros(1, FEATURES).expand(FEATURES, FEATURES), lambda: None)),
    (GATHER, "weight_grad", WeightGradTarget(made_in_inference_mode(FEATURES, FEATURES), lambda: None)),
    (GATHER, "weight_grad", WeightGradTarget(torch._neg_view(torch.zeros(FEATURES, FEATURES)), lambda: None)),
    (GATHER, "x", torch.zeros(TOKENS // 2, 1, FEATURES).to_sparse()),
    (GATHER, "weight", torch.zeros(FEATURES, FEATURES).to_sparse()),
    (ATTENTION, "weight_grad", WeightGradTarget(torch.zeros(3, FEATURES, dtype=torch.int64), lambda: None)),
    (ATTENTION, "q", torch.zeros(TOKENS, 1, 2, FEATURES // 2).to_sparse()), (ATTENTION, "scale", 10**400),
    (ATTENTION, "scale", float("nan")), (EMBEDDING, "first_id", 2**70), (EMBEDDING, "first_id", -(2**63)),
    (EMBEDDING, "weight", torch.ones(FEATURES, FEATURES).to_sparse()),
], ids=lambda value: value if isinstance(value, str) else type(value).__name__)  # fmt: skip
@in_context(2, config())
def test_values_that_could_not_be_computed_with(group, context, op, name, value, needs_gradients):
    """In new calls, and in calls like a good one before: each once raised on one rank alone, after all had agreed."""
    arguments = good(op, group.rank(), group.size())
    if needs_gradients:
        arguments["out_weight" if op == ATTENTION else "weight"].requires_grad_()
    like_a_good_one = dict(arguments)
    if name == "weight_grad":
        shape = arguments["out_weight" if op == ATTENTION else "weight"].shape
        like_a_good_one["weight_grad"] = WeightGradTarget(torch.zeros(shape), lambda: None)
    if name == "scale":
        like_a_good_one["scale"] = 1 if isinstance(value, int) else 1.0
    given = {**arguments, name: value} if group.rank() else like_a_good_one
    expect_refusal(op, name, given, 1, context)
    OPS[op](**like_a_good_one, context=context)
    expect_refusal(op, name, given, 1, context)
    OPS[op](**like_a_good_one, context=context)


@pytest.mark.parametrize("op", [GATHER, "linear_reduce_scatter", ATTENTION])
@in_context(2, config())
def test_operands_of_inference_mode_cannot_be_trained_with(group, context, op):
    arguments = good(op, group.rank(), group.size())
    name = next(iter(arguments))
    weight = arguments["out_weight" if op == ATTENTION else "weight"]
    lost = {**arguments, name: made_in_inference_mode(*arguments[name].shape)}
    with torch.no_grad():
        OPS[op](**lost, context=context)
    OPS[op](**lost, context=context)  # nobody will ask for gradients
    weight.requires_grad_()
    expect_refusal(op, name, lost if group.rank() else arguments, 1, context)
    OPS[op](**arguments, context=context)
    expect_refusal(op, name, lost if group.rank() else arguments, 1, context)


@in_context(2, config())
def test_numbers_of_any_kind_that_mean_something_are_taken(group, context):
    arguments = good(ATTENTION, group.rank(), group.size())
    for mine, theirs in (
        ({"scale": fractions.Fraction(1, 2)}, {"scale": 0.5}),
        ({"window": (10**30, 0)}, {}),
        ({"causal": False, "window": (10**30, TOKENS)}, {"causal": False}),
    ):
        found = ops.query_split_attention(**arguments, **mine, context=context)
        assert torch.equal(found, ops.query_split_attention(**arguments, **theirs, context=context))


@pytest.mark.parametrize("op", OPS)
@in_context(2, config())
def test_a_lazily_negated_operand_is_refused(group, context, op):
    name = {ATTENTION: "out_weight", "ulysses_attention": "v"}.get(op, "weight")
    arguments = good(op, group.rank(), group.size())
    negated = {**arguments, name: torch._neg_view(arguments[name])}
    OPS[op](**arguments, context=context)
    expect_refusal(op, name, negated if group.rank() else arguments, 1, context)
    OPS[op](**{**negated, name: negated[name].resolve_neg()}, context=context)


def in_forward_mode(call: Any, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, x))


#: By name: how many ranks take part (the level of forward mode is one for all threads), and how it calls.
#: By name: how many ranks take part (the level of forward mode is one for all threads), and how it calls.
TRANSFORMS = {
    "vmap": (2, lambda call, x: torch.vmap(call)(torch.stack([x, x]))),
    "jvp": (1, lambda call, x: torch.func.jvp(call, (x,), (x,))), "forward_ad": (1, in_forward_mode),
}  # fmt: skip


@pytest.mark.parametrize("op", [GATHER, "linear_reduce_scatter", ATTENTION])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize(("group_size", "run"), TRANSFORMS.values(), ids=TRANSFORMS)
@in_context("group_size", config())
def test_transforms_are_refused_and_the_context_stays_usable(group, context, op, run) -> None:
    arguments = good(op, group.rank(), group.size())
    name = next(iter(arguments))
    OPS[op](**arguments, context=context)
    with pytest.raises(ShapeError, match="transforms and forward-mode differentiation are not supported"):
        run(lambda x: OPS[op](**{**arguments, name: x}, context=context), arguments[name])
    OPS[op](**arguments, context=context)
