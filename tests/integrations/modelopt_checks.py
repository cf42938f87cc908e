"""Checks of ModelOpt: quantised before and after `convert_model`, a model counts and computes as stock does."""

from collections.abc import Callable
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.nn import QuantModule, TensorQuantizer

from commfuse_megatron.plugin import apply_to_spec, convert_model
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from tests.integrations.adapters import GPTS, LINEARS, TOLERANCE, linears_of, local_spec
from tests.megatron.layers import assert_equal
from tests.megatron.models import draw_tokens, loss_and_gradients, perturb

TOKENS = draw_tokens(2, 32, seed=5)


def build(gpt: SmallGPT, group_size: int, *, by_spec: bool = False) -> Any:
    config = transformer_config(gpt, group_size)
    spec = local_spec(config)
    model = build_gpt(gpt, config, overlap=False, spec=apply_to_spec(spec) if by_spec else spec)
    perturb(model)
    return model


def quantized(model: Any) -> Any:
    def calibrate(model: Any) -> None:
        with torch.no_grad():
            loss_of(model, TOKENS)

    return mtq.quantize(model, mtq.INT8_DEFAULT_CFG, calibrate)


def measured(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is quantised and which quantisers are called how often; loss and gradients."""
    calls: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled
    ]
    results = loss_and_gradients(model, TOKENS, with_mask=True)
    for handle in handles:
        handle.remove()
    quantised = sorted(name for name, module in model.named_modules() if isinstance(module, QuantModule))
    return {"quantised": quantised, "calls": calls}, results


def assert_as_stock(group_size: int, make: Callable[[SmallGPT], Any], words: str) -> None:
    for gpt in GPTS:
        plain = loss_of(build(gpt, group_size), TOKENS).item()
        (expected, results), model = measured(quantized(build(gpt, group_size))), make(gpt)
        found, found_results = measured(model)
        assert len(expected["calls"]) >= 2 * 2 * len(LINEARS)
        assert results["loss"].item() != plain
        assert found == expected
        assert found_results["loss"] == results["loss"]
        assert_equal(results, found_results, TOLERANCE)
        for report in linears_of(model):
            assert report.path == "stock", f"{report.name} is {report.path}"
            assert any(words in reason for reason in report.reasons), f"{report.name}: {report.reasons}"


def check_converted_then_quantised(group_size: int) -> None:
    assert_as_stock(group_size, lambda gpt: quantized(convert_model(build(gpt, group_size))), "derives from")


def check_built_by_spec_then_quantised(group_size: int) -> None:
    assert_as_stock(group_size, lambda gpt: quantized(build(gpt, group_size, by_spec=True)), "derives from")


def check_quantised_then_converted(group_size: int) -> None:
    words = "is not among the classes that are replaced"
    assert_as_stock(group_size, lambda gpt: convert_model(quantized(build(gpt, group_size))), words)
