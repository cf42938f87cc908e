"""Query-split attention against the reference on ranks as threads: forward, every gradient, masks, sizes, layouts."""

import itertools
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import AttentionConfig
from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.ops.attention_arguments import draw_dropout
from commfuse_megatron.problem import AttentionProblem, RowRange, shard_range
from tests.harness import on_ranks, run_threads
from tests.harness.contexts import in_context

LIMIT = 1e-12  # fp64: rounding is some 1e-15, a wrong or missing split errs by order 1
NAMES = ("q", "k", "v", "out_weight", "out_bias")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one call per rank, and its keywords."""

    rows: int = 12
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 6
    value_dim: int = 6
    N: int = 10
    dtype: torch.dtype = torch.float64
    has_bias: bool = True
    seed: int = 0
    keywords: dict[str, Any] = field(default_factory=dict)


def attention_config(path="query_split", m=1, backward="auto", **others) -> OverlapConfig:
    splits = m if path in ("auto", "query_split") else None
    return OverlapConfig(attention=AttentionConfig(path=path, splits_per_shard=splits, backward=backward), **others)


def draw(case: Case, rank: int, group_size: int) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    lead = (case.rows, case.batch)
    operands = {
        "q": tensor(*lead, case.heads, case.head_dim),
        "k": tensor(*lead, case.kv_heads, case.head_dim),
        "v": tensor(*lead, case.kv_heads, case.value_dim),
        "out_weight": tensor(case.N, case.heads * case.value_dim),
        "out_bias": tensor(case.N) if case.has_bias else None,
    }
    own = shard_range(case.rows, group_size, rank)
    return operands, tensor(own.size, case.batch, case.N)


def run(operands, grad_y, call, view=None, **where) -> dict[str, torch.Tensor | None]:
    """Forward and backward; the results by name. view: how operands are seen by the call."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in operands.values()]
    given = leaves if view is None else [None if leaf is None else view(leaf) for leaf in leaves]
    y = call(*given, **where)
    y.backward(grad_y)
    gradients = {f"{name}.grad": None if leaf is None else leaf.grad for name, leaf in zip(NAMES, leaves, strict=True)}
    return {"y": y.detach(), **gradients}


def assert_close(found, expected, limit: float = LIMIT) -> None:
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
            continue
        assert found[name].shape == value.shape, name
        scale = value.abs().max().clamp(min=1.0) if value.numel() else 1.0
        error = ((found[name] - value).abs().max() / scale).item() if value.numel() else 0.0
        assert error <= limit, (name, error)


def draw_own(case: Case, group):
    return draw(case, group.rank(), group.size())


def compare(operands, grad_y, group, context: OverlapContext, view=None, limit: float = LIMIT, **keywords):
    """What the operation and the reference give, which is the same."""
    found = run(operands, grad_y, ops.query_split_attention, view, context=context, **keywords)
    expected = run(operands, grad_y, ops.reference.query_split_attention, view, group=group, **keywords)
    assert_close(found, expected, limit)
    return found, expected


def check(case: Case, group, context: OverlapContext, view=None, limit: float = LIMIT) -> None:
    compare(*draw_own(case, group), group, context, view, limit, **case.keywords)


MASKS = {
    "causal": {}, "full": {"causal": False}, "causal window": {"window": (3, 0)},
    "causal window of one": {"window": (0, -1)}, "window": {"causal": False, "window": (2, 4)},
    "window before": {"causal": False, "window": (3, -1)}, "window after": {"causal": False, "window": (-1, 2)},
    "scale": {"scale": 0.7},
}  # fmt: skip


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("m", "backward"), [(1, "query_split"), (3, "query_split"), (3, "row_parallel")])
@in_context("group_size", lambda m, backward: attention_config(m=m, backward=backward))
def test_forward_and_every_gradient_equal_the_reference(group, context, group_size, m, backward):
    for keywords, kv_heads in zip(MASKS.values(), itertools.cycle((4, 2, 1)), strict=False):
        rows = 4 * group_size * m if kv_heads == 4 else 13
        check(Case(rows=rows, kv_heads=kv_heads, keywords=keywords, seed=rows), group, context)
    records = [record for record in context.report() if record.op == "query_split_attention"]
    paths = {(record.pass_name, record.path) for record in records}
    forward, after = ("query_split", backward) if group_size > 1 else ("local", "local")
    assert paths == {("fprop", forward), ("backward", after)}
    assert all(record.calls and record.attention == "math" for record in records)
    for record in records:
        assert record.chunks_per_shard == (m if record.path == "query_split" else 1)


