"""Query-split attention in whole models, in float64 on the CPU, against stock Megatron at the same group size."""

from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import model_report
from commfuse_megatron.testing.gpt import SmallGPT
from commfuse_megatron.testing.models import Recipe
from commfuse_megatron.tools.verify.megatron_cases import FULL, LATENT, SELECTIVE
from tests.megatron.harness import make_cpu_test
from tests.megatron.layers import assert_equal
from tests.megatron.models import (
    build_latent,
    build_model,
    draw_tokens,
    fuse_gradients,
    losses_and_final_gradients,
    perturb,
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """recipe: of the model. attention: ours. calls: of each attention in a step."""

    recipe: Recipe = field(default_factory=Recipe)
    attention: dict[str, Any] = field(default_factory=dict)
    with_mask: bool = False
    fuses_gradients: bool = False
    has_fused_latents: bool = False
    calls: int = 1


def model(pattern: str | None = None, gpt: dict[str, Any] | None = None, **options: Any) -> Variant:
    gpt = SmallGPT(dtype=torch.float64, **gpt or {})
    return Variant(recipe=Recipe(gpt=gpt, options=options, hybrid_pattern=pattern))


def masked(calls: int = 1, **options: Any) -> Variant:
    """The shim for the mask that Megatron would make does not reach autograd's thread."""
    return Variant(recipe=Recipe(options=options), with_mask=True, calls=calls)


#: Their softmax scale is not 1 / sqrt(head size).
YARN = LATENT | {"rope_type": "yarn", "rotary_scaling_factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
BIASED = Recipe(gpt=SmallGPT.layer_norm_and_bias(dtype=torch.float64))
VARIANTS = {
    "causal": Variant(), "mask_given": masked(), "splits_of_a_shard": Variant(attention={"splits_per_shard": 2}),
    "layer_norm_and_bias": Variant(recipe=BIASED, fuses_gradients=True),
    "one_query_group": model(gpt={"num_query_groups": 1}), "tied_embeddings": model(gpt={"has_tied_embeddings": True}),
    "qk_layernorm": model(qk_layernorm=True), "window": model(window_size=(5, 0)),
    "softmax_scale": model(softmax_scale=0.3), "recompute_full": masked(calls=2, **FULL),
    "recompute_selective": model(**SELECTIVE), "hybrid": model(pattern="*-*-"), "latent": model(**LATENT),
    "latent_yarn": masked(**YARN), "latent_plain_queries": model(**LATENT | {"q_lora_rank": None, "v_head_dim": 24}),
    "latent_recompute_full": masked(calls=2, **LATENT, **FULL), "latent_fused": Variant(has_fused_latents=True),
    "prediction_heads": model(mtp_num_layers=1),
}  # fmt: skip


def is_query_split_as_stock(group_size: int, name: str) -> None:
    """Two right programs differ by the order of sums, a few units of 2.2e-16 times the cancellation in a gradient."""
    variant, tokens = VARIANTS[name], draw_tokens(2, 32, seed=12)
    overlap = OverlapConfig.from_dict({"attention": {"path": "query_split", **variant.attention}})
    if variant.has_fused_latents:
        stock, ours = (build_latent(group_size, each, is_fused=True) for each in (None, overlap))
    else:
        stock, ours = (build_model(variant.recipe, group_size, each) for each in (None, overlap))
    perturb(stock)
    ours.load_state_dict(stock.state_dict())
    if variant.fuses_gradients:
        fuse_gradients(ours)
    (losses, gradients), (found, found_gradients) = (
        losses_and_final_gradients(each, tokens, with_mask=variant.with_mask) for each in (stock, ours)
    )
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
    assert_equal(gradients, found_gradients, tolerance=1e-12)
    # Without this, a model that always fell back would pass every comparison.
    report = model_report(ours)
    calls = {each.name: (each.path, each.overlapped_calls, each.reasons) for each in report.attentions}
    heads = [each for layer, each in calls.items() if "mtp" in layer]
    assert heads == [("overlapped", 1, ())] * (name == "prediction_heads")
    assert [each for layer, each in calls.items() if "mtp" not in layer] == [("overlapped", variant.calls, ())] * 2
    assert {each.path for each in report.layers if each.name.endswith("linear_proj")} == {"overlapped"}
    assert {record.path for record in report.ops if record.op == "query_split_attention"} == {"query_split"}


# Before 0.19 Megatron's fused down-projection does not gather what a column-parallel linear gives.
HAS_FUSED = tuple(map(int, metadata.version("megatron-core").split(".")[:2])) >= (0, 19)


def _checks(group_size: int, *names: str) -> dict[str, Any]:
    return {name: (group_size, __name__, is_query_split_as_stock.__name__, (name,)) for name in names}


test_two_ranks = make_cpu_test(2, _checks(2, *(name for name in VARIANTS if HAS_FUSED or name != "latent_fused")))
test_four_ranks = make_cpu_test(
    4, _checks(4, "causal", "layer_norm_and_bias", "one_query_group", "hybrid", "latent_yarn")
)
