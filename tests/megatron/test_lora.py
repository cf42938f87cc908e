"""Models with adapters at all linears against stock Megatron with the same adapters: every pair of options.

The pairs are covered by the products of options that `cover_pairs` chooses; one group of 2 and one of 4 processes run
those of their size. `commfuse verify --megatron --lora` runs all products.
"""

import itertools
import zlib
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import convert_model, norm_linear
from commfuse_megatron.testing.gpt import SmallGPT, loss_of
from commfuse_megatron.testing.lora import add_lora
from commfuse_megatron.testing.models import Recipe, name_with_separate_norm
from commfuse_megatron.testing.training import Training
from commfuse_megatron.tools.verify.lora_cases import OPTIONS, choose_lora, lora_configurations, options_of
from tests.harness.pairs import cover_pairs
from tests.megatron.harness import make_cpu_test, tensor_parallel
from tests.megatron.layers import random
from tests.megatron.models import assert_same, build_model, draw_tokens, folders, save_entries, sharded
from tests.megatron.test_models import assert_passed, verified

TOLERANCE = 1e-13
TOKENS = draw_tokens(2, 32, seed=5)
BY_NAME = {each.name: each for each in lora_configurations()}
FAULTY = "dense spec_first fused kept autograd frozen rows"


def equals_stock(ranks: int, name: str) -> None:
    result = verified(BY_NAME[name])
    assert_passed(result)
    assert result.overlapped
    assert result.backward


def finds_adapters_on_the_input_of_a_norm(ranks: int) -> None:
    with mock.patch.object(norm_linear, "with_norm_output", lambda _, output, bias, __: (output, bias)):
        wrong = "\n".join(verified(BY_NAME[FAULTY]).complaints)
    assert "losses differ" in wrong
    assert "gradient of" in wrong


def adapters_resume(ranks: int, norm_output: Any, kinds: tuple[str, ...]) -> None:
    """Adapters that stock has trained go on in ours and back: from state dicts, and from distributed checkpoints at
    another tensor-parallel size."""
    with folders(1 + len(kinds)) as (of_stock, *of_ours):
        with tensor_parallel(2):
            stock = model("stock", 2, norm_output, seed=3)
            train(stock)
            trained, loss = adapters_of(stock), evaluate(stock)
            save_entries(sharded_adapters(stock), of_stock)
            for kind in kinds:
                ours = model(kind, 2, norm_output, seed=4)
                assert abs(evaluate(ours) - loss) > 1e-3 * loss
                take(ours, trained)
                assert abs(evaluate(ours) - loss) <= TOLERANCE * loss
                resumed = model("stock", 2, norm_output, seed=5)
                take(resumed, adapters_of(ours))
                assert_same(trained, adapters_of(resumed), at_least=2 * 9)
                after = [train(each) for each in (ours, resumed)]
                assert abs(after[0] - after[1]) <= TOLERANCE * loss
                assert abs(evaluate(ours) - evaluate(resumed)) <= 1e-12 * loss
        with tensor_parallel(4):
            for kind, folder in zip(kinds, of_ours, strict=True):
                ours = model(kind, 4, norm_output, seed=4)
                take(ours, dist_checkpointing.load(sharded_adapters(ours), of_stock))
                assert abs(evaluate(ours) - loss) <= TOLERANCE * loss
                save_entries(sharded_adapters(ours), folder)
        with tensor_parallel(2):
            for folder in of_ours:
                resumed = model("stock", 2, norm_output, seed=5)
                take(resumed, dist_checkpointing.load(sharded_adapters(resumed), folder))
                assert_same(trained, adapters_of(resumed), at_least=2 * 9)


