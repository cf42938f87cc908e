"""The benchmark from end to end on CPU ranks: everything is built, found right and written down."""

import pytest
import torch

from commfuse_megatron.errors import UnsupportedError, VerificationError
from commfuse_megatron.tools.bench import run as run_module
from commfuse_megatron.tools.bench.bounds import sequential
from commfuse_megatron.tools.bench.catalog import make_work
from commfuse_megatron.tools.bench.emulate import EmulatedPath
from commfuse_megatron.tools.bench.operands import Pool, check_results
from commfuse_megatron.tools.bench.ours import Ours, PathOptions
from commfuse_megatron.tools.bench.run import Settings, grid, run_grid
from commfuse_megatron.tools.bench.timing import Timed, measure, measure_host_us
from commfuse_megatron.tools.bench.variant import Plain
from commfuse_megatron.tools.common.cases import Case, linear_case, ulysses_case
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.harness.threads import on_ranks, run_threads

CPU = torch.device("cpu")
# Megatron and its stand-ins for CUDA belong to a process, not to a thread.
OURS = ("planned", "sliced", "slices_only", "slicing", "bulk", "async")


def run_settings(group_size: int, settings: Settings):
    def body(group, device):
        rows = []
        pieces = grid(settings, group.size())
        outcome = run_grid(pieces, group, device, settings, on_rows=lambda _, new: rows.extend(new))
        return rows, outcome

    return run_threads(group_size, body, timeout_s=50)


def run_8b(group_size: int = 2, **options):
    """Rows and outcome by rank, of small linears of 8B."""
    usual = {"models": ("llama-8b",), "tokens": (2048,), "shrink": 64, "rounds": 1}
    return run_settings(group_size, Settings(**usual | options))


@pytest.mark.parametrize("group_size", [2, 4])
def test_every_variant_gives_the_sequential_result(group_size):
    results = run_8b(group_size, linears=("qkv", "fc2"), variants=OURS)
    rows, outcome = results[0]
    assert (outcome.missing, outcome.failures) == ([], [])
    assert outcome.left_out == {}
    names = {row.variant for row in rows}
    assert {"compute_only", "comm_only collective", "comm_only gloo", "sequential", "planned"} <= names
    assert {"slicing C=2", "sliced m=4 gloo", "slices_only m=2 torch", "bulk gloo", "async"} <= names
    checked = {row.variant: row.max_error for row in rows if row.max_error is not None}
    assert {"planned", "slicing C=2", "sliced m=1 gloo", "bulk gloo"} <= set(checked)
    assert max(checked.values()) < 1e-5
    (sliced,) = [r for r in rows if (r.case, r.pass_name, r.variant) == ("llama-8b.fc2", "fprop", "sliced m=2 gloo")]
    assert (sliced.path, sliced.transport, sliced.chunks_per_shard) == ("sliced", "gloo", 2)
    assert (sliced.host_us is None) == (sliced.median_ms > 3.0), "long calls are not timed thirty times more"
    assert sliced.tail_ms >= 0
    assert sliced.split_loss_ms is not None
    assert sliced.schedule_bound_ms is not None
    assert (sliced.device, sliced.exposed_ms) == ("cpu", None)
    # All ranks come to the same rows, since they decide on them together.
    assert [row.median_ms for row in rows] == [row.median_ms for row in results[1][0]]


@pytest.mark.parametrize("group_size", [2, 4])
def test_linears_without_sequence_parallelism(group_size):
    """Each in the pass that sends."""
    rows, outcome = run_8b(group_size, kind="all-reduce", linears=("qkv", "fc2"), variants=OURS)[0]
    assert (outcome.missing, outcome.failures, outcome.left_out) == ([], [], {})
    passes = {(row.case, row.op, row.pass_name) for row in rows}
    assert passes == {
        ("llama-8b.qkv", "linear_grad_all_reduce", "backward"), ("llama-8b.fc2", "linear_all_reduce", "fprop"),
    }  # fmt: skip
    checked = {(row.op, row.variant): row.max_error for row in rows if row.max_error is not None}
    forced = ("planned", "sliced m=1 gloo", "sliced m=4 gloo")
    assert {(op, name) for _, op, _ in passes for name in forced} <= set(checked)
    assert ("linear_grad_all_reduce", "async") in checked
    assert max(checked.values()) < 1e-5
    assert not any("ring" in row.variant or row.variant.startswith("slicing") for row in rows)
    assert {row.schedule_bound_ms for row in rows} == {None}


