"""A whole GPT in float64 on the CPU over several steps: parameters, replicas, attributes, checkpoints as stock's.

`test_models.py` has the losses, gradients and calls of one step of more models.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import model_report
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config
from commfuse_megatron.testing.training import Training
from tests.megatron.harness import make_cpu_test
from tests.megatron.layers import assert_equal
from tests.megatron.models import differing_checkpoint_entries, draw_tokens, fuse_gradients, perturb

NUM_STEPS = 3

PASS = {"algorithm": "ring", "chunks_per_shard": 2}
CHUNKED_RING = {"linear": {"fprop": PASS, "dgrad": PASS, "wgrad": {"keep_gathered_input": True}}}
BIASED = SmallGPT.layer_norm_and_bias(dtype=torch.float64)

#: Sizes, and the configuration of ours. With several data-parallel groups gradients are fused.
VARIANTS: dict[str, tuple[SmallGPT, dict[str, Any]]] = {
    "swiglu": (SmallGPT(dtype=torch.float64), {}),
    "tied_embeddings": (SmallGPT(dtype=torch.float64, has_tied_embeddings=True), {}),
    "layer_norm_and_bias": (BIASED, {}), "ring_in_chunks": (BIASED, CHUNKED_RING),
}  # fmt: skip


def equals_stock(group_size: int, name: str) -> None:
    """Right programs differ in the order of sums: by a few units of 2.2e-16, times the cancellation in a gradient."""
    gpt, overlap = VARIANTS[name]
    stock = build_gpt(gpt, transformer_config(gpt, group_size), overlap=False)
    perturb(stock)
    ours = build_gpt(gpt, transformer_config(gpt, group_size), overlap=OverlapConfig.from_dict(overlap), seed=99)
    ours.load_state_dict(stock.state_dict())
    assert _describe(stock) == _describe(ours)
    assert differing_checkpoint_entries(stock, ours) == []
    is_data_parallel = parallel_state.get_data_parallel_world_size() > 1
    if is_data_parallel:
        fuse_gradients(ours)
    runs = [Training(m, overlap_grad_reduce=is_data_parallel) for m in (stock, ours)]
    rank = parallel_state.get_data_parallel_rank()
    batches = [draw_tokens(2, 32, seed=5 + NUM_STEPS * rank + step) for step in range(NUM_STEPS)]
    stock_loss, our_loss = (run.backward(batches[0]) for run in runs)
    assert abs(our_loss - stock_loss) <= 1e-13 * abs(stock_loss)
    assert_equal(*({name: p.main_grad for name, p in m.named_parameters()} for m in (stock, ours)))
    for batch in batches:
        for run in runs:
            run.step(batch)
    pairs = list(zip(stock.named_parameters(), ours.parameters(), strict=True))
    assert len(pairs) >= 13
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


def _describe(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    return {name: {**vars(p), "shape": p.shape, "dtype": p.dtype} for name, p in model.named_parameters()}


def _checks(group_size: int, *names: str) -> dict[str, Any]:
    return {f"{name}-{group_size}": (group_size, __name__, equals_stock.__name__, (name,)) for name in names}


test_two_ranks = make_cpu_test(2, _checks(2, "swiglu", "tied_embeddings", "ring_in_chunks"))
test_four_ranks = make_cpu_test(4, _checks(4, "layer_norm_and_bias") | _checks(2, "layer_norm_and_bias"))
