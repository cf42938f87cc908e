"""`commfuse verify` passes what is right and finds what is wrong."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import ops
from commfuse_megatron.kernels.attention import MathAttention
from commfuse_megatron.problem import AttentionProblem, RowRange, VisibleKeys
from commfuse_megatron.runtime import hardware
from commfuse_megatron.runtime.tape_program import Tapes
from commfuse_megatron.tools.common.modes import MODES
from commfuse_megatron.tools.verify import cases as cases_of_verify
from commfuse_megatron.tools.verify import ops as verify
from commfuse_megatron.tools.verify.calls import LINEARS, tolerance
from commfuse_megatron.tools.verify.cases import Case, modes_of
from commfuse_megatron.tools.verify.ops import CaseResult, Deviation, compare, run_cases, worst_of
from commfuse_megatron.transport import tape_graphs
from tests.harness import run_threads
from tests.harness.emulated_gpu import emulate_copy_engine, take_part

make_cases = functools.cache(cases_of_verify.make_cases)


def results_of(group_size: int, cases: list[Case]) -> list[CaseResult]:
    """Results merged over ranks run as threads."""

    def body(group: dist.ProcessGroup, device: torch.device) -> list[CaseResult]:
        with take_part(group):
            return run_cases(group, device, cases)

    return [worst_of(results) for results in zip(*run_threads(group_size, body), strict=True)]


def linears(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.op in LINEARS]


def some_cases(group_size: int, **wanted: object) -> list[Case]:
    """The cases whose fields have the wanted values."""
    return [
        case
        for case in make_cases(group_size, "cpu")
        if all(getattr(case, name, getattr(case.call, name, None)) == value for name, value in wanted.items())
    ]


def all_passed(group_size: int, cases: list[Case], at_least: int) -> list[CaseResult]:
    """The results, of so many cases or more, all of them good."""
    found = results_of(group_size, cases)
    assert len(found) == len(cases) > at_least
    assert [(result.case, result.complaints) for result in found if not result.passed] == []
    return found


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_the_operations_pass(group_size: int) -> None:
    cases = linears(some_cases(group_size, dtype=torch.bfloat16, chunks_per_shard=2))
    cases += linears(some_cases(group_size, dtype=torch.float64, variant="S changes", backward_path="sliced"))
    cases += some_cases(group_size, dtype=torch.float32, path="sequential")
    found = all_passed(group_size, cases, 50)
    assert {mode for result in found for mode in result.modes} == {"stepped"}, "gloo has no other"
    expected = {"local"} if group_size == 1 else {"sliced", "sequential", "async", "local"}
    assert {path for result in found for path in result.paths} == expected


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_attention_embedding_and_bulk_passes_pass(group_size: int) -> None:
    cases = some_cases(group_size, op="embedding_reduce_scatter", dtype=torch.float16)
    for dtype in (torch.float64, torch.bfloat16):
        cases += some_cases(group_size, op="query_split_attention", dtype=dtype)
    cases += some_cases(group_size, backward_path="bulk", dtype=torch.float64)
    found = all_passed(group_size, cases, 100)
    paths = {path for result in found for path in result.paths}
    assert paths == ({"local"} if group_size == 1 else {"query_split", "row_parallel", "sliced", "bulk"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_that_sees_a_key_too_few_fails(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AttentionProblem.visible_keys

    def wrong(problem: AttentionProblem, queries: RowRange) -> VisibleKeys:
        visible = right(problem, queries)
        return VisibleKeys(RowRange(visible.keys.start + (queries.start > 0), visible.keys.stop), visible.left, 0)

    monkeypatch.setattr(AttentionProblem, "visible_keys", wrong)
    cases = some_cases(2, op="query_split_attention", dtype=dtype, variant="causal")
    assert not any(result.passed for result in results_of(2, cases))


def test_the_cases_cover_what_is_promised() -> None:
    cases = make_cases(4, "cpu")
    assert len(set(cases)) == len(cases)
    assert {case.call.dtype for case in cases} == {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    assert {(case.algorithm, case.chunks_per_shard) for case in cases} == {
        (algorithm, chunks) for algorithm in ("ring", "direct") for chunks in (1, 2, 3)
    }
    layouts = {case.call.layout for case in linears(cases)}
    assert layouts == {"contiguous", "x transposed", "x strided", "gradient expanded"}
    others = {"embedding_reduce_scatter", "query_split_attention", "ulysses_attention", "ulysses_block"}
    assert {case.op for case in cases} == {*LINEARS, *others}
    assert torch.float64 not in {case.call.dtype for case in make_cases(4, "cuda")}


@pytest.mark.parametrize("group_size", [1, 2, 4, 8, 64])
def test_exact_sums_fit_the_mantissa_of_bfloat16(group_size: int) -> None:
    for case in linears(make_cases(group_size, "cpu")):
        call = case.call
        if call.exact:
            tokens = max(case.rows) * call.batch
            assert 2 * call.K * group_size + 1 <= 257
            assert call.N * group_size <= 256
            # The products of a weight gradient are random signs: their sum stays far below its bound of 2 * tokens.
            assert 6 * math.sqrt(2 * tokens) <= 256


def test_the_tolerance_is_far_below_a_wrong_answer() -> None:
    for case in linears(make_cases(8, "cuda")):
        if not case.call.exact:
            terms = case.call.K * 8
            assert tolerance(case.call, 8, terms) < 0.3 * math.sqrt(terms), case


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


def test_a_block_that_projects_other_heads_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.ulysses_block

    def wrong(x: torch.Tensor, qkv_weight: torch.Tensor, *others: object, **more: object) -> torch.Tensor:
        return right(x, qkv_weight.roll(1, 0), *others, **more)

    cases = some_cases(2, op="ulysses_block", dtype=torch.bfloat16, path="overlapped", variant="zigzag")
    all_passed(2, cases, 1)
    monkeypatch.setattr(verify.ops, "ulysses_block", wrong)
    assert not any(result.passed for result in results_of(2, cases))


def test_the_right_answer_on_another_path_fails() -> None:
    (case,) = some_cases(2, op="all_gather_linear", dtype=torch.float32, path="sequential")

    class AsksForSliced(Case):
        def expected_path(self, pass_name: str) -> str:
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

    def worst(*max_errors: float, complaints: tuple[str, ...] = ()) -> CaseResult:
        shared = {"case": case, "paths": ("sliced",), "transport": "gloo", "gemms": ("torch",), "modes": {}}
        deviations = [Deviation(tensor="y", max_error=error, allowed=1.0) for error in max_errors]
        return worst_of([CaseResult(**shared, deviations=(each,), complaints=complaints) for each in deviations])

    assert worst(0.1, 0.5).deviations[0].max_error == 0.5
    assert worst(0.1, 0.5).passed
    assert math.isnan(worst(0.1, math.nan, math.inf).deviations[0].max_error)
    assert worst(2.0, 3.0, complaints=("bad",)).complaints == ("bad",)


# --- modes of the copy engine, which is emulated: every call with a graph is launched as one at once ------------------


@pytest.fixture
def copy_engine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    machine = emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", -1)  # malloc repeats itself less than the allocator for GPUs
    # As on a GPU, where cuDNN takes what the plain attention stands for here, but one query that sees one key.
    monkeypatch.setattr(
        machine, "tapes_unavailable_reason", lambda _, dtype: None if dtype.itemsize == 2 else "wide", raising=False
    )
    monkeypatch.setattr(cases_of_verify, "cudnn_attention_unavailable_reason", lambda *_: None)
    bind = machine.attention.bind_forward

    def bind_more_than_one(kernel: MathAttention, operands: tuple, *more: object) -> object:
        return None if operands[0].size(0) == operands[1].size(0) == 1 else bind(kernel, operands, *more)

    monkeypatch.setattr(machine.attention, "bind_forward", bind_more_than_one)
    return monkeypatch


def emulated(group_size: int, **wanted: object) -> list[Case]:
    return [dataclasses.replace(case, transport="copy_engine") for case in some_cases(group_size, **wanted)]


def is_taped(case: Case) -> bool:
    wanted = itertools.product(("fprop", "backward"), case.rows)
    return any("tape" in modes_of(case, *each, "copy_engine", torch.device("cpu")) for each in wanted)


@pytest.mark.parametrize("group_size", [2, 3])
def test_every_case_runs_in_every_mode_that_it_can_take(group_size: int, copy_engine: pytest.MonkeyPatch) -> None:
    cases = emulated(group_size, dtype=torch.bfloat16, chunks_per_shard=2, algorithm="direct", variant="S changes")
    cases += emulated(group_size, dtype=torch.bfloat16, chunks_per_shard=2, algorithm="direct", variant="one row")
    cases += emulated(group_size, dtype=torch.bfloat16, chunks_per_shard=2, variant="odd output features")
    cases += emulated(group_size, dtype=torch.bfloat16, backward_path="bulk", variant="uneven")
    if group_size > 2:
        cases += emulated(group_size, dtype=torch.bfloat16, path="grouped", variant="uneven")
        cases += emulated(group_size, dtype=torch.bfloat16, path="grouped", variant="one row")
    cases += emulated(group_size, dtype=torch.float16, backward_path="row_parallel", variant="fused projection")
    cases += emulated(group_size, dtype=torch.float16, backward_path="query_split", variant="causal")
    cases += emulated(group_size, dtype=torch.float32, chunks_per_shard=1, variant="even")
    cases += emulated(group_size, dtype=torch.float16, keep_gathered_input=True)
    cases += emulated(group_size, dtype=torch.float16, path="sequential")
    cases += emulated(group_size, dtype=torch.float16, path="overlapped", variant="zigzag")
    for result in all_passed(group_size, cases, 40):
        case = result.case
        passes = sum(case.expected_path(name) != "local" for name in ("fprop", "backward"))
        calls = passes * len(case.rows)
        if case.path == "sequential":
            assert result.modes == {}
        elif not is_taped(case):
            assert result.modes == {"stepped": calls}
        elif case.op in LINEARS:
            tape, graph = passes * (len(case.rows) + 1 + len(case.rows)), passes * (2 * len(case.rows) + 6)
            assert result.modes == {"stepped": calls, "tape": tape, "graph": graph}
        else:
            assert set(result.modes) == set(MODES[:2] if case.op == "ulysses_block" else MODES)


@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_most_cases_in_16_bits_are_served_by_tapes(group_size: int, copy_engine: pytest.MonkeyPatch) -> None:
    cases = [case for case in make_cases(group_size, "cuda") if case.call.dtype.itemsize == 2]
    taped = [case for case in cases if is_taped(case)]
    assert len(taped) >= len(cases) / 2
    assert {case.op for case in taped} == {case.op for case in cases}
    untaped = {case.variant for case in cases if case.algorithm == "direct" and not is_taped(case)}
    assert {"odd output features", "odd input features"} <= untaped


LINEAR = {"op": "linear_reduce_scatter", "dtype": torch.bfloat16, "algorithm": "direct", "chunks_per_shard": 1}


def test_a_graph_with_a_wrong_step_is_found(copy_engine: pytest.MonkeyPatch) -> None:
    capture = tape_graphs.TapeGraphs._capture

    def forget_the_last_product(graphs: tape_graphs.TapeGraphs, *call: object) -> object:
        graph = capture(graphs, *call)
        number = max(n for n, (action, _) in enumerate(graph._nodes) if "_Matmul" in str(action))
        graph._nodes[number] = (lambda: None, graph._nodes[number][1])
        return graph

    cases = emulated(2, **LINEAR, variant="even", backward_path="sliced", path="sliced", keep_gathered_input=False)
    assert [result.passed for result in results_of(2, cases)] == [True]
    copy_engine.setattr(tape_graphs.TapeGraphs, "_capture", forget_the_last_product)
    (result,) = results_of(2, cases)
    assert ": error " in result.complaints[0]
    assert set(result.modes) == set(MODES)


def break_modes(fault: str, copy_engine: pytest.MonkeyPatch) -> None:
    if fault == "no graph":
        copy_engine.setattr(tape_graphs.TapeGraphs, "_capture", lambda *_: None)
    elif fault == "no tape":
        copy_engine.setattr(Tapes, "_look_up", lambda *_: None)
    else:
        copy_engine.setattr(hardware.current, "tapes_unavailable_reason", lambda *_: None)


def only_complaints(cases: list[Case]) -> tuple[str, ...]:
    """Of one case, which fails however right its numbers are."""
    (result,) = results_of(2, cases)
    assert all(deviation.passed for deviation in result.deviations)
    assert not result.passed
    return result.complaints


@pytest.mark.parametrize(("fault", "complaint"), [
    ("no graph", "up to graph: ran tape 10; the last call, whose addresses had come before, was no graph"),
    ("no tape", "up to tape: ran stepped 5, should have run tape 5"),
    ("a tape too many", "up to graph: ran graph 2, should have run stepped 2"),
])  # fmt: skip
def test_a_mode_that_did_not_run_as_it_should_is_an_error(fault, complaint, copy_engine) -> None:
    break_modes(fault, copy_engine)
    dtype = torch.float32 if fault == "a tape too many" else torch.bfloat16
    wanted = LINEAR | {"dtype": dtype, "variant": "even", "backward_path": "sliced", "keep_gathered_input": False}
    complaints = only_complaints(emulated(2, **wanted))
    assert sum(complaint in each for each in complaints) == 2 * 2, "two passes, two ranks"


@pytest.mark.parametrize(("op", "fault", "complaint"), [
    ("ulysses_attention", "no graph", "the last call, whose addresses had come before, was no graph"),
    ("ulysses_attention", "no tape", "ran stepped"), ("ulysses_block", "no tape", "ran stepped"),
])  # fmt: skip
def test_modes_of_a_split_sequence_must_run_too(op, fault, complaint, copy_engine) -> None:
    cases = emulated(2, op=op, dtype=torch.bfloat16, path="overlapped", chunks_per_shard=2, variant="causal")
    (good,) = all_passed(2, cases, 0)
    assert set(good.modes) == set(MODES[:2] if op == "ulysses_block" else MODES)
    break_modes(fault, copy_engine)
    complaints = only_complaints(cases)
    passes = {each.partition(",")[0] for each in complaints if complaint in each}
    assert passes == {"fprop", "backward"}, complaints
