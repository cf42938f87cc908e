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
QKV, FC2 = (layer_problem(layer, 8192) for layer in ("70b.qkv", "70b.fc2"))
BACKWARD_QKV, BACKWARD_FC2 = (layer_problem(layer, 8192, needs=BOTH) for layer in ("70b.qkv", "70b.fc2"))


def config(path="auto", algorithm="auto", m=None, **transport) -> OverlapConfig:
    chosen = PassConfig(path=path, algorithm=algorithm, chunks_per_shard=m)
    return OverlapConfig(linear=LinearConfig(fprop=chosen, dgrad=chosen), transport=TransportConfig(**transport))


def names(problem, configuration=None, **others) -> list[str]:
    return [plan.name for plan in list_candidates(problem, configuration or OverlapConfig(), **others).plans]


def test_two_ranks_forward_and_backward():
    sliced = ["sliced m=1", "sliced m=2", "sliced m=4"]
    assert names(QKV) == names(FC2) == ["sequential", *sliced]
    assert names(BACKWARD_QKV) == ["sequential", "bulk", *sliced, "async"]
    # Both GEMMs need the gathered gradient: nothing to hide it under; and in bulk two ranks do what one chunk does.
    assert names(BACKWARD_FC2) == ["sequential", *sliced]


def all_reduce(needs="", op="linear_all_reduce") -> GemmProblem:
    return GemmProblem(op, "backward" if needs else "fprop", 8192, 1, 8192, 4096, "bfloat16", 4, needs)


def test_all_reduces_are_direct_and_sliced():
    """Beside Megatron's own, of a backward pass with both gradients."""
    sliced, column = ["sliced m=1", "sliced m=2", "sliced m=4"], "linear_grad_all_reduce"
    assert names(all_reduce()) == ["sequential", *sliced]
    assert names(all_reduce(BOTH, column)) == ["sequential", *sliced, "async"]
    assert names(all_reduce("input", column)) == ["sequential", *sliced]
    plan = list_candidates(all_reduce(), config("sliced", "direct", 2)).plans[0]
    rows = 8192 * 8192 * 2
    assert buffer_needs(all_reduce(), plan) == {
        "gather": rows, "receive": rows * 3 // 4, "send": rows * 3 // 4, "own": rows // 4 * 2,
    }  # fmt: skip
    assert all(all_reduce(*each).sends for each in ((), (BOTH, column), ("input", column)))
    assert not any(all_reduce(*each).sends for each in ((BOTH,), ("", column), ("weight", column)))


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
    assert "sliced m=8" not in names(FC2)
    assert "sliced m=8" in names(FC2, is_link_slow=True)
    assert "sliced m=8" not in names(layer_problem("70b.fc2", 15), is_link_slow=True)
    assert "sliced m=4" not in names(layer_problem("70b.fc2", 8192, 32))


#: What is asked for of which problem, the plans that are offered then, and the note.
OFFERED = [
    (QKV, config("sequential"), ["sequential"], ""), (QKV, config("sliced", "direct", 1), ["sliced m=1"], ""),
    (QKV, config("sliced", "ring", 3), ["sliced ring m=3"], ""),
    (BACKWARD_QKV, config("sliced", m=3), ["sliced m=3"], ""),
    (QKV, config("sliced"), ["sliced m=1", "sliced m=2", "sliced m=4"], ""),
    (QKV, config("auto", m=3), ["sequential", "sliced m=3"], ""),
    (BACKWARD_QKV, config("auto", "ring", 2), ["sequential", "bulk", "sliced ring m=2", "async"], ""),
    (BACKWARD_QKV, config("bulk", "ring", 3), ["bulk"], ""), (BACKWARD_QKV, config("async"), ["async"], ""),
    (all_reduce(), config("sliced", "ring", 2), ["sliced m=2"], '"ring" is not for all-reduces: direct instead'),
    (all_reduce(), config("grouped"), ["sliced m=1", "sliced m=2", "sliced m=4"], '"grouped" is not for all-reduces'),
    # A path that makes no sense is replaced.
    (QKV, config("bulk", m=2), ["sliced m=2"], '"bulk" is for backward passes'),
    *((problem, config("async"), ["sequential"], '"async" finds no GEMM')
      for problem in (QKV, BACKWARD_FC2, layer_problem("70b.qkv", 8192, needs="input"))),
    # Fails without the note: 64 chunks of 32 rows ran as any other number, and nothing said so.
    (layer_problem("70b.qkv", 64), config("sliced", m=64), ["sliced m=64"],
     "chunks_per_shard: 64 chunks are more than the 32 rows of a shard, so some are empty"),
    *((layer_problem("70b.qkv", 64), config("sliced", m=m), [f"sliced m={m}"], "") for m in (32, 1)),
    # 64 MiB received, 64 sent, 128 kept in fp32.
    *((FC2, config(path, max_buffer_mib=255), ["sequential"],
       "sliced would take 256 MiB of buffers, more than transport.max_buffer_mib = 255")
      for path in ("auto", "sliced")),
    # Of more chunks than there are flags the call raised ConfigError, and the context had failed.
    (BACKWARD_FC2, config("sliced", m=2048), ["sliced m=2048"], ""),
    *((BACKWARD_FC2, config(path, m=2049), ["sequential"],
       "sliced would send 4098 chunks, more than 4096: lower chunks_per_shard") for path in ("auto", "sliced")),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "asked", "expected", "note"), OFFERED)
def test_what_is_asked_for_restricts_the_list_with_a_note(problem, asked, expected, note):
    found = list_candidates(problem, asked)
    assert [plan.name for plan in found.plans] == expected
    assert found.note == note or (note.startswith('"') and note in found.note)
    if len(expected) == 1 and found.plans[0].path != "sequential":
        assert choose_only(found).reason == "forced by the configuration" + (f" ({found.note})" if note else "")


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


def test_buffers_that_are_there_already_count_once():
    needs = buffer_needs(FC2, list_candidates(FC2, config("sliced", m=1)).plans[0])
    assert merge_needs(needs, needs) == needs
    assert "sliced m=1" in names(FC2, config(max_buffer_mib=256))
    assert "sliced m=1" in names(FC2, config(max_buffer_mib=256), held=needs)
    assert names(FC2, config(max_buffer_mib=256), held={"gather": 1 << 20}) == ["sequential"]


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
        assert bool(found) == (plan.path in ("sliced", "grouped", "bulk"))
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
