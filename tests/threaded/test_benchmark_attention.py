"""Attention blocks in the benchmark on CPU ranks: everything is built, found right and written down."""

import dataclasses
import functools
import math

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.errors import ConfigError, VerificationError
from commfuse_megatron.kernels import attention_choice
from commfuse_megatron.runtime import prepared
from commfuse_megatron.schedule import closed_form_us
from commfuse_megatron.tools.bench import attention
from commfuse_megatron.tools.bench.attention import heads_of
from commfuse_megatron.tools.bench.catalog import make_work
from commfuse_megatron.tools.bench.emulate import EmulatedPath
from commfuse_megatron.tools.bench.operands import Pool, check_results, ulysses_block
from commfuse_megatron.tools.bench.run import Settings
from commfuse_megatron.tools.bench.summary import summarize
from commfuse_megatron.tools.bench.tables import attention_table
from commfuse_megatron.tools.common.cases import (
    ATTENTION_CASE_NAMES,
    HEADLINE_M,
    Case,
    attention_bound_ms,
    attention_case,
    tokens_of,
    ulysses_case,
)
from commfuse_megatron.transport import tape_graphs
from tests.harness.emulated_cudnn import emulate_cudnn
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.harness.threads import on_ranks, run_threads
from tests.threaded.test_benchmark_runs import run_settings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small():
    """Rows and outcome of a grid of two cases, both passes, on two ranks."""
    settings = Settings(
        models=("llama-8b", "paper"), tokens=(1024,), chunks=(1, 2), shrink=128, rounds=1, kind="attention"
    )
    return run_settings(2, settings)[0]


def test_every_variant_gives_what_the_plain_kernel_does(small):
    rows, outcome = small
    assert (outcome.missing, outcome.failures) == ([], [])
    # A batch of one cannot be cut: said once, and then left out.
    assert {row.case for row in rows} == set(ATTENTION_CASE_NAMES) - {"llama-70b.attention"}
    names = {(row.pass_name, row.variant) for row in rows}
    for pass_name in ("fprop", "backward"):
        for variant in (
            "compute_only", "comm_only collective", "comm_only gloo", "sequential", "row_parallel gloo",
            "query_split m=1 gloo", "query_split m=2 gloo", "planned",
        ):  # fmt: skip
            assert (pass_name, variant) in names
    checked = [
        row for row in rows if row.variant.split()[0] in ("sequential", "row_parallel", "query_split", "planned")
    ]
    assert max(row.max_error for row in checked) < 1e-5
    assert {row.path for row in checked if row.variant.startswith("query_split")} == {"query_split"}
    assert all(row.schedule_bound_ms for row in checked if row.path == "query_split" and row.pass_name == "fprop")


def test_data_slicing_cuts_the_batch_or_else_the_queries(small):
    rows, outcome = small
    sliced = {row.case: row.max_error for row in rows if row.variant == "slicing C=2"}
    assert set(sliced) == {row.case for row in rows}
    assert max(sliced.values()) < 1e-5
    assert outcome.left_out == {}


def test_the_table_has_every_case_and_the_papers_numbers(small):
    rows, _ = small
    timed = [dataclasses.replace(row, device="a GPU") for row in rows]
    table = attention_table(timed)
    assert table.row_count == 2 * len({row.case for row in rows})
    columns = {column.header: list(column.cells) for column in table.columns}
    texts = zip(*(columns[heading] for heading in ("pass", "compute", "comm", "bound")), strict=True)
    for pass_name, *times in texts:
        assert (times[-1] == "") == (pass_name == "backward")
        if pass_name == "fprop":
            compute, comm, bound = map(float, times)
            assert max(compute, comm) - 2e-3 <= bound <= compute + comm + 2e-3
    paper = columns["paper"]
    assert "270.1 / 246.1 / 230.9 / 215.8" in paper
    assert "195.6 / 279.7 / - / 145.1" in paper


