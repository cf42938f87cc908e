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
from commfuse_megatron.ops import query_split_attention
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
