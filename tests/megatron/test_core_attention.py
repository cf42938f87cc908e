"""What Megatron's core attentions would compute, in the operation's words, on modules that were never built."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from commfuse_megatron.plugin.attention import reason_to_keep_megatrons
from commfuse_megatron.plugin.compat import AttnMaskType, DotProductAttention
from commfuse_megatron.plugin.core_attention import CoreAttention, describe_core_attention

ROWS = 8
QUERY, KEY = torch.zeros(ROWS, 2, 4, 16), torch.zeros(ROWS, 2, 2, 16)
MASK = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool).triu(1)


def local(*, is_fused: bool = False, training: bool = True, **attributes: Any) -> Any:
    core = DotProductAttention.__new__(DotProductAttention)
    torch.nn.Module.__init__(core)
    softmax = {"scale": None, "window_size": None, "attn_mask_type": AttnMaskType.causal}
    softmax.update({name: attributes.pop(name) for name in list(attributes) if name in softmax})
    softmax["is_kernel_available"] = lambda *_: is_fused
    core.config = SimpleNamespace(**attributes)
    core.softmax_scale = 0.25
    core.attention_dropout = torch.nn.Dropout(0.1)
    core.scale_mask_softmax = SimpleNamespace(**softmax)
    core.training = training
    return core


def transformer_engines(**attributes: Any) -> Any:
    cls = type("TEDotProductAttention", (), {"__module__": "megatron.core.extensions.transformer_engine"})
    core = cls()
    defaults = {
        "config": SimpleNamespace(), "te_forward_mask_type": True, "qkv_format": "sbhd", "window_size": (-1, 0),
        "softmax_scale": 0.25, "attention_dropout": 0.0, "training": True,
    }  # fmt: skip
    for name, value in {**defaults, **attributes}.items():
        setattr(core, name, value)
    return core


@pytest.mark.parametrize(("core", "mask", "expected"), [
    (local(), None, CoreAttention(True, None, None, 0.25, 0.1)),
    (local(training=False), None, CoreAttention(True, None, None, 0.25, 0.0)),
    (local(scale=3), None, CoreAttention(True, None, None, 0.75, 0.1)),
    (local(attn_mask_type=AttnMaskType.no_mask), None, CoreAttention(False, None, None, 0.25, 0.1)),
    (local(window_size=(3, 0)), None, CoreAttention(False, (3, 0), None, 0.25, 0.1)),
    (local(window_size=(3, 0)), MASK, CoreAttention(False, (3, 0), None, 0.25, 0.1)),
    (local(is_fused=True), MASK, CoreAttention(True, None, None, 0.25, 0.1)),
])  # fmt: skip
def test_local(core: Any, mask: torch.Tensor | None, expected: CoreAttention) -> None:
    assert describe_core_attention(core, QUERY, KEY, mask, None) == expected


@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.padding])
def test_a_mask_that_local_attention_would_use_is_taken_as_it_is(kind: AttnMaskType) -> None:
    found = describe_core_attention(local(attn_mask_type=kind), QUERY, KEY, MASK, None)
    assert isinstance(found, CoreAttention)
    assert found.mask is MASK
    assert not found.causal


@pytest.mark.parametrize(("core", "key", "mask", "words"), [
    (local(softmax_type="learnable"), KEY, None, "softmax_type is learnable"),
    (local(qk_clip=True), KEY, None, "qk_clip"),
    (local(is_fused=True, window_size=(3, 0)), KEY, None, "fused softmax ignores"),
    (local(window_size=(-1, 0)), KEY, None, "takes literally"), (local(), KEY, MASK.float(), "not booleans"),
    (local(), KEY, MASK[..., :4], "not booleans"), (local(), KEY[:4], None, "8 queries meet 4 keys"),
    (SimpleNamespace(config=SimpleNamespace()), KEY, None, "is a SimpleNamespace"),
])  # fmt: skip
def test_reasons(core: Any, key: torch.Tensor, mask: torch.Tensor | None, words: str) -> None:
    found = describe_core_attention(core, QUERY, key, mask, None)
    assert isinstance(found, str)
    assert words in found


@pytest.mark.parametrize(("attributes", "kind", "expected"), [
    ({}, "causal", CoreAttention(True, None, None, 0.25, 0.0)),
    ({"window_size": (-1, -1)}, "no_mask", CoreAttention(False, None, None, 0.25, 0.0)),
    ({"window_size": (5, 0)}, "causal", CoreAttention(True, (5, 0), None, 0.25, 0.0)),
    ({"attention_dropout": 0.2}, "causal", CoreAttention(True, None, None, 0.25, 0.2)),
    ({"attention_dropout": 0.2, "training": False}, "causal", CoreAttention(True, None, None, 0.25, 0.0)),
    ({}, "padding", "type padding"), ({}, "arbitrary", "type arbitrary"),
    ({"qkv_format": "bshd"}, "causal", "layout is bshd"), ({"num_splits": 1}, "causal", "num_splits"),
])  # fmt: skip
def test_transformer_engines(attributes: dict, kind: str, expected: CoreAttention | str) -> None:
    found = describe_core_attention(transformer_engines(**attributes), QUERY, KEY, None, AttnMaskType[kind])
    assert found == expected if isinstance(expected, CoreAttention) else expected in found


@pytest.mark.parametrize(("kernel", "capability", "backend", "words"), [
    ("cudnn", (9, 0), "auto", None), ("cudnn", (9, 0), "fused", None),
    ("cudnn", (9, 0), "flash", "asks for flash, and ours would run cudnn"),
    ("cudnn", (8, 0), "unfused", "asks for unfused"), ("flash", (8, 0), "flash", None),
    ("flash", (8, 6), "auto", None),
    ("flash", (9, 0), "flash", r"half of cuDNN's speed.*faster \(it is not installed\)"),
    ("flash", (8, 0), "fused", "asks for fused, and ours would run flash"),
    ("math", (8, 0), "auto", "only the plain kernel"),
])  # fmt: skip
def test_where_auto_leaves_attention_to_megatron(kernel, capability, backend, words):
    config = SimpleNamespace(attention_backend=AttnBackend[backend])
    reason = reason_to_keep_megatrons(kernel, "it is not installed", capability, config)
    assert (reason is None) == (words is None)
    assert words is None or re.search(words, reason)
    assert backend != "auto" or reason_to_keep_megatrons(kernel, "", capability, SimpleNamespace()) == (
        reason and reason.replace(" (it is not installed)", "")
    )
