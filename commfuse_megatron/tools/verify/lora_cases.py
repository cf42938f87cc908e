"""The configurations of `commfuse verify --megatron --lora`: the same models with adapters, under every set of options.

Data only: importing this imports no Megatron. Beware: a configuration is named by its options, one word each, and no
word belongs to two options, so that words alone choose.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.verify.megatron_cases import (
    FULL,
    LATENT,
    RANKS,
    SELECTIVE,
    Adapters,
    Configuration,
    by_name,
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

_ADAPTERS = "adapter."

#: Words that do not go together -> why.
_IMPOSSIBLE = {
    ("convert_first", "fused"): "fused layers come from a spec, which is ours from the first",
}


def options_of(name: str) -> dict[str, str]:
    """The words in the name of a configuration with adapters, by option."""
    return dict(zip(OPTIONS, name.split(), strict=True))


def lora_configurations() -> list[Configuration]:
    """All products of the options that differ in what they build."""
    products = (dict(zip(OPTIONS, words, strict=True)) for words in itertools.product(*OPTIONS.values()))
    return [_configuration(each) for each in products if _reason_against(each) is None]


def choose_lora(num_ranks: int, words: list[str] | None = None) -> list[Configuration]:
    """Those that `words` leave: of an option of which words are given, only these.

    Raises ConfigError for a number of ranks, a word or a choice that there is nothing for.
    """
    if num_ranks not in RANKS:
        raise ConfigError(f"the configurations are made for {' or '.join(map(str, RANKS))} ranks, not for {num_ranks}")
    wanted = {option: set(words or ()) & set(known) for option, known in OPTIONS.items()}
    unknown = [word for word in words or () if not any(word in known for known in OPTIONS.values())]
    if unknown:
        offered = "; ".join(f"{option}: {', '.join(known)}" for option, known in OPTIONS.items())
        raise ConfigError(f"no option of --lora has the word {', '.join(unknown)}. There are {offered}")
    chosen = [
        each
        for each in lora_configurations()
        if all(not wanted[option] or word in wanted[option] for option, word in options_of(each.name).items())
    ]
    if not chosen:
        reasons = " ".join(f"{' and '.join(words)}: {reason}." for words, reason in _IMPOSSIBLE.items())
        raise ConfigError(f"there is nothing for {' '.join(words or ())}. {reasons}")
    return chosen


def _reason_against(words: dict[str, str]) -> str | None:
    return next((reason for each, reason in _IMPOSSIBLE.items() if set(each) <= set(words.values())), None)


def _configuration(words: dict[str, str]) -> Configuration:
    model, is_frozen, recompute = by_name(words["model"]), words["base"] == "frozen", words["recompute"]
    options: dict[str, Any] = dict(model.options)
    if words["model"] == "mla":
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
    without_backward: tuple[str, ...] = ()
    if is_frozen:
        without_backward = ("embedding",)
        if recompute == "kept":  # nothing before the first layer needs a gradient, then
            without_backward += tuple(f"decoder.layers.0.self_attention.{linear}.to_wrap" for linear in _FIRST)
    return dataclasses.replace(
        model,
        name=" ".join(words.values()),
        options=options,
        is_fused=words["layers"] == "fused",
        way="convert" if words["order"] == "convert_first" else "spec",
        fuses_gradients=words["gradients"] == "main_grad",
        recomputed=recomputed,
        frozen=("",) if is_frozen else (),
        trained=(_ADAPTERS,) if is_frozen else (),
        without_backward=without_backward,
        adapters=Adapters(
            norm_output="rows" if words["adapters"] == "rows" else "gathered", is_first=words["order"] == "lora_first"
        ),
    )


_FIRST = ("linear_qkv", "linear_q_down_proj", "linear_kv_down_proj")
