"""The benchmark's arithmetic, without GPUs: cases, grids, rows, figures of a run, intervals."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.bench.catalog import choose, make_emulated_variants, make_variants
from commfuse_megatron.tools.bench.cli import configurations_without_rows
from commfuse_megatron.tools.bench.figure import draw_rows
from commfuse_megatron.tools.bench.ours import PathOptions, forced_paths
from commfuse_megatron.tools.bench.rows import Report, Row, load_report
from commfuse_megatron.tools.bench.run import Settings, grid
from commfuse_megatron.tools.bench.summary import check_limits, parse_limits, summarize
from commfuse_megatron.tools.bench.tables import overview_table, rows_table
from commfuse_megatron.tools.bench.timing import _summary
from commfuse_megatron.tools.bench.variant import link_name, require_own_link
from commfuse_megatron.tools.common.cases import CASE_NAMES, linear_case, tokens_of
from commfuse_megatron.tools.trace import step_memory
from commfuse_megatron.tools.trace.summary import tail_us

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def a_row(**changes) -> Row:
    values = {
        "case": "llama-70b.fc2", "op": "linear_reduce_scatter", "pass_name": "fprop", "M": 8192, "N": 8192, "K": 14336,
        "dtype": "bfloat16", "group_size": 2, "variant": "planned", "path": "sliced", "transport": "copy_engine",
        "median_ms": 2.7, "p95_ms": 2.8, "compute_only_ms": 2.5, "comm_only_ms": 0.2, "comm_only_collective_ms": 0.3,
        "sequential_ms": 3.0, "device": "NVIDIA H200", "link": "nvlink",
    }  # fmt: skip
    return Row(**(values | changes))


def test_cases_have_the_sizes_of_their_models():
    assert len(CASE_NAMES) == 16 + 2
    qkv, fc2 = linear_case("llama-70b.qkv", 8192, 2), linear_case("llama-70b.fc2", 8192, 2)
    assert (qkv.op, qkv.M, qkv.N, qkv.K, qkv.shard_shape) == ("all_gather_linear", 8192, 5120, 8192, (4096, 8192))
    assert (fc2.op, fc2.M, fc2.N, fc2.K, fc2.shard_shape) == ("linear_reduce_scatter", 8192, 8192, 14336, (4096, 8192))
    (tokens,) = tokens_of("paper-mlp.fc1", (1024, 2048))
    paper = linear_case("paper-mlp.fc1", tokens, 4)
    assert (paper.M, paper.batch, paper.N, paper.K) == (32 * 4096, 32, 4096, 4096)
    small = linear_case("llama-70b.qkv", 8192, 2, shrink=64)
    assert (small.M, small.N, small.K) == (128, 80, 128)


@pytest.mark.parametrize(("name", "M", "match"), [
    ("llama-7b.qkv", 8192, 'unknown case "llama-7b.qkv"'), ("llama-8b.qkv", 8191, "multiples of the group size"),
])  # fmt: skip
def test_unknown_names_and_sizes_that_do_not_divide(name, M, match):
    with pytest.raises(ConfigError, match=match):
        linear_case(name, M, 2)


def test_the_grid_has_every_case_once_with_the_headline_first():
    models = ("llama-8b", "llama-70b", "llama-405b", "gpt3-175b", "paper-mlp")
    pieces = grid(Settings(models=models), 2)
    assert len(pieces) == len(set(pieces)) == 80 * 2 + 2 * 2
    assert {(piece.M, piece.name.split(".")[0]) for piece in pieces[:16]} == {(8192, "llama-8b"), (8192, "llama-70b")}
    assert {(piece.M, piece.name.split(".")[0]) for piece in pieces[-4:]} == {(32 * 4096, "paper-mlp")}
    emulated = grid(Settings(models=("llama-8b",), virtual_ranks=(4, 8), tokens=(8192,)), 2)
    expected = [(size, name) for size in (4, 8) for name in ("fprop", "backward")]
    assert [(piece.group_size, piece.pass_name) for piece in emulated[::4]] == expected
    assert len(emulated) == 16
    assert all(piece.is_emulated for piece in emulated)


def test_all_variants_at_two_sizes_and_the_basic_ones_elsewhere():
    def chosen(pass_name="fprop", is_full=True, prefixes=()):
        variants = make_variants("linears", CUDA, 2, (1, 2))
        return [v.name for v in choose(variants, "all_gather_linear", pass_name, is_full=is_full, prefixes=prefixes)]

    bounds = ["compute_only", "compute_only persistent", "comm_only collective", "comm_only nccl"]
    bounds += ["comm_only copy_engine", "sequential"]
    assert chosen(is_full=False) == [*bounds, "megatron", "planned"]
    full = chosen()
    wanted = {"slicing C=2", "slicing C=4", "slicing C=8", "async_tp", "userbuffers"}
    wanted |= {"sliced m=1 nccl", "sliced m=2 copy_engine", "slices_only m=2 torch"}
    assert wanted <= set(full)
    assert len(set(full)) == len(full)
    assert "bulk copy_engine" not in full
    backward = set(chosen("backward"))
    assert {"bulk copy_engine", "bulk nccl", "async"} <= backward
    assert "async_tp" not in backward
    assert chosen(prefixes=("planned", "slicing C=4")) == [*bounds, "planned", "slicing C=4"]
    assert {"sliced m=1 nccl", "sequential"} <= {v.name for v in make_emulated_variants("linears", CUDA)}


def test_ways_of_ours_are_named_and_configured():
    options = PathOptions(path="sliced", backend="nccl", algorithm="ring", chunks_per_shard=4)
    assert options.name == "sliced ring m=4 nccl"
    config = options.config(record=True)
    assert (config.linear.fprop.chunks_per_shard, config.linear.dgrad.algorithm) == (4, "ring")
    assert (config.transport.backend, config.record) == ("nccl", True)
    assert PathOptions(path="auto").name == "planned"
    bulk = PathOptions(path="bulk", backend="copy_engine").config()
    assert (bulk.linear.fprop.path, bulk.linear.dgrad.path) == ("sequential", "bulk")
    assert any(options.algorithm == "ring" for options in forced_paths("linears", CPU, 4, (1,)))
    assert not any(options.algorithm == "ring" for options in forced_paths("linears", CPU, 2, (1,)))


def test_what_follows_from_a_row():
    row = a_row(schedule_bound_ms=2.55)
    assert row.exposed_ms == pytest.approx(0.2)
    assert row.overlap_efficiency == pytest.approx(1 - 0.2 / 0.5)
    assert row.ideal_fraction == pytest.approx(2.5 / 2.7)
    assert row.schedule_fraction == pytest.approx(2.55 / 2.7)
    assert a_row(sequential_ms=2.4).overlap_efficiency is None
    on_cpu = a_row(device="cpu")
    assert (on_cpu.exposed_ms, on_cpu.overlap_efficiency, on_cpu.ideal_fraction) == (None, None, None)


def test_rows_have_the_keys_of_the_report_format():
    row = a_row()
    data = row.as_json()
    wanted = {"case", "op", "pass", "M", "N", "K", "dtype", "group_size", "emulated", "variant", "path", "transport"}
    wanted |= {"median_ms", "p95_ms", "compute_only_ms", "comm_only_ms", "comm_only_collective_ms", "sequential_ms"}
    wanted |= {"exposed_ms", "overlap_efficiency", "ideal_fraction", "tail_ms", "split_loss_ms", "host_us"}
    wanted |= {"device", "link", "commit", "schedule_bound_ms", "cuda_device_max_connections"}
    wanted |= {"recipe", "layers"}
    assert wanted <= set(data)
    assert "pass_name" not in data
    assert Row.from_json(json.loads(json.dumps(data))) == row


def test_a_report_is_whole_after_every_case(tmp_path: Path):
    file = tmp_path / "rows.json"
    report = Report(file, {"commit": "0"})
    report.write()
    assert load_report(file) == ({"commit": "0"}, [])
    report.add([a_row()])
    report.add([a_row(variant="sequential"), a_row(M=1024)])
    header, rows = load_report(file)
    assert (header, rows) == ({"commit": "0"}, report.rows)
    assert len(rows) == 3
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("changed", "complaint"), [
    ({"median_ms": 0.0}, "median_ms is no time in milliseconds: 0.0"),
    ({"median_ms": float("nan")}, "median_ms is no time in milliseconds: nan"),
    ({"median_ms": None}, "median_ms is no time in milliseconds: None"),
    ({"compute_only_ms": -1.0}, "compute_only_ms is no time in milliseconds: -1.0"),
    ({"comm_only_ms": float("inf")}, "comm_only_ms is no time in milliseconds: inf"),
    ({"group_size": 1}, "group_size must be an integer of at least 2, is 1"),
    ({"K": "many"}, "K must be an integer of at least 1, is 'many'"), ({"dtype": "int8"}, "dtype must be of "),
    ({"algorithm": "tree"}, "algorithm must be of , direct, ring, is 'tree'"),
])  # fmt: skip
def test_rows_that_nobody_can_have_measured_are_refused(changed, complaint, tmp_path: Path):
    """Predictions from them were nonsense, or a traceback."""
    file = tmp_path / "rows.json"
    rows = [a_row().as_json(), a_row().as_json() | changed]
    file.write_text(json.dumps({"rows": rows}))
    with pytest.raises(ConfigError, match="row 2 of its rows: ") as raised:
        load_report(file)
    assert complaint in str(raised.value)


def test_rows_of_other_sizes_and_names_do_not_mix():
    """A shrunken case has the same name and tokens; a configuration of a user's may be named like a variant."""
    rows = headline_rows()
    before = summarize(rows).metrics
    shrunk = [dataclasses.replace(row, shrink=4, N=1, K=1, median_ms=row.median_ms / 9) for row in rows]
    assert summarize([*rows, *shrunk]).metrics["vs_sequential"] == before["vs_sequential"]
    assert "vs_sequential" not in summarize(shrunk).metrics
    in_fp8 = [dataclasses.replace(row, recipe="tensorwise", median_ms=row.median_ms / 9) for row in rows]
    assert summarize([*rows, *in_fp8]).metrics["vs_sequential"] == before["vs_sequential"]
    mine = [
        dataclasses.replace(row, variant=f"{row.variant.split()[0]}_mine", median_ms=row.median_ms / 9)
        for row in rows
        if row.variant != "planned"
    ]
    assert summarize([*rows, *mine]).metrics == before
    again = [dataclasses.replace(row, commit="later", median_ms=2 * row.median_ms) for row in rows]
    assert summarize([*again, *rows]).metrics == before
    assert summarize([*rows, *again]).metrics["ideal"].value == pytest.approx(2 * before["ideal"].value)


