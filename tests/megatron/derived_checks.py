"""Checks of layers that somebody else has derived from ours, or put something around. Each is run on all ranks.

Quantisers change the class of a layer to one that derives from its class, found by the class or by its `forward`, and
replace Megatron's module functions while `super().forward` runs. Whoever overlaps such a layer passes them by.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers as megatron_layers
from torch.nn.utils import parametrize

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseLayerNormColumnParallelLinear,
    CommFuseRowParallelLinear,
    CommFuseVocabParallelEmbedding,
    apply_to_spec,
    convert_model,
    model_report,
    unsupported_reason,
)
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tests.megatron.layers import (
    KINDS,
    assert_equal,
    assert_overlapped,
    assert_stock,
    build,
    config,
    example_input,
    pair,
    run,
)

FUNCTIONS = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")


def quantised(layer: Any, calls: list[str]) -> None:
    """Do to `layer` as quantisers do: another class, whose forward replaces Megatron's functions meanwhile."""
    base = type(layer)

    class Quantised(base):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                for name in FUNCTIONS:
                    patch.setattr(megatron_layers, name, _halving(getattr(megatron_layers, name), calls))
                return super().forward(*args, **kwargs)

    layer.__class__ = Quantised


def _halving(function: Any, calls: list[str]) -> Any:
    @functools.wraps(function)  # Megatron keeps an attribute on it
    def with_half_the_weight(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(function.__name__)
        return function(input, 0.5 * weight, *args, **kwargs)

    return with_half_the_weight


def check_quantised_layers_are_not_passed_by(group_size: int) -> None:
    for kind in KINDS:
        for is_converted_first in (True, False):
            stock, ours = pair(kind, group_size)
            x = example_input(kind, group_size)
            if not is_converted_first:
                ours.__class__ = type(stock)
            calls: list[str] = []
            for layer in (stock, ours):
                quantised(layer, calls)
            convert_model(torch.nn.ModuleList([ours]))
            assert_equal(run(stock, x), run(ours, x))
            assert calls == [FUNCTIONS[0]] * 2
            report = model_report(torch.nn.ModuleList([ours])).layers[0]
            assert (report.path, report.overlapped_calls) == ("stock", 0)
            words = "derives from CommFuse" if is_converted_first else "not among the classes that are replaced"
            assert words in report.reasons[0]


def check_replaced_functions_are_not_passed_by(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
        calls: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in FUNCTIONS:
                patch.setattr(megatron_layers, name, _halving(getattr(megatron_layers, name), calls))
            assert_equal(run(stock, x), run(ours, x))
        assert len(calls) == 2
        assert_stock(ours, f"{FUNCTIONS[0]} of megatron.core.tensor_parallel.layers is replaced")


def check_functions_replaced_on_classes_are_not_passed_by(group_size: int) -> None:
    def doubled(function: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            return (2 * found[0], found[1]) if isinstance(found, tuple) else 2 * found

        return forward

    places = {
        "column": [(ColumnParallelLinear, "_forward_impl"), (ColumnParallelLinear, "forward")],
        "row": [
            (RowParallelLinear, "forward"),
            (RowParallelLinear, "_forward_impl"),
            (megatron_layers, "reduce_scatter_to_sequence_parallel_region"),
        ],
    }
    for kind in KINDS:
        for holder, name in places[kind]:
            stock, ours = pair(kind, group_size)
            x = example_input(kind, group_size)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(holder, name, doubled(vars(holder)[name]))
                assert_equal(run(stock, x), run(ours, x))
            assert_stock(ours, f"{name} of {holder.__name__} is replaced")
            assert_equal(run(stock, x), run(ours, x))


def check_functions_of_ours_by_their_class(group_size: int) -> None:
    """Of a fused norm and linear, the class's forward includes the norm."""
    fused = build("column", CommFuseLayerNormColumnParallelLinear, config(group_size), is_expert=False)
    x = example_input("column", group_size)
    assert torch.equal(type(fused).forward(fused, x)[0], fused(x)[0])
    _, ours = pair("row", group_size)
    x = example_input("row", group_size)
    expected = ours(x)[0]
    forward = CommFuseRowParallelLinear.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommFuseRowParallelLinear, "forward", lambda layer, x: forward(layer, x))
        assert (ours(x)[0] - expected).abs().max() < 1e-13
        assert "forward is replaced" in unsupported_reason(ours)


def check_parametrized_layers_are_overlapped(group_size: int) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        for layer in (stock, ours):
            parametrize.register_parametrization(layer, "weight", Doubled())
        x = example_input(kind, group_size)
        assert_equal(run(stock, x), run(ours, x))
        assert_overlapped(ours)


def check_registries_find_what_ours_stand_for(_: int) -> None:
    for stock, ours in (
        (ColumnParallelLinear, CommFuseColumnParallelLinear),
        (RowParallelLinear, CommFuseRowParallelLinear),
        (VocabParallelEmbedding, CommFuseVocabParallelEmbedding),
    ):
        assert issubclass(ours, stock)
        assert ours is not stock
        assert ours.forward is stock.forward
        assert ours.__name__ == stock.__name__
        assert ours.__qualname__.startswith("CommFuse")


def check_arguments_that_are_none(group_size: int) -> None:
    """Fails without the check: the layers were converted, and the first forward pass failed."""
    stock, _ = pair("row", group_size)
    held = torch.nn.ModuleList([stock])
    for wrong in ({}, {"linear": {}}, OverlapConfig().linear, 3, object):
        for call in (convert_model, apply_to_spec):
            with pytest.raises(ConfigError, match=f"{call.__name__} takes an OverlapConfig"):
                call(held if call is convert_model else RowParallelLinear, wrong)
    for wrong in (3, "spec", held, get_gpt_layer_local_spec, OverlapConfig()):
        with pytest.raises(ConfigError, match="apply_to_spec takes a ModuleSpec"):
            apply_to_spec(wrong)
    for wrong in (None, "model", {}, [None], SimpleNamespace()):
        for call in (convert_model, model_report):
            with pytest.raises(ConfigError, match="takes a torch module"):
                call(wrong)
    with pytest.raises(ConfigError, match="cannot be read"):
        convert_model(held, "there is no such file.yaml")
    assert type(stock) is RowParallelLinear
    convert_model(held, "configs/default.yaml")
    assert type(stock) is CommFuseRowParallelLinear
