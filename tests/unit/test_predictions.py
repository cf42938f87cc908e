"""Predictions, in a made-up world whose GEMMs and links follow known curves exactly."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from commfuse_megatron.benchmark.attention_cases import attention_case
from commfuse_megatron.benchmark.cases import linear_case
from commfuse_megatron.benchmark.curves import fit_curves, fit_terms, traffic_of_sum
from commfuse_megatron.benchmark.predict import LIMITS, WAYS, deviations, predict, predict_way
from commfuse_megatron.benchmark.report import read_rows
from commfuse_megatron.benchmark.rows import Report, Row, load_report
from commfuse_megatron.cli import main as cli
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.schedule import Algorithm

LATENCY_US, GB_S, COLLECTIVE_GB_S = 8.0, 300.0, 200.0
HOST_CALL_US, HOST_SLICE_US = 20.0, 30.0
SUM_US_PER_BYTE = 1e-3 / 2000


def gemm_us(M: float, N: float, K: float) -> float:
    waves = max(0.25, -(-M // 128) * -(-N // 256) / 132)
    return 5.0 + waves * (2.0 + K * 0.02)


def a_row(case, variant, path, ms, **changes) -> Row:
    shard_bytes = case.shard_shape[0] * case.shard_shape[1] * 2
    messages = case.group_size - 1
    values = {
        "case": case.name,
        "op": case.op,
        "pass_name": "fprop",
        "M": case.M,
        "N": case.N,
        "K": case.K,
        "dtype": "bfloat16",
        "group_size": case.group_size,
        "variant": variant,
        "path": path,
        "transport": "none",
        "median_ms": ms,
        "p95_ms": ms,
        "compute_only_ms": gemm_us(case.M, case.N, case.K) / 1e3,
        "comm_only_ms": messages * (LATENCY_US + shard_bytes / GB_S / 1e3) / 1e3,
        "comm_only_collective_ms": messages * (LATENCY_US + shard_bytes / COLLECTIVE_GB_S / 1e3) / 1e3,
        "sequential_ms": 1.0,
        "device": "NVIDIA H200",
        "link": "nvlink",
    }
    return Row(**(values | changes))


def measured_rows() -> list[Row]:
    rows = []
    for name in ("llama-8b.qkv", "llama-8b.proj", "llama-70b.fc1", "llama-70b.fc2"):
        for M in (1024, 4096, 8192):
            case = linear_case(name, M, 2)
            bounds = a_row(case, "x", "x", 1.0)
            compute_us = gemm_us(case.M, case.N, case.K)
            rows.append(a_row(case, "compute_only", "compute", compute_us / 1e3))
            rows.append(a_row(case, "comm_only copy_engine", "transfers", bounds.comm_only_ms, transport="copy_engine"))
            collective_ms = bounds.comm_only_collective_ms
            rows.append(a_row(case, "comm_only collective", "transfers", collective_ms, transport="nccl"))
            rows.append(a_row(case, "sequential", "sequential", compute_us / 1e3 + collective_ms, transport="nccl"))
            for m in (1, 2):
                slices = 2 * m
                slice_us = gemm_us(M / slices, case.N, case.K)
                name_of_slices = f"slices_only m={m} torch"
                rows.append(a_row(case, name_of_slices, "slices", slices * slice_us / 1e3, chunks_per_shard=m))
                traffic = traffic_of_sum(case.N * 2, case.M / 2, 2)
                sum_us = 0.0 if case.gathers or m > 1 else SUM_US_PER_BYTE * traffic
                # With two ranks the bound is what the schedule takes.
                messages_us = m * LATENCY_US + bounds.comm_only_ms * 1e3 - LATENCY_US
                total_us = max(slices * slice_us, messages_us + slice_us) + sum_us
                host_us = HOST_CALL_US + slices * HOST_SLICE_US
                forced = {"transport": "copy_engine", "algorithm": "direct", "chunks_per_shard": m, "host_us": host_us}
                ms = max(total_us, host_us) / 1e3
                rows.append(a_row(case, f"sliced m={m} copy_engine", "sliced", ms, tail_ms=sum_us / 1e3, **forced))
    return rows


def test_curves_are_found_again():
    curves = fit_curves(measured_rows(), device="NVIDIA H200", link="nvlink")
    gemm = curves.gemms["torch"]
    assert (gemm.launch_us, gemm.per_wave_us, gemm.per_k_us) == pytest.approx((5.0, 2.0, 0.02), rel=1e-6)
    message = curves.messages["copy_engine"]
    assert (message.latency_us, message.bandwidth_gb_s) == pytest.approx((LATENCY_US, GB_S), rel=1e-6)
    assert curves.collective.bandwidth_gb_s == pytest.approx(COLLECTIVE_GB_S, rel=1e-6)
    host = curves.hosts["copy_engine"]
    assert (host.call_us, host.slice_us) == pytest.approx((HOST_CALL_US, HOST_SLICE_US), rel=1e-6)
    assert curves.sum_us_per_byte == pytest.approx(SUM_US_PER_BYTE, rel=1e-6)


def test_factors_are_never_negative():
    factors = fit_terms([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [1.0, 3.0, 5.0])  # 2 x - 1
    assert min(factors) >= 0
    assert factors[1] > 0


def test_measured_rows_are_predicted_where_the_model_holds():
    rows = measured_rows()
    curves = fit_curves(rows, device="NVIDIA H200", link="nvlink")
    found = deviations(rows, curves)
    assert {deviation.variant for deviation in found} == {
        "sequential",
        "sliced m=1 copy_engine",
        "sliced m=2 copy_engine",
    }
    assert max(abs(deviation.error) for deviation in found) < 1e-6
    slower = [Row.from_json(row.as_json() | {"median_ms": 2 * row.median_ms}) for row in rows]
    assert deviations(slower, curves)[0].error == pytest.approx(-0.5)


PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "results" / "linears_h200_202611.json"


@pytest.mark.parametrize(("gemm", "most"), [("torch", 0.13), ("persistent", 0.13)])
def test_slices_take_what_the_curve_of_whole_products_says(gemm, most):
    """Fails where less than a wave of large tiles counts as one: 73 % of one were to take 1.26 of what they do."""
    forward = [Row.from_json(row) for row in read_rows(PUBLISHED) if row["commit"] == "65cc961"]
    whole = [row for row in forward if row.path != "slices"]
    curve = fit_curves(whole, device="NVIDIA H200", link="nvlink").gemms[gemm]
    slices = [row for row in forward if row.path == "slices" and row.variant.endswith(gemm)]
    assert len(slices) == 8 * 3
    for row in slices:
        count = row.group_size * row.chunks_per_shard
        predicted_us = count * curve.us(row.M / count, row.N, row.K)
        assert predicted_us == pytest.approx(row.median_ms * 1e3, rel=most), (row.case, count)


def test_a_larger_group_is_cut_into_more_slices_until_their_launches_decide():
    curves = fit_curves(measured_rows(), device="NVIDIA H200", link="nvlink")
    small = linear_case("llama-8b.proj", 1024, 64)
    us, limit = predict_way(small, curves, "copy_engine", Algorithm.DIRECT, 1)
    assert limit == "launches"
    assert us == pytest.approx(HOST_CALL_US + 64 * HOST_SLICE_US)
    large = linear_case("llama-70b.fc2", 8192, 8)
    us, limit = predict_way(large, curves, "copy_engine", Algorithm.DIRECT, 1)
    sum_us = SUM_US_PER_BYTE * traffic_of_sum(8192 * 2, 1024, 8)
    assert (limit, us) == ("GEMMs", pytest.approx(8 * gemm_us(1024, 8192, 28672 // 8) + sum_us))
    ways = predict(large, curves)
    assert len(ways) == 1 + len(WAYS)
    assert [way.ms for way in ways] == sorted(way.ms for way in ways)
    assert ways[0].as_json()["predicted"] is True


def test_curves_without_rows_do_not_exist():
    rows = measured_rows()
    with pytest.raises(ConfigError, match="no `compute_only` rows"):
        fit_curves([row for row in rows if row.path not in ("compute", "slices")], device="NVIDIA H200", link="nvlink")
    for wanted, message in (
        (lambda row: row.path != "transfers", "no `comm_only collective` rows"),
        (lambda row: row.transport != "copy_engine", "no `comm_only` rows of a transport"),
        (lambda row: row.M == 8192 or row.path != "transfers", "`comm_only copy_engine` rows do not show a bandwidth"),
        (lambda row: row.M == 8192 or row.variant != "comm_only collective", "`comm_only collective` rows do not show"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            fit_curves([row for row in one_width(rows) if wanted(row)], device="NVIDIA H200", link="nvlink")
        assert "\n  torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda" in str(caught.value)
    with pytest.raises(ConfigError, match=r"link host.*\n  NCCL_P2P_DISABLE=1 torchrun"):
        fit_curves(rows, device="NVIDIA H200", link="host")


def one_width(rows: list[Row]) -> list[Row]:
    """Those of linears of one width: one size of message for each M."""
    return [row for row in rows if row.case.startswith("llama-70b")]


def test_a_transport_without_a_curve_is_left_out(rows_file: Path, capsys: pytest.CaptureFixture[str]):
    """Fails without going on: one transport's rows of one size stopped the others' predictions."""
    header, rows = load_report(rows_file)
    kept = [row for row in one_width(rows) if row.variant != "comm_only nccl" or row.M == 8192]
    Report(rows_file, header, kept).write()
    out = rows_file.with_name("out.json")
    options = ["simulate", "--rows", str(rows_file), "--ranks", "8", "--models", "llama-70b", "--json", str(out)]
    assert cli.main(options) == 0
    text = capsys.readouterr().out
    assert "left out transport nccl: 2 `comm_only nccl` rows do not show a bandwidth" in text
    data = json.loads(out.read_text())
    assert set(data["curves"]["messages"]) == {"copy_engine"}
    assert {way["transport"] for way in data["predictions"] if way["variant"] != "sequential"} == {"copy_engine"}
    assert cli.main([*options, "--link", "25"]) == 2
    assert "nccl serves such links" in capsys.readouterr().err


def test_what_limits_a_prediction_is_explained(rows_file: Path, capsys: pytest.CaptureFixture[str]):
    options = [
        "--rows",
        str(rows_file),
        "--ranks",
        "2",
        "8",
        "--tokens",
        "1024",
        "8192",
        "--models",
        "llama-8b",
        "llama-70b",
    ]
    assert cli.main(["simulate", *options, "--json", str(rows_file.with_name("out.json"))]) == 0
    out = capsys.readouterr().out
    predictions = json.loads(rows_file.with_name("out.json").read_text())["predictions"]
    # Sorted by case, the fastest first: only those are in the table.
    best = {(way["case"], way["M"], way["group_size"]): way["limit"] for way in reversed(predictions)}
    assert len(set(best.values())) > 1
    for limit, meaning in LIMITS.items():
        assert (f"  - {limit}: {meaning}" in out) == (limit in best.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": 1}, 'it has no list "rows"'),
        ({"rows": 3}, 'it has no list "rows"'),
        ([], 'it has no list "rows"'),
        ({"rows": [{"pass": "fprop", "M": 1}]}, "row 1 of its rows has no case, op, N, K, "),
        ({"rows": [1]}, "row 1 of its rows has no case, op, pass, "),
    ],
)
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


def test_the_command_predicts_and_says_how_wrong_it_is(rows_file: Path, capsys: pytest.CaptureFixture[str]):
    out = rows_file.with_name("out.json")
    figure = rows_file.with_name("figure.png")
    options = ["--rows", str(rows_file), "--ranks", "8", "16", "--models", "llama-70b", "--json", str(out)]
    assert cli.main(["simulate", *options, "--figure", str(figure)]) == 0
    text = capsys.readouterr().out
    assert "predicted, not measured" in text
    assert re.search(r"median size of the error on 36 measured rows: 0\.0 %; the largest: [+-]0\.\d %, .* M=\d+", text)
    assert "may be predicted wrongly" not in text
    data = json.loads(out.read_text())
    assert {prediction["group_size"] for prediction in data["predictions"]} == {8, 16}
    assert len(data["deviations"]) == 36
    assert figure.stat().st_size > 10_000
    # A slower link that was not measured: nothing to check it with, and it takes longer.
    assert cli.main(["simulate", *options, "--link", "25"]) == 0
    assert "no measured rows of this link" in capsys.readouterr().out
    slow = json.loads(out.read_text())
    assert slow["curves"]["messages"]["nccl"]["bandwidth_gb_s"] == 25
    assert min(p["comm_ms"] for p in slow["predictions"]) > min(p["comm_ms"] for p in data["predictions"])


def test_a_larger_group_stands_beside_what_two_ranks_said_of_it(rows_file: Path, capsys: pytest.CaptureFixture[str]):
    case = linear_case("llama-70b.fc1", 8192, 4)
    way = {"transport": "copy_engine", "algorithm": "direct", "chunks_per_shard": 1}
    here = load_report(rows_file)[1]
    emulated = a_row(case, "sliced m=1 copy_engine", "sliced", 2.2, emulated=True, **way)
    over_host = a_row(case, "sliced m=1 copy_engine", "sliced", 22.0, emulated=True, **way, link="host")
    Report(rows_file, {"multiprocessors": 132}, [*here, emulated, over_host]).write()
    real, out = rows_file.with_name("four.json"), rows_file.with_name("out.json")
    measured = a_row(case, "sliced m=1 copy_engine", "sliced", 2.0, **way)
    elsewhere = a_row(case, "sliced m=1 copy_engine", "sliced", 9.0, **way, device="NVIDIA H100 80GB HBM3")
    Report(real, {}, [measured, elsewhere]).write()
    options = ["--rows", str(rows_file), "--ranks", "4", "--models", "llama-70b", "--json", str(out)]
    assert cli.main(["simulate", *options, "--against", str(real)]) == 0
    text = capsys.readouterr().out
    assert "median size of the error of the emulation: 10.0 %; the largest: 10.0 %" in text
    (entry,) = json.loads(out.read_text())["against"]
    assert (entry["measured_ms"], entry["emulated_ms"]) == (2.0, 2.2)
    assert entry["emulation_error"] == pytest.approx(0.1)
    assert entry["prediction_error"] == pytest.approx(entry["predicted_ms"] / 2.0 - 1)
    planned = a_row(case, "planned", "sliced", 3.0, **way)
    for of_the_way, measured_ms in ([planned], 3.0), ([planned, measured], 2.0):
        Report(real, {}, of_the_way).write()
        assert cli.main(["simulate", *options, "--against", str(real)]) == 0
        (entry,) = json.loads(out.read_text())["against"]
        assert (entry["variant"], entry["measured_ms"]) == ("sliced m=1 copy_engine", measured_ms)
        assert (entry["emulated_ms"], entry["predicted_ms"] is None) == (2.2, False)
    of_a_file = a_row(case, "few_sms", "sliced", 4.0, **way)
    smaller = Row.from_json(measured.as_json() | {"N": case.N // 4, "K": case.K // 4, "shrink": 4, "median_ms": 0.2})
    alone = json.loads(out.read_text())["against"]
    for rows in ([measured, of_a_file, smaller], [smaller, of_a_file, measured]):
        Report(real, {}, rows).write()
        assert cli.main(["simulate", *options, "--against", str(real)]) == 0
        large, small = sorted(json.loads(out.read_text())["against"], key=lambda e: -e["measured_ms"])
        assert [large] == alone
        assert (small["emulated_ms"], small["predicted_ms"] < large["predicted_ms"]) == (None, True)
    Report(real, {}, [measured, elsewhere]).write()
    capsys.readouterr()
    other_model = [*options, "--models", "llama-8b"]
    for wanted in (other_model, [*options, "--linears", "qkv"]):
        assert cli.main(["simulate", *wanted, "--against", str(real)]) == 2
        assert "of these models and linears no forward rows" in capsys.readouterr().err
    paper = linear_case("paper-mlp.fc1", 131072, 4)
    Report(real, {}, [measured, a_row(paper, "sliced m=1 copy_engine", "sliced", 2.0, **way)]).write()
    assert cli.main(["simulate", *other_model, "--against", str(real)]) == 0
    assert [entry["case"] for entry in json.loads(out.read_text())["against"]] == ["paper-mlp.fc1"]
    capsys.readouterr()
    Report(real, {}, [elsewhere]).write()
    assert cli.main(["simulate", *options, "--against", str(real)]) == 2
    assert "rows of other machines and links are not compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    ],
)
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
    curves = fit_curves(rows, device="NVIDIA H200", link="nvlink")
    forced = [row for row in rows if row.variant == "sliced m=2 copy_engine"]
    planned = [dataclasses.replace(row, variant="planned") for row in forced]
    others = [row for row in rows if row.path != "sliced"]
    for given in (forced, planned, forced + planned):
        found = [each for each in deviations(others + given, curves) if each.variant != "sequential"]
        assert [each.variant for each in found] == ["sliced m=2 copy_engine"] * len(forced)


def test_nothing_is_better_than_ideal():
    """Over a link whose collectives are faster than its messages, too."""
    rows = [dataclasses.replace(row, median_ms=row.median_ms / 10) if "collective" in row.variant else row
            for row in measured_rows()]  # fmt: skip
    curves = fit_curves(rows, device="NVIDIA H200", link="nvlink")
    for group_size in (2, 8, 64):
        for best in predict(linear_case("llama-8b.proj", 8192, group_size), curves):
            assert max(best.compute_ms, best.comm_ms) <= best.ms * 1.000001


def test_rows_of_attention_blocks_are_left_alone():
    """Fails without the look at the operation: attention's time would count as a GEMM's."""
    rows = measured_rows()
    case = attention_case("llama-8b.attention", 8192, 2)
    names = (("compute_only", "compute"), ("comm_only copy_engine", "transfers"), ("sequential", "sequential"))
    blocks = [a_row(case, variant, path, 77.0, transport="copy_engine") for variant, path in names]
    here = {"device": "NVIDIA H200", "link": "nvlink"}
    curves = fit_curves(rows, **here)
    assert fit_curves(rows + blocks, **here) == curves
    assert deviations(blocks, curves) == []
