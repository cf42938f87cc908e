"""Checks of mcore-bridge, which makes peft's LoRA one for Megatron: adapters of Transformer Engine's linears only."""

from typing import Any

import peft
from mcore_bridge.tuners import LoraParallelLinear

from tests.integrations import transformer_engine_on_cpu as te_on_cpu
from tests.integrations.adapters import GPTS, LINEARS, assert_equals_stock


def adapt(model: Any) -> Any:
    config = peft.LoraConfig(target_modules=list(LINEARS), r=4, lora_alpha=8, bias="none")
    adapted = peft.get_peft_model(model, config)
    assert sum(isinstance(module, LoraParallelLinear) for module in adapted.modules()) == 2 * len(LINEARS)
    return adapted


def check_lora_on_transformer_engine(group_size: int) -> None:
    # The other GPT returns biases, and this library's wrapper does not expect three results, of stock layers neither.
    with te_on_cpu.computes():
        assert_equals_stock(
            group_size, adapt, te_on_cpu.gpt_spec, "base_layer", building=te_on_cpu.can_be_built, gpts=GPTS[:1]
        )
