"""Attention over a split sequence against the reference on ranks as threads: forward, every gradient, masks, sizes."""

import importlib
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import TransportConfig, UlyssesConfig
from commfuse_megatron.errors import ShapeError, TransportTimeoutError
from commfuse_megatron.kernels.attention import Dropout
from commfuse_megatron.ops.collectives import gather_rows
from commfuse_megatron.problem import shard_range
from commfuse_megatron.transport.copy_tape import CopyTape
from tests.harness import on_ranks, run_threads
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.threaded.test_planning import TRIAL, MadeUpTimes, machine
from tests.threaded.test_query_split_attention import MASKS, assert_close, every_second, first_expanded, outer_swapped

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


@pytest.mark.parametrize("path", ["overlapped", "sequential"])
@on_ranks(3)
def test_sizes_of_zero_and_one(group, device, path):
    with OverlapContext(group, ulysses_config(path)) as context:
        for sizes in ({"rows": 0}, {"rows": 1}, {"rows": 2}, {"batch": 0}, {"head_dim": 1}, {"rows": 4}):
            check(Case(**sizes), group, context)
        check(Case(rows=6, heads=3, kv_heads=1, head_dim=1, value_dim=1, keywords={"order": "zigzag"}), group, context)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 3), (6, 4), (192, 128)])
@on_ranks(2)
def test_values_of_another_size_than_keys(group, device, head_dim, value_dim):
    with OverlapContext(group, ulysses_config()) as context:
        for kv_heads in (1, 2, 4):
            check(Case(head_dim=head_dim, value_dim=value_dim, heads=4, kv_heads=kv_heads), group, context)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@on_ranks(2)
def test_operands_that_are_not_contiguous(group, device, order):
    with OverlapContext(group, ulysses_config()) as context:
        for view in (outer_swapped, every_second, first_expanded):
            check(Case(kv_heads=2, keywords={"order": order}), group, context, view)


@on_ranks(2)
def test_an_output_gradient_that_is_not_contiguous(group, device):
    operands, grad_y = draw(Case(), group.rank(), group.size())
    ones = torch.ones((), dtype=grad_y.dtype).expand(grad_y.shape)  # what out.sum() sends back
    with OverlapContext(group, ulysses_config()) as context:
        for grad in (outer_swapped(grad_y), ones):
            found = run(operands, grad, ops.ulysses_attention, context=context)
            assert_close(found, run(operands, grad, ops.reference.ulysses_attention, group=group))


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@on_ranks(4)
def test_exact_results_where_every_sum_is(group, device, kv_heads, order):
    """Scores of zero make every softmax a mean over a power of two of keys: all sums are exact, in any order."""
    generator = torch.Generator().manual_seed(group.rank())
    draw_integers = lambda *shape: torch.randint(-2, 3, (8, 2, *shape), generator=generator).double()  # noqa: E731
    operands = [torch.zeros(8, 2, 8, 3).double(), draw_integers(kv_heads, 3), draw_integers(kv_heads, 5)]
    grad_y, keywords = draw_integers(40), {"causal": False, "scale": 1.0, "order": order}
    with OverlapContext(group, ulysses_config()) as context:
        found = run(operands, grad_y, ops.ulysses_attention, context=context, **keywords)
    expected = run(operands, grad_y, ops.reference.ulysses_attention, group=group, **keywords)
    for name in ("y", "v.grad"):
        torch.testing.assert_close(found[name], expected[name], atol=0, rtol=0)
    assert_close(found, expected)


