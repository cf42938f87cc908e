"""Query-split attention with cuDNN's kernels over the copy engine, both emulated: on tapes, in graphs, on lanes.

Graphs run in every order that streams and events leave open, so scratch memory that two lanes shared would show.
"""

import dataclasses
import itertools
import threading
import weakref
from collections import defaultdict

import pytest
import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import AttentionConfig
from commfuse_megatron.kernels import attention_choice, attention_pieces
from commfuse_megatron.ops import query_split_attention
from commfuse_megatron.ops import reference as references
from commfuse_megatron.ops.weight_grad import WeightGradTarget
from commfuse_megatron.runtime.prepared import PreparedPass
from tests.harness.emulated_cudnn import Launch, emulate_cudnn
from tests.threaded.test_copy_engine_emulated import COPIES, in_copy_context, number_of_graphs
from tests.threaded.test_query_split_attention import Case, assert_close, draw, run

CASE = Case(rows=24, heads=4, kv_heads=2, head_dim=16, value_dim=16, N=16, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    """The emulated cuDNN."""
    monkeypatch.setattr(attention_choice, "cudnn_attention_unavailable_reason", lambda problem, device: None)
    return emulate_cudnn(monkeypatch)


def config(m=1, backward="auto", path="query_split", kernel="cudnn") -> OverlapConfig:
    splits = m if path == "query_split" else None
    attention = AttentionConfig(path=path, splits_per_shard=splits, backward=backward, kernel=kernel)
    return OverlapConfig(attention=attention, transport=COPIES)


def compare(case, group, context, view=None, **keywords):
    operands, grad_y = draw(case, group.rank(), group.size())
    found = run(operands, grad_y, query_split_attention, view, context=context, **keywords)
    wide = {name: None if tensor is None else tensor.double() for name, tensor in operands.items()}
    exact = run(wide, grad_y.double(), references.query_split_attention, group=group)
    if "weight_grad" in keywords:
        found["out_weight.grad"] = exact["out_weight.grad"]
    # Several roundings to 8 bits in a row; a piece that is lost, crossed or added twice errs by order 1.
    assert_close(found, exact, 0.04)


def masks(cudnn):
    return [launch.mask for launch in cudnn.launches if launch.kind == "backward"]


@pytest.fixture
def worth(request, monkeypatch):
    """What a second call has to save."""
    monkeypatch.setattr(attention_pieces, "_WORTH_A_CALL", request.param)
    return request.param


@pytest.mark.parametrize("worth", [0, 1e30], ids=["pieces", "whole"], indirect=True)
@pytest.mark.parametrize("stepwise", [-1, 1000], ids=["graphs", "tapes"])
@pytest.mark.parametrize(("group_size", "m", "backward"), [
    (2, 1, "query_split"), (2, 2, "query_split"), (3, 2, "query_split"), (2, 2, "row_parallel"),
    (3, 1, "row_parallel"),
])  # fmt: skip
@in_copy_context("group_size", lambda m, backward: config(m, backward), stepwise="stepwise")
def test_both_passes_equal_the_reference_in_every_order(group, context, stepwise, backward, worth, cudnn):
    for seed, rows in itertools.product(range(4), (24, 25)):
        compare(dataclasses.replace(CASE, rows=rows, seed=seed), group, context)
    assert (number_of_graphs(context) > 0) == (stepwise < 0)
    group.barrier().wait()  # the launches are of all ranks
    of_splits = set() if backward == "row_parallel" else {"none" if worth == 0 else "bottom right"}
    assert set(masks(cudnn)) == {"top left", *of_splits}


def num_at_once(context):
    """How many tapes there are of a backward pass whose attention is not split: on the projection's pass."""
    projections = [p for p in context._prepared.values() if p.problem.call == "linear_reduce_scatter backward"]
    return sum(tape is not None for p in projections for tape in p.tapes)


@pytest.mark.parametrize("takes_stats_among_others", [True, False])
@pytest.mark.parametrize("rows", [32, 36])
@pytest.mark.parametrize(("path", "m", "backward"), [
    ("query_split", 1, "row_parallel"), ("query_split", 2, "row_parallel"), ("row_parallel", None, "auto"),
])  # fmt: skip
@in_copy_context(2, lambda path, m, backward: config(m, backward, path))
def test_attention_at_once_backward_is_on_a_tape(group, context, rows, takes_stats_among_others, cudnn):
    """Also where a split's statistics cannot lie among the others', of 18 rows say: then they are put together."""
    cudnn.takes_stats_among_others = takes_stats_among_others
    for seed in range(3):
        compare(dataclasses.replace(CASE, rows=rows, seed=seed), group, context)
    assert num_at_once(context) == 1
    group.barrier().wait()
    assert masks(cudnn) == ["top left"] * 6


LARGER = dataclasses.replace(CASE, rows=32)


@in_copy_context(2, config(backward="row_parallel"))
def test_a_call_that_no_tape_serves_takes_none_from_the_others(group, context):
    by_columns = torch.zeros(64, 16).t()
    compare(LARGER, group, context, weight_grad=WeightGradTarget(by_columns, lambda: None))
    assert num_at_once(context) == 0
    compare(LARGER, group, context)
    assert num_at_once(context) == 1


def one_element_further(tensor):
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def odd_stride_of_one_sequence(tensor):
    return tensor.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2) if tensor.dim() == 4 else tensor