@pytest.mark.parametrize(("chunks", "forced"), [((2,), {"sliced m=2 gloo"}), ((), set())])
def test_chunks_that_are_asked_for_are_forced_in_every_case(chunks, forced):
    """At M 1024 they were left out without a word."""
    sizes = {"linears": ("fc2",), "tokens": (1024,), "passes": ("fprop",)}
    rows, outcome = run_8b(**sizes, variants=("planned", "sliced"), chunks=chunks)[0]
    assert {row.variant for row in rows if row.variant.startswith("sliced")} == forced
    assert (outcome.missing, outcome.failures) == ([], [])


def test_a_run_stops_before_its_time_is_up():
    for rows, outcome in run_8b(variants=("none",), budget_s=0.0):
        assert len(outcome.missing) + len({row.problem for row in rows}) == 8
        assert "no time left" in outcome.missing[-1]


def test_sizes_that_the_group_does_not_divide_are_missing():
    ((rows, outcome), _) = run_8b(linears=("qkv",), tokens=(65,), passes=("fprop",), shrink=1)
    assert rows == []
    assert "multiples of the group size" in outcome.missing[0]


def test_cases_without_what_they_are_compared_with_are_missing(monkeypatch):
    build = Plain.build

    def refuse(self, work):
        if self.name == "sequential" and work.expected:
            raise UnsupportedError("not today")
        return build(self, work)

    monkeypatch.setattr(Plain, "build", refuse)
    for rows, outcome in run_8b(linears=("qkv",), passes=("fprop",), variants=("planned",)):
        assert rows == []
        assert outcome.missing == ["llama-8b.qkv M=2048 fprop: nothing to compare with: there is no sequential"]
        assert outcome.left_out == {"sequential": "not today"}


@pytest.mark.parametrize("virtual_ranks", [2, 4, 8])
@pytest.mark.parametrize(("path", "chunks", "name"), [
    ("sliced", 1, "qkv"), ("sliced", 1, "proj"), ("overlapped", 1, "ulysses"), ("overlapped", 2, "ulysses"),
])  # fmt: skip
@on_ranks(2)
def test_emulated_groups_compute_with_what_was_sent(group, device, virtual_ranks, path, chunks, name):
    pool = Pool(device, torch.float32, seed=group.rank())
    make_case = ulysses_case if name == "ulysses" else linear_case
    case = make_case(f"llama-8b.{name}", 2048, virtual_ranks, 32)
    work = make_work(case, "fprop", group, pool, is_emulated=True)
    variant = EmulatedPath(path, "gloo", chunks)
    ready = variant.build(work)
    found = [ready.results() for _ in range(3)]
    assert max(check_results(work, variant.name, results) for results in found) < 1e-5
    # The peer's data differ from this rank's, so a slice of its own would be found out.
    with pytest.raises(VerificationError):
        check_results(work, variant.name, {"y": torch.roll(found[0]["y"], 1, 0)})
    variant.close()


