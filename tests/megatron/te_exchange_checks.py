"""Checks of Transformer Engine's core attention under context parallelism, replaced in specs and built models.

Both ranks of one spawn share sequences. What ours exchanges runs on the CPU; Transformer Engine's own attention does
not, so where it is to be taken it is watched instead.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import build_module

from commfuse_megatron import OverlapConfig
from commfuse_megatron.ops.reference import ulysses_attention
from commfuse_megatron.ops.ulysses_attention import UlyssesInputs
from commfuse_megatron.plugin import (
    CommFuseDotProductAttention,
    CommFuseTEDotProductAttention,
    apply_to_spec,
    convert_model,
    model_report,
    reset_contexts,
)
from commfuse_megatron.plugin.compat import AttnMaskType, get_cuda_rng_tracker, unchanged_random_states
from commfuse_megatron.plugin.decision import context_of, state_of
from commfuse_megatron.plugin.norm_linear import normalized
from commfuse_megatron.plugin.spec import block_spec
from commfuse_megatron.plugin.ulysses import _reason_in_kernel
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config
from tests.megatron import layers
from tests.megatron.models import sharing_sequences
from tests.megatron.te_checks import on_the_cpu, te_gpt
from tests.threaded.test_planning import TRIAL, MadeUpTimes, machine

ROWS, HEADS, SIZE = 4, 8, 8  # rows of a rank
OVERLAPPED = OverlapConfig.from_dict({"ulysses": {"path": "overlapped"}})
RAISES = OverlapConfig.from_dict({"fallback": {"unsupported": "raise"}})


def build(leaf: Any, ranks: int, comm_type: str = "a2a", **options: Any) -> Any:
    transformer = layers.config(1, context_parallel_size=ranks, cp_comm_type=comm_type, **options)
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(), "hcp": None,
    }  # fmt: skip
    with on_the_cpu():
        return build_module(
            leaf, config=transformer, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
            cp_comm_type=comm_type, pg_collection=SimpleNamespace(**groups),
        )  # fmt: skip


def heads() -> list[torch.Tensor]:
    rank = parallel_state.get_context_parallel_rank()
    return [
        layers.random((ROWS, 2, heads, SIZE), 3 * rank + n).requires_grad_() for n, heads in enumerate((HEADS, 4, 4))
    ]


def attend(core: Any) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v."""
    q, k, v = heads()
    output = core(q, k, v, None, attn_mask_type=AttnMaskType.causal)
    output.backward(torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view_as(output))
    return [output.detach(), q.grad, k.grad, v.grad]


def check_both_classes_exchange_alike(ranks: int) -> None:
    with sharing_sequences(ranks):
        expected = attend(build(CommFuseDotProductAttention, ranks, num_query_groups=4))
        converted = build(te.TEDotProductAttention, ranks, num_query_groups=4)
        held = torch.nn.ModuleDict({"core_attention": converted})
        (report,) = model_report(held).layers
        assert (report.path, report.layer) == ("stock", "TEDotProductAttention")
        assert "neither in the spec given to apply_to_spec nor converted" in report.reasons[0]
        convert_model(held)
        assert type(converted) is CommFuseTEDotProductAttention
        assert type(converted).forward is te.TEDotProductAttention.forward
        assert type(converted).__name__ == "TEDotProductAttention"
        leaf = apply_to_spec(te.TEDotProductAttention, OVERLAPPED)
        assert leaf.params == {"overlap_config": OVERLAPPED}
        for core in (converted, build(leaf, ranks, num_query_groups=4)):
            for one, other in zip(expected, attend(core), strict=True):
                assert torch.equal(one, other)
            layers.assert_overlapped(core)
        (report,) = model_report(held).layers
        assert (report.name, report.path, report.reasons) == ("core_attention", "overlapped", ())


def check_auto_takes_the_faster_one(ranks: int) -> None:
    """With made-up times, on which the ranks do not agree; what is Transformer Engine's is stood in for."""
    stock = te.TEDotProductAttention.__bases__[0]
    for theirs_us, ours, is_stock in ((7210.0, 7350.0, True), (7350.0, 7210.0, False)):
        times = {"stock": theirs_us, "sequential": 8000.0}
        with sharing_sequences(ranks):
            group = parallel_state.get_context_parallel_group()
            theirs = mock.Mock(side_effect=lambda q, k, v, mask, group=group, **_: reference(q, k, v, group))
            watch = MadeUpTimes(lambda rank, name, times=times, ours=ours: times.get(name, ours) - 3000.0 * (rank == 0))
            # Nothing is missed where the planner leaves a call to Megatron, so nothing is raised.
            leaf = apply_to_spec(te.TEDotProductAttention, RAISES)
            core = by_cost(build(leaf, ranks, num_query_groups=4))
            with mock.patch.object(stock, "forward", theirs), mock.patch(TRIAL, return_value=watch):
                with torch.no_grad():  # as what is recomputed
                    core(*heads(), None, attn_mask_type=AttnMaskType.causal)
                found = attend(core)
                core.eval()
                with torch.no_grad():  # forward passes alone are timed, with times that are as good
                    core(*heads(), None, attn_mask_type=AttnMaskType.causal)
            with mock.patch.object(stock, "forward", theirs):
                expected = attend(build(te.TEDotProductAttention, ranks, num_query_groups=4))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-12)
            assert all(call.kwargs["attn_mask_type"] == "causal" for call in theirs.call_args_list)
            (report,) = model_report(torch.nn.ModuleDict({"core_attention": core})).layers
            assert (report.stock_calls, report.overlapped_calls) == ((3, 0) if is_stock else (0, 3))
            if is_stock:
                assert report.reasons[0].startswith("planned as stock, Transformer Engine's own: ")
                assert "measured: stock 7.210 ms, overlapped m=1 7.350" in report.reasons[0]
            else:
                assert report.reasons == ()