@pytest.mark.parametrize("path", ["row_parallel", "sequential", "auto"])
@in_context(3, lambda path: attention_config(path))
def test_other_paths_equal_the_reference_and_are_reported(group, context, path):
    for rows, keywords in itertools.product((12, 7, 2, 1), MASKS.values()):
        check(Case(rows=rows, keywords=keywords), group, context)
    records = context.report()
    of_attention = [record for record in records if record.op == "query_split_attention"]
    assert {record.path for record in of_attention} == {"row_parallel" if path == "auto" else path}
    assert any("default on the CPU" in r.reason for r in of_attention) == (path == "auto")
    of_projection = {record.path for record in records if record.op == "linear_reduce_scatter"}
    assert of_projection == (set() if path == "sequential" else {"sliced"})


@pytest.mark.parametrize(("m", "backward"), [(1, "query_split"), (4, "query_split"), (4, "row_parallel")])
@in_context(3, lambda m, backward: attention_config(m=m, backward=backward))
def test_sizes_of_zero_and_one(group, context):
    for sizes in ({"rows": 0}, {"rows": 1}, {"rows": 2}, {"batch": 0}, {"N": 0}, {"head_dim": 1}):
        check(Case(**sizes), group, context)
    check(Case(head_dim=8, value_dim=3, kv_heads=2), group, context)  # values of another size than keys
    check(Case(rows=3, batch=1, heads=1, kv_heads=1, head_dim=1, value_dim=1, N=1), group, context)


def outer_swapped(tensor):
    return tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 1 else tensor


def every_second(tensor):
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def first_expanded(tensor):
    return tensor[..., :1].expand(tensor.shape)


@pytest.mark.parametrize("view", [outer_swapped, every_second, first_expanded])
@in_context(2, attention_config(m=2))
def test_operands_that_are_not_contiguous(group, context, view):
    check(Case(kv_heads=2), group, context, view)


@in_context(2, attention_config())
def test_an_output_gradient_that_is_not_contiguous(group, context):
    operands, grad_y = draw_own(Case(), group)
    ones = torch.ones((), dtype=grad_y.dtype).expand(grad_y.shape)  # what out.sum() sends back
    for grad in (outer_swapped(grad_y), ones):
        compare(operands, grad, group, context)


@in_context(2, attention_config(m=2))
def test_exact_results_where_every_sum_is(group, context):
    """Scores of zero make every softmax a mean over a power of two of keys: all sums are exact, in any order."""
    generator = torch.Generator().manual_seed(group.rank())
    draw_integers = lambda *shape: torch.randint(-2, 3, shape, generator=generator).double()  # noqa: E731
    operands = {
        "q": torch.zeros(8, 2, 2, 3, dtype=torch.float64), "k": draw_integers(8, 2, 2, 3),
        "v": draw_integers(8, 2, 2, 3), "out_weight": draw_integers(5, 6), "out_bias": draw_integers(5),
    }  # fmt: skip
    grad_y = draw_integers(4, 2, 5)
    found, expected = compare(operands, grad_y, group, context, limit=1e-14, causal=False, scale=1.0)
    for name in ("y", "out_weight.grad", "out_bias.grad", "v.grad"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-14, rtol=1e-14)


@in_context(3, attention_config(m=2))
def test_random_masks(group, context):
    for seed, (batches, heads) in enumerate([(1, 1), (2, 1), (1, 4), (2, 4)]):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(batches, heads, 13, 13, generator=generator) < 0.5
        mask[..., 5, :] = True  # a query that sees nothing: the mean of all values, as in Megatron
        check(Case(rows=13, kv_heads=2, keywords={"mask": mask, "causal": False}), group, context)
    assert {record.path for record in context.report()} == {"query_split"}


