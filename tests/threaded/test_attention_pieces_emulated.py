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

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import AttentionConfig, TransportConfig
from commfuse_megatron.kernels import attention_choice, attention_pieces
from commfuse_megatron.ops import query_split_attention
from commfuse_megatron.ops import reference as references
from commfuse_megatron.ops.weight_grad import WeightGradTarget
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.transport import tape_graphs
from tests.harness import run_threads
from tests.harness.emulated_cudnn import Launch, emulate_cudnn
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.threaded.test_copy_engine_emulated import number_of_graphs
from tests.threaded.test_query_split_attention import Case, assert_close, draw, run

CASE = Case(rows=24, heads=4, kv_heads=2, head_dim=16, value_dim=16, N=16, dtype=torch.bfloat16)


def emulated(monkeypatch, **attention):
    """The emulated cuDNN and a configuration."""
    cudnn = emulate_cudnn(monkeypatch)
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(attention_choice, "cudnn_attention_unavailable_reason", lambda problem, device: None)
    attention = AttentionConfig(**{"kernel": "cudnn", **attention})
    return cudnn, OverlapConfig(attention=attention, transport=TransportConfig(backend="copy_engine"))


def compare(case, group, context, view=None, **keywords):
    operands, grad_y = draw(case, group.rank(), group.size())
    found = run(operands, grad_y, query_split_attention, view, context=context, **keywords)
    wide = {name: None if tensor is None else tensor.double() for name, tensor in operands.items()}
    exact = run(wide, grad_y.double(), references.query_split_attention, group=group)
    if "weight_grad" in keywords:
        found["out_weight.grad"] = exact["out_weight.grad"]
    # Several roundings to 8 bits in a row; a piece that is lost, crossed or added twice errs by order 1.
    assert_close(found, exact, 0.04)


@pytest.mark.parametrize("worth", [0, 1e30], ids=["pieces", "whole"])
@pytest.mark.parametrize("stepwise", [-1, 1000], ids=["graphs", "tapes"])
@pytest.mark.parametrize(("group_size", "m", "backward"), [
    (2, 1, "query_split"), (2, 2, "query_split"), (3, 2, "query_split"), (2, 2, "row_parallel"),
    (3, 1, "row_parallel"),
])  # fmt: skip
def test_both_passes_equal_the_reference_in_every_order(group_size, m, backward, stepwise, worth, monkeypatch):
    cudnn, config = emulated(monkeypatch, path="query_split", splits_per_shard=m, backward=backward)
    monkeypatch.setattr(attention_pieces, "_WORTH_A_CALL", worth)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", stepwise)

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            for seed, rows in itertools.product(range(4), (24, 25)):
                compare(dataclasses.replace(CASE, rows=rows, seed=seed), group, context)
            return number_of_graphs(context)

    assert (min(run_threads(group_size, body)) > 0) == (stepwise < 0)
    masks = {launch.mask for launch in cudnn.launches if launch.kind == "backward"}
    of_splits = set() if backward == "row_parallel" else {"none" if worth == 0 else "bottom right"}
    assert masks == {"top left", *of_splits}


def num_at_once(context):
    """How many tapes there are of a backward pass whose attention is not split: on the projection's pass."""
    projections = [p for p in context._prepared.values() if p.problem.call == "linear_reduce_scatter backward"]
    return sum(tape is not None for p in projections for tape in p.tapes)


@pytest.mark.parametrize("takes_stats_among_others", [True, False])
@pytest.mark.parametrize("rows", [32, 36])
@pytest.mark.parametrize(("path", "m"), [("query_split", 1), ("query_split", 2), ("row_parallel", None)])
def test_attention_at_once_backward_is_on_a_tape(path, m, rows, takes_stats_among_others, monkeypatch):
    """Also where a split's statistics cannot lie among the others', of 18 rows say: then they are put together."""
    backward = {} if m is None else {"backward": "row_parallel"}
    cudnn, config = emulated(monkeypatch, path=path, splits_per_shard=m, **backward)
    cudnn.takes_stats_among_others = takes_stats_among_others

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            for seed in range(3):
                compare(dataclasses.replace(CASE, rows=rows, seed=seed), group, context)
            return num_at_once(context)

    assert run_threads(2, body) == [1, 1]
    masks = [launch.mask for launch in cudnn.launches if launch.kind == "backward"]
    assert masks == ["top left"] * 6


