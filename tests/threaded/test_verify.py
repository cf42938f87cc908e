"""`commfuse verify` passes what is right and finds what is wrong."""

import dataclasses
import math

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import ops
from commfuse_megatron.problem import AttentionProblem, RowRange, VisibleKeys
from commfuse_megatron.verify import ops as verify
from commfuse_megatron.verify.attention import make_attention_cases
from commfuse_megatron.verify.cases import Case, make_cases
from commfuse_megatron.verify.ops import CaseResult, Deviation, compare, run_cases, tolerance, worst_of
from tests.harness import run_threads


def results_of(group_size: int, cases: list[Case]) -> list[CaseResult]:
    """Results merged over ranks run as threads."""

    def body(group: dist.ProcessGroup, device: torch.device) -> list[CaseResult]:
        return run_cases(group, device, cases)

    return [worst_of(results) for results in zip(*run_threads(group_size, body), strict=True)]


def some_cases(group_size: int, **wanted: object) -> list[Case]:
    """The cases whose fields have the wanted values."""
    return [
        case
        for case in make_cases(group_size, "cpu")
        if all(getattr(case, name) == value for name, value in wanted.items())
    ]


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_the_operations_pass(group_size: int) -> None:
    cases = some_cases(group_size, dtype=torch.bfloat16, chunks_per_shard=2)
    cases += some_cases(group_size, dtype=torch.float64, variant="S changes")
    cases += some_cases(group_size, dtype=torch.float32, path="sequential")
    found = results_of(group_size, cases)
    assert len(found) == len(cases) > 50
    assert [result.complaints for result in found if not result.passed] == []
    expected = {"local"} if group_size == 1 else {"sliced", "sequential"}
    assert {path for result in found for path in result.paths} == expected


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_query_split_attention_passes(group_size: int) -> None:
    cases = make_attention_cases(group_size, "cpu")
    found = results_of(group_size, cases)
    assert len(found) == len(cases) == 108
    assert [result.complaints for result in found if not result.passed] == []
    paths = {path for result in found for path in result.paths}
    assert paths == ({"local"} if group_size == 1 else {"query_split", "row_parallel"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_that_sees_a_key_too_few_fails(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AttentionProblem.visible_keys

    def wrong(problem: AttentionProblem, queries: RowRange) -> VisibleKeys:
        visible = right(problem, queries)
        return VisibleKeys(RowRange(visible.keys.start + (queries.start > 0), visible.keys.stop), visible.left, 0)

    monkeypatch.setattr(AttentionProblem, "visible_keys", wrong)
    cases = [case for case in make_attention_cases(2, "cpu", dtype) if case.variant == "causal"]
    assert not any(result.passed for result in results_of(2, cases))


def test_the_cases_cover_what_is_promised() -> None:
    cases = make_cases(4, "cpu")
    assert len(set(cases)) == len(cases)
    assert {case.dtype for case in cases} == {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    assert {(case.algorithm, case.chunks_per_shard) for case in cases} == {
        (algorithm, chunks) for algorithm in ("ring", "direct") for chunks in (1, 2, 3)
    }
    assert {case.layout for case in cases} == {"contiguous", "x transposed", "x strided", "gradient expanded"}
    assert torch.float64 not in {case.dtype for case in make_cases(4, "cuda")}


@pytest.mark.parametrize("group_size", [1, 2, 4, 8, 64])
def test_exact_sums_fit_the_mantissa_of_bfloat16(group_size: int) -> None:
    for case in make_cases(group_size, "cpu"):
        if case.exact:
            tokens = max(case.rows) * case.batch
            assert 2 * case.K * group_size + 1 <= 257
            assert case.N * group_size <= 256
            # The products of a weight gradient are random signs: their sum stays far below its bound of 2 * tokens.
            assert 6 * math.sqrt(2 * tokens) <= 256


def test_the_tolerance_is_far_below_a_wrong_answer() -> None:
    for case in make_cases(8, "cuda"):
        if not case.exact:
            terms = case.K * 8
            assert tolerance(case, terms) < 0.3 * math.sqrt(terms), case


FAULTS = ("forgets the bias", "drops a rank", "scrambles rows")


@pytest.mark.parametrize(
    ("fault", "exact"),
    # Small integers survive the sum's rounding to bfloat16; random numbers do not.
    [*((fault, exact) for fault in FAULTS for exact in (True, False)), ("sums in bfloat16", False)],
)
def test_a_wrong_operation_is_found(fault: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.linear_reduce_scatter

    def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, context: object) -> torch.Tensor:
        if fault == "forgets the bias":
            return right(x, weight, None, context=context) + 0 * bias
        if fault == "drops a rank" and context.group_rank == 1:
            return right(0 * x, weight, bias, context=context)
        y = right(x, weight, bias, context=context)
        if fault == "sums in bfloat16":
            return y.bfloat16().to(y.dtype)
        return y.flip(0) if fault == "scrambles rows" else y

    monkeypatch.setattr(verify.ops, "linear_reduce_scatter", wrong)
    variant = "even" if exact else "even, random"
    (case,) = some_cases(
        2, op="linear_reduce_scatter", dtype=torch.float32, algorithm="ring", chunks_per_shard=1, variant=variant
    )
    (result,) = results_of(2, [case])
    assert not result.passed
    assert result.complaints[0].startswith("y: error")


def test_the_right_answer_on_another_path_fails() -> None:
    (case,) = some_cases(2, op="all_gather_linear", dtype=torch.float32, path="sequential")

    class AsksForSliced(Case):
        @property
        def expected_path(self) -> str:
            return "sliced"

    (result,) = results_of(2, [AsksForSliced(**{f.name: getattr(case, f.name) for f in dataclasses.fields(case)})])
    assert all(deviation.passed for deviation in result.deviations)
    assert not result.passed
    assert "took the path 'sequential' in fprop, asked for 'sliced'" in result.complaints[0]


def test_comparisons_fail_on_what_cannot_be_compared() -> None:
    one = torch.ones(2)
    assert compare("y", one, one, 0.0).passed
    assert compare("y", None, None, 0.0).passed
    assert not compare("y", None, one, 1e9).passed
    assert not compare("y", torch.ones(3), one, 1e9).passed
    assert not compare("y", torch.tensor([1.0, math.nan]), one, 1e9).passed
    assert not compare("y", one + 1e-7, one, 0.0).passed
    assert compare("y", torch.ones(0), torch.ones(0), 0.0).passed


def test_the_worst_rank_decides() -> None:
    (case,) = some_cases(2, op="all_gather_linear", dtype=torch.float32, path="sequential")

    def result(max_error: float, *complaints: str) -> CaseResult:
        return CaseResult(
            case=case,
            deviations=(Deviation(tensor="y", max_error=max_error, allowed=1.0),),
            paths=("sliced",),
            transport="gloo",
            gemms=("torch",),
            complaints=complaints,
        )

    assert worst_of([result(0.1), result(0.5)]).deviations[0].max_error == 0.5
    assert worst_of([result(0.1), result(0.5)]).passed
    assert math.isnan(worst_of([result(0.1), result(math.nan), result(math.inf)]).deviations[0].max_error)
    assert worst_of([result(0.1), result(2.0, "bad"), result(3.0, "bad")]).complaints == ("bad",)