def test_rows_of_emulated_groups_say_so():
    ((rows, outcome), _) = run_8b(linears=("fc1",), virtual_ranks=(4,))
    assert outcome.failures == []
    assert {(row.emulated, row.group_size, row.N) for row in rows} == {(True, 4, 28672 // 64 // 4)}
    assert {"compute_only", "comm_only gloo", "sequential", "sliced m=1 gloo"} <= {row.variant for row in rows}


@on_ranks(3)
def test_larger_groups_are_emulated_on_two_ranks_only(group, device):
    with pytest.raises(UnsupportedError, match="on 2 ranks, not on 3"):
        make_work(
            linear_case("llama-8b.proj", 2048, 8, 32), "fprop", group, Pool(device, torch.float32, 0), is_emulated=True
        )


@on_ranks(2)
def test_a_forced_path_that_fell_back_is_an_error(group, device):
    work = make_work(linear_case("llama-8b.proj", 2048, 2, 64), "fprop", group, Pool(device, torch.float32, 0))
    variant = Ours(PathOptions(path="sliced", backend="gloo"))
    ready = variant.build(work)
    ready.results()
    variant.check_path(work, ready)
    variant.options = PathOptions(path="bulk", backend="gloo")
    with pytest.raises(VerificationError, match="fell back to sliced"):
        variant.check_path(work, ready)
    variant.close()


@on_ranks(2)
def test_a_wrong_result_is_found(group, device):
    work = make_work(linear_case("llama-8b.qkv", 2048, 2, 64), "backward", group, Pool(device, torch.float32, 0))
    found = sequential(work).results()
    assert check_results(work, "sequential", found) == 0.0
    with pytest.raises(VerificationError, match=r"weight\.grad differs from the sequential program"):
        check_results(work, "sequential", found | {"weight.grad": found["weight.grad"] * 1.1})
    with pytest.raises(VerificationError, match=r"x\.grad has shape"):
        check_results(work, "sequential", found | {"x.grad": found["x.grad"][:1]})


@on_ranks(2)
def test_bursts_are_prepared_outside_of_the_timed_part(group, device):
    ahead = []
    timed = Timed(ahead.pop, lambda calls: ahead.extend([0] * calls))
    samples = measure({"one": timed, "two": lambda: None}, group, rounds=3, device=device)
    assert samples["one"].rounds == 3
    assert measure_host_us(timed, group, device) >= 0
    assert not ahead


def test_what_fails_on_one_rank_is_left_out_on_all(monkeypatch):
    check = run_module.check_results

    def check_but_fail_on_the_second(work, name, found):
        if name == "slicing C=2" and work.group.rank() == 1:
            raise ZeroDivisionError("only here")
        if name == "sliced m=2 gloo" and work.group.rank() == 0:
            raise VerificationError("wrong only here")
        return check(work, name, found)

    monkeypatch.setattr(run_module, "check_results", check_but_fail_on_the_second)
    monkeypatch.setattr(Plain, "is_foreign", True)
    (rows, first), (_, second) = run_8b(linears=("qkv",), variants=("slicing", "sliced"))
    passes = ("fprop", "backward")
    assert first.left_out == {f"slicing C=2, {name}": "it failed on another rank" for name in passes}
    assert second.left_out == {f"slicing C=2, {name}": "ZeroDivisionError: only here" for name in passes}
    assert first.failures == ["sliced m=2 gloo: wrong only here"] * 2
    assert second.failures == ["sliced m=2 gloo: it failed on another rank"] * 2
    assert not {"slicing C=2", "sliced m=2 gloo"} & {row.variant for row in rows}
    assert {"slicing C=4", "sliced m=1 gloo"} <= {row.variant for row in rows}


@pytest.mark.parametrize("path", ["sliced", "grouped", "bulk"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("op", ["all_gather_linear", "linear_reduce_scatter"])
def test_linears_of_emulated_groups_over_tapes(op, size, path, monkeypatch):
    emulate_copy_engine(monkeypatch)

    def body(group, device):
        case = Case("some", op, M=16 * size, N=16, K=24, batch=2, group_size=size)
        variant = EmulatedPath(path, "copy_engine")
        for pass_name in variant.passes:
            work = make_work(case, pass_name, group, Pool(CPU, torch.bfloat16, group.rank()), is_emulated=True)
            with take_part(group):
                check_results(work, variant.name, variant.build(work).results())
            next(iter(work.expected.values()))[0] += 1.0
            with take_part(group), pytest.raises(VerificationError, match="differs"):
                check_results(work, variant.name, variant.build(work).results())
        variant.close()

    run_threads(2, body)
