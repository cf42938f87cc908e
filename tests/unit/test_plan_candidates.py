"""Which plans are offered for a problem: by path, algorithm, chunks and memory."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import AttentionConfig, LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.plan.candidates import buffer_needs, list_candidates, merge_needs
from commfuse_megatron.plan.choose import choose_only
from commfuse_megatron.problem import DTYPE_BYTES, AttentionProblem, GemmProblem
from commfuse_megatron.schedule import Algorithm, Collective
from commfuse_megatron.schedule.binding import bind
from tests.harness.problems import layer_problem

BOTH = "input+weight"


def config(path="auto", algorithm="auto", m=None, **transport) -> OverlapConfig:
    chosen = PassConfig(path=path, algorithm=algorithm, chunks_per_shard=m)
    return OverlapConfig(linear=LinearConfig(fprop=chosen, dgrad=chosen), transport=TransportConfig(**transport))


def names(problem, configuration=None, **others) -> list[str]:
    return [plan.name for plan in list_candidates(problem, configuration or OverlapConfig(), **others).plans]


def test_two_ranks_forward_and_backward():
    sliced = ["sliced m=1", "sliced m=2", "sliced m=4"]
    assert names(layer_problem("70b.qkv", 8192)) == ["sequential", *sliced]
    assert names(layer_problem("70b.fc2", 8192)) == ["sequential", *sliced]
    assert names(layer_problem("70b.qkv", 8192, needs=BOTH)) == ["sequential", "bulk", *sliced, "async"]
    # Both GEMMs need the gathered gradient: nothing to hide it under; and in bulk two ranks do what one chunk does.
    assert names(layer_problem("70b.fc2", 8192, needs=BOTH)) == ["sequential", *sliced]


def test_more_ranks_may_go_round_in_a_ring():
    found = names(layer_problem("70b.fc2", 8192, 4, needs=BOTH))
    assert found[:2] == ["sequential", "bulk"]
    assert "sliced ring m=2" in found
    assert "sliced ring m=1" not in names(layer_problem("70b.fc2", 8192, 2))


@pytest.mark.parametrize(("layer", "expected"), [("70b.qkv", "input"), ("70b.qkv", "weight"), ("70b.fc2", "weight")])
def test_with_one_gradient_alone_no_whole_gemm_hides_a_transfer(layer, expected):
    found = names(layer_problem(layer, 8192, 4, needs=expected))
    assert "async" not in found
    assert "bulk" not in found
    if expected == "weight":  # nothing is sliced
        assert found == ["sequential", "sliced m=1"]


def test_never_more_chunks_than_rows_eight_on_slow_links_only():
    assert names(layer_problem("70b.fc2", 6)) == ["sequential", "sliced m=1", "sliced m=2"]
    assert names(layer_problem("70b.fc2", 3)) == ["sequential", "sliced m=1"]
    assert "sliced m=8" not in names(layer_problem("70b.fc2", 8192))
    assert "sliced m=8" in names(layer_problem("70b.fc2", 8192), is_link_slow=True)
    assert "sliced m=8" not in names(layer_problem("70b.fc2", 15), is_link_slow=True)
    assert "sliced m=4" not in names(layer_problem("70b.fc2", 8192, 32))


@pytest.mark.parametrize(("forced", "needs", "expected"), [
    (config("sequential"), "", ["sequential"]), (config("sliced", "direct", 1), "", ["sliced m=1"]),
    (config("sliced", "ring", 3), "", ["sliced ring m=3"]), (config("sliced", m=3), BOTH, ["sliced m=3"]),
    (config("sliced"), "", ["sliced m=1", "sliced m=2", "sliced m=4"]),
    (config("auto", m=3), "", ["sequential", "sliced m=3"]),
    (config("auto", "ring", 2), BOTH, ["sequential", "bulk", "sliced ring m=2", "async"]),
    (config("bulk", "ring", 3), BOTH, ["bulk"]), (config("async"), BOTH, ["async"]),
])  # fmt: skip
def test_forced_fields_restrict_the_list(forced, needs, expected):
    found = list_candidates(layer_problem("70b.qkv", 8192, needs=needs), forced)
    assert [plan.name for plan in found.plans] == expected
    assert not found.note


def test_a_path_that_makes_no_sense_is_replaced_and_said():
    found = list_candidates(layer_problem("70b.qkv", 8192), config("bulk", m=2))
    assert [plan.name for plan in found.plans] == ["sliced m=2"]
    assert '"bulk" is for backward passes' in found.note
    for problem in (
        layer_problem("70b.qkv", 8192),
        layer_problem("70b.fc2", 8192, needs=BOTH),
        layer_problem("70b.qkv", 8192, needs="input"),
    ):
        found = list_candidates(problem, config("async"))
        assert [plan.name for plan in found.plans] == ["sequential"]
        assert '"async" finds no GEMM' in found.note


@pytest.mark.parametrize(("m", "note"), [
    (64, "chunks_per_shard: 64 chunks are more than the 32 rows of a shard, so some are empty"), (32, ""), (1, ""),
])  # fmt: skip
def test_more_chunks_than_rows_are_said(m, note):
    """Fails without the note: 64 chunks of 32 rows ran as any other number, and nothing said so."""
    found = list_candidates(layer_problem("70b.qkv", 64), config("sliced", m=m))
    assert [plan.name for plan in found.plans] == [f"sliced m={m}"]
    assert found.note == note
    assert choose_only(found).reason == "forced by the configuration" + (f" ({note})" if note else "")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_what_is_offered_is_never_more_than_the_rows(rows):
    assert not list_candidates(layer_problem("70b.qkv", rows, 4), config("sliced", m=1)).note
    assert not list_candidates(layer_problem("70b.qkv", rows), OverlapConfig()).note


def test_more_splits_than_rows_are_said():
    problem = AttentionProblem(
        pass_name="fprop", rows=8, batch=1, heads=2, kv_heads=2, head_dim=8, value_dim=8, N=16, dtype="bfloat16",
        group_size=2,
    )  # fmt: skip
    for m, note in ((4, ""), (5, "splits_per_shard: 5 chunks are more than the 4 rows of a shard, so some are empty")):
        attention = AttentionConfig(path="query_split", splits_per_shard=m)
        assert list_candidates(problem, OverlapConfig(attention=attention)).note == note


def test_what_exceeds_the_buffers_is_left_out_and_said():
    problem = layer_problem("70b.fc2", 8192)  # 64 MiB received, 64 sent, 128 kept in fp32
    assert "sliced m=1" in names(problem, config(max_buffer_mib=256))
    found = list_candidates(problem, config(max_buffer_mib=255))
    assert [plan.name for plan in found.plans] == ["sequential"]
    assert found.note == "sliced would take 256 MiB of buffers, more than transport.max_buffer_mib = 255"
    forced = list_candidates(problem, config("sliced", max_buffer_mib=255))
    assert [plan.name for plan in forced.plans] == ["sequential"]


def test_more_chunks_than_there_are_flags_are_left_out_and_said():
    """Fails without the fix: the call raised ConfigError, and the context had failed."""
    problem = layer_problem("70b.fc2", 8192, needs=BOTH)
    assert names(problem, config("sliced", m=2048)) == ["sliced m=2048"]
    found = list_candidates(problem, config("sliced", m=2049))
    assert [plan.name for plan in found.plans] == ["sequential"]
    assert found.note == "sliced would send 4098 chunks, more than 4096: lower chunks_per_shard"
    assert names(problem, config(m=2049)) == ["sequential"]


def test_buffers_that_are_there_already_count_once():
    problem = layer_problem("70b.fc2", 8192)
    plan = list_candidates(problem, config("sliced", m=1)).plans[0]
    needs = buffer_needs(problem, plan)
    assert merge_needs(needs, needs) == needs
    assert "sliced m=1" in names(problem, config(max_buffer_mib=256), held=needs)
    assert names(problem, config(max_buffer_mib=256), held={"gather": 1 << 20}) == ["sequential"]


@given(
    st.sampled_from(["all_gather_linear", "linear_reduce_scatter"]),
    st.sampled_from(["", "input", "weight", BOTH]),
    st.integers(1, 40),
    st.integers(2, 5),
    st.sampled_from(["bfloat16", "float64"]),
)
def test_buffer_needs_cover_what_programs_carve(op, needs, rows, group_size, dtype):
    problem = GemmProblem(
        op=op, pass_name="backward" if needs else "fprop", rows=rows, batch=2, N=3, K=5, dtype=dtype,
        group_size=group_size, needs=needs,
    )  # fmt: skip
    features = problem.K if op == "all_gather_linear" else problem.N
    itemsize = DTYPE_BYTES[dtype]
    for plan in list_candidates(problem, OverlapConfig()).plans:
        found = buffer_needs(problem, plan)
        assert bool(found) == (plan.path in ("sliced", "bulk"))
        for rank in range(group_size) if found else ():
            where = (plan.algorithm, group_size, rank, plan.chunks_per_shard, rows, problem.batch)
            bound = bind(Collective.REDUCE_SCATTER, *where)
            if "send" in found:
                assert found["send"] >= (bound.total_rows - bound.own_rows) * features * itemsize
                assert found["receive"] >= bound.most_arrived_rows * features * itemsize
                own_rows = max(bound.chunk_rows) if plan.algorithm is Algorithm.RING else bound.own_rows
                assert found["own"] >= own_rows * features * max(4, itemsize)
            if "gather" in found:
                assert found["gather"] == bound.total_rows * features * itemsize
        scatters = (op == "all_gather_linear") == bool(needs)
        if found:
            assert ("send" in found) == (scatters and needs != "weight")


def test_plans_differ_in_name():
    problem = layer_problem("70b.qkv", 8192, 8, needs=BOTH)
    plans = list_candidates(problem, OverlapConfig(), is_link_slow=True).plans
    assert len({plan.name for plan in plans}) == len(plans)
    assert all(not dataclasses.replace(plan, reason="x").predicted_us for plan in plans)


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_rings_can_be_left_out_unless_they_are_forced(algorithm):
    forced = PassConfig(path="sliced", algorithm=algorithm)
    config = OverlapConfig(linear=LinearConfig(fprop=forced))
    found = list_candidates(layer_problem("70b.proj", 8192, 4), config, with_rings=False).plans
    expected = Algorithm.RING if algorithm == "ring" else Algorithm.DIRECT
    assert {plan.algorithm for plan in found} == {expected}