@pytest.mark.parametrize("group_size", [4, 8])
def test_emulated_groups(group_size):
    settings = Settings(
        models=("paper",), tokens=(1024,), shrink=64, rounds=1, kind="attention", virtual_ranks=(group_size,)
    )
    rows, outcome = run_settings(2, settings)[0]
    assert (outcome.missing, outcome.failures, outcome.left_out) == ([], [], {})
    assert {row.group_size for row in rows} == {group_size}
    assert all(row.emulated for row in rows)
    names = {row.variant for row in rows}
    assert {"compute_only", "sequential", "slicing C=2", "row_parallel gloo", "query_split m=1 gloo"} <= names
    assert max(row.max_error for row in rows if row.max_error is not None) < 1e-5


def make_emulated(case: Case, group, dtype: torch.dtype):
    return make_work(case, "fprop", group, Pool(CPU, dtype, group.rank()), is_emulated=True)


@on_ranks(2)
def test_a_wrong_emulated_result_is_noticed(group, device):
    work = make_emulated(attention_case(*SMALL, 4, 64), group, torch.float32)
    variant = EmulatedPath("query_split", "gloo")
    ready = variant.build(work)
    check_results(work, variant.name, ready.results())
    work.operands.others["k"].data.add_(1.0 * torch.arange(work.operands.others["k"].size(0)).view(-1, 1, 1, 1))
    with pytest.raises(VerificationError, match="differs"):
        check_results(work, variant.name, ready.results())
    variant.close()


@pytest.mark.parametrize("splits", [None, 1, 2])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_emulated_tapes_give_what_they_should_in_every_order(size, splits, monkeypatch):
    emulate_cudnn(monkeypatch)
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(attention_choice, "cudnn_attention_unavailable_reason", lambda problem, device: None)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", -1)  # every call is one
    monkeypatch.setattr(prepared, "choose_num_lanes", lambda *arguments: 3)

    def body(group, device):
        sizes = {"M": 64, "N": 16, "K": 32, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
        case = Case("some", "query_split_attention", group_size=size, **sizes)
        work = make_emulated(case, group, torch.bfloat16)
        variant = EmulatedPath("query_split" if splits else "row_parallel", "copy_engine", splits or 1)
        with take_part(group):
            ready = variant.build(work)
            for _ in range(6):
                check_results(work, variant.name, ready.results())
            work.operands.others["v"].data.add_(1.0)
            with pytest.raises(VerificationError, match="differs"):
                check_results(work, variant.name, ready.results())
            graphs = variant._context.link.transport.graphs.num_alive
            variant.close()
        return graphs

    assert min(run_threads(2, body)) > 0


SMALL = ("paper.attention-4x8192", 4 * 8192)


@pytest.mark.parametrize("pass_name", ["fprop", "backward"])
@pytest.mark.parametrize("scores", [1, 1000, 2**27])
def test_what_is_expected_is_the_reference(pass_name, scores, monkeypatch):
    """In pieces of one query, of some, or whole; and by no kernel of PyTorch's, which on GPUs may be cuDNN's."""
    monkeypatch.setattr(attention, "_SCORES_AT_ONCE", scores)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, *others, **options: q * 0)
    run_threads(2, functools.partial(_expect_the_reference, pass_name))


def _expect_the_reference(pass_name, group, device):
    work = make_work(attention_case(*SMALL, 2, 256), pass_name, group, Pool(CPU, torch.float64, group.rank()))
    heads = [head.clone().requires_grad_() for head in heads_of(work)]
    y = ops.reference.query_split_attention(*heads, work.operands.weight, group=group)
    if pass_name == "fprop":
        torch.testing.assert_close(work.expected["y"], y.detach())
        return
    found = torch.autograd.grad(y, [*heads, work.operands.weight], work.operands.grad_y)
    for grad, name in zip(found, ("x.grad", "k.grad", "v.grad", "weight.grad"), strict=True):
        torch.testing.assert_close(grad.view(work.expected[name].shape), work.expected[name])