@pytest.mark.parametrize("view", [one_element_further, odd_stride_of_one_sequence])
@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
@in_copy_context(2, lambda path: config(path=path))
def test_contiguous_operands_that_kernels_cannot_load_are_copied(group, context, view):
    """`contiguous` leaves both as they are: of one sequence, a tensor may have any stride from one to the next."""
    compare(dataclasses.replace(LARGER, batch=1, has_bias=False), group, context, view)


@pytest.fixture
def replayed(monkeypatch):
    """By thread, what was given to tapes, and whether they ran."""
    calls, replay = defaultdict(list), PreparedPass.run_from_tape

    def keep(*given, **keywords):
        ran = replay(*given, **keywords)
        calls[threading.get_ident()].append((given, keywords, ran))
        return ran

    monkeypatch.setattr(PreparedPass, "run_from_tape", keep)
    return calls


@pytest.mark.parametrize("backward", ["query_split", "row_parallel"])
@in_copy_context(2, lambda backward: config(backward=backward))
def test_a_weight_by_columns_has_its_backward_pass_on_a_tape(group, context, replayed):
    def by_columns(tensor):
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor

    compare(LARGER, group, context, by_columns)
    assert [ran for *_, ran in replayed[threading.get_ident()]] == [True] * 2


@in_copy_context(2, config(None, "row_parallel", kernel="auto"))
def test_a_kernel_that_refuses_all_queries_is_passed_over(group, context, cudnn):
    cudnn.refused = {Launch("backward", "top left", 32, 32)}
    compare(LARGER, group, context)
    assert {r.attention for r in context.report() if r.op == "query_split_attention"} == {"math"}


class Allocator:
    """Hands out bytes that were freed again, as PyTorch's allocator does on GPUs. in_use, most: how many, by thread."""

    def __init__(self) -> None:
        self._empty = torch.empty
        self._free = defaultdict(list)
        self.in_use = defaultdict(int)
        self.most = defaultdict(int)

    def empty(self, *sizes, dtype=None, **others):
        if dtype is not torch.uint8:
            return self._empty(*sizes, dtype=dtype, **others)
        thread, (size,) = threading.get_ident(), sizes
        free = self._free[thread, size]
        memory = free.pop() if free else self._empty(size, dtype=dtype)
        self.in_use[thread] += size
        self.most[thread] = max(self.most[thread], self.in_use[thread])
        given = memory[:]
        weakref.finalize(given, self._take_back, thread, memory)
        return given

    def _take_back(self, thread, memory):
        self._free[thread, memory.numel()].append(memory)
        self.in_use[thread] -= memory.numel()


@pytest.fixture
def allocator(monkeypatch):
    found = Allocator()
    monkeypatch.setattr(torch, "empty", found.empty)
    yield found
    assert not any(found.in_use.values()), "after all contexts are closed"


@pytest.mark.parametrize("backward", ["query_split", "row_parallel"])
@in_copy_context(2, lambda backward: config(2, backward), stepwise=0)
def test_scratch_memory_is_free_after_a_call_and_graphs_go_on(group, context, allocator, replayed):
    thread = threading.get_ident()
    compare(LARGER, group, context)
    kept = allocator.in_use[thread]
    calls = list(replayed[thread])
    assert len(calls) == 2
    for (prepared, *given), keywords, _ in calls:
        allocator.most[thread] = 0
        for _ in range(4):
            with prepared:
                assert prepared.run_from_tape(*given, **keywords)
            assert allocator.in_use[thread] == kept < allocator.most[thread]
        assert prepared.modes == {"stepped": 0, "tape": 1, "graph": 4}
