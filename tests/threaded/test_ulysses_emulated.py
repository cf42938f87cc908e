"""Attention over a split sequence with cuDNN's kernels over the copy engine, both emulated: from tapes and in graphs.

Graphs run in every order that streams and events leave open, so what is read too early, or written too late, shows.
"""

import dataclasses

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import AttentionConfig, TransportConfig
from commfuse_megatron.kernels import attention_choice
from commfuse_megatron.kernels.strided_copy import merge_dimensions
from commfuse_megatron.tools.common.modes import MODES, with_mode
from commfuse_megatron.transport import tape_graphs
from tests.harness import run_threads
from tests.harness.emulated_cudnn import emulate_cudnn
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.threaded.test_copy_engine_emulated import number_of_graphs
from tests.threaded.test_query_split_attention import assert_close
from tests.threaded.test_ulysses import Case, draw, run, ulysses_config

CASE = Case(rows=48, heads=12, head_dim=16, value_dim=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("stepwise", [-1, 1000], ids=["graphs", "tapes"])
@pytest.mark.parametrize(("group_size", "kv_heads", "head_groups"), [
    (2, 12, 1), (2, 4, 2), (3, 6, 2), (2, 2, 3), (3, 1, 2),
])  # fmt: skip
def test_both_passes_equal_the_reference(group_size, kv_heads, head_groups, stepwise, order, monkeypatch):
    emulate_cudnn(monkeypatch)
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(attention_choice, "cudnn_attention_unavailable_reason", lambda problem, device: None)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", stepwise)
    others = {"attention": AttentionConfig(kernel="cudnn"), "transport": TransportConfig(backend="copy_engine")}

    def body(group, device):
        with take_part(group), OverlapContext(group, ulysses_config("overlapped", head_groups, **others)) as context:
            for seed in range(6):
                case = dataclasses.replace(CASE, kv_heads=kv_heads, seed=seed, keywords={"order": order})
                operands, grad_y = draw(case, group.rank(), group_size)
                found = run(operands, grad_y, ops.ulysses_attention, context=context, **case.keywords)
                wide = [each.double() for each in operands]
                exact = run(wide, grad_y.double(), ops.reference.ulysses_attention, group=group, **case.keywords)
                # A few roundings to 8 bits in a row; a piece that is lost, crossed or added twice errs by order 1.
                assert_close(found, exact, 0.04)
            return number_of_graphs(context), {record.pass_name: record.modes for record in context.report()}

    # Sums over groups or ranks are PyTorch's.
    is_summed = kv_heads % group_size or (kv_heads == group_size and head_groups > 1)
    for graphs, modes in run_threads(group_size, body):
        assert "stepped" not in modes["fprop"]
        assert ("stepped" in modes["backward"]) == bool(is_summed)
        assert (graphs > 0) == (stepwise < 0)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("group_size", "kv_heads", "head_groups"), [(2, 12, 2), (3, 6, 2), (4, 12, 3), (2, 1, 3)])
def test_graphs_and_tapes_give_the_bits_of_steps(group_size, kv_heads, head_groups, order, monkeypatch):
    emulate_copy_engine(monkeypatch)
    config = ulysses_config("overlapped", head_groups, transport=TransportConfig(backend="copy_engine"))
    rows = 8 * 2 * group_size  # runs begin where kernels can load statistics
    case = dataclasses.replace(CASE, rows=rows, kv_heads=kv_heads, dtype=torch.float32, keywords={"order": order})

    def body(group, device):
        found, modes = {}, {}
        for mode in MODES:
            with take_part(group), OverlapContext(group, with_mode(config, mode)) as context:
                found[mode] = []
                for seed in range(3):
                    operands, grad_y = draw(dataclasses.replace(case, seed=seed), group.rank(), group_size)
                    found[mode].append(run(operands, grad_y, ops.ulysses_attention, context=context, **case.keywords))
                modes[mode] = {record.pass_name: set(record.modes) for record in context.report()}
        for stepped, taped, graphed in zip(*found.values(), strict=True):
            for name, tensor in stepped.items():
                assert torch.equal(tensor, taped[name]), name
                assert torch.equal(tensor, graphed[name]), name
        return modes

    monkeypatch.setattr(tape_graphs, "_STEPWISE", -1)
    for modes in run_threads(group_size, body):
        assert all(modes[mode]["fprop"] == {mode} for mode in MODES)
        backward = {"stepped"} if kv_heads == 1 else {"graph"}  # sums over groups or ranks are PyTorch's
        assert modes["graph"]["backward"] == backward


@pytest.mark.parametrize(("shape", "of", "sizes"), [
    ((2, 3, 4), lambda tensor: tensor, (1, 1, 1, 1, 24)),
    ((4, 6, 8), lambda tensor: tensor[:, :3], (1, 1, 1, 4, 24)),
    ((4, 6, 8), lambda tensor: tensor[:, :, ::2], (1, 1, 1, 96, 1)),
    ((4, 1, 8), lambda tensor: tensor.expand(4, 5, 8), (1, 1, 4, 5, 8)),
    ((3, 4, 5, 6, 7, 8), lambda tensor: tensor[:2, :3, :4, :5, :6, :7], None),
    ((1, 1), lambda tensor: tensor, (1, 1, 1, 1, 1)),
])  # fmt: skip
def test_copies_are_made_in_as_few_dimensions_as_there_can_be(shape, of, sizes):
    source = of(torch.empty(shape))
    merged = merge_dimensions(torch.empty(source.shape), source)
    assert (merged and merged.sizes) == sizes
    if merged is not None:
        source = of(torch.arange(torch.Size(shape).numel()).view(shape))
        target = torch.empty(source.shape, dtype=source.dtype)
        target.as_strided(merged.sizes, merged.target).copy_(source.as_strided(merged.sizes, merged.source))
        assert torch.equal(target, source)