def check_auto_times_nothing_beside_ours_where_it_need_not(ranks: int) -> None:
    """On the CPU; local attention, which has no exchange; more ranks than heads of keys, which theirs refuses."""
    watch = MadeUpTimes(lambda rank, name: 1.0)
    with sharing_sequences(ranks), mock.patch(TRIAL, return_value=watch):
        local = by_cost(build(CommFuseDotProductAttention, ranks, num_query_groups=4))
        attend(local)
        assert "sequential" in watch.names[parallel_state.get_context_parallel_rank()]
        core = build(apply_to_spec(te.TEDotProductAttention), ranks, num_query_groups=1)
        q, k, v = heads()
        core(q, k[:, :, :1], v[:, :, :1], None, attn_mask_type=AttnMaskType.causal)
        watch.names.clear()
        reset_contexts()
        attend(build(apply_to_spec(te.TEDotProductAttention), ranks, num_query_groups=4))
        assert watch.names == {}
    assert all("stock" not in names for names in watch.names.values())


def check_trials_change_no_random_state(_: int) -> None:
    device, tracker = torch.device("cpu"), get_cuda_rng_tracker()
    generator = torch.Generator().manual_seed(5)
    states = {"tensor": torch.get_rng_state(), "generator": generator}
    with mock.patch.object(tracker, "states_", states):
        kept = torch.get_rng_state(), generator.get_state()
        with unchanged_random_states(device):
            torch.rand(3)
            torch.rand(3, generator=generator)
            tracker.states_["tensor"] = torch.get_rng_state()
        assert torch.equal(torch.get_rng_state(), kept[0])
        assert torch.equal(tracker.get_states()["tensor"], kept[0])
        assert tracker.get_states()["generator"] is generator
        assert torch.equal(generator.get_state(), kept[1])


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
    return ulysses_attention(q, k, v, order="zigzag", group=group)


def by_cost(core: Any) -> Any:
    """`core`, whose context plans as it would on a GPU."""
    planner = context_of(core).planner
    planner.default_reason, planner.machines["float64"] = None, machine()
    return core


def check_what_only_the_plain_kernel_computes_stays_theirs(ranks: int) -> None:
    attention = (True, "zigzag", None, 0.3, 0.1, None)
    with sharing_sequences(ranks):
        for name, words in (("math", "only the plain kernel"), ("flash", "")):
            core = build(apply_to_spec(te.TEDotProductAttention, OVERLAPPED), ranks)
            kernels, chosen = context_of(core).attention_kernels, SimpleNamespace()
            chosen.name = name
            with mock.patch.object(kernels, "choose", return_value=chosen):
                reason = _reason_in_kernel(context_of(core), UlyssesInputs(*heads(), *attention))
            assert (reason or "").startswith(words)
            assert bool(reason) == bool(words)
            reset_contexts()


def check_what_is_not_exchanged_is_transformer_engines(ranks: int) -> None:
    """Called as Megatron calls it, with its reason counted."""
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("cp_comm_type is p2p", {"comm_type": "p2p"}, {}),
        ("cp_comm_type is all_gather", {"comm_type": "all_gather"}, {}),
        ("the mask is of type padding", {}, {"attn_mask_type": AttnMaskType.padding}),
        ("sequences are packed", {}, {"packed_seq_params": SimpleNamespace(cp_group=None, local_cp_size=None)}),
        ("an attention bias", {}, {"attention_bias": torch.ones(1)}), ("num_splits", {}, {"num_splits": 2}),
    ]  # fmt: skip
    stock = te.TEDotProductAttention.__bases__[0]
    with sharing_sequences(ranks):
        for words, options, given in cases:
            core, (q, k, v) = build(apply_to_spec(te.TEDotProductAttention), ranks, **options), heads()
            if "packed_seq_params" in given:
                core.kept_packed_seq_params = set()
            with mock.patch.object(stock, "forward", return_value="theirs") as theirs:
                found = core(q, k, v, None, **{"attn_mask_type": AttnMaskType.causal, **given})
            assert found == "theirs"
            assert all(mine is its for mine, its in zip((q, k, v), theirs.call_args.args, strict=False))
            layers.assert_stock(core, words)
        for change, words in (
            ({"commfuse": False}, "switched off"), ({"fp8": "hybrid", "fp8_multi_head_attention": True}, "in fp8"),
            ({"cpu_offloading": True}, "cpu_offloading"),
        ):  # fmt: skip
            core = build(apply_to_spec(te.TEDotProductAttention), ranks)
            for name, value in change.items():
                setattr(core.config, name, value)
            assert words in model_report(torch.nn.ModuleList([core])).layers[0].reasons[0]
        core, recipe = build(apply_to_spec(te.TEDotProductAttention), ranks), SimpleNamespace(fp8_dpa=True)
        with (
            mock.patch.object(te.FP8GlobalStateManager, "is_fp8_enabled", return_value=True),
            mock.patch.object(te.FP8GlobalStateManager, "get_fp8_recipe", return_value=recipe),
        ):
            assert "computed in fp8" in model_report(torch.nn.ModuleList([core])).layers[0].reasons[0]
            recipe.fp8_dpa = False
            assert model_report(torch.nn.ModuleList([core])).layers[0].reasons == (), "fp8 linears around it are none"


