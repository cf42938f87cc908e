"""Query-split attention with cuDNN's kernels over the copy engine, both emulated: on tapes, in graphs, on lanes.

Graphs run in every order that streams and events leave open, so scratch memory that two lanes shared would show.
"""

import dataclasses
import itertools

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import AttentionConfig, TransportConfig
from commfuse_megatron.kernels import attention_choice, attention_pieces
from commfuse_megatron.ops import attention_passes, query_split_attention
from commfuse_megatron.ops import reference as references
from commfuse_megatron.transport import tape_graphs
from tests.harness import run_threads
from tests.harness.emulated_cudnn import emulate_cudnn
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.threaded.test_copy_engine_emulated import number_of_graphs
from tests.threaded.test_query_split_attention import Case, assert_close, draw, run

CASE = Case(rows=24, heads=4, kv_heads=2, head_dim=16, value_dim=16, N=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("worth", [0, 1e30], ids=["pieces", "whole"])
@pytest.mark.parametrize("stepwise", [-1, 1000], ids=["graphs", "tapes"])
@pytest.mark.parametrize(
    ("group_size", "m", "backward"),
    [
        (2, 1, "query_split"),
        (2, 2, "query_split"),
        (3, 2, "query_split"),
        (2, 2, "row_parallel"),
        (3, 1, "row_parallel"),
    ],
)
def test_both_passes_equal_the_reference_in_every_order(group_size, m, backward, stepwise, worth, monkeypatch):
    cudnn = emulate_cudnn(monkeypatch)
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(attention_choice, "cudnn_attention_unavailable_reason", lambda problem, device: None)
    monkeypatch.setattr(attention_pieces, "_WORTH_A_CALL", worth)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", stepwise)
    attention = AttentionConfig(path="query_split", splits_per_shard=m, backward=backward, kernel="cudnn")
    config = OverlapConfig(attention=attention, transport=TransportConfig(backend="copy_engine"))

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            for seed, rows in itertools.product(range(4), (24, 25)):
                case = dataclasses.replace(CASE, rows=rows, seed=seed)
                operands, grad_y = draw(case, group.rank(), group.size())
                found = run(operands, grad_y, query_split_attention, context=context)
                wide = {name: tensor.double() for name, tensor in operands.items()}
                exact = run(wide, grad_y.double(), references.query_split_attention, group=group)
                # Several roundings to 8 bits in a row; a piece that is lost, crossed or added twice errs by order 1.
                assert_close(found, exact, 0.04)
            return number_of_graphs(context)

    assert (min(run_threads(group_size, body)) > 0) == (stepwise < 0)
    masks = {launch.mask for launch in cudnn.launches if launch.kind == "backward"}
    of_splits = set() if backward == "row_parallel" else {"none" if worth == 0 else "bottom right"}
    assert masks == {"top left", *of_splits}


@pytest.mark.parametrize("takes_stats_among_others", [True, False])
@pytest.mark.parametrize(("path", "m"), [("query_split", 1), ("query_split", 2), ("row_parallel", None)])
def test_attention_at_once_backward_is_on_a_tape(path, m, takes_stats_among_others, monkeypatch):
    """Where a split's statistics cannot lie among the others' they are put together, and the pass is not replayed."""
    cudnn = emulate_cudnn(monkeypatch)
    cudnn.takes_stats_among_others = takes_stats_among_others
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(attention_choice, "cudnn_attention_unavailable_reason", lambda problem, device: None)
    recorded = []
    record = attention_passes.AttentionAtOnce.record
    monkeypatch.setattr(
        attention_passes.AttentionAtOnce, "record", lambda self, *given: recorded.append(1) or record(self, *given)
    )
    backward = {} if m is None else {"backward": "row_parallel"}
    attention = AttentionConfig(path=path, splits_per_shard=m, kernel="cudnn", **backward)
    config = OverlapConfig(attention=attention, transport=TransportConfig(backend="copy_engine"))

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            for seed in range(3):
                case = dataclasses.replace(CASE, rows=32, seed=seed)
                operands, grad_y = draw(case, group.rank(), group.size())
                found = run(operands, grad_y, query_split_attention, context=context)
                wide = {name: tensor.double() for name, tensor in operands.items()}
                exact = run(wide, grad_y.double(), references.query_split_attention, group=group)
                assert_close(found, exact, 0.04)

    run_threads(2, body)
    masks = [launch.mask for launch in cudnn.launches if launch.kind == "backward"]
    assert masks == ["top left"] * 6
    assert bool(recorded) == (takes_stats_among_others or m is None)
