"""Core attention under context parallelism by itself: what it leaves to Megatron, or where there is nothing, refuses.

Two context-parallel ranks of one tensor-parallel rank each, float64 on the CPU.
"""

import copy
import logging
import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.ops.reference import query_split_attention
from commfuse_megatron.plugin import CommFuseDotProductAttention, model_report, reset_contexts, unsupported_reason
from commfuse_megatron.plugin.compat import AttnMaskType, DotProductAttention
from commfuse_megatron.plugin.compat_training import rows_of_this_rank
from commfuse_megatron.plugin.contexts import open_contexts
from commfuse_megatron.plugin.decision import state_of
from tests.megatron import layers
from tests.megatron.harness import make_cpu_test
from tests.megatron.models import loss_and_gradients, sharing_sequences, tiny_gpt

RANKS, ROWS, HEADS, SIZE = 2, 4, 8, 8  # rows of a rank
STOCK = OverlapConfig.from_dict({"ulysses": {"path": "stock"}})
RAISES = OverlapConfig.from_dict({"fallback": {"unsupported": "raise"}})


class Derived(CommFuseDotProductAttention):
    """As of somebody who puts something around it."""


def build(cls: type = CommFuseDotProductAttention, overlap: OverlapConfig | None = None, **options: Any) -> Any:
    """options: of the configuration, those that Megatron checks against others set when it is built."""
    late = {name: options.pop(name) for name in list(options) if name in LATE}
    transformer = layers.config(1, context_parallel_size=RANKS, **{"cp_comm_type": "a2a", **options})
    for name, value in late.items():
        setattr(transformer, name, value)
    return cls(transformer, 1, AttnMaskType.causal, "self", cp_comm_type="a2a", overlap_config=overlap)


LATE = ("commfuse", "fp8", "fp8_dot_product_attention", "fp8_multi_head_attention", "cpu_offloading", "qk_clip",
        "fine_grained_activation_offloading", "offload_modules")  # fmt: skip


