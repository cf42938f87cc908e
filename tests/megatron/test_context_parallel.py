"""Context parallelism of Megatron's models with our core attention, float64 on the CPU, against models without it.

Ranks are given the slices that Megatron's `get_batch_on_this_cp_rank` deals. The losses of their tokens must be those
that stock gives the same tokens of whole sequences at the same tensor-parallel size, and so must the gradients, which
Megatron's data-parallel wrapper sums over ranks with other rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import model_report, reset_contexts
from commfuse_megatron.testing.gpt import SmallGPT, tensor_parallel
from commfuse_megatron.testing.models import Recipe, build_chunks, make_config
from commfuse_megatron.testing.training import Training
from commfuse_megatron.tools.verify.megatron_cases import FULL, LATENT, SELECTIVE
from tests.megatron import layers
from tests.megatron.harness import make_cpu_test
from tests.megatron.models import perturb

TOKENS = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(12))
TOLERANCE = 1e-12
CORE_ATTENTION_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """sizes, options, hybrid_pattern: of the model, see `Recipe`. options_of_ours: what only the model with context
    parallelism is given. calls: of each core attention. way: as in `build_chunks`."""

    sizes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    options_of_ours: dict[str, Any] = field(default_factory=lambda: {"cp_comm_type": "a2a"})
    hybrid_pattern: str | None = None
    is_biased: bool = False
    calls: int = 1

    def recipe(self, **options: Any) -> Recipe:
        make = SmallGPT.layer_norm_and_bias if self.is_biased else SmallGPT
        gpt = make(dtype=torch.float64, **self.sizes)
        return Recipe(gpt=gpt, options=self.options | options, hybrid_pattern=self.hybrid_pattern)


VARIANTS = {
    "causal": Variant(), "layer_norm_and_bias": Variant(is_biased=True),
    "one_query_group": Variant(sizes={"num_query_groups": 1}),
    "tied_embeddings": Variant(sizes={"has_tied_embeddings": True}),
    "window": Variant(options={"window_size": (5, 0)}), "softmax_scale": Variant(options={"softmax_scale": 0.3}),
    "type_per_layer": Variant(options_of_ours={"cp_comm_type": ["a2a", "a2a"]}),
    "recompute_full": Variant(options=FULL, calls=2), "recompute_selective": Variant(options=SELECTIVE),
    "recompute_core_attention": Variant(options=CORE_ATTENTION_AGAIN, calls=2),
    "latent": Variant(options=LATENT), "latent_yarn": Variant(options=LATENT | {"rope_type": "yarn", "mscale": 0.7}),
    "latent_other_values": Variant(options=LATENT | {"v_head_dim": 24}), "hybrid": Variant(hybrid_pattern="*-*-"),
}  # fmt: skip


def equals_stock_without(ranks: int, context: int, name: str) -> None:
    variant, tensor = VARIANTS[name], ranks // context
    with tensor_parallel(tensor):
        stock, weights = _run(variant.recipe(), tensor, None, None)
    with _context_parallel(tensor, context) as group:
        recipe = variant.recipe(context_parallel_size=context, **variant.options_of_ours)
        ours, _ = _run(recipe, tensor, OverlapConfig(), weights)
        expected = _own_rows(group, losses=stock.losses)["losses"]
        assert expected.shape == ours.losses.shape == (2, 32 // context)
        torch.testing.assert_close(ours.losses, expected, atol=TOLERANCE, rtol=TOLERANCE)
        layers.assert_equal(stock.gradients, ours.gradients, tolerance=TOLERANCE)
        assert len(stock.gradients) >= 13
        _assert_all_overlapped(ours.model, tensor, variant.calls)


@contextmanager
def _context_parallel(tensor: int, context: int) -> Iterator[Any]:
    with tensor_parallel(tensor, context_parallel_size=context):
        yield parallel_state.get_context_parallel_group()
        reset_contexts()


@dataclass(frozen=True)
class Run:
    model: Any
    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]


def _run(recipe: Recipe, tensor: int, overlap: OverlapConfig | None, weights: Any) -> tuple[Run, Any]:
    (model,) = build_chunks(recipe, make_config(recipe, tensor), overlap=overlap)
    if weights is None:
        perturb(model)
    else:
        model.load_state_dict(weights)
    wrapped = Training(model).wrapped
    wrapped.zero_grad_buffer()
    group = parallel_state.get_context_parallel_group()
    positions = torch.arange(32).expand(2, 32)
    batch = _own_rows(group, tokens=TOKENS[:, :-1], labels=TOKENS[:, 1:], positions=positions)
    losses = wrapped(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    losses.mean().backward()
    finalize_model_grads([wrapped])
    gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
    return Run(model, losses.detach(), gradients), model.state_dict()


def _own_rows(group: dist.ProcessGroup, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """What Megatron's loaders leave a rank of [batch, sequence]."""
    batch = {name: tensor.contiguous() for name, tensor in batch.items()}
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def _assert_all_overlapped(model: Any, tensor: int, calls: int) -> None:
    """Without this, a model that always fell back would pass every comparison."""
    report = model_report(model)
    cores = [each for each in report.layers if each.name.endswith("core_attention")]
    assert [(each.path, each.overlapped_calls, each.reasons) for each in cores] == [("overlapped", calls, ())] * 2
    others = [each for each in report.layers if each not in cores]
    assert len(others) >= 10
    for each in others:
        assert each.path == ("overlapped" if tensor > 1 else "stock"), each
        assert tensor > 1 or "the tensor-parallel group has one rank" in each.reasons[0], each
    assert all("context parallelism is on" in each.reasons[0] for each in report.attentions)


def _checks(context: int, *names: str) -> dict[str, Any]:
    return {f"{name}-cp{context}": (0, __name__, equals_stock_without.__name__, (context, name)) for name in names}


test_two_ranks = make_cpu_test(2, _checks(2, *VARIANTS))
test_four_ranks = make_cpu_test(
    4,
    _checks(4, "causal", "one_query_group", "window", "latent", "recompute_full")
    | _checks(2, "causal", "layer_norm_and_bias", "latent", "hybrid", "recompute_core_attention"),
)
