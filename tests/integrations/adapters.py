"""Models with adapters, in every order of adapting, converting and describing by a spec; what training them gives."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.plugin import apply_to_spec, convert_model, model_report
from commfuse_megatron.plugin.spec import block_spec, local_layer_spec
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config
from tests.megatron.layers import assert_equal, random
from tests.megatron.models import differing_checkpoint_entries, draw_tokens, loss_and_gradients, perturb

#: Order -> what is done to the model of a stock spec, one after the other.
ORDERS: dict[str, tuple[str, ...]] = {
    "adapt, convert": ("adapt", "convert"),
    "convert, adapt": ("convert", "adapt"),
    "spec, adapt": ("spec", "adapt"),
    "spec, adapt, convert": ("spec", "adapt", "convert"),
}
STOCK = ("adapt",)
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
GPTS = (SmallGPT(dtype=torch.float64), SmallGPT.layer_norm_and_bias(dtype=torch.float64))
TOLERANCE = 1e-13

Adapt = Callable[[Any], Any]


def local_spec(config: Any) -> Any:
    """Of a block of local layers with a norm that works under sequence parallelism."""
    return block_spec(local_layer_spec(), config, with_torch_norm=True)


def linears_of(model: Any, name: str | None = None) -> list[Any]:
    """What is reported of the four linears of both layers, or of what is held under this name in their adapters."""
    names = LINEARS if name is None else (name,)
    found = [layer for layer in model_report(model).layers if layer.name.rpartition(".")[2] in names]
    assert len(found) == 2 * len(LINEARS), [layer.name for layer in found]
    return found


def model_in_order(
    gpt: SmallGPT,
    group_size: int,
    order: tuple[str, ...],
    adapt: Adapt,
    spec_of: Callable[[Any], Any],
    building: Any,
    seed: int = 7,
) -> Any:
    config = transformer_config(gpt, group_size)
    spec = spec_of(config)
    with building():
        model = build_gpt(gpt, config, overlap=False, spec=apply_to_spec(spec) if "spec" in order else spec, seed=seed)
        adapted = model
        for step in order:
            if step == "adapt":
                adapted = adapt(model)
            elif step == "convert":
                convert_model(adapted)
    trainable = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trainable) == gpt.num_layers * len(LINEARS) * 2, trainable
    return adapted


def _draw_weights(adapted: torch.nn.Module) -> None:
    """Random A and B: as they are made, B is zero and A without a gradient. Replicated ones are equal on all ranks."""
    perturb(adapted)  # norm weights of one would hide a norm that is left out
    for number, parameter in enumerate(p for p in adapted.parameters() if p.requires_grad):
        rank = dist.get_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
        with torch.no_grad():
            parameter.copy_(0.1 * random(parameter.shape, 1000 * rank + number))


def _take_over(stock: torch.nn.Module, adapted: torch.nn.Module) -> None:
    """By name: Bridge's wrapper writes state dicts without itself in the names and cannot read them so."""
    assert list(adapted.state_dict()) == list(stock.state_dict())
    with torch.no_grad():
        for (name, ours), (stock_name, value) in zip(adapted.named_parameters(), stock.named_parameters(), strict=True):
            assert name == stock_name
            ours.copy_(value)


def _gpt_of(adapted: Any) -> Any:
    return adapted.base_model.model if hasattr(adapted, "base_model") else adapted


def second_step(adapted: Any) -> dict[str, torch.Tensor]:
    """Two calls, since what a layer keeps from the first must not change the second; of the second, everything."""
    for seed in (5, 6):
        found = loss_and_gradients(adapted, draw_tokens(2, 32, seed), with_mask=True)
    return {name: value for name, value in found.items() if value is not None}


def assert_equals_stock(
    group_size: int,
    adapt: Adapt,
    spec_of: Callable[[Any], Any],
    base_name: str,
    *,
    building: Any = nullcontext,
    gpts: tuple[SmallGPT, ...] = GPTS,
) -> None:
    """With stock's weights: loss and every adapter's gradient are stock's in every order, every adapted linear is
    overlapped, and checkpoints have the same entries, so that those made on stock resume.

    Args:
        base_name: the name under which an adapter holds the linear.
        building: makes the context in which models are built, adapted and converted.
    """
    for gpt in gpts:
        stock = model_in_order(gpt, group_size, STOCK, adapt, spec_of, building)
        _draw_weights(stock)
        expected = second_step(stock)
        assert all(value.abs().max() > 0 for value in expected.values())
        problems: list[str] = []
        for name, order in ORDERS.items():
            adapted = model_in_order(gpt, group_size, order, adapt, spec_of, building, seed=99)
            _take_over(stock, adapted)
            entries = differing_checkpoint_entries(_gpt_of(stock), _gpt_of(adapted))
            problems += [f"{name}: {entry} is another in a distributed checkpoint" for entry in entries]
            try:
                assert_equal(expected, second_step(adapted), TOLERANCE)
            except AssertionError as error:
                problems.append(f"{name}: {error}")
            not_overlapped = [layer for layer in linears_of(adapted, base_name) if layer.path != "overlapped"]
            problems += [f"{name}: {layer.name} is {layer.path}: {layer.reasons}" for layer in not_overlapped]
        assert not problems, "\n".join(problems)