def heads(rows: int = ROWS, number: int = HEADS, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.ones(rows, 2, number, SIZE, dtype=dtype)


def check_what_cannot_be_exchanged_is_an_error(_: int) -> None:
    """Megatron's local attention has no exchange of its own. Both ranks raise, before anything is made or sent."""
    q = heads()
    cases: list[tuple[str, dict[str, Any], tuple, dict[str, Any]]] = [
        ("every replay would drop", {"attention_dropout": 0.1, "cuda_graph_impl": "local"}, (), {}),
        ("softmax_type is off-by-one", {"softmax_type": "off-by-one"}, (), {}),
        ("qk_clip", {"qk_clip": True}, (), {}),
        ("config.commfuse is False", {"commfuse": False}, (), {}),
        ("ulysses.path is stock", {"overlap": STOCK}, (), {}),
        ("fp8_dot_product_attention", {"fp8": "hybrid", "fp8_dot_product_attention": True}, (), {}),
        ("cpu_offloading", {"cpu_offloading": True}, (), {}),
        ("core_attn", {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, (), {}),
        ("Derived derives from", {"cls": Derived}, (), {}),
        ("a mask is given", {}, (q, q, q, torch.zeros(1, 1, ROWS, 2 * ROWS, dtype=torch.bool)), {}),
        ("sequences are packed", {}, (q, q, q, None), {"packed_seq_params": SimpleNamespace()}),
        ("an attention bias", {}, (q, q, q, None), {"attention_bias": q}),
        ("3 rows, an odd number", {}, (heads(3), heads(3), heads(3), None), {}),
        ("3 heads of queries and 3 of keys", {}, (heads(number=3),) * 3 + (None,), {}),
        ("6 heads of queries and 3 of keys", {}, (heads(number=6), heads(number=3), heads(number=3), None), {}),
        ("only one dtype", {}, (q, q.float(), q, None), {}), ("torch.int64", {}, (q.long(), q, q, None), {}),
        ("the value is empty", {}, (q, q, q[:0], None), {}), ("4 queries meet 2 keys", {}, (q, q[:2], q[:2], None), {}),
    ]  # fmt: skip
    for words, options, tensors, others in cases:
        with pytest.raises(UnsupportedError, match=words) as raised:
            build(**options)(*(tensors or (q, q, q, None)), **others)
        assert "or take Transformer Engine's layers" in str(raised.value)
    with mock.patch.object(DotProductAttention, "forward"), pytest.raises(UnsupportedError, match="is replaced"):
        build()(q, q, q, None)
    assert open_contexts() == []


def check_other_types_are_errors(_: int) -> None:
    q = heads()
    for given, configured, words in (
        ("p2p", "a2a", "p2p"), ("all_gather", "a2a", "all_gather"), ("a2a+p2p", "a2a", "a2a.p2p"),
        (None, "p2p", "p2p"), (None, None, "p2p"), (None, ["p2p", "a2a"], "p2p"),
    ):  # fmt: skip
        core = build(cp_comm_type=configured)
        core.cp_comm_type = given
        with pytest.raises(UnsupportedError, match=f"cp_comm_type is {words}: only the exchange of a2a"):
            core(q, q, q, None)
    core.layer_number = 2
    assert unsupported_reason(core) is None, "the second of the list"


def check_hosts_are_counted(_: int) -> None:
    with mock.patch.object(OverlapContext, "num_hosts", 2), pytest.raises(UnsupportedError, match="spans 2 hosts"):
        build()(heads(), heads(), heads(), None)
    reset_contexts()
    core = build()
    core(heads(), heads(), heads(), None)
    assert state_of(core).context.num_hosts == 1


def check_dropout_is_none_in_evaluation(_: int) -> None:
    core = build(attention_dropout=0.1).eval()
    whole = [layers.random((2, 2 * ROWS, heads, SIZE), seed) for seed, heads in enumerate((HEADS, 1, 1))]
    q, k, v = (rows_of_this_rank({"x": each})["x"].transpose(0, 1) for each in whole)
    found = core(q, k, v, None)
    identity = torch.eye(HEADS * SIZE, dtype=torch.float64)
    alone = parallel_state.get_tensor_model_parallel_group()
    expected = query_split_attention(*(each.transpose(0, 1) for each in whole), identity, group=alone)
    expected = rows_of_this_rank({"x": expected.transpose(0, 1)})["x"].transpose(0, 1)
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-12)
    (report,) = model_report(torch.nn.ModuleDict({"core": core})).layers
    assert (report.name, report.layer, report.path) == ("core", "CommFuseDotProductAttention", "overlapped")


def check_dropout_is_drawn_by_torchs_generator(_: int) -> None:
    """So that a recomputed forward pass drops what the first one did."""
    core, torch_state = build(attention_dropout=0.4), torch.get_rng_state()
    q, k, v = (layers.random((ROWS, 2, number, SIZE), seed) for seed, number in enumerate((HEADS, 1, 1)))
    first, other = core(q, k, v, None), core(q, k, v, None)
    torch.set_rng_state(torch_state)
    again = core(q, k, v, None)
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.1
    (report,) = model_report(torch.nn.ModuleDict({"core": core})).layers
    assert report.path == "overlapped"


def check_it_stands_in_for_megatrons(_: int) -> None:
    core = build(cp_comm_type="a2a")
    assert type(core).__name__ == "DotProductAttention"
    assert type(core).forward is DotProductAttention.forward
    assert core.config.context_parallel_size == RANKS
    assert list(core.state_dict()) == []
    core(heads(), heads(), heads(), None)
    del core.pg_collection, core.tp_group  # process groups cannot be copied
    for copied in (copy.deepcopy(core), pickle.loads(pickle.dumps(core))):
        assert type(copied) is CommFuseDotProductAttention
        assert state_of(copied).context is None


def check_one_tensor_parallel_rank_misses_nothing(_: int) -> None:
    """Fails without: linears of a group of one rank raised, or warned, each."""
    logger = logging.getLogger("commfuse_megatron")
    records: list[logging.LogRecord] = []
    handler = mock.Mock(level=logging.WARNING, handle=records.append)
    logger.addHandler(handler)
    model = tiny_gpt(1, RAISES, context_parallel_size=RANKS, cp_comm_type="a2a")
    loss_and_gradients(model, torch.arange(2 * 17).view(2, 17))
    logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []
    paths = {layer.name.rpartition(".")[2]: layer.path for layer in model_report(model).layers}
    assert paths.pop("core_attention") == "overlapped"
    assert set(paths.values()) == {"stock"}


def in_context_parallel_groups(ranks: int, check: str) -> None:
    with sharing_sequences(ranks):
        globals()[check](ranks)


test_core_attention = make_cpu_test(
    RANKS,
    {
        name: (0, __name__, in_context_parallel_groups.__name__, (name,))
        for name in list(globals())
        if name.startswith("check_")
    },
)
