"""Checks of ModelOpt on layers of Transformer Engine: what is quantised. Nothing is computed, which takes a GPU."""

from typing import Any

import modelopt.torch.quantization as mtq
from modelopt.torch.quantization.nn import QuantModule

from commfuse_megatron.plugin import apply_to_spec, convert_model
from commfuse_megatron.testing.gpt import build_gpt, transformer_config
from tests.integrations import transformer_engine_on_cpu as te_on_cpu
from tests.integrations.adapters import GPTS, LINEARS, linears_of


def check_as_many_linears_are_quantised(group_size: int) -> None:
    """After conversion, built by spec, and before conversion; each then takes Transformer Engine's path."""
    for gpt in GPTS:

        def build(*, by_spec: bool = False, gpt: Any = gpt) -> Any:
            config = transformer_config(gpt, group_size)
            spec = te_on_cpu.gpt_spec(config)
            with te_on_cpu.can_be_built():
                return build_gpt(gpt, config, overlap=False, spec=apply_to_spec(spec) if by_spec else spec)

        expected = quantised(_quantize(build()))
        assert len([name for name in expected if name.rsplit(".", 1)[-1] in LINEARS]) == gpt.num_layers * len(LINEARS)
        for model, words in (
            (_quantize(convert_model(build())), "derives from"),
            (_quantize(build(by_spec=True)), "derives from"),
            (convert_model(_quantize(build())), "is not among the classes that are replaced"),
        ):
            assert quantised(model) == expected
            for report in linears_of(model):
                assert any(words in reason for reason in report.reasons), f"{report.name}: {report.reasons}"


def quantised(model: Any) -> dict[str, str]:
    """Module -> the name of the class that it had before, by which Bridge exports it."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantModule)}
    return {name: layer.get_original_cls_by_level(level=0).__name__ for name, layer in layers.items()}


def _quantize(model: Any) -> Any:
    with te_on_cpu.can_be_built():
        mtq.replace_quant_module(model)
    return model