def model(kind: str, group_size: int, norm_output: Any, *, seed: int) -> Any:
    """A GPT of the same weights each time, with adapters drawn from `seed`, which alone are trained."""
    recipe = Recipe(gpt=SmallGPT(dtype=torch.float64), is_fused=kind == "fused")
    overlap = OverlapConfig() if kind in ("spec_first", "fused") else None
    built = build_model(recipe, group_size, overlap)
    for name, parameter in built.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * random(parameter.shape, zlib.crc32(name_with_separate_norm(name).encode()))
    built.requires_grad_(False)
    add_lora(built, norm_output=norm_output, seed=seed)
    return convert_model(built, OverlapConfig()) if kind == "lora_first" else built


def train(m: Any) -> float:
    return Training(m, lr=1e-2).step(TOKENS)


def evaluate(m: Any) -> float:
    with torch.no_grad():
        return loss_of(m, TOKENS).item()


def adapters_of(m: Any) -> dict[str, Any]:
    return {n: v.clone() for n, v in m.state_dict().items() if ".adapter." in n and isinstance(v, torch.Tensor)}


def sharded_adapters(m: Any) -> dict[str, Any]:
    return {name: entry for name, entry in sharded(m).items() if ".adapter." in name}


def take(m: Any, adapters: dict[str, Any]) -> None:
    found = m.load_state_dict(adapters, strict=False)
    assert not found.unexpected_keys
    assert not [name for name in found.missing_keys if ".adapter." in name and not name.endswith("_extra_state")]


ALL = [tuple(name.split()) for name in BY_NAME]
COVERING = cover_pairs([(ranks, *words) for words in ALL for ranks in ("2", "4")])
CHECKS = {
    int(ranks): {
        name: (0, __name__, "equals_stock", (name,))
        for size, *words in COVERING
        if size == ranks
        for name in [" ".join(words)]
    }
    for ranks in ("2", "4")
}
test_two_ranks = make_cpu_test(2, {**CHECKS[2], "fault": (0, __name__, "finds_adapters_on_the_input_of_a_norm", ())})
#: Which adapters, which models of ours. Row-parallel pairs of the two forms are split differently.
test_four_ranks = make_cpu_test(
    4,
    {
        **CHECKS[4],
        "rows resume": (0, __name__, "adapters_resume", ("rows", ("lora_first", "fused"))),
        "gathered resume": (0, __name__, "adapters_resume", ("gathered", ("spec_first", "fused"))),
    },
)


def test_every_pair_of_options_is_covered() -> None:
    for (i, one), (j, other) in itertools.combinations(enumerate([("2", "4"), *OPTIONS.values()]), 2):
        for pair in itertools.product(one, other):
            is_covered = any((words[i], words[j]) == pair for words in COVERING)
            assert is_covered == (pair != ("convert_first", "fused")), pair
    assert len(COVERING) <= 20, "a few suffice"


def test_all_products_are_offered() -> None:
    words = [word for known in OPTIONS.values() for word in known]
    assert len(words) == len(set(words)), "a word belongs to one option"
    assert len(ALL) == len(set(ALL)) == 6 * (3 + 2) * 3 * 2 * 2 * 2
    assert len(choose_lora(4)) == len(ALL)


def test_words_choose() -> None:
    chosen = choose_lora(2, ["dense", "mla", "fused", "frozen"])
    found = [options_of(each.name) for each in chosen]
    assert {each["model"] for each in found} == {"dense", "mla"}
    assert {each["layers"] for each in found} == {"fused"}
    assert {each["recompute"] for each in found} == set(OPTIONS["recompute"])
    assert len(chosen) == 2 * 2 * 3 * 2 * 2


@pytest.mark.parametrize(("ranks", "words", "complaint"), [
    (3, None, "2 or 4 ranks, not for 3"),
    (2, ["dense", "sparse"], "no option of --lora has the word sparse. There are model: dense, "),
    (2, ["convert_first", "fused"], "there is nothing for convert_first fused. convert_first and fused: "),
])  # fmt: skip
def test_wrong_choices(ranks: int, words: list[str] | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_lora(ranks, words)
