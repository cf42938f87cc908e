"""Attention between its projections, in parts, against the reference: results, every gradient, what is interrupted."""

import functools
import importlib
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import CommFuseError, ShapeError, UnsupportedError
from commfuse_megatron.ops import WeightGradTarget, ulysses_parts
from commfuse_megatron.ops.qkv_gradient import GradProjected
from commfuse_megatron.problem import shard_range
from commfuse_megatron.runtime.tensor_program import TensorProgram
from commfuse_megatron.tools.common.modes import with_mode
from tests.harness import on_ranks, run_threads
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.threaded.test_query_split_attention import MASKS, assert_close, every_second, first_expanded, outer_swapped
from tests.threaded.test_ulysses import ulysses_config

ulysses_block = importlib.import_module("commfuse_megatron.ops.ulysses_block")  # the function has its name
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
    angle = torch.full((), 0.3, dtype=leaves[0].dtype, device=leaves[0].device, requires_grad=True)

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


@pytest.mark.parametrize("path", ["overlapped", "sequential"])
@on_ranks(3)
def test_sizes_of_zero_and_one(group, device, path):
    with OverlapContext(group, ulysses_config(path)) as context:
        for sizes in (
            {"rows": 0},
            {"rows": 1},
            {"rows": 2},
            {"batch": 0},
            {"head_dim": 2, "value_dim": 3},
            {"rows": 4},
        ):
            check(Case(**sizes), group, context)
        check(Case(rows=6, heads=3, kv_heads=1, value_dim=1, keywords={"order": "zigzag"}), group, context)


@pytest.mark.parametrize("head_groups", [1, 3])
@on_ranks(2)
def test_operands_that_are_not_contiguous(group, device, head_groups):
    """The weights too, and a gradient that is one number everywhere, as of a sum."""
    operands, _ = draw(Case(), group.rank(), group.size())
    ones = torch.ones((), dtype=torch.float64).expand(12, 2, 7)
    with OverlapContext(group, ulysses_config(head_groups=head_groups)) as context:
        for view in (outer_swapped, every_second, first_expanded):
            for seen in range(3):
                views = [view if number == seen else lambda tensor: tensor for number in range(4)]

                def call(block, *leaves, views=views, **where):
                    return block(*[view(leaf) for view, leaf in zip(views, leaves, strict=True)], **where)

                where = {"context": context, **Case().sizes}
                found = run(operands, ones, functools.partial(call, ops.ulysses_block), is_fused=True, **where)
                where = {"group": group, "head_dim": 4, **Case().sizes}
                plain = functools.partial(call, ops.reference.ulysses_block)
                assert_close(found, run(operands, ones, plain, is_fused=False, **where))


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("group_size", "kv_heads", "head_groups"), [(2, 12, 2), (3, 1, 4), (4, 12, 3), (4, 2, 3)])
def test_the_copy_engine_gives_the_bits_that_gloo_gives(group_size, kv_heads, head_groups, order, monkeypatch):
    all_rows = (24, 48, 24) if order == "zigzag" else (24, 49, 7, 2, 1, 24)
    cases = [
        Case(rows=rows, kv_heads=kv_heads, seed=seed, dtype=torch.float32, keywords={"order": order})
        for seed, rows in enumerate(all_rows)
    ]

    def body(group, device):
        with take_part(group), OverlapContext(group, ulysses_config(head_groups=head_groups)) as context:
            found = []
            for case in cases:
                operands, grad_y = draw(case, group.rank(), group_size)
                where = {"is_fused": True, "context": context, **case.sizes}
                found.append(run(operands, grad_y, ops.ulysses_block, **where))
            return found, {record.transport for record in context.report()}

    over_gloo = run_threads(group_size, body)
    emulate_copy_engine(monkeypatch)
    over_windows = run_threads(group_size, body)
    assert [names for _, names in over_windows] == [{"copy_engine"}] * group_size
    for (first, _), (second, _) in zip(over_gloo, over_windows, strict=True):
        for one, other in zip(first, second, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("group_size", "kv_heads", "head_groups"), [(2, 12, 3), (3, 6, 2), (4, 12, 3), (2, 2, 3), (4, 2, 1)]
)
def test_tapes_give_the_bits_of_steps(group_size, kv_heads, head_groups, order, monkeypatch):
    emulate_copy_engine(monkeypatch)
    config = ulysses_config("overlapped", head_groups, transport=TransportConfig(backend="copy_engine"))
    rows = 8 * 2 * group_size  # runs begin where kernels can load statistics
    sizes = {"rows": rows, "kv_heads": kv_heads, "head_dim": 16, "value_dim": 16, "dtype": torch.float32}

    def body(group, device):
        found, modes = {}, {}
        for mode in ("stepped", "tape"):
            with take_part(group), OverlapContext(group, with_mode(config, mode)) as context:
                found[mode] = []
                for seed in range(6):  # addresses that come again make no graph
                    case = Case(seed=seed % 2, keywords={"order": order}, **sizes)
                    operands, grad_y = draw(case, group.rank(), group_size)
                    where = {"is_fused": True, "context": context, **case.sizes}
                    found[mode].append(run(operands, grad_y, ops.ulysses_block, **where))
                modes[mode] = {record.pass_name: record.modes for record in context.report()}
        for stepped, taped in zip(*found.values(), strict=True):
            for name, tensor in stepped.items():
                assert torch.equal(tensor, taped[name]), name
        return modes

    is_summed = kv_heads % group_size or (kv_heads == group_size and head_groups > 1)  # over groups or ranks: PyTorch's
    for modes in run_threads(group_size, body):
        assert modes["stepped"] == {"fprop": {"stepped": 6}, "backward": {"stepped": 6}}
        assert modes["tape"] == {"fprop": {"tape": 6}, "backward": {"stepped" if is_summed else "tape": 6}}


