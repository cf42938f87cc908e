"""Context parallelism of Megatron's models with our core attention, float64 on the CPU, against models without it.

Ranks are given the slices that Megatron's `get_batch_on_this_cp_rank` deals. The losses of their tokens must be those
that stock gives the same tokens of whole sequences at the same tensor-parallel size, and so must the gradients, which
Megatron's data-parallel wrapper sums over ranks with other rows. `test_models.py` has the plain models on two ranks.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import convert_model, model_report
from commfuse_megatron.plugin.compat_training import rows_of_this_rank
from commfuse_megatron.testing.gpt import SmallGPT
from commfuse_megatron.testing.models import Recipe
from commfuse_megatron.testing.pipeline import ScheduledRun
from commfuse_megatron.tools.verify.megatron_cases import FULL, LATENT, SELECTIVE
from tests.megatron.harness import make_cpu_test, tensor_parallel
from tests.megatron.layers import assert_equal
from tests.megatron.models import (
    build_model,
    draw_tokens,
    fuse_gradients,
    losses_and_final_gradients,
    perturb,
    sharing_sequences,
)

TOKENS = draw_tokens(2, 32, seed=12)
TOLERANCE = 1e-12
#: Without the loss of their balance, which is of each rank's own tokens.
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"}  # fmt: skip
NOT_PLAIN = "only SelfAttention itself is cut into groups of heads"
CORE_ATTENTION_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """recipe: of the model. comm_type: what only the model with context parallelism is given. overlap: for it. calls:
    of each core attention in a step. alone: why its exchanges do not hide under the projections. fuses: whether weight
    gradients are added to main_grad."""

    recipe: Recipe = field(default_factory=Recipe)
    comm_type: str | list[str] = "a2a"
    overlap: dict[str, Any] = field(default_factory=dict)
    calls: int = 1
    alone: str | None = None
    fuses: bool = False


def model(calls: int = 1, pattern: str | None = None, alone: str | None = None, **options: Any) -> Variant:
    return Variant(recipe=Recipe(options=options, hybrid_pattern=pattern), calls=calls, alone=alone)


def sizes(gpt: SmallGPT) -> Variant:
    return Variant(recipe=Recipe(gpt=gpt))


PROJECTIONS = {"with_projections": "on"}
WITH_PROJECTIONS = {"ulysses": PROJECTIONS}

VARIANTS = {
    "causal": Variant(), "layer_norm_and_bias": sizes(SmallGPT.layer_norm_and_bias(dtype=torch.float64)),
    "one_query_group": replace(sizes(SmallGPT(dtype=torch.float64, num_query_groups=1)), alone="one head of keys"),
    "eight_query_groups": sizes(SmallGPT(dtype=torch.float64, num_query_groups=8)),
    "tied_embeddings": sizes(SmallGPT(dtype=torch.float64, has_tied_embeddings=True)),
    "window": model(window_size=(5, 0)), "softmax_scale": model(softmax_scale=0.3),
    "qk_layernorm": model(qk_layernorm=True), "type_per_layer": Variant(comm_type=["a2a", "a2a"]),
    "asked_for": Variant(overlap={"ulysses": PROJECTIONS | {"path": "overlapped"}, "check_decisions": True}),
    "one_group": Variant(
        overlap={"ulysses": PROJECTIONS | {"head_groups": 1}}, alone="all heads are planned to go in one group"
    ),
    "projections_off": Variant(overlap={"ulysses": {}}, alone="with_projections is off"),
    "main_grad": replace(sizes(SmallGPT.layer_norm_and_bias(dtype=torch.float64)), fuses=True),
    "recompute_full": model(**FULL, calls=2), "recompute_selective": model(**SELECTIVE),
    "recompute_core_attention": model(**CORE_ATTENTION_AGAIN, calls=2, alone="core attention is recomputed by itself"),
    "latent": model(**LATENT, alone=NOT_PLAIN),
    "latent_yarn": model(**LATENT | {"rope_type": "yarn", "mscale": 0.7}, alone=NOT_PLAIN),
    "latent_other_values": model(**LATENT | {"v_head_dim": 24}, alone=NOT_PLAIN), "hybrid": model(pattern="*-*-"),
    "experts": model(**EXPERTS),
}  # fmt: skip


def equals_stock_without(ranks: int, context: int, name: str) -> None:
    variant, tensor = VARIANTS[name], ranks // context
    with tensor_parallel(tensor):
        stock = build_model(variant.recipe, tensor, None)
        perturb(stock)
        losses, gradients = losses_and_final_gradients(stock, TOKENS)
    with sharing_sequences(context, tensor):
        ours = _build(variant, tensor, context)
        ours.load_state_dict(stock.state_dict())
        if variant.fuses:
            fuse_gradients(ours)
        found, found_gradients = losses_and_final_gradients(ours, TOKENS)
        expected = rows_of_this_rank({"losses": losses})["losses"]
        assert expected.shape == found.shape == (2, 32 // context)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert_equal(gradients, found_gradients, TOLERANCE)
        heads = variant.recipe.gpt.num_query_groups // tensor
        alone = variant.alone or ("one head of keys" if heads == context else None)
        _assert_all_overlapped(
            ours, tensor, variant.calls, alone="has 2 ranks" if tensor > 1 and not variant.alone else alone
        )


def a_pipeline_equals_stock_without(_: int) -> None:
    """PP2 x CP2, two micro-batches by Megatron's schedule."""
    batches = [TOKENS, TOKENS.flip(1)]
    recipe = Recipe(options={"pipeline_model_parallel_size": 2, "num_layers": 4})
    with tensor_parallel(1, pipeline_model_parallel_size=2):
        stock = build_model(recipe, 1, None)
        perturb(stock)
        expected = ScheduledRun([stock]).step(batches)
    with sharing_sequences(2, pipeline_model_parallel_size=2):
        ours = _build(Variant(recipe=recipe), 1, 2)
        ours.load_state_dict(stock.state_dict())
        found = ScheduledRun([ours]).step(batches)
        means = torch.tensor(found.losses, dtype=torch.float64) / 2  # of this rank's rows, of each micro-batch
        dist.all_reduce(means, group=parallel_state.get_context_parallel_group())
        # Megatron's cross-entropies are float32; their means over all rows and over half of them are rounded.
        torch.testing.assert_close(means, torch.tensor(expected.losses, dtype=torch.float64), rtol=2.0**-22, atol=0)
        assert_equal(expected.gradients, found.gradients, TOLERANCE)
        _assert_all_overlapped(ours, 1, calls=2, others=9)


