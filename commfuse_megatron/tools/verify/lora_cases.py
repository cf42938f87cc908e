"""The configurations of `commfuse verify --megatron --lora`: the same models with adapters, under every set of options.

Data only: importing this imports no Megatron. Beware: a configuration is named by its options, one word each, and no
word belongs to two options, so that words alone choose.
"""

import dataclasses
import itertools
from typing import Any

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.verify.megatron_cases import (
    CONFIGURATIONS,
    FULL,
    LATENT,
    SELECTIVE,
    Adapters,
    Configuration,
    choose_configurations,
    require_ranks,
)

#: Option -> its words.
#:
#: order: the stock model gets adapters and is converted; or is converted, or built from a mapped spec, and gets
#: adapters. Fused layers can be built from a spec only, without Transformer Engine.
#: layers: norm and linear apart, or in one module where Transformer Engine has them so; stock has them apart.
#: gradients: weight gradients go to autograd, or are added into `main_grad`. base: everything but the adapters.
#: adapters: see `testing.lora`.
OPTIONS: dict[str, tuple[str, ...]] = {
    "model": ("dense", "layer_norm_and_bias", "mtp", "mla", "moe_shared_expert", "hybrid_moe"),
    "order": ("lora_first", "convert_first", "spec_first"),
    "layers": ("local", "fused"),
    "recompute": ("kept", "full", "selective"),
    "gradients": ("autograd", "main_grad"),
    "base": ("trained", "frozen"),
    "adapters": ("rows", "gathered"),
}

# Words that do not go together: fused layers come from a spec.
_IMPOSSIBLE = {"convert_first", "fused"}


def options_of(name: str) -> dict[str, str]:
    """The words in the name of a configuration with adapters, by option."""
    return dict(zip(OPTIONS, name.split(), strict=True))


def lora_configurations() -> list[Configuration]:
    """All products of the options that differ in what they build."""
    return [_configuration(words) for words in itertools.product(*OPTIONS.values()) if not set(words) >= _IMPOSSIBLE]


def choose(num_ranks: int, names: list[str] | None, *, lora: bool) -> list[Configuration]:
    """Those that the command line leaves. Raises ConfigError."""
    return choose_lora(num_ranks, names) if lora else choose_configurations(num_ranks, names)


def choose_lora(num_ranks: int, words: list[str] | None = None) -> list[Configuration]:
    """Those that `words` leave: of an option of which words are given, only these.

    Raises ConfigError for a number of ranks, a word or a choice that there is nothing for.
    """
    require_ranks(num_ranks)
    given = set(words or ())
    unknown = [word for word in words or () if not any(word in known for known in OPTIONS.values())]
    if unknown:
        offered = "; ".join(f"{option}: {', '.join(known)}" for option, known in OPTIONS.items())
        raise ConfigError(f"no option of --lora has the word {', '.join(unknown)}. There are {offered}")
    left = [given.intersection(known) or known for known in OPTIONS.values()]
    chosen = [
        each
        for each in lora_configurations()
        if all(word in words_left for word, words_left in zip(each.name.split(), left, strict=True))
    ]
    if not chosen:
        why = "convert_first and fused: fused layers come from a spec, which is ours from the first"
        raise ConfigError(f"there is nothing for {' '.join(words or ())}. {why}.")
    return chosen


def _configuration(words: tuple[str, ...]) -> Configuration:
    name, order, layers, recompute, gradients, base, adapters = words
    (model,) = [each for each in CONFIGURATIONS if each.name == name]
    options: dict[str, Any] = dict(model.options)
    if name == "mla":
        options |= LATENT | {"qk_layernorm": True}
    recomputed: tuple[str, ...] = ()
    if recompute == "full":
        options |= FULL
        recomputed = ("decoder.layers.", "mtp.layers.")
    elif recompute == "selective":
        options |= SELECTIVE
        recomputed = ("mlp.linear_fc1", "mlp.linear_fc2")
        if model.variant == "layer_norm_and_bias":
            # Stock's backward pass never ends where a recomputed MLP returns its bias: autograd takes the parameter
            # for an output of the checkpoint.
            options["recompute_modules"], recomputed = ["layernorm"], ()
    is_frozen = base == "frozen"
    without_backward: tuple[str, ...] = ("embedding",) if is_frozen else ()
    if is_frozen and recompute == "kept":  # nothing before the first layer needs a gradient, then
        first = ("linear_qkv", "linear_q_down_proj", "linear_kv_down_proj")
        without_backward += tuple(f"decoder.layers.0.self_attention.{linear}.to_wrap" for linear in first)
    return dataclasses.replace(
        model,
        name=" ".join(words),
        options=options,
        is_fused=layers == "fused",
        way="convert" if order == "convert_first" else "spec",
        fuses_gradients=gradients == "main_grad",
        recomputed=recomputed,
        frozen=("",) if is_frozen else (),
        trained=("adapter.",) if is_frozen else (),
        without_backward=without_backward,
        adapters=Adapters(norm_output="rows" if adapters == "rows" else "gathered", is_first=order == "lora_first"),
    )