@pytest.mark.parametrize("frozen", [("q", "k", "v"), ("out_weight",), ("k",), ("q", "k", "v", "out_weight")])
@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
@on_ranks(3)
def test_frozen_operands_get_no_gradient_and_the_others_theirs(group, device, frozen, path):
    operands, grad_y = draw_own(Case(rows=9), group)
    results = []
    with OverlapContext(group, attention_config(path)) as context:
        for call, where in (
            (ops.query_split_attention, {"context": context}),
            (ops.reference.query_split_attention, {"group": group}),
        ):
            leaves = {name: t.clone().requires_grad_(name not in frozen) for name, t in operands.items()}
            call(*leaves.values(), **where).backward(grad_y)
            results.append({name: leaf.grad for name, leaf in leaves.items()})
    assert_close(*results)
    assert all(results[0][name] is None for name in frozen)


@on_ranks(3)
def test_interleaved_with_a_linear_and_with_another_context(group, device):
    operands, grad_y = draw_own(Case(), group)
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(group.rank()), dtype=torch.float64)
    x = torch.randn(12, 2, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    expected = run(operands, grad_y, ops.reference.query_split_attention, group=group)
    linear = ops.reference.linear_reduce_scatter(x, weight, group=group)
    with OverlapContext(group, attention_config()) as first, OverlapContext(group, attention_config(m=3)) as second:
        for contexts in ((first, first), (first, second), (second, first)):
            found = []

            def call(*leaves, contexts=contexts, found=found):
                y = ops.query_split_attention(*leaves, context=contexts[0])
                found.append(ops.linear_reduce_scatter(x, weight, context=contexts[1]))
                return y

            assert_close(run(operands, grad_y, call), expected)
            torch.testing.assert_close(found[0], linear, atol=LIMIT, rtol=LIMIT)


@in_context(3, attention_config())
def test_a_hundred_runs_are_bit_identical(group, context):
    operands, grad_y = draw_own(Case(rows=10, dtype=torch.float32), group)
    first, *others = (run(operands, grad_y, ops.query_split_attention, context=context) for _ in range(100))
    assert all(torch.equal(again[name], first[name]) for again in others for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
@in_context(4, lambda path: attention_config(path))
def test_narrow_dtypes_err_no_more_than_the_reference(group, context, dtype):
    operands, grad_y = draw_own(Case(rows=24, kv_heads=2, dtype=dtype), group)
    wide = {name: t.double() for name, t in operands.items()}
    oracle = run(wide, grad_y.double(), ops.reference.query_split_attention, group=group)
    stock = run(operands, grad_y, ops.reference.query_split_attention, group=group)
    ours = run(operands, grad_y, ops.query_split_attention, context=context)
    for name, exact in oracle.items():
        scale = exact.abs().max()
        error, stock_error = (((t[name].double() - exact).abs().max() / scale).item() for t in (ours, stock))
        assert ours[name].dtype == dtype
        # Rounding once more or less than the reference is some eps; a split that is lost errs by order 1.
        assert error <= 2 * stock_error + 16 * torch.finfo(dtype).eps, (name, error, stock_error)


@in_context(2, attention_config())
def test_weight_gradient_added_into_a_wider_tensor(group, context):
    operands, grad_y = draw_own(Case(dtype=torch.float32), group)
    main_grad = torch.full(operands["out_weight"].shape, 3.0, dtype=torch.float64)
    target = ops.WeightGradTarget(main_grad, lambda: None)
    found = run(operands, grad_y, ops.query_split_attention, context=context, weight_grad=target)
    expected = run(operands, grad_y, ops.reference.query_split_attention, group=group)
    assert found["out_weight.grad"] is None
    torch.testing.assert_close(main_grad - 3, expected["out_weight.grad"].double(), atol=1e-5, rtol=1e-5)


@in_context(2, attention_config())
def test_no_grad_and_autocast(group, context):
    operands, grad_y = draw_own(Case(dtype=torch.float32), group)
    with torch.no_grad():
        y = ops.query_split_attention(*operands.values(), context=context)
    expected = ops.reference.query_split_attention(*operands.values(), group=group)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    leaves = [t.clone().requires_grad_() for t in operands.values()]
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.query_split_attention(*leaves, context=context)
    assert y.dtype is torch.bfloat16
    y.backward(grad_y.bfloat16())
    assert all(leaf.grad.dtype is torch.float32 for leaf in leaves)
    assert [(record.pass_name, record.calls) for record in context.report()] == [
        ("fprop", 1),
        ("fprop", 1),
        ("backward", 1),
    ]


def seeded(seed, operands, grad_y, context, **keywords):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return run(operands, grad_y, ops.query_split_attention, context=context, **keywords)


@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
@in_context(1, lambda path: attention_config(path))
def test_dropout_is_repeated_from_the_same_state(group, context):
    given = draw_own(Case(rows=16, batch=1, heads=2, kv_heads=2), group)
    first, again, other = (seeded(seed, *given, context, dropout=0.4, causal=False) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["y"], other["y"])


@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
@in_context(2, lambda path: attention_config(path))
def test_dropout_does_not_depend_on_the_default_dtype(group, context):
    """The mask was drawn in the default dtype: of another one in the backward pass it was another mask. y is linear in
    v, so <dv, v> over all ranks is <dy, y>."""
    operands, grad_y = draw_own(Case(has_bias=False), group)
    v = operands["v"].requires_grad_()
    group.barrier().wait()
    if group.rank() == 0:  # of the process, so of all threads
        torch.set_default_dtype(torch.bfloat16)
    group.barrier().wait()
    try:
        y = ops.query_split_attention(*operands.values(), causal=False, dropout=0.3, context=context)
        group.barrier().wait()
    finally:
        torch.set_default_dtype(torch.float32)
    group.barrier().wait()
    y.backward(grad_y)
    pair = torch.stack([(v.grad * v).sum(), (grad_y * y).sum()]).detach()
    group.allreduce([pair]).wait()
    assert pair[0] == pytest.approx(pair[1])


def test_dropout_differs_between_groups_of_one_state():
    """Ranks of one number in two groups, the CPU's generator in one state: as of tensor-parallel ranks."""

    def seed_on(global_rank: int, state: int) -> int:
        torch.manual_seed(state)
        context = SimpleNamespace(is_capturing=False, global_rank=global_rank, group_rank=0, group_size=2)
        return draw_dropout(0.1, context).seed

    with torch.random.fork_rng(devices=[]):
        seeds = {seed_on(rank, state) % 2**32 for rank in range(8) for state in range(64)}
    assert len(seeds) == 8 * 64, "the last 32 bits, which the CPU's generator takes"


def test_dropout_differs_between_ranks_and_splits():
    """Queries and keys of zero weigh all values alike, so rows and ranks differ by what they drop only."""

    def body(group, device):
        q = torch.zeros(64, 1, 1, 1, dtype=torch.float64)
        weight = torch.zeros(2, 1, dtype=torch.float64)
        weight[group.rank()] = 1.0  # each rank's heads arrive in a column of their own
        with OverlapContext(group, attention_config()) as context:
            barrier.wait()
            if group.rank() == 0:
                torch.manual_seed(0)
            state = torch.get_rng_state()
            barrier.wait()
            torch.set_rng_state(state)
            y = ops.query_split_attention(q, q, torch.ones_like(q), weight, causal=False, dropout=0.5, context=context)
        return y.squeeze(1)

    barrier = threading.Barrier(2)
    y = torch.cat(run_threads(2, body))
    assert y.mean().item() == pytest.approx(1.0, abs=0.1)
    assert len({tuple(column) for column in y.T.tolist()}) == 2
    assert not torch.equal(y[:32], y[32:])


@in_context(1, attention_config(m=2))
def test_gradients_under_dropout_are_those_of_the_forward_pass(group, context):
    """By finite differences along a random direction: with another mask in backward they differ by order 1."""
    operands, grad_y = draw_own(Case(rows=8, batch=1, heads=2, kv_heads=1), group)
    names, step = ("q", "k", "v"), 1e-6
    generator = torch.Generator().manual_seed(5)
    direction = {n: torch.randn(operands[n].shape, generator=generator, dtype=torch.float64) for n in names}

    def attend(step):
        moved = {n: t + step * direction[n] if n in names else t for n, t in operands.items()}
        return seeded(11, moved, grad_y, context, dropout=0.5)

    gradients = attend(0.0)
    change = ((attend(step)["y"] - attend(-step)["y"]) * grad_y).sum() / (2 * step)
    slope = sum((gradients[f"{n}.grad"] * direction[n]).sum() for n in names)
    torch.testing.assert_close(slope, change, rtol=1e-6, atol=1e-6)


@in_context(2, attention_config())
def test_complaints_reach_every_rank_and_leave_the_context(group, context):
    operands, _ = draw_own(Case(), group)
    q, k, v, weight, _ = operands.values()
    wrong = {
        "positive multiple": (q[:, :, :3], k[:, :, :2], v[:, :, :2], weight),
        "share S and B": (q, k[:5], v, weight),
        "out_weight must be": (q, k, v, weight[:, :3]),
        "one dtype": (q, k, v.float(), weight),
        "4 heads": (q, k, v, weight.new_zeros(3, 5)),
    }
    for words, arguments in wrong.items():
        with pytest.raises(ShapeError, match=words if group.rank() == 0 else None):
            ops.query_split_attention(*(arguments if group.rank() == 0 else (q, k, v, weight)), context=context)
    mask = torch.zeros(1, 1, 12, 12, dtype=torch.bool)
    with pytest.raises(ShapeError, match="exclude"):
        ops.query_split_attention(q, k, v, weight, window=(1, 1), mask=mask, context=context)
    check(Case(), group, context)


@on_ranks(2)
def test_different_problems_raise_on_all_and_fail_the_context(group, device):
    operands, _ = draw_own(Case(), group)
    q, k, v, weight, _ = operands.values()
    context = OverlapContext(group, attention_config())
    with pytest.raises(ShapeError, match="do not agree"):
        ops.query_split_attention(q, k, v, weight, causal=group.rank() == 0, context=context)
    assert not context.is_usable


@on_ranks(2)
def test_a_kernel_that_cannot_is_refused(group, device):
    config = OverlapConfig(attention=AttentionConfig(path="query_split", kernel="flash"))
    operands, _ = draw_own(Case(), group)
    with pytest.raises(UnsupportedError, match="flash"), OverlapContext(group, config) as context:
        ops.query_split_attention(*operands.values(), context=context)


@pytest.mark.parametrize("left", [None, 0, 2, 20])
@pytest.mark.parametrize("right", [None, 0, 3, 20])
def test_visible_keys_are_those_that_some_query_sees(left, right):
    problem = AttentionProblem(
        pass_name="fprop", rows=11, batch=1, heads=1, kv_heads=1, head_dim=1, value_dim=1, N=1, dtype="float64",
        group_size=2, left=left, right=right,
    )  # fmt: skip

    def sees(query: int, key: int) -> bool:
        return (left is None or key >= query - left) and (right is None or key <= query + right)

    for start, stop in itertools.combinations(range(12), 2):
        visible = problem.visible_keys(RowRange(start, stop))
        pairs = [(q, k) for q in range(start, stop) for k in range(11) if sees(q, k)]
        assert problem.count_scores(RowRange(start, stop)) == len(pairs)
        assert min(k for _, k in pairs) == visible.keys.start
        assert max(k for _, k in pairs) + 1 == visible.keys.stop
        offset = visible.keys.size - (stop - start)
        in_band = [
            (start + i, visible.keys.start + j)
            for i in range(stop - start)
            for j in range(visible.keys.size)
            if (visible.left is None or j >= i + offset - visible.left)
            and (visible.right is None or j <= i + offset + visible.right)
        ]
        assert in_band == pairs
