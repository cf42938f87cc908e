"""Models with adapters at all linears against stock Megatron with the same adapters: every pair of options.

The pairs are covered by the products of options that `cover_pairs` chooses; one group of 2 and one of 4 processes run
those of their size. `commfuse verify --megatron --lora` runs all products.
"""

import itertools
from typing import Any

import pytest

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.verify.lora_cases import OPTIONS, choose_lora, lora_configurations, options_of
from tests.harness import run_spawned
from tests.harness.pairs import cover_pairs
from tests.megatron import lora_bodies

ALL = [tuple(each.name.split()) for each in lora_configurations()]
COVERING = cover_pairs([(ranks, *words) for words in ALL for ranks in ("2", "4")])
NAMES = {int(ranks): [" ".join(words) for size, *words in COVERING if size == ranks] for ranks in ("2", "4")}
CASES = [(ranks, name) for ranks, names in NAMES.items() for name in names]


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[Any]]:
    return {ranks: run_spawned(ranks, lora_bodies.verify_pairs, names) for ranks, names in NAMES.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_equals_stock_with_the_same_adapters(outcomes: dict, ranks: int, name: str) -> None:
    everyones = [result for results, _ in outcomes[ranks] for result in results if result.name == name]
    assert len(everyones) == ranks
    assert all(each == everyones[0] for each in everyones), "all ranks come to the same verdict"
    result = everyones[0]
    assert result.passed, "\n".join(result.complaints)
    assert result.loss_error <= 1e-13
    assert result.gradient_error <= 1e-13
    assert result.overlapped
    assert result.backward


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_adapters_on_the_input_of_a_norm_are_found(outcomes: dict) -> None:
    for _, complaints in outcomes[2]:
        wrong = "\n".join(complaints)
        assert "losses differ" in wrong
        assert "gradient of" in wrong


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


@pytest.mark.parametrize(
    ("ranks", "words", "complaint"),
    [
        (3, None, "2 or 4 ranks, not for 3"),
        (2, ["dense", "sparse"], "no option of --lora has the word sparse. There are model: dense, "),
        (2, ["convert_first", "fused"], "there is nothing for convert_first fused. convert_first and fused: "),
    ],
)
def test_wrong_choices(ranks: int, words: list[str] | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_lora(ranks, words)