def test_what_comes_last_in_a_file_counts():
    """Also where the machine, or the commit, was in the file before."""
    rows = headline_rows()
    before = summarize(rows).metrics["ideal"].value

    def changed(factor, **values):
        return [dataclasses.replace(row, median_ms=factor * row.median_ms, **values) for row in rows]

    mixed = [*rows, *changed(9, link="host"), *changed(3, commit="later")]
    assert summarize(mixed).metrics["ideal"].value == pytest.approx(3 * before)
    mixed = [*changed(5), *changed(3, commit="later"), *changed(2)]
    assert summarize(mixed).metrics["ideal"].value == pytest.approx(2 * before)


def test_rows_without_what_a_user_has_without_us_are_summarized():
    rows = [row for row in headline_rows() if row.variant not in ("sequential", "megatron")]
    assert "never_slower" not in summarize(rows).metrics
    assert summarize(rows).metrics["ideal"].value == summarize(headline_rows()).metrics["ideal"].value


def test_a_link_to_a_report_stays_one(tmp_path: Path):
    file, link = tmp_path / "rows.json", tmp_path / "latest.json"
    link.symlink_to(file)
    Report(link, {"commit": "0"}, [a_row()]).write()
    assert link.is_symlink()
    assert load_report(file) == load_report(link)


