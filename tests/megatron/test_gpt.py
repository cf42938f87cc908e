"""A whole GPT in float64 on the CPU over several steps: parameters, replicas, attributes, checkpoints as stock's."""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import model_report
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config
from commfuse_megatron.testing.training import Training
from tests.megatron.harness import make_cpu_test
from tests.megatron.models import differing_checkpoint_entries, fuse_gradients, perturb

NUM_STEPS = 3

CHUNKED_RING = {
    "linear": {
        "fprop": {"algorithm": "ring", "chunks_per_shard": 2},
        "dgrad": {"algorithm": "ring", "chunks_per_shard": 2},
        "wgrad": {"keep_gathered_input": True},
    }
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """`overlap` is ours; `is_data_parallel`: two groups, gradients fused."""

    gpt: SmallGPT = field(default_factory=lambda: SmallGPT(dtype=torch.float64))
    overlap: dict[str, Any] = field(default_factory=dict)
    is_data_parallel: bool = False


BIASED = SmallGPT.layer_norm_and_bias(dtype=torch.float64)
VARIANTS = {
    "swiglu": Variant(),
    "layer_norm_and_bias": Variant(gpt=BIASED),
    "tied_embeddings": Variant(gpt=SmallGPT(dtype=torch.float64, has_tied_embeddings=True)),
    "ring_in_chunks": Variant(gpt=BIASED, overlap=CHUNKED_RING),
    "data_parallel": Variant(gpt=BIASED, is_data_parallel=True),
}


def equals_stock(group_size: int, name: str) -> None:
    """Right programs differ in the order of sums: by a few units of 2.2e-16, times the cancellation in a gradient."""
    variant = VARIANTS[name]
    gpt = variant.gpt
    stock = build_gpt(gpt, transformer_config(gpt, group_size), overlap=False)
    perturb(stock)
    config = OverlapConfig.from_dict(variant.overlap)
    ours = build_gpt(gpt, transformer_config(gpt, group_size), overlap=config, seed=99)
    ours.load_state_dict(stock.state_dict())
    assert _differing_attributes(stock, ours) == []
    assert differing_checkpoint_entries(stock, ours) == []
    if variant.is_data_parallel:
        fuse_gradients(ours)
    runs = [Training(m, overlap_grad_reduce=variant.is_data_parallel) for m in (stock, ours)]
    generator = torch.Generator().manual_seed(5 + parallel_state.get_data_parallel_rank())
    batches = [torch.randint(gpt.vocab_size, (2, 33), generator=generator) for _ in range(NUM_STEPS)]
    stock_loss, our_loss = (run.backward(batches[0]) for run in runs)
    assert abs(our_loss - stock_loss) <= 1e-13 * abs(stock_loss)
    pairs = list(zip(stock.named_parameters(), ours.parameters(), strict=True))
    assert len(pairs) >= 13
    for (parameter, a), b in pairs:
        error = ((a.main_grad - b.main_grad).abs().max() / a.main_grad.abs().max()).item()
        assert error <= 1e-13, f"gradient of {parameter} differs by {error:.1e}"
    for batch in batches:
        for run in runs:
            run.step(batch)
    for (parameter, a), b in pairs:
        assert (a - b).abs().max() <= 1e-12, f"{parameter} after {NUM_STEPS} steps"
        assert b.tensor_model_parallel or _is_equal_on_all_ranks(b), parameter
    assert not any("CommFuse" in type(m).__qualname__ for m in stock.modules())
    # Without this, a model that always fell back would pass every comparison.
    report = model_report(ours)
    assert len(report.layers) == 10, "embedding, four linears in each of two layers, output layer"
    for layer in report.layers:
        assert (layer.path, layer.overlapped_calls, layer.stock_calls) == ("overlapped", 1 + NUM_STEPS, 0), layer
    paths = {(record.op, record.pass_name, record.path) for record in report.ops if record.calls}
    assert {path for *_, path in paths} == {"sliced"}
    assert len(paths) == 6, "three operations, forward and backward"


def _is_equal_on_all_ranks(parameter: torch.Tensor) -> bool:
    copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, parameter.detach().contiguous())
    return all(torch.equal(copies[0], other) for other in copies)


def _differing_attributes(stock: torch.nn.Module, ours: torch.nn.Module) -> list[str]:
    def describe(model: torch.nn.Module) -> dict[str, dict]:
        return {name: {**vars(p), "shape": p.shape, "dtype": p.dtype} for name, p in model.named_parameters()}

    expected, found = describe(stock), describe(ours)
    return sorted(set(expected) ^ set(found)) + [name for name in expected if expected[name] != found.get(name)]


def _checks(group_size: int, *names: str) -> dict[str, Any]:
    return {name: (group_size, __name__, equals_stock.__name__, (name,)) for name in names}


test_two_ranks = make_cpu_test(2, _checks(2, "swiglu", "tied_embeddings", "ring_in_chunks"))
test_four_ranks = make_cpu_test(4, _checks(4, "layer_norm_and_bias") | _checks(2, "data_parallel"))
