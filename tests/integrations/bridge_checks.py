"""Checks of Megatron-Bridge: LoRA in every order; what its export takes our layers for. Needs Transformer Engine."""

from typing import Any

import torch
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.peft.lora import LoRA

from commfuse_megatron.plugin import apply_to_spec, convert_model
from commfuse_megatron.testing.gpt import build_gpt, transformer_config
from tests.integrations import transformer_engine_on_cpu as te_on_cpu
from tests.integrations.adapters import GPTS, LINEARS, assert_equals_stock, local_spec

HELD_AS = "to_wrap"


def adapt(model: Any, **options: Any) -> Any:
    return LoRA(target_modules=list(LINEARS), dim=4, alpha=8, **options)(model)


def adapt_and_regather(model: Any) -> Any:
    return adapt(model, sequence_parallel_input_regather=True)


def check_lora_on_local_layers(group_size: int) -> None:
    assert_equals_stock(group_size, adapt, local_spec, HELD_AS)


def check_lora_on_local_layers_that_regathers(group_size: int) -> None:
    assert_equals_stock(group_size, adapt_and_regather, local_spec, HELD_AS)


def check_lora_on_transformer_engine(group_size: int) -> None:
    with te_on_cpu.computes():
        assert_equals_stock(group_size, adapt, te_on_cpu.gpt_spec, HELD_AS, building=te_on_cpu.can_be_built)


def check_lora_on_transformer_engine_that_regathers(group_size: int) -> None:
    with te_on_cpu.computes():
        assert_equals_stock(
            group_size, adapt_and_regather, te_on_cpu.gpt_spec, HELD_AS, building=te_on_cpu.can_be_built
        )


def check_export_takes_ours_for_what_it_takes_stock_for(group_size: int) -> None:
    for spec_of in (local_spec, te_on_cpu.gpt_spec):
        for gpt in GPTS:
            with te_on_cpu.can_be_built():
                config = transformer_config(gpt, group_size)
                expected = detected(build_gpt(gpt, config, overlap=False, spec=spec_of(config)))
                converted = convert_model(build_gpt(gpt, config, overlap=False, spec=spec_of(config)))
                described = build_gpt(gpt, config, overlap=False, spec=apply_to_spec(spec_of(config)))
            assert {"column", "row", "replicated"} <= set(expected.values())
            assert detected(converted) == expected
            assert detected(described) == expected


def detected(model: torch.nn.Module) -> dict[str, str]:
    """What Bridge takes each parameter for, or why it cannot tell."""
    found = {}
    for name, module in model.named_modules():
        for parameter, _ in module.named_parameters(prefix=name, recurse=False):
            try:
                found[parameter] = AutoMapping(parameter, "x")._detect_parallelism_type(module)
            except ValueError as error:
                found[parameter] = str(error).splitlines()[0]
    return found
