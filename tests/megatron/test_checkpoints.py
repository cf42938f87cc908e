"""Checks of distributed checkpoints: stock and ours, the local layout and Transformer Engine's, TP 2 and TP 4.

Each is run on every rank of one spawn of four. Transformer Engine's layout, the norms fused into the linears, is built
from our classes here, which need no Transformer Engine.
"""

from typing import Any

import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import model_report
from commfuse_megatron.testing.gpt import SmallGPT, loss_of
from commfuse_megatron.testing.models import Recipe
from commfuse_megatron.testing.training import Training
from tests.megatron.harness import checks_of_module, make_cpu_test, tensor_parallel
from tests.megatron.layers import assert_equal
from tests.megatron.models import (
    assert_same,
    build_model,
    draw_tokens,
    folders,
    load,
    perturb,
    save,
    save_entries,
    sharded,
    values,
)

GPT = SmallGPT.layer_norm_and_bias(dtype=torch.float64, num_layers=2)
TOLERANCE = 1e-13
TOKENS = draw_tokens(2, 32, seed=5)
FIRST, OTHER = 7, 99


def model(group_size: int, kind: str, *, seed: int) -> Any:
    recipe, overlap = Recipe(gpt=GPT, is_fused=kind == "fused"), None if kind == "stock" else OverlapConfig()
    built = build_model(recipe, group_size, overlap, seed=seed)
    if seed == FIRST:
        perturb(built)
    return built


def check_checkpoints_go_both_ways_between_layouts_and_sizes(_: int) -> None:
    with folders(3) as (of_stock, of_fused, of_ours):
        with tensor_parallel(2):
            stock = model(2, "stock", seed=FIRST)
            expected, loss = values(stock), loss_of(stock, TOKENS).item()
            save(stock, of_stock)
        with tensor_parallel(4):
            for kind in ("ours", "fused"):
                loaded = _loaded(4, kind, of_stock, loss)
            save(loaded, of_fused)
        with tensor_parallel(2):
            assert_same(expected, values(_loaded(2, "stock", of_fused, loss)))
            loaded = _loaded(2, "ours", of_fused, loss)
            assert_same(expected, values(loaded))
            save(loaded, of_ours)
        with tensor_parallel(4):
            _loaded(4, "stock", of_ours, loss)


def _loaded(group_size: int, kind: str, folder: str, expected_loss: float) -> Any:
    """A model that had other weights before it loaded `folder`, and has the expected loss since."""
    m = model(group_size, kind, seed=OTHER)
    assert abs(loss_of(m, TOKENS).item() - expected_loss) > 1e-3
    load(m, folder)
    assert abs(loss_of(m, TOKENS).item() - expected_loss) <= TOLERANCE * expected_loss
    paths = {layer.path for layer in model_report(m).layers}
    assert paths == {"stock" if kind == "stock" else "overlapped"}
    return m


def check_fused_layout_has_the_keys_of_the_local_one(group_size: int) -> None:
    # Megatron maps the keys of separate norms to those that Transformer Engine's fused layers have.
    local, fused = (sharded(model(group_size, kind, seed=FIRST)) for kind in ("stock", "fused"))
    keys = [{entry.key for entry in entries.values() if hasattr(entry, "key")} for entries in (local, fused)]
    assert keys[0] == keys[1]
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in keys[1]
    assert "decoder.layers.mlp.linear_fc1.layer_norm_bias" in keys[1]
    assert sum(key.endswith("linear_fc1._extra_state") for key in keys[1]) == 1


def check_extra_state_as_transformer_engine_writes_it(group_size: int) -> None:
    # Without FP8 it writes an empty tensor where local layers write None; both must load.
    with folders(1) as (folder,):
        saved = model(group_size, "fused", seed=FIRST)
        entries = sharded(saved)
        extra = [entry for name, entry in entries.items() if name.endswith("_extra_state")]
        assert len(extra) >= 8
        for entry in extra:
            entry.data = torch.empty(0, dtype=torch.uint8)
        save_entries(entries, folder)
        loaded = model(group_size, "fused", seed=OTHER)
        load(loaded, folder)
        assert_same(values(saved), values(loaded))


def check_fused_layout_trains_like_stock(group_size: int) -> None:
    stock, fused = model(group_size, "stock", seed=FIRST), model(group_size, "fused", seed=OTHER)
    with folders(1) as (folder,):
        save(stock, folder)
        load(fused, folder)
    runs = [Training(m) for m in (stock, fused)]
    losses = [training.backward(TOKENS) for training in runs]
    assert abs(losses[0] - losses[1]) <= TOLERANCE * losses[0]
    gradients = [
        {
            f"{entry.key} {entry.global_offset}": entry.data.main_grad
            for entry in sharded(m).values()
            if isinstance(getattr(entry, "data", None), torch.nn.Parameter)
        }
        for m in (stock, fused)
    ]
    assert len(gradients[0]) >= 13
    assert_equal(*gradients, TOLERANCE)
    for _ in range(2):
        losses = [training.step(TOKENS) for training in runs]
        assert abs(losses[0] - losses[1]) <= 1e-12 * losses[0]


test_checkpoints = make_cpu_test(4, checks_of_module(__name__, 4))
