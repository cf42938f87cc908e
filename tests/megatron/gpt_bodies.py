"""Run on every rank: a whole GPT, stock and overlapped, with the same weights and the same batches."""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import model_report
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, tensor_parallel, transformer_config
from commfuse_megatron.testing.training import Training

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
    """`options` are Megatron's, `overlap` is ours; `is_data_parallel`: two groups, gradients fused."""

    gpt: SmallGPT = field(default_factory=lambda: SmallGPT(dtype=torch.float64))
    options: dict[str, Any] = field(default_factory=dict)
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


def compare_with_stock(group_size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Variants that are data-parallel come last: they end the parallel state that everything else uses."""
    results = {}
    for name in names:
        variant = VARIANTS[name]
        if variant.is_data_parallel:
            parallel_state.destroy_model_parallel()
            with tensor_parallel(group_size // 2):
                results[name] = _compare(group_size // 2, variant)
        else:
            results[name] = _compare(group_size, variant)
    return results


def _compare(group_size: int, variant: Variant) -> dict[str, Any]:
    gpt, options = variant.gpt, variant.options
    stock = build_gpt(gpt, transformer_config(gpt, group_size, **options), overlap=False)
    perturb(stock)
    config = OverlapConfig.from_dict(variant.overlap)
    ours = build_gpt(gpt, transformer_config(gpt, group_size, **options), overlap=config, seed=99)
    ours.load_state_dict(stock.state_dict())
    found: dict[str, Any] = {
        "attributes_differ": _differing_attributes(stock, ours),
        "checkpoint_differs": differing_checkpoint_entries(stock, ours),
    }
    for layer in ours.modules() if variant.is_data_parallel else ():
        if type(layer).__qualname__.startswith("CommFuse"):
            layer.gradient_accumulation_fusion = True  # Megatron asks for Apex when it is set at construction
    stock_run, our_run = (Training(m, overlap_grad_reduce=variant.is_data_parallel) for m in (stock, ours))
    generator = torch.Generator().manual_seed(5 + parallel_state.get_data_parallel_rank())
    batches = [torch.randint(gpt.vocab_size, (2, 33), generator=generator) for _ in range(NUM_STEPS)]
    found["loss"] = stock_run.backward(batches[0]), our_run.backward(batches[0])
    found["gradient_errors"] = {
        name: _relative(a.main_grad, b.main_grad)
        for (name, a), b in zip(stock.named_parameters(), ours.parameters(), strict=True)
    }
    for batch in batches:
        stock_run.step(batch)
        our_run.step(batch)
    found["parameter_errors"] = {
        name: (a - b).abs().max().item()
        for (name, a), b in zip(stock.named_parameters(), ours.parameters(), strict=True)
    }
    found["replicas_differ"] = [
        name for name, p in ours.named_parameters() if not p.tensor_model_parallel and not _is_equal_on_all_ranks(p)
    ]
    report = model_report(ours)
    found["layers"] = {layer.name: (layer.path, layer.overlapped_calls, layer.stock_calls) for layer in report.layers}
    found["op_paths"] = sorted({(record.op, record.pass_name, record.path) for record in report.ops if record.calls})
    found["stock_classes_unchanged"] = not any("CommFuse" in type(m).__qualname__ for m in stock.modules())
    return found


def perturb(model: torch.nn.Module) -> None:
    """Make biases and norm weights something else than zeros and ones, equally on all ranks."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def _relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    return ((expected - found).abs().max() / expected.abs().max()).item()


def _is_equal_on_all_ranks(parameter: torch.Tensor) -> bool:
    copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, parameter.detach().contiguous())
    return all(torch.equal(copies[0], other) for other in copies)


def _differing_attributes(stock: torch.nn.Module, ours: torch.nn.Module) -> list[str]:
    def describe(model: torch.nn.Module) -> dict[str, dict]:
        return {name: {**vars(p), "shape": p.shape, "dtype": p.dtype} for name, p in model.named_parameters()}

    expected, found = describe(stock), describe(ours)
    return sorted(set(expected) ^ set(found)) + [name for name in expected if expected[name] != found.get(name)]


def differing_checkpoint_entries(stock: Any, ours: Any) -> list[str]:
    metadata = {"dp_cp_group": stock.pg_collection.dp_cp}
    expected, found = (_describe_checkpoint(m.sharded_state_dict(metadata=metadata)) for m in (stock, ours))
    assert len(expected) >= 13
    return sorted(set(expected) ^ set(found)) + [name for name in expected if expected[name] != found.get(name)]


def _describe_checkpoint(entries: dict[str, Any]) -> dict[str, Any]:
    fields = ("key", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id")
    return {
        name: (type(entry).__name__, {f: getattr(entry, f) for f in fields if hasattr(entry, f)})
        for name, entry in entries.items()
    }