def test_a_call_that_no_tape_serves_takes_none_from_the_others(monkeypatch):
    _, config = emulated(monkeypatch, path="query_split", splits_per_shard=1, backward="row_parallel")

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            case = dataclasses.replace(CASE, rows=32)
            by_columns = torch.zeros(64, 16).t()
            compare(case, group, context, weight_grad=WeightGradTarget(by_columns, lambda: None))
            before = num_at_once(context)
            compare(case, group, context)
            return before, num_at_once(context)

    assert run_threads(2, body) == [(0, 1), (0, 1)]


def one_element_further(tensor):
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def odd_stride_of_one_sequence(tensor):
    if tensor.dim() != 4:
        return tensor
    return tensor.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)


@pytest.mark.parametrize("view", [one_element_further, odd_stride_of_one_sequence])
@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
def test_contiguous_operands_that_kernels_cannot_load_are_copied(path, view, monkeypatch):
    """`contiguous` leaves both as they are: of one sequence, a tensor may have any stride from one to the next."""
    _, config = emulated(monkeypatch, path=path)

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            compare(dataclasses.replace(CASE, rows=32, batch=1, has_bias=False), group, context, view)

    run_threads(2, body)


@pytest.mark.parametrize("backward", ["query_split", "row_parallel"])
def test_a_weight_by_columns_has_its_backward_pass_on_a_tape(backward, monkeypatch):
    _, config = emulated(monkeypatch, path="query_split", splits_per_shard=1, backward=backward)
    replayed = []
    replay = PreparedPass.run_from_tape

    def count(*given, **keywords):
        replayed.append(replay(*given, **keywords))
        return replayed[-1]

    monkeypatch.setattr(PreparedPass, "run_from_tape", count)

    def by_columns(tensor):
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            compare(dataclasses.replace(CASE, rows=32), group, context, by_columns)

    run_threads(2, body)
    assert replayed == [True] * 4


def test_a_kernel_that_refuses_all_queries_is_passed_over(monkeypatch):
    cudnn, config = emulated(monkeypatch, path="query_split", backward="row_parallel", kernel="auto")
    cudnn.refused = {Launch("backward", "top left", 32, 32)}

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            compare(dataclasses.replace(CASE, rows=32), group, context)
            return {record.attention for record in context.report() if record.op == "query_split_attention"}

    assert run_threads(2, body) == [{"math"}] * 2


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


@pytest.mark.parametrize("backward", ["query_split", "row_parallel"])
def test_scratch_memory_is_free_after_a_call_and_graphs_go_on(backward, monkeypatch):
    _, config = emulated(monkeypatch, path="query_split", splits_per_shard=2, backward=backward)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", 0)
    allocator = Allocator()
    monkeypatch.setattr(torch, "empty", allocator.empty)
    calls = defaultdict(list)
    replay = PreparedPass.run_from_tape

    def keep(*given, **keywords):
        calls[threading.get_ident()].append((given, keywords))
        return replay(*given, **keywords)

    monkeypatch.setattr(PreparedPass, "run_from_tape", keep)

    def body(group, device):
        thread = threading.get_ident()
        with take_part(group), OverlapContext(group, config) as context:
            compare(dataclasses.replace(CASE, rows=32), group, context)
            kept = allocator.in_use[thread]
            assert len(calls[thread]) == 2
            for (prepared, *given), keywords in calls[thread]:
                allocator.most[thread] = 0
                for _ in range(4):
                    with prepared:
                        assert replay(prepared, *given, **keywords)
                    assert allocator.in_use[thread] == kept < allocator.most[thread]
                assert prepared.modes == {"stepped": 0, "tape": 1, "graph": 4}
        assert allocator.in_use[thread] == 0

    run_threads(2, body)
