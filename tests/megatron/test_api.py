"""`docs/api.md` has every public name with its parameters; its examples run, and how the guide switches layers off."""

import inspect
from pathlib import Path

import pytest

from tests.harness.documents import code_of, section_of
from tests.megatron.harness import run_megatron

DOCS = Path(__file__).parents[2] / "docs"
API, GUIDE = DOCS / "api.md", DOCS / "guide.md"
MODULES = ("commfuse_megatron", "commfuse_megatron.ops", "commfuse_megatron.plugin", "commfuse_megatron.testing")
LAYERS = section_of(API, "### Classes of layers")


def complaints(group_size: int) -> list[str]:
    """What of the public names the page does not say."""
    import importlib

    found = []
    for module in MODULES:
        page = section_of(API, f"## `{module}`")
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if f"\n### `{name}`\n" not in page:
                found += [] if f"| `{name}` |" in LAYERS else [f"{module}.{name}"]
                continue
            said = section_of(API, f"### `{name}`")
            if inspect.isfunction(value) or name in ("OverlapConfig", "WeightGradTarget", "DeferredWeightGrad"):
                signature, _, _ = said.partition("`:")
                missing = [p for p in inspect.signature(value).parameters if p not in signature]
                found += [f"{name}({', '.join(missing)})"] if missing else []
    return found


def run_examples(group_size: int) -> tuple[int, int, str | None]:
    """(overlapped calls before the first step, layers, what is said of the output layer)."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from commfuse_megatron.testing.gpt import SmallGPT, transformer_config

    gpt = SmallGPT()
    names = {
        "GPTModel": GPTModel,
        "config": transformer_config(gpt, group_size),
        "sizes": {"vocab_size": gpt.vocab_size, "max_sequence_length": 64, "position_embedding_type": "rope"},
    }
    exec(code_of(API, "## `commfuse_megatron.plugin`"), names)
    exec(code_of(API, "## `commfuse_megatron.testing`"), {})
    report = names["model_report"](names["model"])
    assert names["arguments"].commfuse is False
    assert names["norm"].weight.numel() == names["config"].hidden_size
    assert names["provider"].column_parallel_linear().__name__ == "ColumnParallelLinear"  # ours go by that name
    return report.overlapped_calls, len(report.layers), names["reason"]


def build_stock(group_size: int) -> tuple[float, float, int]:
    """Losses of the guide's stock model before and after it is converted, and how many calls are overlapped then."""
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel

    from commfuse_megatron.plugin import convert_model, model_report
    from commfuse_megatron.testing.gpt import SmallGPT, loss_of, transformer_config

    gpt, tokens = SmallGPT(), torch.arange(33)[None]
    sizes = {"vocab_size": gpt.vocab_size, "max_sequence_length": 64, "position_embedding_type": "rope"}
    names = {"GPTModel": GPTModel, "config": transformer_config(gpt, group_size), "sizes": sizes}
    exec(code_of(GUIDE, "### Stock, to compare with"), names)
    stock = loss_of(names["stock"], tokens).item()
    assert not model_report(names["stock"]).overlapped_calls
    return stock, loss_of(convert_model(names["stock"]), tokens).item(), model_report(names["stock"]).overlapped_calls


def switch_off(group_size: int) -> tuple[list[str], list[str]]:
    """The layers that are switched off as the guide switches one off, and then all."""
    import torch

    from commfuse_megatron.plugin import model_report
    from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config

    gpt, tokens = SmallGPT(), torch.arange(33)[None]
    model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=True)
    exec(code_of(GUIDE, "## 8. When to switch it off"), {"layer": model.decoder.layers[0].mlp.linear_fc1})
    loss_of(model, tokens).backward()
    one = [layer.name for layer in model_report(model).layers if layer.stock_calls]
    model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=True)
    assert "`model.config.commfuse = False`" in section_of(GUIDE, "## 8. When to switch it off")
    model.config.commfuse = False
    loss_of(model, tokens).backward()
    report = model_report(model)
    assert report.overlapped_calls == 0
    return one, [layer.name for layer in report.layers if not layer.stock_calls]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_layer_is_switched_off_as_the_guide_says() -> None:
    """Fails with `layer.config.commfuse = False` alone: the configuration is all layers'."""
    assert run_megatron(2, switch_off) == [(["decoder.layers.0.mlp.linear_fc1"], [])] * 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_guides_stock_model_is_built_and_converted() -> None:
    for stock, converted, overlapped_calls in run_megatron(2, build_stock):
        assert converted == pytest.approx(stock, rel=1e-5)
        assert overlapped_calls == 10


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_public_name_is_there_with_its_parameters() -> None:
    assert run_megatron(1, complaints) == [[]]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_examples_of_the_plugin_run() -> None:
    assert run_megatron(2, run_examples) == [(0, 10, None)] * 2


def test_what_documents_import_from_us_exists() -> None:
    """Lines of all documents; importing the plugin once is enough."""
    assert run_megatron(1, missing_imports) == [[]]


def missing_imports(group_size: int) -> list[str]:
    import importlib.util
    import re

    root = API.parents[1]
    found, count = [], 0
    for document in (root / "README.md", *sorted((root / "docs").rglob("*.md")), *root.glob("*/README.md")):
        text = document.read_text(encoding="utf-8")
        for module, names in re.findall(r"^ *from (commfuse_megatron[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            for name in names.split(","):
                count += 1
                whole = f"{module}.{name.strip()}"
                if not hasattr(importlib.import_module(module), name.strip()) and not importlib.util.find_spec(whole):
                    found.append(f"{document.name}: from {module} import {name}")
    assert count > 20
    return found