def check_one_group_and_several(ranks: int) -> None:
    """What the instance says counts: Transformer Engine's class may be given another group, or several, later."""
    with sharing_sequences(ranks):
        core = build(apply_to_spec(te.TEDotProductAttention), ranks)
        cp, alone = core.cp_group, parallel_state.get_tensor_model_parallel_group()
        held = torch.nn.ModuleList([core])
        for group, is_listed in ((cp, True), ([alone, cp], True), ([alone], False), (alone, False), (None, False)):
            core.cp_group = group
            assert len(model_report(held).layers) == is_listed
        core.cp_group, core.cp_comm_type = [alone, cp], "a2a+p2p"
        assert "cp_comm_type is a2a+p2p" in model_report(held).layers[0].reasons[0]
        core.cp_group = None
        with mock.patch.object(te.TEDotProductAttention.__bases__[0], "forward", return_value="theirs"):
            assert core(*heads(), None, attn_mask_type=AttnMaskType.causal) == "theirs"
        assert state_of(core).stock_calls == {}


def check_a_whole_model_is_built(ranks: int) -> None:
    gpt = SmallGPT(dtype=torch.float64)
    with sharing_sequences(ranks), on_the_cpu():
        options = {"context_parallel_size": ranks, "cp_comm_type": ["a2a", "p2p"]}
        transformer = transformer_config(gpt, 1, transformer_impl="transformer_engine", **options)
        spec = block_spec(get_gpt_layer_with_transformer_engine_spec(), transformer)
        for overlap in (True, False):
            built = build_gpt(gpt, transformer, overlap=overlap, spec=spec)
            convert_model(built)
            layers_of_it = model_report(built).layers
            cores = {each.name: each.reasons for each in layers_of_it if each.name.endswith("core_attention")}
            assert cores == {
                "decoder.layers.0.self_attention.core_attention": (),
                "decoder.layers.1.self_attention.core_attention": (
                    "cp_comm_type is p2p: only the exchange of a2a is overlapped",
                ),
            }


def check_self_attention_hides_exchanges_under_its_projections(ranks: int) -> None:
    """With the fused norm in linear_qkv, against the local class behind the same norm."""
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    options = {"context_parallel_size": ranks, "cp_comm_type": "a2a"}
    with sharing_sequences(ranks):
        fused = te_gpt(gpt, 1, overlap=OVERLAPPED, **options)
        plain = build_gpt(gpt, transformer_config(gpt, 1, **options), overlap=OVERLAPPED)
        ours, local = (each.decoder.layers[0].self_attention for each in (fused, plain))
        norm, generator = ours.linear_qkv.layer_norm_weight, torch.Generator().manual_seed(5)
        with torch.no_grad():
            norm.copy_(1 + torch.rand(norm.shape, generator=generator, dtype=torch.float64))
            for name in ("linear_qkv", "linear_proj"):
                getattr(local, name).weight.copy_(getattr(ours, name).weight)
        found, expected = (layers.random((ROWS, 2, 64), 9 + parallel_state.get_context_parallel_rank()).requires_grad_()
                           for _ in range(2))  # fmt: skip
        weight = norm.detach().clone().requires_grad_()
        y, _ = ours(found, None)
        normed = normalized(expected, weight, None, ours.linear_qkv.eps, "RMSNorm", is_zero_centered=False)
        z, _ = local(normed, None)
        assert state_of(ours.linear_qkv).overlapped_calls == state_of(local.linear_qkv).overlapped_calls == 1
        for each in (y, z):
            each.backward(torch.cos(torch.arange(each.numel(), dtype=torch.float64)).view_as(each))
        pairs = [(y, z), (found.grad, expected.grad), (norm.grad, weight.grad)]
        pairs += [(getattr(ours, name).weight.grad, getattr(local, name).weight.grad) for name in ("linear_qkv",
                  "linear_proj")]  # fmt: skip
        for one, other in pairs:
            torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-12)
