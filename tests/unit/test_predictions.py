"""Predictions, in a made-up world that follows the planner's model exactly, and on rows that were measured."""

import dataclasses
import functools
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.cost_model import PassCosts, predict_parts_us, predict_us
from commfuse_megatron.plan.machine import REPLAYED, Channel, MachineModel, Traits, assumed_machine
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools import main as cli
from commfuse_megatron.tools.bench.report import read_rows
from commfuse_megatron.tools.bench.rows import Report, Row, load_report
from commfuse_megatron.tools.common.cases import attention_case, linear_case
from commfuse_megatron.tools.simulate.fit import SEQUENTIAL, fit_channel_to, fit_machines
from commfuse_megatron.tools.simulate.predict import LIMITS, deviations, predict

LATENCY_US, GB_S, COLLECTIVE_GB_S, HOST = 8.0, 300.0, 200.0, 0.5
RATE = dataclasses.replace(assumed_machine(Traits(transport=""), "bfloat16").gemm, tflops=400.0, memory_gb_s=2000.0)
TRUTH = MachineModel(
    gemm=RATE,
    link=Channel(latency_us=LATENCY_US, bandwidth_gb_s=GB_S),
    collective=Channel(latency_us=LATENCY_US, bandwidth_gb_s=COLLECTIVE_GB_S),
    traits=Traits(transport="copy_engine", adds_in_epilogue=True, replays=True),
    source="made up",
    replay=REPLAYED.scaled(HOST),
)
HERE = {"device": "NVIDIA H200", "link": "nvlink"}


def gemm_us(M: int, N: int, K: int) -> float:
    return RATE.time_us(M, N, K, 2)


def a_row(case, variant, path, ms, **changes) -> Row:
    problem = case.problem("fprop", "bfloat16")
    messages = case.group_size - 1
    values = {
        "case": case.name, "op": case.op, "pass_name": "fprop", "M": case.M, "N": case.N, "K": case.K,
        "dtype": "bfloat16", "group_size": case.group_size, "variant": variant, "path": path, "transport": "none",
        "median_ms": ms, "p95_ms": ms, "compute_only_ms": gemm_us(case.M, case.N, case.K) / 1e3,
        "comm_only_ms": messages * TRUTH.link.time_us(problem.shard_bytes) / 1e3,
        "comm_only_collective_ms": TRUTH.collective.time_us(messages * problem.shard_bytes) / 1e3,
        "sequential_ms": 1.0, **HERE,
    }  # fmt: skip
    return Row(**(values | changes))


def sliced(m: int, algorithm: Algorithm = Algorithm.DIRECT) -> PassPlan:
    return PassPlan("sliced", "", algorithm, m, keep_gathered_input=False)