@pytest.mark.parametrize("frozen", [("q",), ("k",), ("q", "v"), ("q", "k", "v")])
@pytest.mark.parametrize("path", ["overlapped", "sequential"])
@on_ranks(2)
def test_frozen_operands_get_no_gradient_others_do(group, device, frozen, path):
    operands, grad_y = draw(Case(kv_heads=1), group.rank(), group.size())
    results = []
    with OverlapContext(group, ulysses_config(path)) as context:
        for call, where in ((ops.ulysses_attention, {"context": context}),
                            (ops.reference.ulysses_attention, {"group": group})):  # fmt: skip
            leaves = {name: t.clone().requires_grad_(name not in frozen) for name, t in zip(NAMES, operands)}  # noqa: B905
            y = call(*leaves.values(), **where)
            assert y.requires_grad == (len(frozen) < 3)
            if y.requires_grad:
                y.backward(grad_y)
            results.append({"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}})
        passes = {record.pass_name for record in context.report()}
    assert_close(*results)
    assert all(results[0][name] is None for name in frozen)
    assert passes == ({"fprop"} if len(frozen) == 3 else {"fprop", "backward"})


@on_ranks(2)
def test_gradients_that_are_asked_for_one_by_one(group, device):
    operands, grad_y = draw(Case(kv_heads=2), group.rank(), group.size())
    expected = run(operands, grad_y, ops.reference.ulysses_attention, group=group)
    with OverlapContext(group, ulysses_config()) as context:
        leaves = [each.clone().requires_grad_() for each in operands]
        y = ops.ulysses_attention(*leaves, context=context)
        for name, leaf in zip(NAMES, leaves, strict=True):
            (found,) = torch.autograd.grad(y, leaf, grad_y, retain_graph=True)
            assert_close({name: found}, {name: expected[f"{name}.grad"]})


@pytest.mark.parametrize("is_emulated", [False, True], ids=["gloo", "copy engine"])
def test_calls_in_a_row_and_beside_another_operation(is_emulated, monkeypatch):
    if is_emulated:
        emulate_copy_engine(monkeypatch)
    run_threads(3, _calls_in_a_row)


def _calls_in_a_row(group, device):
    """New data and sizes in windows that the other operation used, with all backward passes at the end."""
    with take_part(group), OverlapContext(group, OverlapConfig()) as context:
        pending = []
        for seed, rows in enumerate([24, 18, 30, 6, 24, 18]):
            case = Case(rows=rows, seed=seed, kv_heads=(1, 3, 12)[seed % 3])
            operands, grad_y = draw(case, group.rank(), 3)
            leaves = [each.clone().requires_grad_() for each in operands]
            y = ops.ulysses_attention(*leaves, context=context)
            weight = torch.randn(5, y.size(-1), dtype=torch.float64, requires_grad=True)
            z = ops.all_gather_linear(y, weight, context=context)
            expected = run(operands, grad_y, ops.reference.ulysses_attention, group=group)
            torch.testing.assert_close(z.detach(), gathered(expected["y"], group) @ weight.detach().t())
            pending.append((y, grad_y, leaves, expected))
        for y, grad_y, leaves, expected in pending:
            y.backward(grad_y)
            found = {f"{name}.grad": leaf.grad for name, leaf in zip(NAMES, leaves, strict=True)}
            assert_close({"y": y.detach(), **found}, expected)


def gathered(rows: torch.Tensor, group) -> torch.Tensor:
    return gather_rows(rows, rows.size(0) * group.size(), group)


@pytest.mark.parametrize("path", ["overlapped", "sequential"])
def test_dropout_is_drawn_anew_and_the_same_when_recomputed(path, monkeypatch):
    seeds = threading.local()  # ranks as threads share the CPU's generator
    draw_one = lambda dropout, context: Dropout(dropout, seeds.of_rank) if dropout else None  # noqa: E731
    module = importlib.import_module("commfuse_megatron.ops.ulysses_attention")
    monkeypatch.setattr(module, "draw_dropout", draw_one)

    def body(group, device):
        operands, _ = draw(Case(rows=64, heads=4, kv_heads=4), group.rank(), 2)
        with OverlapContext(group, ulysses_config(path)) as context:

            def call(seed, *given):
                seeds.of_rank = 2 * seed + group.rank()
                return ops.ulysses_attention(*given, dropout=0.4, context=context)

            with torch.no_grad():
                first, again, other = call(1, *operands), call(1, *operands), call(2, *operands)
            leaves = [each.clone().requires_grad_() for each in operands]
            y = call(1, *leaves)
            # The result is linear in v while the mask stays: its gradient times v is the result.
            (grad_v,) = torch.autograd.grad(y, leaves[2], torch.ones_like(y))
            sums = torch.stack([(grad_v * operands[2]).sum(), y.sum()]).detach()
            torch.distributed.all_reduce(sums, group=group)
            torch.testing.assert_close(sums[0], sums[1], rtol=1e-12, atol=1e-10)
            assert torch.equal(first, again)
            assert torch.equal(first, y.detach())
            assert (first - other).abs().max() > 0.1

    run_threads(2, body)


COMPLAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"heads": 10, "kv_heads": 10}, "multiple of the 4 ranks, got 10"),
    "kv heads": ({"heads": 12, "kv_heads": 6}, "a divisor of them, got 6"),
    "kv heads of others": ({"heads": 12, "kv_heads": 8}, "a positive multiple of those of k and v"),
    "order": ({"order": "ring"}, "order must be one of contiguous, zigzag, got 'ring'"),
    "zigzag": ({"order": "zigzag", "rows": 20}, "a multiple of 8 rows, twice the ranks, got 20"),
    "rows": ({"total_rows": 26}, "of total_rows=26, group rank 1 of 4 must bring 7 rows"),
    "total rows": ({"total_rows": -1}, "total_rows must not be negative"),
    "window": ({"window": (1, -2)}, "window must be"),
    "dropout": ({"dropout": 1.0}, "dropout must be"),
    "kind": ({"total_rows": "24"}, "total_rows must be"),
}