@pytest.mark.parametrize("is_emulated", [False, True], ids=["gloo", "copy engine"])
def test_calls_in_a_row_and_beside_other_operations(is_emulated, monkeypatch):
    """Two blocks one behind the other, with an attention and a linear between, whose backward passes come later."""
    if is_emulated:
        emulate_copy_engine(monkeypatch)

    def body(group, device):
        with take_part(group), OverlapContext(group, ulysses_config(head_groups=3)) as context:
            for seed in range(3):
                case = Case(seed=seed, kv_heads=(12, 6, 1)[seed], keywords={"order": "zigzag"})
                operands, grad_y = draw(case, group.rank(), 2)
                square = torch.randn(7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / 3

                def twice(block, attend, of_attention, case=case, square=square, operands=operands, **where):
                    leaves = [each.clone().requires_grad_() for each in operands]
                    y = block(*leaves, **where, **case.sizes) @ square
                    heads = y.unflatten(-1, (2, 5))
                    y = y + attend(heads, heads, heads, order="zigzag", **of_attention)
                    y = block(y, *leaves[1:], **where, **case.sizes)
                    return y, leaves

                found, leaves = twice(ops.ulysses_block, ops.ulysses_attention, {"context": context}, context=context)
                reference = ops.reference.ulysses_block, ops.reference.ulysses_attention, {"group": group}
                expected, others = twice(*reference, group=group, head_dim=4)
                found.backward(grad_y)
                expected.backward(grad_y)
                results = [
                    {"y": y.detach(), **{name: leaf.grad for name, leaf in zip(NAMES, given, strict=True)}}
                    for y, given in ((found, leaves), (expected, others))
                ]
                assert_close(*results)

    run_threads(2, body)


def test_what_is_computed_between_which_parts(monkeypatch):
    """Every transfer has something behind it that needs nothing of it: a product, a weight's gradient, attention."""
    log = threading.local()
    places = [(ulysses_block, "multiply_blocks"), (ulysses_block, "compute_weight_gradient"),
              (ulysses_parts, "multiply_columns"), (GradProjected, "multiply"),
              (TensorProgram, "run_part")]  # fmt: skip
    for place, name in places:
        function = getattr(place, name)

        def noted(*args, name=name, function=function, **kwargs):
            log.of_rank.append(f"part {args[-1]}" if name == "run_part" else name)
            return function(*args, **kwargs)

        monkeypatch.setattr(place, name, noted)

    def body(group, device):
        log.of_rank = []
        with OverlapContext(group, ulysses_config(head_groups=2)) as context:
            operands, grad_y = draw(Case(), group.rank(), 2)
            run(operands, grad_y, ops.ulysses_block, is_fused=True, context=context, **Case().sizes)
        return log.of_rank

    forward = ["multiply_blocks", "part 0", "multiply_blocks", "part 1"]
    arriving = ["multiply_columns", "part 0", "multiply_columns", "part 1", "compute_weight_gradient"]
    leaving = ["part 2", "part 3", "multiply", "part 4", "multiply"]
    assert run_threads(2, body) == [forward + arriving + leaving] * 2


FROZEN = [("x",), ("qkv_weight",), ("out_weight",), ("x", "qkv_weight", "qkv_bias"), ("x", "out_weight"), NAMES]


@pytest.mark.parametrize("frozen", FROZEN, ids=" ".join)
@pytest.mark.parametrize("path", ["overlapped", "sequential"])
@on_ranks(2)
def test_frozen_operands_get_no_gradient_others_do(group, device, frozen, path):
    case = Case(kv_heads=4)
    operands, grad_y = draw(case, group.rank(), group.size())
    results = []
    with OverlapContext(group, ulysses_config(path)) as context:
        for call, where in ((ops.ulysses_block, {"context": context}),
                            (ops.reference.ulysses_block, {"group": group, "head_dim": 4})):  # fmt: skip
            leaves = {name: t.clone().requires_grad_(name not in frozen) for name, t in zip(NAMES, operands)}  # noqa: B905
            y = call(*leaves.values(), **where, **case.sizes)
            assert y.requires_grad == (len(frozen) < 4)
            if y.requires_grad:
                y.backward(grad_y)
            results.append({"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}})
        passes = {record.pass_name for record in context.report()}
    assert_close(*results)
    assert all(results[0][name] is None for name in frozen)
    assert ("backward" in passes) == (not {"x", "qkv_weight", "qkv_bias"} <= set(frozen))


@on_ranks(2)
def test_gradients_that_are_asked_for_one_by_one(group, device):
    """Of x, then of a weight; and of what only one group of heads leads to, when the others' never come."""
    case = Case(kv_heads=4)
    operands, grad_y = draw(case, group.rank(), group.size())
    where = {"group": group, "head_dim": 4, **case.sizes}
    expected = run(operands, grad_y, ops.reference.ulysses_block, is_fused=False, **where)
    with OverlapContext(group, ulysses_config(head_groups=2)) as context:
        leaves, parts = [each.clone().requires_grad_() for each in operands], []
        angle = torch.full((), 0.3, dtype=torch.float64)

        def to_heads(part):
            parts.append(part)
            return turn(part.q, part.k, part.v, angle)

        y = ops.ulysses_block(*leaves, to_heads=to_heads, context=context, **case.sizes)
        for name, leaf in zip(NAMES, leaves, strict=True):
            (found,) = torch.autograd.grad(y, leaf, grad_y, retain_graph=True)
            assert_close({name: found}, {name: expected[f"{name}.grad"]})
        assert len(parts) == 2
        both = torch.autograd.grad(y, [part.projected for part in parts], grad_y, retain_graph=True)
        for part, whole in zip(parts, both, strict=True):
            (alone,) = torch.autograd.grad(y, part.projected, grad_y, retain_graph=True)
            assert torch.equal(alone, whole)
        y.backward(grad_y)
        for name, leaf in zip(NAMES, leaves, strict=True):
            assert_close({name: leaf.grad}, {name: expected[f"{name}.grad"]})


@pytest.mark.parametrize("way", ["fp32", "deferred"])
@pytest.mark.parametrize("path", ["overlapped", "sequential"])
@on_ranks(2)
def test_weight_gradients_go_where_they_are_told(group, device, way, path):
    case = Case(kv_heads=4, dtype=torch.float32)
    operands, grad_y = draw(case, group.rank(), group.size())
    with OverlapContext(group, ulysses_config(path, 3 if path == "overlapped" else None)) as context:
        expected = run(operands, grad_y, ops.ulysses_block, is_fused=True, context=context, **case.sizes)
        sums = [torch.ones_like(each, dtype=torch.float64) for each in operands[1:3]]
        targets = [WeightGradTarget(each, lambda: None) for each in sums]
        queues = [ops.WeightGradQueue(), ops.WeightGradQueue()]
        if way == "deferred":
            targets = [ops.DeferredWeightGrad(*each) for each in zip(queues, targets, strict=True)]
        grads = dict(zip(("qkv_weight_grad", "out_weight_grad"), targets, strict=True))
        found = run(operands, grad_y, ops.ulysses_block, is_fused=True, context=context, **grads, **case.sizes)
    assert found["qkv_weight.grad"] is None
    assert found["out_weight.grad"] is None
    assert torch.equal(found["x.grad"], expected["x.grad"])
    for name, total, queue in zip(NAMES[1:3], sums, queues, strict=True):
        if way == "deferred":
            assert torch.equal(total, torch.ones_like(total))
            queue.pop()()
        torch.testing.assert_close(total - 1, expected[f"{name}.grad"].double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("path", ["overlapped", "sequential"])
@on_ranks(2)
def test_a_block_that_is_recomputed(group, device, use_reentrant, path):
    case = Case(kv_heads=4)
    operands, grad_y = draw(case, group.rank(), group.size())
    with OverlapContext(group, ulysses_config(path)) as context:
        where = {"context": context, **case.sizes}

        def call(*given, to_heads, **_):
            block = lambda *inner: ops.ulysses_block(*inner, to_heads=to_heads, **where)  # noqa: E731
            return torch.utils.checkpoint.checkpoint(block, *given, use_reentrant=use_reentrant)

        found = [run(operands, grad_y, call, is_fused=True) for _ in range(2)]
        expected = run(operands, grad_y, ops.ulysses_block, is_fused=True, **where)
    for each in found:
        for name in expected:
            if name != "angle.grad" or not use_reentrant:  # which no reentrant checkpoint sees
                assert torch.equal(each[name], expected[name]), name


@on_ranks(2)
def test_autocast_and_no_gradients(group, device):
    case = Case(kv_heads=4, dtype=torch.float32)
    operands, _ = draw(case, group.rank(), group.size())
    with OverlapContext(group, ulysses_config()) as context:
        rounded = [each.bfloat16() for each in operands]
        with torch.no_grad():
            expected = ops.ulysses_block(*rounded, context=context, **case.sizes)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(ops.ulysses_block(*operands, context=context, **case.sizes), expected)
        leaves = [each.clone().requires_grad_() for each in operands]
        with torch.autocast("cpu", torch.bfloat16):
            y = ops.ulysses_block(*leaves, context=context, **case.sizes)
            y.backward(torch.ones_like(y))
        assert torch.equal(y.detach(), expected)
        assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)


@pytest.mark.parametrize("is_emulated", [False, True], ids=["gloo", "copy engine"])
@pytest.mark.parametrize("group_size", [2, 3, 4, 5])
def test_random_problems(group_size, is_emulated, monkeypatch):
    if is_emulated:
        emulate_copy_engine(monkeypatch)

    def body(group, device):
        draws = random.Random(group_size)
        with take_part(group):
            for seed in range(10):
                number, shared_by = draws.randint(1, 3), draws.randint(1, 3)
                kv_heads = draws.choice([1, group_size * number])
                order, rows = draws.choice(["contiguous", "zigzag"]), draws.randint(0, 30)
                rows = rows if order == "contiguous" else rows // 4 * 2 * group_size
                window = draws.choice([None, (3, 2), (-1, 4)])
                case = Case(
                    rows=rows, batch=draws.randint(1, 3), heads=group_size * number * shared_by, kv_heads=kv_heads,
                    head_dim=draws.choice([2, 4, 6]), value_dim=draws.randint(1, 5), features=draws.randint(1, 9),
                    has_bias=draws.random() < 0.5, seed=seed,
                    keywords={"order": order, "window": window, "causal": draws.random() < 0.5},
                )  # fmt: skip
                with OverlapContext(group, ulysses_config(head_groups=draws.randint(1, 5))) as context:
                    check(case, group, context)

    run_threads(group_size, body)


def test_nothing_of_a_call_is_kept_behind_its_backward_pass():
    """Fails without the last line of a departure's backward pass: all that was exchanged lived as long as the graph."""

    def body(group, device):
        operands, grad_y = draw(Case(), group.rank(), 2)
        leaves = [each.requires_grad_() for each in operands]
        with OverlapContext(group, ulysses_config(head_groups=3)) as context:
            y = ops.ulysses_block(*leaves, context=context, **Case().sizes)
            call = y.grad_fn.call
            assert call.forward is None
            y.backward(grad_y, retain_graph=True)
            assert call.backward is None
            assert call.grad_projected is None
            assert context.under_way.is_done
            (found,) = torch.autograd.grad(y, leaves[1], grad_y)
            assert torch.equal(found, leaves[1].grad)
            assert call.backward is None

    run_threads(2, body)


@on_ranks(2)
def test_only_what_the_caller_does_to_heads_has_a_gradient(group, device):
    operands, grad_y = draw(Case(kv_heads=4), group.rank(), 2)
    found = []
    with OverlapContext(group, ulysses_config(head_groups=2)) as context:
        plain = (ops.reference.ulysses_block, False, {"group": group, "head_dim": 4})
        for call, is_fused, where in ((ops.ulysses_block, True, {"context": context}), plain):
            angle = torch.full((), 0.3, dtype=torch.float64, requires_grad=True)

            def to_heads(*given, angle=angle, is_fused=is_fused):
                return turn(*((given[0].q, given[0].k, given[0].v) if is_fused else given), angle)

            call(*operands, to_heads=to_heads, **where, **Case(kv_heads=4).sizes).backward(grad_y)
            found.append({"angle": angle.grad})
    assert_close(*found)


# -- what goes wrong --------------------------------------------------------------------------------------------------


COMPLAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"heads": 10}, "heads must be a positive multiple of kv_heads, got 10 and 12"),
    "ranks": ({"heads": 9, "kv_heads": 9}, "the heads of q must be a multiple of the 2 ranks, got 9"),
    "rows of the weight": ({"kv_heads": 4}, r"qkv_weight must have 4 \* \(3 \* D \+ D \+ D\) rows for 12 heads"),
    "values": ({"value_dim": 5}, r"qkv_weight must have 12 \* \(1 \* D \+ D \+ 5\) rows"),
    "order": ({"order": "ring"}, "order must be one of contiguous, zigzag, got 'ring'"),
    "kind": ({"heads": "12"}, "heads must be"),
    "target": ({"qkv_weight_grad": WeightGradTarget(torch.ones(1), lambda: None)}, "but the weight is"),
}


