"""`docs/api.md` has every public name with its parameters; its examples run, and how the guide switches layers off."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from commfuse_megatron.plugin import convert_model, model_report
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from tests.harness.documents import code_of, section_of
from tests.megatron.harness import checks_of_module, make_cpu_test

ROOT = Path(__file__).parents[2]
API, GUIDE = ROOT / "docs/api.md", ROOT / "docs/guide.md"
MODULES = ("commfuse_megatron", "commfuse_megatron.ops", "commfuse_megatron.plugin", "commfuse_megatron.testing")
GPT, TOKENS = SmallGPT(), torch.arange(33)[None]


def test_every_public_name_is_there_with_its_parameters() -> None:
    classes, missing = section_of(API, "### Classes of layers"), []
    for module in MODULES:
        page = section_of(API, f"## `{module}`")
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if f"\n### `{name}`\n" not in page:
                missing += [] if f"| `{name}` |" in classes else [f"{module}.{name}"]
            elif inspect.isfunction(value) or name in ("OverlapConfig", "WeightGradTarget", "DeferredWeightGrad"):
                signature, _, _ = section_of(API, f"### `{name}`").partition("`:")
                parameters = inspect.signature(value).parameters
                missing += [f"{name}({each})" for each in parameters if each not in signature]
    assert missing == []


def test_what_documents_import_from_us_exists() -> None:
    missing, count = [], 0
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("*/README.md")):
        text = document.read_text(encoding="utf-8")
        for module, names in re.findall(r"^ *from (commfuse_megatron[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            for name in map(str.strip, names.split(",")):
                count += 1
                if not hasattr(importlib.import_module(module), name) and not importlib.util.find_spec(
                    f"{module}.{name}"
                ):
                    missing.append(f"{document.name}: from {module} import {name}")
    assert count > 20
    assert missing == []


def names_of_examples(group_size: int) -> dict[str, Any]:
    sizes = {"vocab_size": GPT.vocab_size, "max_sequence_length": 64, "position_embedding_type": "rope"}
    return {"GPTModel": GPTModel, "config": transformer_config(GPT, group_size), "sizes": sizes}


def check_the_examples_of_the_plugin_run(group_size: int) -> None:
    names = names_of_examples(group_size)
    exec(code_of(API, "## `commfuse_megatron.plugin`"), names)
    exec(code_of(API, "## `commfuse_megatron.testing`"), {})
    report = names["model_report"](names["model"])
    assert names["arguments"].commfuse is False
    assert names["norm"].weight.numel() == names["config"].hidden_size
    assert names["provider"].column_parallel_linear().__name__ == "ColumnParallelLinear"  # ours go by that name
    assert (report.overlapped_calls, len(report.layers)) == (0, 10), "before the first step"
    assert names["reason"] is None


def check_the_guides_stock_model_is_built_and_converted(group_size: int) -> None:
    names = names_of_examples(group_size)
    exec(code_of(GUIDE, "### Stock, to compare with"), names)
    model = names["stock"]
    stock = loss_of(model, TOKENS).item()
    assert not model_report(model).overlapped_calls
    assert loss_of(convert_model(model), TOKENS).item() == pytest.approx(stock, rel=1e-5)
    assert model_report(model).overlapped_calls == 10


def check_layers_are_switched_off_as_the_guide_says(group_size: int) -> None:
    """Fails with `layer.config.commfuse = False` for one layer: the configuration is all layers'."""
    one, everything = (build_gpt(GPT, transformer_config(GPT, group_size), overlap=True) for _ in range(2))
    exec(code_of(GUIDE, "## 8. When to switch it off"), {"layer": one.decoder.layers[0].mlp.linear_fc1})
    loss_of(one, TOKENS).backward()
    off = [layer.name for layer in model_report(one).layers if layer.stock_calls]
    assert off == ["decoder.layers.0.mlp.linear_fc1"]
    assert "`model.config.commfuse = False`" in section_of(GUIDE, "## 8. When to switch it off")
    everything.config.commfuse = False
    loss_of(everything, TOKENS).backward()
    report = model_report(everything)
    assert report.overlapped_calls == 0
    assert all(layer.stock_calls for layer in report.layers)


test_examples = make_cpu_test(2, checks_of_module(__name__, 2))