@pytest.mark.parametrize("name", COMPLAINTS)
def test_wrong_arguments_raise_everywhere_and_calls_go_on(name):
    wrong, sentence = COMPLAINTS[name]
    sizes = {key: value for key, value in wrong.items() if key in ("heads", "kv_heads", "rows")}
    keywords = {key: value for key, value in wrong.items() if key not in sizes}

    def body(group, device):
        case = Case(**sizes) if group.rank() == 1 else Case()
        operands, _ = draw(case, group.rank(), 4)
        with OverlapContext(group, ulysses_config()) as context:
            with pytest.raises(ShapeError) as caught:
                ops.ulysses_attention(*operands, **(keywords if group.rank() == 1 else {}), context=context)
            check(Case(), group, context)
            return str(caught.value)

    messages = run_threads(4, body)
    assert all(sentence in message for message in messages), messages


def test_ranks_that_bring_different_problems_raise():
    def body(group, device):
        operands, _ = draw(Case(), group.rank(), 2)
        with pytest.raises(ShapeError, match=r"keys -all"), OverlapContext(group, ulysses_config()) as context:
            ops.ulysses_attention(*operands, causal=group.rank() == 0, context=context)

    run_threads(2, body)


def test_a_rank_that_does_not_come_is_named():
    both = threading.Barrier(2)

    def call_twice(group):
        operands, grad_y = draw(Case(), group.rank(), 2)
        config = ulysses_config(transport=TransportConfig(timeout_s=0.5), check_agreement=False)
        with OverlapContext(group, config) as context:
            run(operands, grad_y, ops.ulysses_attention, context=context)
            if group.rank() == 0:
                run(operands, grad_y, ops.ulysses_attention, context=context)
            both.wait()

    def body(group, device):
        if group.rank() == 1:
            call_twice(group)
            return
        with pytest.raises(TransportTimeoutError, match="all-to-all to the heads, step 0 of 4: group rank 0"):
            call_twice(group)
        both.wait()

    run_threads(2, body)


def test_nothing_is_saved_where_no_gradient_can_be_asked_for():
    def body(group, device):
        operands, _ = draw(Case(), group.rank(), 2)
        packed: list[torch.Tensor] = []
        with OverlapContext(group, ulysses_config()) as context:
            with torch.autograd.graph.saved_tensors_hooks(lambda each: packed.append(each) or each, lambda each: each):
                ops.ulysses_attention(*operands, context=context)
                assert not packed
                ops.ulysses_attention(*[each.requires_grad_() for each in operands], context=context)
            windows = {each.tensor.untyped_storage().data_ptr() for each in context.slots._buffers.values()}
            assert packed
            assert not windows & {each.untyped_storage().data_ptr() for each in packed}

    run_threads(2, body)


