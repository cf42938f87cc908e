"""Checks of ModelOpt: quantised before and after `convert_model`, a model counts and computes as stock does."""

from collections.abc import Callable
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.nn import QuantModule, TensorQuantizer

from commfuse_megatron.plugin import apply_to_spec, convert_model, model_report
from commfuse_megatron.plugin.spec import block_spec, local_layer_spec
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from tests.megatron.models import perturb

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def build(gpt: SmallGPT, group_size: int, *, by_spec: bool = False) -> Any:
    config = transformer_config(gpt, group_size)
    spec = block_spec(local_layer_spec(), config, with_torch_norm=True)
    model = build_gpt(gpt, config, overlap=False, spec=apply_to_spec(spec) if by_spec else spec)
    perturb(model)
    return model


def tokens(gpt: SmallGPT) -> torch.Tensor:
    return torch.randint(gpt.vocab_size, (2, 33), generator=torch.Generator().manual_seed(5))


def quantized(model: Any, gpt: SmallGPT) -> Any:
    def calibrate(model: Any) -> None:
        with torch.no_grad():
            loss_of(model, tokens(gpt))

    return mtq.quantize(model, mtq.INT8_DEFAULT_CFG, calibrate)


def measured(model: Any, gpt: SmallGPT) -> dict[str, Any]:
    """How much is quantised, how often its quantisers are called, and what loss and gradients come out."""
    calls: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and module.is_enabled
    ]
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, tokens(gpt))
    loss.backward()
    for handle in handles:
        handle.remove()
    return {
        "quantised": sorted(name for name, m in model.named_modules() if isinstance(m, QuantModule)),
        "calls": calls,
        "loss": loss.item(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
    }


def assert_as_stock(group_size: int, make: Callable[[SmallGPT], Any], words: str) -> None:
    for gpt in (SmallGPT(dtype=torch.float64), SmallGPT.layer_norm_and_bias(dtype=torch.float64)):
        plain = loss_of(build(gpt, group_size), tokens(gpt)).item()
        expected = measured(quantized(build(gpt, group_size), gpt), gpt)
        model = make(gpt)
        found = measured(model, gpt)
        assert len(expected["calls"]) >= 2 * 2 * len(LINEARS)
        assert expected["loss"] != plain
        assert found["quantised"] == expected["quantised"]
        assert found["calls"] == expected["calls"]
        assert found["loss"] == expected["loss"]
        for name, gradient in expected["gradients"].items():
            difference = (gradient - found["gradients"][name]).abs().max() / gradient.abs().max()
            assert difference <= 1e-13, f"{name}: {difference:.1e}"
        linears = [r for r in model_report(model).layers if r.name.rsplit(".", 1)[-1] in LINEARS]
        assert len(linears) == 2 * len(LINEARS), [r.name for r in model_report(model).layers]
        for report in linears:
            assert report.path == "stock", f"{report.name} is {report.path}"
            assert any(words in reason for reason in report.reasons), f"{report.name}: {report.reasons}"


def check_converted_then_quantised(group_size: int) -> None:
    assert_as_stock(group_size, lambda gpt: quantized(convert_model(build(gpt, group_size)), gpt), "derives from")


def check_built_by_spec_then_quantised(group_size: int) -> None:
    assert_as_stock(group_size, lambda gpt: quantized(build(gpt, group_size, by_spec=True), gpt), "derives from")


def check_quantised_then_converted(group_size: int) -> None:
    words = "is not among the classes that are replaced"
    assert_as_stock(group_size, lambda gpt: convert_model(quantized(build(gpt, group_size), gpt)), words)