def test_cases():
    case = attention_case("llama-70b.attention", 8192, 8)
    assert (case.M, case.N, case.K, case.batch) == (8192, 8192, 1024, 1)
    assert (case.heads, case.kv_heads, case.head_dim) == (8, 1, 128)
    paper = attention_case("paper.attention-16x4096", 65536, 4)
    assert (paper.rows, paper.batch, paper.N, paper.K) == (4096, 16, 4096, 1024)
    assert tokens_of(paper.name, (8192,)) == (65536,)
    assert tokens_of(case.name, (8192, 4096)) == (8192, 4096)
    for name, M, size, words in (
        ("llama-8b.qkv", 8192, 2, "unknown case"),
        ("llama-8b.attention", 8192, 3, "8192 rows must be a multiple of the group size 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            attention_case(name, M, size)


def test_the_bound_is_between_the_closed_form_and_no_overlap():
    case = attention_case("llama-8b.attention", 8192, 8)
    for compute_ms, comm_ms in ((1.0, 0.1), (1.0, 0.9), (1.0, 3.0)):
        for splits in (1, 2, 4):
            bound = attention_bound_ms(case, compute_ms, comm_ms, splits)
            assert max(compute_ms, comm_ms) <= bound * (1 + 1e-9)
            assert bound <= compute_ms + comm_ms
    # With nothing masked out all splits cost the same, and the closed form is exact.
    flat = dataclasses.replace(case, M=8, heads=1, head_dim=1, N=4096, K=4096)
    assert math.isclose(attention_bound_ms(flat, 1.0, 0.5, 1), closed_form_us(1.0, 0.5, 8), rel_tol=1e-2)


def test_attention_blocks_are_no_headline(small):
    """Fails without the look at the operation: the headline is one of linears."""
    rows, _ = small
    timed = [dataclasses.replace(row, device="a GPU", M=HEADLINE_M) for row in rows]
    assert set(summarize(timed).metrics) == {"never_slower"}


@pytest.mark.parametrize("group_size", [2, 4])
def test_every_way_of_a_split_sequence_gives_the_same(group_size):
    settings = Settings(models=("llama-8b",), tokens=(2048,), shrink=32, rounds=1, kind="ulysses")
    rows, outcome = run_settings(group_size, settings)[0]
    assert (outcome.missing, outcome.failures) == ([], [])
    assert set(outcome.left_out) == {"transformer_engine"}
    names = {"compute_only", "comm_only collective", "sequential", "planned"}
    names |= {f"{path} m={m} gloo" for m in (1, 2, 4) for path in ("overlapped", "with_projections")}
    assert {(row.pass_name, row.variant) for row in rows} == {(p, v) for p in ("fprop", "backward") for v in names}
    checked = [row for row in rows if row.path in ("sequential", "overlapped")]
    assert all(row.max_error is not None and row.max_error < 1e-5 for row in checked)
    assert {row.path for row in rows if row.variant == "planned"} == {"overlapped"}


def test_emulated_groups_of_a_split_sequence_say_so():
    settings = Settings(models=("llama-8b",), tokens=(2048,), shrink=32, rounds=1, kind="ulysses", virtual_ranks=(4, 8))
    rows, outcome = run_settings(2, settings)[0]
    assert (outcome.missing, outcome.failures) == ([], [])
    names = {"compute_only", "comm_only collective", "sequential", *(f"overlapped m={m} gloo" for m in (1, 2, 4))}
    assert {(row.group_size, row.variant) for row in rows} == {(size, name) for size in (4, 8) for name in names}
    assert {(row.emulated, row.op, row.M) for row in rows} == {(True, "ulysses_attention", 2048 // 32)}
    checked = [row.max_error for row in rows if row.path == "overlapped"]
    assert len(checked) == 6
    assert max(checked) < 1e-5


@on_ranks(2)
def test_a_wrong_row_of_a_split_sequence_is_noticed(group, device):
    case = ulysses_case("llama-8b.ulysses", 2048, 2, 32)
    work = make_work(case, "fprop", group, Pool(CPU, torch.float32, group.rank()))
    # Without its order, as a rank that takes what it holds for the first half of the sequence.
    with OverlapContext(group, OverlapConfig()) as context, torch.no_grad():
        attend = functools.partial(ops.ulysses_attention, context=context)
        found = {"y": ulysses_block(case, work.operands, attend)}
    with pytest.raises(VerificationError, match="differs"):
        check_results(work, "contiguous", found)
