"""Whole models: how their weights are drawn, compared, saved and loaded; groups of other sizes within a check."""

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin.compat import ColumnParallelLinear
from commfuse_megatron.testing import models
from commfuse_megatron.testing.gpt import tensor_parallel
from commfuse_megatron.testing.models import Recipe, build_chunks, make_config
from commfuse_megatron.tools.verify.megatron_cases import choose_configurations

(MLA,) = choose_configurations(2, ["mla"])


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
def tensor_parallel_size(size: int, **other_sizes: int) -> Iterator[None]:
    """Other groups inside the with-block, those of all ranks again after it."""
    parallel_state.destroy_model_parallel()
    with tensor_parallel(size, **other_sizes):
        yield
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())


def sharded(m: Any) -> dict[str, Any]:
    return m.sharded_state_dict(metadata={"dp_cp_group": parallel_state.get_data_parallel_group()})


def save(m: Any, folder: str) -> None:
    save_entries(sharded(m), folder)


def save_entries(entries: dict[str, Any], folder: str) -> None:
    # Megatron logs the memory of the process, for which alone it needs psutil, and fails without it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem_async, "_process_memory", lambda: 0)
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
    recipe = Recipe(options={**MLA.options, **options})
    with pytest.MonkeyPatch.context() as patch:
        if is_fused:
            patch.setattr(models, "get_gpt_layer_local_spec", _with_fused_down_projection)
        (model,) = build_chunks(recipe, make_config(recipe, group_size), overlap=overlap)
    return model


def _with_fused_down_projection(**options: Any) -> Any:
    spec = copy.deepcopy(get_gpt_layer_local_spec(**options))
    attention = spec.submodules.self_attention
    attention.module = FusedMLASelfAttention
    attention.submodules.linear_q_down_proj = attention.submodules.linear_kv_down_proj = None
    attention.submodules.linear_qkv_down_proj = ColumnParallelLinear
    return spec