@pytest.mark.parametrize("name", COMPLAINTS)
def test_wrong_arguments_raise_everywhere_and_calls_go_on(name):
    wrong, sentence = COMPLAINTS[name]

    def body(group, device):
        case = Case(heads=9, kv_heads=9) if name == "ranks" and group.rank() == 1 else Case()
        operands, _ = draw(case, group.rank(), 2)
        with OverlapContext(group, ulysses_config()) as context:
            given = case.sizes | (wrong if group.rank() == 1 else {})
            with pytest.raises(ShapeError) as caught:
                ops.ulysses_block(*operands, context=context, **given)
            check(Case(), group, context)
            return str(caught.value)

    messages = run_threads(2, body)
    for message in messages:
        with pytest.raises(AssertionError, match=sentence):
            raise AssertionError(message)


GIVES = {
    "another shape": (lambda part: (part.q[:, :, 1:], part.k, part.v), ShapeError, r"q must be \[12, 2, 6, 4\], got"),
    "another dtype": (lambda part: (part.q, part.k.float(), part.v), ShapeError, r"k must be torch.float64 on cpu"),
    "nothing": (lambda part: (part.q, None, part.v), ShapeError, r"k must be \[12, 2, 6, 4\], got NoneType"),
    "an error": (lambda part: (part.q, 1 / 0, part.v), ZeroDivisionError, "division"),
}