def test_rows_without_what_later_versions_added_can_be_read(tmp_path: Path):
    file = tmp_path / "rows.json"
    old = {key: value for key, value in a_row(host_us=5.0).as_json().items() if key not in ("host_us", "recipe")}
    file.write_text(json.dumps({"rows": [old]}))
    (row,) = load_report(file)[1]
    assert (row.host_us, row.recipe, row.case) == (None, None, "llama-70b.fc2")


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{"case": "x"}]}', '{"no": 1}'])
def test_files_that_are_no_reports_are_refused(tmp_path: Path, text):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is no file that `commfuse bench --json` wrote"):
        load_report(file)


def headline_rows() -> list[Row]:
    rows = []
    for model in ("llama-8b", "llama-70b"):
        for linear in ("qkv", "proj", "fc1", "fc2"):
            for variant, ms in (("planned", 2.6), ("sequential", 3.0), ("megatron", 2.9), ("async_tp", 2.8)):
                rows.append(a_row(case=f"{model}.{linear}", variant=variant, median_ms=ms))
    return rows


def test_figures_of_a_whole_run():
    rows = headline_rows()
    rows += [a_row(M=1024, variant="planned", median_ms=3.3), a_row(M=1024, variant="sequential", median_ms=3.0)]
    rows += [a_row(variant="planned", median_ms=99.0, emulated=True, group_size=8)]
    rows += [a_row(variant="planned", median_ms=99.0, device="cpu")]
    rows = [*(dataclasses.replace(row, link="host", median_ms=4.0) for row in headline_rows()), *rows]
    summary = summarize(rows)
    assert summary.metrics["ideal"].value == pytest.approx(2.6 / 2.5)
    assert summary.metrics["vs_sequential"].value == pytest.approx(2.6 / 3.0)
    assert summary.metrics["vs_async_tp"].value == pytest.approx(2.6 / 2.8)
    assert summary.metrics["vs_async_tp"].count == 8
    assert "vs_userbuffers" not in summary.metrics
    assert summary.metrics["never_slower"].value == pytest.approx(1.1)
    assert (summary.offenders[0][1].M, len(summary.offenders)) == (1024, 9 + 8)
    assert check_limits(summary, parse_limits(["ideal=1.05", "vs_sequential=0.9"])) == []
    missed = check_limits(summary, parse_limits(["never_slower=1.02", "vs_userbuffers=1"]))
    assert missed == ["never_slower: 1.1000 is more than 1.02", "vs_userbuffers: not measured"]
    partly = summarize([row for row in rows if row.case != "llama-8b.qkv"])  # of either link
    assert check_limits(partly, {"ideal": 2.0}) == ["ideal: measured in 7 of 8 cases only"]


