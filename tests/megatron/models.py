"""Whole models: how their weights are drawn, compared, saved and loaded; groups of other sizes within a check."""

import copy
import queue
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import reset_contexts
from commfuse_megatron.plugin.compat import ColumnParallelLinear
from commfuse_megatron.plugin.spec import replace_in_spec
from commfuse_megatron.testing import models
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, losses_of, transformer_config
from commfuse_megatron.testing.models import Recipe, build_chunks, make_config
from commfuse_megatron.testing.training import Training
from commfuse_megatron.tools.verify.megatron_cases import LATENT
from tests.megatron.harness import tensor_parallel

QUERY_SPLIT = OverlapConfig.from_dict({"attention": {"path": "query_split"}})
ROW_PARALLEL = OverlapConfig.from_dict({"attention": {"path": "row_parallel"}})
TINY = SmallGPT(dtype=torch.float64, num_layers=1)


def with_attention_and_norm(spec: Any, attention: type, norm: type) -> Any:
    """A copy of the spec of a block of dense layers with other classes for core attention and for every norm."""
    layers = [layer.submodules for layer in spec.layer_specs]
    replacements = {layer.self_attention.submodules.core_attention: attention for layer in layers}
    norms = [spec.layer_norm, *(n for layer in layers for n in (layer.input_layernorm, layer.pre_mlp_layernorm))]
    return replace_in_spec(spec, {**replacements, **dict.fromkeys(norms, norm)})


def draw_tokens(batch: int = 2, length: int = 16, seed: int = 1) -> torch.Tensor:
    """One more than the length, since the next one of each is predicted."""
    return torch.randint(256, (batch, length + 1), generator=torch.Generator().manual_seed(seed))


def tiny_gpt(group_size: int, overlap: OverlapConfig | bool, **options: Any) -> Any:
    """One layer of the default sizes in float64."""
    return build_gpt(TINY, transformer_config(TINY, group_size, **options), overlap=overlap)


def build_model(recipe: Recipe, group_size: int, overlap: OverlapConfig | None, *, seed: int = 7) -> Any:
    (model,) = build_chunks(recipe, make_config(recipe, group_size), overlap=overlap, seed=seed)
    return model


def loss_and_gradients(model: Any, tokens: torch.Tensor, *, with_mask: bool = False) -> dict[str, torch.Tensor | None]:
    """By name; gradients are those of this rank alone."""
    model.zero_grad(set_to_none=True)
    loss = losses_of(model, tokens, with_mask=with_mask).mean()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def losses_and_final_gradients(
    model: Any, tokens: torch.Tensor, *, with_mask: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of every token; by name, summed over the ranks as Megatron's data-parallel wrapper does."""
    wrapped = Training(model).wrapped
    wrapped.zero_grad_buffer()
    losses = losses_of(wrapped, tokens, with_mask=with_mask)
    losses.mean().backward()
    finalize_model_grads([wrapped])
    gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
    assert len(gradients) >= 13
    return losses.detach(), gradients


def perturb(model: torch.nn.Module) -> None:
    """Make biases and norm weights something else than zeros and ones, equally on all ranks."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise.to(parameter.device))


def fuse_gradients(model: torch.nn.Module) -> None:
    """As by `gradient_accumulation_fusion`, for which Megatron asks for Apex when it is set at construction."""
    for layer in model.modules():
        if type(layer).__qualname__.startswith("CommFuse") and hasattr(layer, "gradient_accumulation_fusion"):
            layer.gradient_accumulation_fusion = True


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


@contextmanager
def sharing_sequences(context: int, tensor: int = 1, **other_sizes: int) -> Iterator[None]:
    """Groups of so many context-parallel ranks inside the with-block."""
    with tensor_parallel(tensor, context_parallel_size=context, **other_sizes):
        yield
        dist.barrier()
        reset_contexts()


def sharded(m: Any) -> dict[str, Any]:
    return m.sharded_state_dict(metadata={"dp_cp_group": parallel_state.get_data_parallel_group()})


def save(m: Any, folder: str) -> None:
    save_entries(sharded(m), folder)


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Megatron saves within its own process."""
    with pytest.MonkeyPatch.context() as patch:
        # It logs the memory of the process, for which alone it needs psutil, and fails without it.
        patch.setattr(filesystem_async, "_process_memory", lambda: 0)
        # Its own queue lives in a process that takes longer to start than all else.
        patch.setattr(filesystem_async, "_results_queue", queue.Queue(), raising=False)
        yield


def save_entries(entries: dict[str, Any], folder: str) -> None:
    with plain_checkpoints():
        dist_checkpointing.save(entries, folder)


def load(m: Any, folder: str) -> None:
    m.load_state_dict(dist_checkpointing.load(sharded(m), folder))


@contextmanager
def folders(number: int) -> Iterator[list[str]]:
    """Empty folders that all ranks share."""
    names: list[Any] = [tempfile.mkdtemp() for _ in range(number)] if dist.get_rank() == 0 else [None] * number
    dist.broadcast_object_list(names)
    yield names
    dist.barrier()  # not after an error, which the others may not have
    if dist.get_rank() == 0:
        for name in names:
            shutil.rmtree(name)


def values(m: Any) -> dict[str, torch.Tensor]:
    """Parameters by checkpoint key and offset."""
    # Not the objects, as which Transformer Engine keeps its extra states.
    entries = (entry for entry in sharded(m).values() if isinstance(entry, dist_checkpointing.ShardedTensor))
    return {f"{entry.key} {entry.global_offset}": entry.data.detach().clone() for entry in entries}


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], at_least: int = 13) -> None:
    assert len(expected) >= at_least
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def build_latent(group_size: int, overlap: OverlapConfig | None, *, is_fused: bool = False, **options: Any) -> Any:
    """The model of `commfuse verify --megatron --only mla`; Megatron fuses it with Transformer Engine's layers only."""
    recipe = Recipe(options={**LATENT, **options})
    with pytest.MonkeyPatch.context() as patch:
        if is_fused:
            patch.setattr(models, "get_gpt_layer_local_spec", _with_fused_down_projection)
        return build_model(recipe, group_size, overlap)


def _with_fused_down_projection(**options: Any) -> Any:
    spec = copy.deepcopy(get_gpt_layer_local_spec(**options))
    attention = spec.submodules.self_attention
    attention.module = FusedMLASelfAttention
    attention.submodules.linear_q_down_proj = attention.submodules.linear_kv_down_proj = None
    attention.submodules.linear_qkv_down_proj = ColumnParallelLinear
    return spec
