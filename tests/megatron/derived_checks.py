"""Checks of layers that somebody else has derived from ours, or put something around. Each is run on all ranks.

Quantisers change the class of a layer to one that derives from its class, found by the class or by its `forward`, and
replace Megatron's module functions while `super().forward` runs. Whoever overlaps such a layer passes them by.
"""

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel import mappings as megatron_mappings
from torch import distributed as dist
from torch.nn.utils import parametrize

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseLayerNormColumnParallelLinear,
    CommFuseRowParallelLinear,
    CommFuseVocabParallelEmbedding,
    apply_to_spec,
    convert,
    convert_model,
    model_report,
    unsupported_reason,
)
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from commfuse_megatron.plugin.decision import state_of
from tests.megatron.layers import (
    IN,
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


def check_autograd_functions_and_collectives_that_are_replaced_are_not_passed_by(group_size: int) -> None:
    """Fails without the look at them: quantisers of weights and compressors of messages were passed by in silence."""

    linear = megatron_layers.LinearWithGradAccumulationAndAsyncCommunication
    frozen = megatron_layers.LinearWithFrozenWeight
    scatter, gather = "_ReduceScatterToSequenceParallelRegion", "_GatherFromSequenceParallelRegion"
    for is_frozen, kinds, holder, name in (
        (False, KINDS, megatron_layers, linear.__name__),
        (True, KINDS, megatron_layers, frozen.__name__),
        (False, KINDS, linear, "forward"),
        (False, KINDS, linear, "backward"),
        (True, KINDS, frozen, "forward"),
        (False, ("column",), megatron_layers, "dist_all_gather_func"),
        (False, ("column",), megatron_layers, "dist_reduce_scatter_func"),
        (True, ("column",), megatron_layers, "gather_from_sequence_parallel_region"),
        (False, ("row",), megatron_mappings, "_reduce_scatter_along_first_dim"),
        (False, ("row",), megatron_mappings, "_gather_along_first_dim"),
        (False, ("row",), megatron_mappings, "dist_reduce_scatter_func"),
        (False, ("row",), getattr(megatron_mappings, scatter), "forward"),
        (True, ("column",), getattr(megatron_mappings, gather), "forward"),
    ):
        for kind in kinds:
            stock, ours = pair(kind, group_size)
            for layer in (stock, ours):
                layer.weight.requires_grad_(not is_frozen)
            x = example_input(kind, group_size)
            calls: list[str] = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(holder, name, _counting(vars(holder)[name], calls))
                assert_equal(run(stock, x), run(ours, x))
            assert len(calls) >= 2, "by stock and by ours"
            assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
            assert_stock(ours, f"{name} of {holder.__name__} is replaced")


def _counting(found: Any, calls: list[str]) -> Any:
    """The same function, or a class derived from the same class, that writes down that it was called."""
    if isinstance(found, type):
        return type(found.__name__, (found,), {"forward": _counting(vars(found)["forward"], calls)})
    function = getattr(found, "__func__", found)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return staticmethod(counted) if isinstance(found, staticmethod) else counted


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


class Counted(torch.nn.Module):
    """A parametrization that is another one each time, as a spectral norm is."""

    calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight * (1 + 1 / self.calls)


def check_parametrized_weights_are_computed_as_often_as_in_stock(group_size: int) -> None:
    """Fails with a second look at the weight: a spectral norm's state went on twice per call, and losses differed."""
    ids = torch.arange(2 * group_size).view(1, -1)
    for change in ({}, {"commfuse": False}, {"cpu_offloading": True}):
        for kind in (*KINDS, "embedding"):
            if kind == "embedding":
                stock, ours = (embedding(cls, group_size) for cls in (VocabParallelEmbedding, None))
            else:
                stock, ours = pair(kind, group_size)
            for name, value in change.items():
                setattr(ours.config, name, value)
            counted = []
            for layer in (stock, ours):
                counted.append(Counted())
                parametrize.register_parametrization(layer, "weight", counted[-1])
                counted[-1].calls = 0  # registering tries it out
            model_report(torch.nn.ModuleList([ours]))
            assert counted[1].calls == 0
            results = []
            for layer in (stock, ours):
                for _ in range(3):
                    output = layer(ids) if kind == "embedding" else layer(example_input(kind, group_size))[0]
                results.append({"output": output})
            assert_equal(*results)
            assert counted[0].calls == counted[1].calls > 0
            if kind != "embedding" or not change.get("cpu_offloading"):  # embeddings may stay overlapped
                assert bool(state_of(ours).stock_calls) == bool(change)


def embedding(cls: type | None, group_size: int) -> Any:
    torch.manual_seed(3)
    made = VocabParallelEmbedding(
        8 * group_size,
        IN,
        init_method=torch.nn.init.normal_,
        reduce_scatter_embeddings=True,
        config=config(group_size),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    return made if cls is VocabParallelEmbedding else convert_model(made)


class Tagged(torch.Tensor):
    """A tensor that does something of its own whenever it is used."""


def check_tensors_of_other_classes_are_not_passed_by(group_size: int) -> None:
    """Fails without the look at input and bias: what their class does was passed by, and the output had another."""
    for kind in KINDS:
        for what in ("input", "bias"):
            stock, ours = pair(kind, group_size)
            x = example_input(kind, group_size)
            for layer in (stock, ours):
                if what == "bias":
                    layer.bias = torch.nn.Parameter(layer.bias.detach().as_subclass(Tagged))
            x = x.as_subclass(Tagged) if what == "input" else x
            (expected, _), (found, _) = stock(x), ours(x)
            assert type(found) is type(expected)
            assert torch.equal(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
            assert_stock(ours, f"the {what} is a Tagged: only plain tensors are overlapped")


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
    with pytest.raises(ConfigError, match=r"takes an OverlapConfig.*got a str: ''"):
        convert_model(held, "")
    for wrong in ([held], [stock.config], stock.config):
        with pytest.raises(ConfigError, match="apply_to_spec takes a ModuleSpec"):
            apply_to_spec(wrong)
    for call in (convert_model, apply_to_spec):
        with pytest.raises(ConfigError, match=r"the (configuration|model) is|a model is the first argument") as raised:
            call(OverlapConfig(), held)
        assert "\n" not in str(raised.value), "a model is named, not printed"


def check_nothing_converted_is_said(_: int) -> None:
    """Fails without the warning: a list that was empty by mistake trained stock layers in silence."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("commfuse_megatron.plugin.convert")
    logger.addHandler(handler)
    convert._log_once.cache_clear()
    try:
        for model in ([], torch.nn.Linear(2, 2), []):
            assert convert_model(model) is model
    finally:
        logger.removeHandler(handler)
    said = [record.getMessage() for record in records]
    assert len(said) == (dist.get_rank() == 0)
    assert all("nothing was converted" in text for text in said)


def check_conversion_of_a_file(group_size: int) -> None:
    stock, _ = pair("row", group_size)
    held = torch.nn.ModuleList([stock])
    assert type(stock) is RowParallelLinear
    convert_model(held, "configs/default.yaml")
    assert type(stock) is CommFuseRowParallelLinear