@pytest.mark.parametrize("text", ["nonsense=1", "ideal", "ideal=fast", "ideal=nan", "ideal=inf"])
def test_limits_that_cannot_be_read(text):
    with pytest.raises(ConfigError, match=f"--check {text}"):
        parse_limits([text])


def test_tables_have_a_line_per_row_and_per_case():
    rows = headline_rows()
    assert rows_table(rows).row_count == len(rows)
    assert overview_table(rows).row_count == 8


def test_the_figure_is_drawn_from_comparable_rows_only(tmp_path: Path):
    file = draw_rows(tmp_path / "rows.png", headline_rows())
    assert file.stat().st_size > 10_000
    with pytest.raises(UnsupportedError, match="no rows to compare"):
        draw_rows(file, [dataclasses.replace(row, device="cpu") for row in headline_rows()])


def test_the_tail_starts_at_the_end_of_the_last_gemm():
    def interval(name, track, start_us, end_us):
        return Interval(name, track, start_us, end_us, None, "op", 1)

    recorded = [
        interval("multiply 1", "compute", 0.0, 4.0),
        interval("to rank 1", "transfer", 4.0, 9.0),
        interval("multiply 0", "compute", 4.0, 8.0),
        interval("sum", "compute", 9.0, 10.0),
    ]
    assert tail_us(recorded) == 2.0
    assert tail_us(recorded[1:2]) is None


def test_summaries_are_medians_and_95th_percentiles():
    sample = _summary([float(value) for value in range(1, 22)])
    assert (sample.median_ms, sample.p95_ms, sample.rounds) == (11.0, 20.0, 21)


def test_what_would_not_use_a_slow_link_is_left_out_there(monkeypatch):
    require_own_link(CUDA, "copy_engine")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert (link_name(CUDA), link_name(CPU)) == ("host", "gloo")
    require_own_link(CUDA, "nccl")
    with pytest.raises(UnsupportedError, match="which copy_engine does not use"):
        require_own_link(CUDA, "copy_engine")


def test_a_configuration_of_which_nothing_ran_is_found():
    rows = [a_row(variant="mine"), a_row(variant="planned")]
    assert configurations_without_rows(["configs/mine.yaml", "other/yours.yaml"], rows) == ["yours"]
    assert configurations_without_rows([], rows) == []


class OneDevice:
    """The memory of a device, by PyTorch and in all: what is there, and the most since `forget`."""

    def __init__(self) -> None:
        self.now = self.peak = torch.zeros(2, dtype=torch.int64)

    def take(self, allocated: int, device: int) -> None:
        self.now = self.now + torch.tensor([allocated, device])
        self.peak = torch.maximum(self.peak, self.now)

    def forget(self, _) -> torch.Tensor:
        self.peak = self.now
        return self.peak

    def peaks(self, *_) -> torch.Tensor:
        return self.peak


def test_each_variants_memory_is_as_if_no_other_were_there(monkeypatch):
    there = OneDevice()
    there.take(0, 5)  # the driver's
    monkeypatch.setattr(step_memory, "_bytes_in_use", there.forget)
    monkeypatch.setattr(step_memory, "_peak_bytes", there.peaks)
    calls: list[str] = []
    of_step = {"stock": 30, "planned": 20, "no_communication": 25}

    def build(name: str) -> str:
        there.take(100, 101)
        return name

    def run(name: str, model: str) -> None:
        assert model == ("planned" if name == "planned" else "stock")
        is_first = name not in calls
        calls.append(name)
        if is_first and name == "stock":
            there.take(3, 11)  # a workspace, and NCCL's buffers: all use them
        if is_first and name == "planned":
            there.take(50, 50)  # of plans that are tried
            there.take(-50, -50 + 7)  # a window of ours
        there.take(of_step[name], 2 * of_step[name])
        there.take(-of_step[name], -2 * of_step[name])

    builders = {"stock": lambda: build("stock"), "planned": lambda: build("planned"), "no_communication": None}
    memory = step_memory.warm_up(builders, run, 2, CPU)
    assert {name: sizes.tolist() for name, sizes in memory.items()} == {
        "stock": [100 + 3 + 30, 5 + 101 + 11 + 60],
        "planned": [100 + 3 + 20, 5 + 101 + 11 + 7 + 40],
        "no_communication": [100 + 3 + 25, 5 + 101 + 11 + 50],
    }
    assert calls == [name for name in builders for _ in range(2)]