@pytest.mark.parametrize("is_emulated", [False, True], ids=["gloo", "copy engine"])
@pytest.mark.parametrize("name", GIVES)
def test_heads_that_are_wrong_half_way_end_it_on_all_ranks(name, is_emulated, monkeypatch):
    """On rank 1, of the second group, when the first has left: nobody hangs, and everybody knows."""
    if is_emulated:
        emulate_copy_engine(monkeypatch)
    wrong, kind, sentence = GIVES[name]

    def body(group, device):
        operands, _ = draw(Case(), group.rank(), 2)
        timeout = TransportConfig(timeout_s=1.0)
        config = ulysses_config(head_groups=2, check_agreement=not is_emulated, transport=timeout)
        with take_part(group):
            context = OverlapContext(group, config)

            def to_heads(part):
                is_wrong = part.number and group.rank() == 1
                return wrong(part) if is_wrong else (part.q, part.k, part.v)

            if group.rank() == 1:
                with pytest.raises(kind, match=sentence):
                    ops.ulysses_block(*operands, to_heads=to_heads, context=context, **Case().sizes)
                assert not context.is_usable
                with pytest.raises(CommFuseError):
                    context.close()
                return
            calls = [functools.partial(ops.ulysses_block, *operands, to_heads=to_heads, **Case().sizes)] * 2
            with pytest.raises((CommFuseError, AssertionError)):  # the latter of the emulated device: waited in vain
                [call(context=context) for call in calls]  # over the copy engine the second one
            assert not context.is_usable

    run_threads(2, body)