# -- over the copy engine, emulated -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("group_size", "kv_heads", "head_groups"), [(2, 12, 2), (3, 1, 4), (4, 12, 4), (4, 2, 2)])
def test_the_copy_engine_gives_the_bits_that_gloo_gives(group_size, kv_heads, head_groups, order, monkeypatch):
    cases = [
        Case(rows=rows, kv_heads=kv_heads, seed=rows, keywords={"order": order}, dtype=torch.float32)
        for rows in ((24, 48, 24) if order == "zigzag" else (24, 49, 7, 2, 1))
    ]

    def body(group, device):
        found = []
        with take_part(group), OverlapContext(group, ulysses_config(head_groups=head_groups)) as context:
            for case in cases:
                operands, grad_y = draw(case, group.rank(), group_size)
                keywords = {"total_rows": case.rows, **case.keywords}
                found.append(run(operands, grad_y, ops.ulysses_attention, context=context, **keywords))
            return found, {record.transport for record in context.report()}

    over_gloo = run_threads(group_size, body)
    emulate_copy_engine(monkeypatch)
    over_windows = run_threads(group_size, body)
    assert [names for _, names in over_gloo] == [{"gloo"}] * group_size
    assert [names for _, names in over_windows] == [{"copy_engine"}] * group_size
    for (first, _), (second, _) in zip(over_gloo, over_windows, strict=True):
        for one, other in zip(first, second, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_computed_is_sent_behind_its_computation(monkeypatch):
    """Fails without the fix: an operand that the call brought counted as complete from the start."""
    emulate_copy_engine(monkeypatch)
    events = threading.local()
    for name in ("order", "push", "compute"):
        monkeypatch.setattr(CopyTape, name, noting(events, name, getattr(CopyTape, name)))

    def body(group, device):
        events.of_rank = []
        with take_part(group), OverlapContext(group, ulysses_config(head_groups=2)) as context:
            operands, grad_y = draw(Case(), group.rank(), 2)
            run(operands, grad_y, ops.ulysses_attention, context=context)
        return events.of_rank

    for names in run_threads(2, body):
        assert names.count("push") == 8
        for index, name in enumerate(names):
            if name == "push":
                last = max(at for at, other in enumerate(names[:index]) if other != "push")
                assert names[last] == "order", names[: index + 1]


def noting(events, name, function):
    def noted(self, *args, **kwargs):
        events.of_rank.append(name)
        return function(self, *args, **kwargs)

    return noted


# -- plans ------------------------------------------------------------------------------------------------------------

WAYS = ("sequential", "overlapped m=1", "overlapped m=2", "overlapped m=4")


@pytest.mark.parametrize("best", WAYS)
def test_the_fastest_on_the_slowest_rank_is_taken(best, monkeypatch):
    times = [{name: 50.0 if name == best else 90.0 for name in WAYS} for _ in range(2)]
    times[0].update({name: 10.0 for name in WAYS if name != best})  # fast here, slow on the other rank
    monkeypatch.setattr(TRIAL, lambda device: MadeUpTimes(lambda rank, name: times[rank][name]))

    def body(group, device):
        with OverlapContext(group, OverlapConfig()) as context:
            context.planner.default_reason = None
            context.planner.machines["float64"] = machine()
            check(Case(), group, context)
            return context.report()

    for forward, backward in run_threads(2, body):
        assert forward.reason.startswith(f"measured: {best} 0.050 ms")
        assert (forward.path, backward.path) == (best.partition(" ")[0],) * 2
        assert backward.reason == "as the forward pass"
        assert (forward.measured_us, forward.calls, backward.calls) == (50.0, 1, 1)


@on_ranks(2)
def test_recorded_calls_show_what_was_computed_and_sent(group, device):
    with OverlapContext(group, ulysses_config(head_groups=2, record=True)) as context:
        operands, grad_y = draw(Case(), group.rank(), 2)
        run(operands, grad_y, ops.ulysses_attention, context=context)
        calls = [of_problem[0] for of_problem in context.recorder.calls_by_problem().values()]
        assert all(record.exposed_comm_us is not None for record in context.report())
    names = [[interval.name for interval in call] for call in calls]
    assert names[0].count("pack 0") == names[0].count("attend group 0") == names[0].count("unpack 1") == 1
    assert sum(name.startswith("to rank") for name in names[0]) == sum(name.startswith("to rank") for name in names[1])
