"""Checks of attentions around whose parts somebody has put something of his own. Each is run on every rank.

Every layer of one model is changed in another way, so that one step of stock and ours compares them all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as of_all_modules

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import model_report
from commfuse_megatron.plugin.attention import attention_unsupported_reason
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config
from tests.megatron.attention_checks import QUERY_SPLIT, assert_equal, attention_of, build, run

FACTOR = 1.5  # what a change multiplies by, in one pass or the other: passed by, it would be seen


class Scaled(torch.nn.Module):
    """As adapters wrap a layer: no more attributes than a module has, and a parameter of its own."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.factor = torch.nn.Parameter(torch.tensor(FACTOR, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.base(*args, **kwargs), self.factor)


def scaled(output: Any, factor: Any = FACTOR) -> Any:
    """The output of core attention, or of a projection with its bias."""
    return (output[0] * factor, output[1]) if isinstance(output, tuple) else output * factor


def patch_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: scaled(forward(*args, **kwargs))


def derive(module: Any) -> None:
    base = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scaled(base.forward(self, *args, **kwargs))

    module.__class__ = type("Derived", (base,), {"forward": forward})


def scale_gradients(_: Any, *gradients: Any) -> tuple:
    return tuple(None if gradient is None else gradient * FACTOR for gradient in gradients[0])


def hook_backward(module: Any) -> None:
    module.register_full_backward_hook(scale_gradients)


def hook_before_backward(module: Any) -> None:
    module.register_full_backward_pre_hook(scale_gradients)


def hook_before_forward(module: Any) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * FACTOR, *inputs[1:]))


def hook_forward(module: Any) -> None:
    module.register_forward_hook(lambda _, __, output: scaled(output))


def adapt_by_hook(module: Any) -> None:
    """As an adapter that adds something of its own to what the projection makes of its input."""
    module.register_forward_hook(lambda _, inputs, output: (output[0] + 0 * inputs[0].sum(), output[1]))


def wait_for_parameters(module: Any) -> None:
    """As Megatron's data-parallel wrapper, which does not look at the input."""

    def hook(*_: Any) -> None:
        return None

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    module.register_forward_pre_hook(hook)


class Change(NamedTuple):
    """What is done to which part of an attention, and why its calls are not split then; None: they are."""

    part: str
    change: Callable[[Any], None] | type[Scaled]
    words: str | None


CORE, PROJECTION = "core_attention", "linear_proj"
CHANGES = (
    Change(CORE, patch_forward, "core attention has a forward of its own"),
    Change(CORE, derive, "core attention is a Derived"),
    Change(CORE, hook_backward, "core attention has backward hooks"),
    Change(CORE, hook_before_backward, "core attention has backward hooks"),
    Change(CORE, Scaled, "core attention is a Scaled"),
    Change(CORE, hook_before_forward, None),
    Change(CORE, hook_forward, "core attention has forward hooks"),
    Change(PROJECTION, patch_forward, "linear_proj has a forward of its own"),
    Change(PROJECTION, derive, "linear_proj is a Derived"),
    Change(PROJECTION, hook_backward, "linear_proj has backward hooks"),
    Change(PROJECTION, hook_before_backward, "linear_proj has backward hooks"),
    Change(PROJECTION, Scaled, "linear_proj is a Scaled"),
    Change(PROJECTION, hook_forward, "linear_proj has forward hooks"),
    Change(PROJECTION, hook_before_forward, "linear_proj has forward pre-hooks"),
    Change(PROJECTION, adapt_by_hook, "linear_proj has forward hooks"),
    Change(PROJECTION, wait_for_parameters, None),
)


def build_changed(group_size: int, overlap: OverlapConfig | bool) -> Any:
    gpt = SmallGPT(dtype=torch.float64, num_layers=len(CHANGES))
    model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=overlap)
    for layer, (part, change, _) in zip(model.decoder.layers, CHANGES, strict=True):
        attention = layer.self_attention
        if change is Scaled:
            setattr(attention, part, Scaled(getattr(attention, part)))
        else:
            change(getattr(attention, part))
    return model


def check_what_is_put_around_parts_of_an_attention_counts(group_size: int) -> None:
    """Fails for every change whose reason is left out: our operation would pass by what was put there."""
    stock, ours = (build_changed(group_size, each) for each in (False, QUERY_SPLIT))
    expected, found = run(stock), run(ours)
    assert_equal(found, expected)
    report = model_report(ours)
    for change, attention in zip(CHANGES, report.attentions, strict=True):
        if change.words is None:
            assert (attention.path, attention.overlapped_calls, attention.reasons) == ("overlapped", 1, ())
        else:
            assert (attention.path, attention.overlapped_calls, attention.stock_calls) == ("stock", 0, 1)
            assert len(attention.reasons) == 1
            assert change.words in attention.reasons[0], attention.reasons
    # Whatever becomes of the attention, what is left of our projection is overlapped, unless its class is another one.
    projections = [layer for layer in report.layers if PROJECTION in layer.name]
    for change, layer in zip(CHANGES, projections, strict=True):
        is_derived = change.part == PROJECTION and change.change is derive
        assert (layer.path, layer.overlapped_calls) == (("stock", 0) if is_derived else ("overlapped", 1))


def check_hooks_of_all_modules_see_no_placeholder(group_size: int) -> None:
    """Fails without the look at them: they were shown NaN."""

    def look(_: Any, __: Any, output: Any) -> Any:
        given = output if isinstance(output, tuple) else (output,)
        seen.extend(torch.isnan(each).any().item() for each in given if isinstance(each, torch.Tensor))
        return output

    seen: list[bool] = []
    model = build(group_size)
    hook = of_all_modules.register_module_forward_hook(look)
    try:
        assert_equal(run(model), run(build(group_size, False)))
    finally:
        hook.remove()
    assert seen
    assert not any(seen)
    (attention,) = model_report(model).attentions
    assert (attention.path, attention.overlapped_calls) == ("stock", 0)
    assert "hooks of all modules" in attention.reasons[0]
    run(model)
    assert state_of(attention_of(model)).overlapped_calls == 1
    for register in (
        of_all_modules.register_module_forward_pre_hook,
        of_all_modules.register_module_full_backward_hook,
        of_all_modules.register_module_full_backward_pre_hook,
    ):
        hook = register(lambda *_: None)
        assert "hooks of all modules" in str(attention_unsupported_reason(attention_of(model)))
        hook.remove()
    assert attention_unsupported_reason(attention_of(model)) is None