@on_ranks(2)
def test_what_computes_heads_must_not_use_the_context(group, device):
    """Fails without the check: the other call wrote over what had arrived."""
    operands, _ = draw(Case(), group.rank(), 2)
    context = OverlapContext(group, ulysses_config(head_groups=2))

    def to_heads(part):
        if part.number:
            ops.ulysses_attention(part.q, part.k, part.v, context=context)
        return part.q, part.k, part.v

    with pytest.raises(UnsupportedError, match="part 1 of 2, and another call of its context"):
        ops.ulysses_block(*operands, to_heads=to_heads, context=context, **Case().sizes)
    assert not context.is_usable


class _Broken(torch.autograd.Function):
    """Raises in its backward pass on one rank."""

    @staticmethod
    def forward(ctx, q, raises):
        ctx.raises = raises
        return q.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.raises:
            raise ZeroDivisionError("given up")
        return grad, None


@pytest.mark.parametrize("follows", ["a call", "the end"])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_a_backward_pass_given_up_half_way_is_noticed(ranks, follows):
    """By what comes next, on all ranks: on the one that gave it up at once, on others by what it told them."""

    def body(group, device):
        operands, grad_y = draw(Case(), group.rank(), 2)
        context = OverlapContext(group, ulysses_config(head_groups=2))
        leaves = [each.requires_grad_() for each in operands]
        is_broken = group.rank() in ranks

        def to_heads(part):
            return _Broken.apply(part.q, is_broken and part.number == 1), part.k, part.v

        def go_on():
            if follows == "the end" and is_broken:
                context.close()
            else:
                ops.ulysses_block(*leaves, context=context, **Case().sizes)

        y = ops.ulysses_block(*leaves, to_heads=to_heads, context=context, **Case().sizes)
        if is_broken:
            with pytest.raises(ZeroDivisionError, match="given up"):
                y.backward(grad_y)
            with pytest.raises(UnsupportedError, match="part 4 of 5, and another call"):
                go_on()
        else:
            y.backward(grad_y)
            with pytest.raises(CommFuseError, match="part 4 of 5, and another call"):
                go_on()
        assert not context.is_usable

    run_threads(2, body)
