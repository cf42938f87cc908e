"""Plans for attention over a split sequence: which are offered, what they need, what is predicted of them."""

import dataclasses

import pytest

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import TransportConfig, UlyssesConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.candidates import buffer_needs, list_candidates
from commfuse_megatron.plan.choose import choose_by_default, predict
from commfuse_megatron.plan.machine import Traits, assumed_machine
from commfuse_megatron.problem import UlyssesProblem


def problem(ranks: int = 2, rows: int = 32768, needs: str = "input", **others) -> UlyssesProblem:
    """Llama-8B's attention: 32 heads of 128, 8 groups."""
    sizes = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128}
    return UlyssesProblem(
        pass_name="fprop", rows=rows, dtype="bfloat16", group_size=ranks, right=0, needs=needs, **{**sizes, **others}
    )


def config(path="auto", head_groups=None, **transport) -> OverlapConfig:
    return OverlapConfig(
        ulysses=UlyssesConfig(path=path, head_groups=head_groups), transport=TransportConfig(**transport)
    )


def names(the_problem, configuration=None) -> list[str]:
    return [plan.name for plan in list_candidates(the_problem, configuration or config()).plans]


def test_candidates():
    assert names(problem()) == ["sequential", "overlapped m=1", "overlapped m=2", "overlapped m=4"]
    assert names(problem(4)) == ["sequential", "overlapped m=1", "overlapped m=2"]  # two heads of keys each
    assert names(problem(8)) == names(problem(16, heads=64)) == names(problem())  # one, with four heads of queries
    assert names(problem(8, heads=8)) == ["sequential", "overlapped m=1"]
    assert names(problem(), config("overlapped", 3)) == ["overlapped m=3"]
    assert names(problem(), config("overlapped", 9)) == ["overlapped m=4"]
    assert names(problem(), config("sequential")) == ["sequential"]
    assert choose_by_default(list_candidates(problem(), config()), "").name == "overlapped m=4"


@pytest.mark.parametrize(("ranks", "number"), [(1, 3), (2, 3), (4, 4), (8, 3), (16, 2)])
def test_groups_hold_every_head_once(ranks, number):
    one = problem(ranks)
    groups = one.head_groups(number)
    assert [group.q.start for group in groups] == [0, *(group.q.stop for group in groups[:-1])]
    assert groups[-1].q.stop == one.own_heads
    assert sum(group.kv.size for group in groups if group.brings_kv) == one.own_kv_heads
    for group in groups:
        shared_by = one.own_heads // one.own_kv_heads
        assert (group.kv.start, group.kv.stop) == (group.q.start // shared_by, -(-group.q.stop // shared_by))


def test_what_does_not_fit_runs_sequentially():
    # Of half the heads all tokens: 16 of queries, 4 of keys, 4 of values, 256 bytes each; the gradients likewise.
    mib = 32768 * 24 * 256 >> 20
    (plan,) = list_candidates(problem(), config("overlapped", 1)).plans
    assert buffer_needs(problem(), plan) == {"gather": mib << 20, "receive": mib << 19}
    assert buffer_needs(problem(needs=""), plan) == {"gather": mib << 20, "receive": 32768 * 16 * 128}
    assert names(problem(), config(max_buffer_mib=mib)) == ["sequential"]
    assert "overlapped would take" in list_candidates(problem(), config(max_buffer_mib=mib)).note


@pytest.mark.parametrize(("order", "most"), [("contiguous", 1024), ("zigzag", 512)])
def test_more_pieces_than_there_are_flags_are_left_out(order, most):
    """Fails without the fix: the call raised ConfigError, and the context had failed."""
    many = problem(4, rows=8, heads=8192, kv_heads=8192, head_dim=1, value_dim=1, order=order)
    assert names(many, config("overlapped", most)) == [f"overlapped m={most}"]
    found = list_candidates(many, config("overlapped", most + 1))
    assert [plan.name for plan in found.plans] == ["sequential"]
    number = (most + 1) * 4096 // most
    assert found.note == f"overlapped would send {number} chunks, more than 4096: lower ulysses.head_groups"


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_heads_pay_where_links_are_slow(ranks, order):
    traits = Traits(
        transport="copy_engine", num_sms=132, transfer_sms=0, regains_sms=False, overlaps=True, adds_in_epilogue=True,
        replays=True,
    )  # fmt: skip
    machine = assumed_machine(traits, "bfloat16")
    slow = dataclasses.replace(machine, link=dataclasses.replace(machine.link, bandwidth_gb_s=50.0))
    found = predict(problem(ranks, order=order), list_candidates(problem(ranks, order=order), config()), slow).plans
    times = {plan.name: plan.predicted_us for plan in found}
    assert times["overlapped m=2"] < times["overlapped m=1"]
    alone = predict(problem(ranks, order=order, needs=""), list_candidates(problem(ranks), config()), machine).plans
    assert all(one.predicted_us < both.predicted_us for one, both in zip(alone, found, strict=True))


def test_groups_of_heads_are_an_overlapped_path_s():
    with pytest.raises(ConfigError, match='path "sequential" does not have'):
        UlyssesConfig(path="sequential", head_groups=2)
    with pytest.raises(ConfigError, match="head_groups must be at least 1, got 0"):
        UlyssesConfig(head_groups=0)