@functools.cache
def measured_rows() -> list[Row]:
    rows = []
    for name in ("llama-8b.qkv", "llama-8b.proj", "llama-70b.fc1", "llama-70b.fc2"):
        for M in (1024, 4096, 8192):
            case = linear_case(name, M, 2)
            problem = case.problem("fprop", "bfloat16")
            bounds = a_row(case, "x", "x", 1.0)
            rows.append(a_row(case, "compute_only", "compute", bounds.compute_only_ms))
            rows.append(a_row(case, "comm_only copy_engine", "transfers", bounds.comm_only_ms, transport="copy_engine"))
            collective_ms = bounds.comm_only_collective_ms
            rows.append(a_row(case, "comm_only collective", "transfers", collective_ms, transport="nccl"))
            sequential_ms = predict_us(problem, SEQUENTIAL, TRUTH) / 1e3
            rows.append(a_row(case, "sequential", "sequential", sequential_ms, transport="nccl"))
            for m in (1, 2):
                slices = 2 * m
                slices_ms = slices * gemm_us(M // slices, case.N, case.K) / 1e3
                rows.append(a_row(case, f"slices_only m={m} torch", "slices", slices_ms, chunks_per_shard=m))
                parts_us = predict_parts_us(problem, sliced(m), TRUTH)
                forced = {"transport": "copy_engine", "algorithm": "direct", "chunks_per_shard": m}
                # The own partial, the other rank's and the result.
                tail_ms = 3 * problem.shard_bytes / (RATE.memory_gb_s * 1e6)
                forced |= {"host_us": parts_us[1], "tail_ms": tail_ms}
                rows.append(a_row(case, f"sliced m={m} copy_engine", "sliced", max(parts_us) / 1e3, **forced))
    return rows


def test_the_machine_is_found_again():
    machines = fit_machines(measured_rows(), **HERE)
    found = machines.by_transport["copy_engine"]
    assert found.gemm.tflops == pytest.approx(RATE.tflops, rel=1e-6)
    assert found.gemm.memory_gb_s == pytest.approx(RATE.memory_gb_s, rel=1e-6)
    assert (found.link.latency_us, found.link.bandwidth_gb_s) == pytest.approx((LATENCY_US, GB_S), rel=1e-6)
    assert found.collective.bandwidth_gb_s == pytest.approx(COLLECTIVE_GB_S, rel=1e-6)
    assert found.replay.call_us == pytest.approx(TRUTH.replay.call_us, rel=1e-6)
    assert machines.assumed == []
    assert max(fit.error for fit in machines.fits.values()) < 1e-6


def test_what_the_rows_do_not_tell_is_assumed_and_said():
    bare = [dataclasses.replace(row, host_us=None, tail_ms=None) for row in measured_rows()]
    machines = fit_machines(bare, **HERE)
    assert machines.any.gemm.memory_gb_s == assumed_machine(Traits(transport=""), "bfloat16").gemm.memory_gb_s
    assert machines.any.replay == REPLAYED
    assert machines.assumed == ["memory at 2900 GB/s (tails of final sums)", "host time of calls, copy_engine"]


def test_a_channel_has_no_negative_latency():
    assert fit_channel_to([(1e6, 10.0), (2e6, 25.0), (3e6, 40.0)]).latency_us == 0.0
    assert fit_channel_to([(1e6, 10.0), (1e6, 11.0)]) is None
    assert fit_channel_to([(1e6, 20.0), (2e6, 20.0), (3e6, 19.0)]) is None


def test_measured_rows_are_predicted_where_the_model_holds():
    rows = measured_rows()
    machines = fit_machines(rows, **HERE)
    found = deviations(rows, machines)
    assert {deviation.variant for deviation in found} == {
        "sequential",
        "sliced m=1 copy_engine",
        "sliced m=2 copy_engine",
    }
    assert max(abs(deviation.error) for deviation in found) < 1e-6
    slower = [Row.from_json(row.as_json() | {"median_ms": 2 * row.median_ms}) for row in rows]
    assert deviations(slower, machines)[0].error == pytest.approx(-0.5)


RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
PUBLISHED = RESULTS / "linears_h200_202611.json"
FOUR_GPUS = RESULTS / "four_gpus_h200_202611.json"


@pytest.mark.parametrize(("file", "group_size", "channels"), [
    (PUBLISHED, 2, ("link", "collective")), (FOUR_GPUS, 4, ("collective",)),
])  # fmt: skip
def test_assumed_channels_are_those_of_the_rows(file, group_size, channels):
    rows = [row for row in load_report(file)[1] if row.is_comparable]
    told = fit_machines(rows, device="NVIDIA H200", link="nvlink").by_transport["copy_engine"]
    assumed = assumed_machine(told.traits, "bfloat16", group_size=group_size)
    for name in channels:
        for mib in (4, 64):
            expected_us = getattr(told, name).time_us(mib << 20)
            assert getattr(assumed, name).time_us(mib << 20) == pytest.approx(expected_us, rel=0.01)


@pytest.mark.parametrize(("file", "group_size", "count"), [(PUBLISHED, 2, 22), (FOUR_GPUS, 4, 12)])
def test_half_of_megatrons_backward_passes_hide_less(file, group_size, count):
    """What the model says stock's asynchronous collectives leave unhidden is the median of what was measured."""
    passes: dict[tuple[object, ...], dict[str, float]] = {}
    for row in read_rows(file):
        is_here = (row.get("op"), row.get("pass")) == ("all_gather_linear", "backward") and row.get("link") != "host"
        if is_here and row["M"] >= 4096 and not row.get("emulated"):
            key = (row["case"], row["M"], row["N"], row["K"], row["commit"])
            passes.setdefault(key, {})[row["variant"]] = row["median_ms"]
    shares = [
        (ms["megatron"] - ms["compute_only"]) / ms["comm_only collective"]
        for ms in passes.values()
        if {"megatron", "compute_only", "comm_only collective"} <= ms.keys()
    ]
    assert len(shares) == count
    problem = linear_case("llama-70b.fc1", 8192, group_size).problem("backward", "bfloat16")
    plan = PassPlan("async", "", Algorithm.DIRECT, 1, keep_gathered_input=False)
    collectives_us = 2 * TRUTH.collective.time_us((group_size - 1) * problem.shard_bytes)
    gemms_us = PassCosts(problem, TRUTH).product_us(problem.M) + PassCosts(problem, TRUTH).weight_gradient_us()
    unhidden = (predict_parts_us(problem, plan, TRUTH)[0] - gemms_us) / collectives_us
    assert unhidden == pytest.approx(statistics.median(shares), abs=0.01)


def test_slices_take_what_the_rate_of_whole_products_says():
    """Fails where less than a wave of large tiles counts as one: 73 % of one were to take 1.26 of what they do."""
    rows = [Row.from_json(row) for row in read_rows(PUBLISHED) if row.get("commit") == "65cc961"]
    forward = [row for row in rows if row.pass_name == "fprop" and row.is_linear]
    rate = fit_machines([row for row in forward if row.path != "slices"], **HERE).any.gemm
    for name, idle_sms in (("torch", None), ("persistent", 0)):
        slices = [row for row in forward if row.path == "slices" and row.variant.endswith(name)]
        assert len(slices) == 8 * 3
        for row in slices:
            count = row.group_size * row.chunks_per_shard
            predicted_us = count * rate.time_us(row.M // count, row.N, row.K, 2, idle_sms=idle_sms)
            assert predicted_us == pytest.approx(row.median_ms * 1e3, rel=0.13), (row.case, count)


@pytest.mark.parametrize(("file", "most"), [("linears", 0.021), ("four_gpus", 0.08)])
def test_the_median_error_on_measured_rows(file, most):
    """Curves of three terms and other host times had 0.024 and 0.106."""
    _, rows = load_report(RESULTS / f"{file}_h200_202611.json")
    real = [row for row in rows if not row.emulated and row.link == "nvlink"]
    errors = sorted(abs(deviation.error) for deviation in deviations(real, fit_machines(real, **HERE)))
    assert len(errors) > 100
    assert errors[len(errors) // 2] < most


def test_a_larger_group_is_cut_finer_until_launches_decide():
    machines = fit_machines(measured_rows(), **HERE)
    small = predict(linear_case("llama-8b.proj", 1024, 64), machines)
    assert {way.limit for way in small if way.variant != "sequential"} == {"launches"}
    large = linear_case("llama-70b.fc2", 8192, 8)
    ways = predict(large, machines)
    assert next(way.variant for way in ways if way.limit == "GEMMs") == "sliced m=1 copy_engine"
    sum_us = RATE.launch_us + RATE.pass_us(9 * 1024 * 8192 * 2)
    expected_us = 8 * gemm_us(1024, 8192, 28672 // 8) + sum_us
    (one_chunk,) = [way for way in ways if way.variant == "sliced m=1 copy_engine"]
    assert one_chunk.ms == pytest.approx(expected_us / 1e3)
    assert {way.variant for way in ways} == {"sequential", *(f"sliced m={m} copy_engine" for m in (1, 2, 4))}
    assert [way.ms for way in ways] == sorted(way.ms for way in ways)
    assert ways[0].as_json()["predicted"] is True


def test_without_rows_there_is_no_machine():
    rows = measured_rows()
    with pytest.raises(ConfigError, match="no `compute_only` rows"):
        fit_machines([row for row in rows if row.path not in ("compute", "slices")], **HERE)
    for wanted, message in (
        (lambda row: row.path != "transfers", "no `comm_only collective` rows"),
        (lambda row: row.transport != "copy_engine", "no `comm_only` rows of a transport"),
        (lambda row: row.M == 8192 or row.path != "transfers", "`comm_only copy_engine` rows do not show a bandwidth"),
        (lambda row: row.M == 8192 or row.variant != "comm_only collective", "`comm_only collective` rows do not show"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            fit_machines([row for row in one_width(rows) if wanted(row)], **HERE)
        assert "\n  torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda" in str(caught.value)
    with pytest.raises(ConfigError, match=r"link host.*\n  NCCL_P2P_DISABLE=1 torchrun"):
        fit_machines(rows, device="NVIDIA H200", link="host")


def one_width(rows: list[Row]) -> list[Row]:
    """Those of linears of one width: one size of message for each M."""
    return [row for row in rows if row.case.startswith("llama-70b")]


def simulate(rows_file: Path, *options: str | Path, models: tuple[str, ...] = ("llama-70b",)) -> dict[str, Any]:
    """What the command writes of these rows and models."""
    out = rows_file.with_name("out.json")
    asked = ("--rows", rows_file, "--models", *models, "--json", out, *options)
    assert cli.main(["simulate", *map(str, asked)]) == 0
    return json.loads(out.read_text())


def test_a_transport_without_a_bandwidth_is_left_out(rows_file: Path, capsys: pytest.CaptureFixture[str]):
    """Fails without going on: one transport's rows of one size stopped the others' predictions."""
    header, rows = load_report(rows_file)
    kept = [row for row in one_width(rows) if row.variant != "comm_only nccl" or row.M == 8192]
    Report(rows_file, header, kept).write()
    data = simulate(rows_file, "--ranks", "8")
    text = capsys.readouterr().out
    assert "left out transport nccl: 2 `comm_only nccl` rows do not show a bandwidth" in text
    assert set(data["machines"]["by_transport"]) == {"copy_engine"}
    assert {way["transport"] for way in data["predictions"] if way["variant"] != "sequential"} == {"copy_engine"}
    assert (
        cli.main(["simulate", "--rows", str(rows_file), "--ranks", "8", "--models", "llama-70b", "--link", "25"]) == 2
    )
    assert "nccl serves such links" in capsys.readouterr().err


def test_what_limits_a_prediction_is_explained(rows_file: Path, capsys: pytest.CaptureFixture[str]):
    options = ("--ranks", "2", "8", "--tokens", "1024", "8192")
    predictions = simulate(rows_file, *options, models=("llama-8b", "llama-70b"))["predictions"]
    out = capsys.readouterr().out
    # Sorted by case, the fastest first: only those are in the table.
    best = {(way["case"], way["M"], way["group_size"]): way["limit"] for way in reversed(predictions)}
    assert len(set(best.values())) > 1
    for limit, meaning in LIMITS.items():
        assert (f"  - {limit}: {meaning}" in out) == (limit in best.values())


@pytest.mark.parametrize(("content", "message"), [
    ({"a": 1}, 'it has no list "rows"'), ({"rows": 3}, 'it has no list "rows"'), ([], 'it has no list "rows"'),
    ({"rows": [{"pass": "fprop", "M": 1}]}, "row 1 of its rows has no case, op, N, K, "),
    ({"rows": [1]}, "row 1 of its rows has no case, op, pass, "),
])  # fmt: skip
def test_a_file_of_something_else_is_named_in_words(content, message, tmp_path: Path, capsys):
    """Fails without the look at what is there: it said KeyError('rows')."""
    (tmp_path / "x.json").write_text(json.dumps(content))
    assert cli.main(["simulate", "--rows", str(tmp_path / "x.json")]) == 2
    err = capsys.readouterr().err
    assert f"x.json is no file that `commfuse bench --json` wrote: {message}" in err
    assert "Error" not in err


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    nccl = [
        Row.from_json(row.as_json() | {"variant": "comm_only nccl", "transport": "nccl"})
        for row in measured_rows()
        if row.variant == "comm_only copy_engine"
    ]
    Report(tmp_path / "rows.json", {"multiprocessors": 132}, [*measured_rows(), *nccl]).write()
    return tmp_path / "rows.json"


def test_the_command_predicts_and_says_how_wrong_it_is(
    rows_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from matplotlib.figure import Figure

    heights, save = [], Figure.savefig

    def save_and_look(drawn: Figure, *args: object) -> None:
        save(drawn, *args)
        heights.append([axes.get_ylabel() for axes in drawn.axes])

    monkeypatch.setattr(Figure, "savefig", save_and_look)
    figure = rows_file.with_name("figure.png")
    options = ("--ranks", "8", "16", "--figure", figure)
    data = simulate(rows_file, *options)
    text = capsys.readouterr().out
    assert "predicted, not measured" in text
    assert re.search(r"median size of the error on 36 measured rows: 0\.0 %; the largest: [+-]0\.\d %, .* M=\d+", text)
    assert "may be predicted wrongly" not in text
    assert {prediction["group_size"] for prediction in data["predictions"]} == {8, 16}
    assert len(data["deviations"]) == 36
    assert figure.stat().st_size > 10_000
    assert heights == [2 * ["time / max(compute, comm), ratio"]]
    # A slower link that was not measured: nothing to check it with, and it takes longer.
    slow = simulate(rows_file, *options, "--link", "25")
    assert "no measured rows of this link" in capsys.readouterr().out
    assert slow["machines"]["by_transport"]["nccl"]["link"]["bandwidth_gb_s"] == 25
    assert min(p["comm_ms"] for p in slow["predictions"]) > min(p["comm_ms"] for p in data["predictions"])


def test_a_larger_group_stands_beside_what_two_ranks_said_of_it(rows_file: Path, capsys: pytest.CaptureFixture[str]):
    case, real = linear_case("llama-70b.fc1", 8192, 4), rows_file.with_name("four.json")

    def a_way(ms: float, case=case, variant="sliced m=1 copy_engine", **changes) -> Row:
        way = {"transport": "copy_engine", "algorithm": "direct", "chunks_per_shard": 1}
        return a_row(case, variant, "sliced", ms, **way | changes)

    def against(*rows: Row, models: tuple[str, ...] = ("llama-70b",)) -> list[dict[str, Any]]:
        Report(real, {}, list(rows)).write()
        return simulate(rows_file, "--ranks", "4", "--against", real, models=models)["against"]

    def refused(*rows: Row, asked: tuple[str, ...] = ()) -> str:
        Report(real, {}, list(rows)).write()
        options = ("--rows", str(rows_file), "--ranks", "4", "--models", "llama-70b", *asked, "--against", str(real))
        capsys.readouterr()
        assert cli.main(["simulate", *options]) == 2
        return capsys.readouterr().err

    emulated, over_host = a_way(2.2, emulated=True), a_way(22.0, emulated=True, link="host")
    Report(rows_file, {"multiprocessors": 132}, [*load_report(rows_file)[1], emulated, over_host]).write()
    measured, elsewhere = a_way(2.0), a_way(9.0, device="NVIDIA H100 80GB HBM3")
    (entry,) = against(measured, elsewhere)
    text = capsys.readouterr().out
    assert "median size of the error of the emulation: 10.0 %; the largest: 10.0 %" in text
    assert (entry["measured_ms"], entry["emulated_ms"]) == (2.0, 2.2)
    assert entry["emulation_error"] == pytest.approx(0.1)
    assert entry["prediction_error"] == pytest.approx(entry["predicted_ms"] / 2.0 - 1)
    planned = a_way(3.0, variant="planned")
    for of_the_way, measured_ms in ([planned], 3.0), ([planned, measured], 2.0):
        (alone,) = against(*of_the_way)
        assert (alone["variant"], alone["measured_ms"]) == ("sliced m=1 copy_engine", measured_ms)
        assert (alone["emulated_ms"], alone["predicted_ms"] is None) == (2.2, False)
    of_a_file = a_way(4.0, variant="few_sms")
    smaller = Row.from_json(measured.as_json() | {"N": case.N // 4, "K": case.K // 4, "shrink": 4, "median_ms": 0.2})
    for rows in ([measured, of_a_file, smaller], [smaller, of_a_file, measured]):
        large, small = sorted(against(*rows), key=lambda e: -e["measured_ms"])
        assert large == alone
        assert (small["emulated_ms"], small["predicted_ms"] < large["predicted_ms"]) == (None, True)
    for wanted in (("--models", "llama-8b"), ("--linears", "qkv")):
        assert "of these models and linears no forward rows" in refused(measured, elsewhere, asked=wanted)
    paper = a_way(2.0, linear_case("paper-mlp.fc1", 131072, 4))
    assert [entry["case"] for entry in against(measured, paper, models=("llama-8b",))] == ["paper-mlp.fc1"]
    assert "rows of other machines and links are not compared" in refused(elsewhere)


@pytest.mark.parametrize(("options", "message"), [
    ([], "no measurements: name a file of rows with --rows FILE"),
    (["--rows", "{folder}/none.json"], "cannot be read"),
    (["--rows", "{rows}", "--link", "host"], "has rows of nvlink only"),
    (["--rows", "{rows}", "--link", "-3"], "positive number of GB/s"),
    (["--rows", "{rows}", "--ranks", "1"], "--ranks must be at least 2"),
    (["--rows", "{rows}", "--ranks", "8", "512"], "--ranks must be at most 256, got 512"),
    (["--rows", "{rows}", "--tokens", "0"], "--tokens must be at least 1, got 0"),
    (["--rows", "{rows}", "--link", "nan"], "write nvlink, host or a positive number of GB/s"),
    (["--rows", "{rows}", "--ranks", "7"], "must be multiples of the group size 7"),
    (["--rows", "{cpu}"], "no rows from GPUs"),
    (["--rows", "{fp32}"], "has rows of float32: what is predicted is bfloat16"),
    (["--rows", "{rows}", "--against", "{fp32}"], "has rows of float32: what is predicted is bfloat16"),
])  # fmt: skip
def test_without_measurements_nothing_is_predicted(options, message, rows_file: Path, capsys):
    cpu = rows_file.with_name("cpu.json")
    Report(cpu, {}, [Row.from_json(row.as_json() | {"device": "cpu"}) for row in measured_rows()]).write()
    fp32 = rows_file.with_name("fp32.json")
    Report(fp32, {}, [dataclasses.replace(row, dtype="float32") for row in measured_rows()]).write()
    names = {"rows": rows_file, "folder": rows_file.parent, "cpu": cpu, "fp32": fp32}
    assert cli.main(["simulate", *(option.format(**names) for option in options)]) == 2
    assert message in capsys.readouterr().err


def test_what_the_planner_took_is_checked_once():
    rows = measured_rows()
    machines = fit_machines(rows, **HERE)
    forced = [row for row in rows if row.variant == "sliced m=2 copy_engine"]
    planned = [dataclasses.replace(row, variant="planned") for row in forced]
    others = [row for row in rows if row.path != "sliced"]
    for given in (forced, planned, forced + planned):
        found = [each for each in deviations(others + given, machines) if each.variant != "sequential"]
        assert [each.variant for each in found] == ["sliced m=2 copy_engine"] * len(forced)


def test_nothing_is_better_than_ideal():
    """Over a link whose collectives are faster than its messages, too."""
    rows = [dataclasses.replace(row, median_ms=row.median_ms / 10) if "collective" in row.variant else row
            for row in measured_rows()]  # fmt: skip
    machines = fit_machines(rows, **HERE)
    for group_size in (2, 8, 64):
        for best in predict(linear_case("llama-8b.proj", 8192, group_size), machines):
            assert max(best.compute_ms, best.comm_ms) <= best.ms * 1.000001


def test_rows_of_attention_blocks_are_left_alone():
    """Fails without the look at the operation: attention's time would count as a GEMM's."""
    rows = measured_rows()
    case = attention_case("llama-8b.attention", 8192, 2)
    names = (("compute_only", "compute"), ("comm_only copy_engine", "transfers"), ("sequential", "sequential"))
    blocks = [a_row(case, variant, path, 77.0, transport="copy_engine") for variant, path in names]
    machines = fit_machines(rows, **HERE)
    assert fit_machines(rows + blocks, **HERE) == machines
    assert deviations(blocks, machines) == []