def set_after_building(ranks: int) -> None:
    """A stock model that is built without: fails without the exchange, for its core attention then sees its own rows
    only, and Megatron says nothing."""
    with tensor_parallel(1):
        stock = build_model(Recipe(), 1, None)
        perturb(stock)
        _, gradients = losses_and_final_gradients(stock, TOKENS)
    with sharing_sequences(ranks):
        late = build_model(Recipe(), 1, None)
        late.load_state_dict(stock.state_dict())
        late.config.context_parallel_size, late.config.cp_comm_type = ranks, "a2a"
        convert_model(late, OverlapConfig.from_dict(WITH_PROJECTIONS))
        _assert_all_overlapped(late, 1, calls=0)
        assert_equal(gradients, losses_and_final_gradients(late, TOKENS)[1], TOLERANCE)
        _assert_all_overlapped(late, 1, calls=1)


def _build(variant: Variant, tensor: int, context: int) -> Any:
    options = {**variant.recipe.options, "context_parallel_size": context, "cp_comm_type": variant.comm_type}
    return build_model(
        replace(variant.recipe, options=options), tensor, OverlapConfig.from_dict(WITH_PROJECTIONS | variant.overlap)
    )


def _assert_all_overlapped(built: Any, tensor: int, calls: int, others: int = 10, alone: str | None = None) -> None:
    """Without this, a model that always fell back would pass every comparison. alone: see `Variant`."""
    path = "overlapped" if calls else "not called yet"
    report = model_report(built)
    cores = [each for each in report.layers if each.name.endswith("core_attention")]
    assert [(each.path, each.overlapped_calls, each.reasons) for each in cores] == [(path, calls, ())] * 2
    exchanges = [each for each in report.ops if each.op == "ulysses_attention"]
    assert {each.pass_name for each in exchanges if each.calls} == ({"backward", "fprop"} if calls else set())
    assert {each.path for each in exchanges} <= {"overlapped"}
    linears = [each for each in report.layers if each not in cores]
    assert len(linears) >= others
    for each in linears:
        if "experts" in each.name:
            assert "belongs to an expert" in each.reasons[0], each
            continue
        is_projection = each.name.endswith(("self_attention.linear_qkv", "self_attention.linear_proj"))
        is_part = bool(calls) and alone is None and is_projection  # of attention
        assert each.path == (path if tensor > 1 or not calls or is_part else "stock"), each
        assert tensor > 1 or is_part or "the tensor-parallel group has one rank" in each.reasons[0], each
    for each in report.attentions:
        assert "context parallelism is on" in each.reasons[0]
        assert not calls or ("do not hide under the projections" in each.reasons[0]) == (alone is not None)
        assert not calls or alone is None or alone in each.reasons[0], each


def _checks(context: int, *names: str) -> dict[str, Any]:
    return {f"{name}-cp{context}": (0, __name__, equals_stock_without.__name__, (context, name)) for name in names}


ON_TWO_RANKS = [name for name in VARIANTS if name not in ("causal", "latent", "recompute_full")]
test_two_ranks = make_cpu_test(
    2, _checks(2, *ON_TWO_RANKS) | {"set_after_building": (0, __name__, set_after_building.__name__, ())}
)
test_four_ranks = make_cpu_test(
    4,
    _checks(4, "causal", "eight_query_groups", "one_query_group", "window", "latent", "recompute_full")
    | _checks(2, "layer_norm_and_bias", "latent", "hybrid", "experts", "recompute_core_attention", "asked_for")
    | {"pipeline": (0, __name__, a_pipeline_equals_stock_without.__name__, ())},
)
