"""`commfuse trace` as a user starts it, on few ranks and tiny sizes; and its building blocks on real groups."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.runtime.recorder import Recorder
from commfuse_megatron.tools import trace
from commfuse_megatron.tools.trace.collectives import local_copies, recorded_calls
from tests.harness import run_on_ranks, run_spawned
from tests.spawned.test_commands import run_commfuse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def outputs_in(folder: Path) -> tuple[str, ...]:
    """What makes the command write `x.json`, `x.png` and the numbers into `folder`."""
    return ("--output", str(folder), "--name", "x", "--json", str(folder / "out.json"))


def outcome(folder: Path, out: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the --json file, the Perfetto file) of a command that has printed `out`."""
    assert (folder / "x.png").stat().st_size > 5000
    assert not [word for word in ("speed-up", "speedup", "faster") if word in out.lower()]
    return json.loads((folder / "out.json").read_text("utf-8")), json.loads((folder / "x.json").read_text("utf-8"))


SMALL = ("--tokens", "121", "--N", "24", "--K", "16", "--calls", "3")


@pytest.mark.parametrize(("ranks", "op", "pass_name", "path"), [
    (2, "linear_reduce_scatter", "fprop", "sliced"), (2, "all_gather_linear", "backward", "sequential"),
    (2, "all_gather_linear", "backward", "async"), (3, "all_gather_linear", "backward", "sliced"),
])  # fmt: skip
def test_one_operation(ranks: int, op: str, pass_name: str, path: str, tmp_path: Path) -> None:
    way = ("--op", op, "--pass", pass_name, "--path", path, *(("--algorithm", "direct") if path == "sliced" else ()))
    asked = ("trace", *way, *SMALL, *outputs_in(tmp_path))
    starts_ranks = pass_name == "fprop"  # itself, once
    ran = run_commfuse(*asked, "--ranks", str(ranks)) if starts_ranks else run_on_ranks(ranks, *asked)
    out = ran.stdout
    assert ran.returncode == 0, out + ran.stderr
    data, trace = outcome(tmp_path, out)
    assert f"{op} {pass_name}, M 121, N 24, K 16: {path}" in out
    record = data["record"]
    assert (record["op"], record["pass_name"], record["path"]) == (op, pass_name, path)
    assert [row["rank"] for row in data["ranks"]] == list(range(ranks))
    for row in data["ranks"]:
        assert row["calls"] == 3
        assert 0 < row["gemm_us"] <= row["compute_us"] <= row["span_us"]
        assert 0 <= row["exposed_us"] <= row["transfer_us"] <= row["span_us"]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(ranks))
    assert {event["args"]["call"] for event in slices} == {1, 2, 3}
    transfers = [event for event in slices if event["cat"] == "transfer"]
    gathers_and_scatters = 2  # a column's backward gathers x again and scatters dx
    if path in ("sequential", "async"):
        assert {event["name"] for event in transfers} == {"all-gather", "reduce-scatter"}
        assert len(transfers) == 3 * ranks * gathers_and_scatters
        return
    exchanges = gathers_and_scatters if pass_name == "backward" else 1
    assert len(transfers) == 3 * ranks * (ranks - 1) * exchanges
    phases = [event["ph"] for event in trace["traceEvents"]]
    assert phases.count("s") == phases.count("f") == phases.count("i") == len(transfers), "a message without an arrow"
    assert len([event for event in slices if event["name"].startswith("multiply")]) == 3 * ranks * ranks


@pytest.mark.parametrize(("pass_name", "options", "paths"), [
    ("fprop", ("--splits", "2"), ["sequential", "row_parallel", "query_split"]),
    ("backward", ("--paths", "query_split", "sequential", "--case", "paper.attention-4x8192"), None),
])  # fmt: skip
def test_one_attention_block(pass_name: str, options: tuple[str, ...], paths: list[str] | None, tmp_path: Path) -> None:
    asked = ("--attention", "--pass", pass_name, "--calls", "3", "--shrink", "128", *options)
    ran = run_on_ranks(2, "trace", *asked, *outputs_in(tmp_path))
    out = ran.stdout
    assert ran.returncode == 0, out + ran.stderr
    data, trace = outcome(tmp_path, out)
    paths = paths or ["query_split", "sequential"]
    m = 2 if pass_name == "fprop" else 1
    assert f"query_split, {m} split{'s' * (m > 1)} per shard" in out
    assert (data["pass"], data["source"], list(data["paths"])) == (pass_name, "recorder", paths)
    for path, found in data["paths"].items():
        assert (found["record"]["path"], found["config"]["attention"]["path"]) == (path, path)
        assert (found["projection"] is None) == (path != "row_parallel")
        assert len(found["durations_us"]) == 3
        assert found["duration_us"] == sorted(found["durations_us"])[1]
        for row in found["ranks"]:
            assert 0 < row["gemm_us"] < row["compute_us"] <= row["span_us"] <= found["duration_us"]
            assert 0 < row["attention_us"] < row["compute_us"]
            assert 0 <= row["exposed_us"] <= row["transfer_us"]
            if path == "sequential":
                assert row["exposed_us"] == row["transfer_us"] > 0
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"{path}, rank {rank}" for path in paths for rank in (0, 1)]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for index, path in enumerate(paths):
        for process in (2 * index, 2 * index + 1):
            own = [event for event in slices if event["pid"] == process]
            kinds = [event["args"]["op"] for event in own]
            splits = 2 * m if path == "query_split" else 1
            wgrads = pass_name == "backward"
            products = {"sequential": 1, "row_parallel": 2, "query_split": splits}[path] + wgrads
            assert (kinds.count("attention"), kinds.count("GEMMs")) == (splits, products), path
            if path == "sequential":
                name = "reduce-scatter" if pass_name == "fprop" else "all-gather"
                assert [event["name"] for event in own if event["cat"] == "transfer"] == [name]
        start = min(event["ts"] for event in slices if event["pid"] in (2 * index, 2 * index + 1))
        assert start == 0, "paths begin at different times"


def test_a_whole_step_stock_and_planned(tmp_path: Path) -> None:
    step = ("--step", "--seq", "32", "--layers", "1", "--rounds", "1", "--runs", "3")
    ran = run_on_ranks(2, "trace", *step, *outputs_in(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    data, trace = outcome(tmp_path, ran.stdout)
    assert "lower bound; results are wrong on purpose" in ran.stdout
    assert "6 of 6 layers were overlapped in their forward passes" in ran.stdout
    *rows, free = data["rows"]
    assert [row["variant"] for row in data["rows"]] == ["stock", "planned", "no_communication"]
    shared = {"case": "demo", "op": "whole_step", "pass": "step", "dtype": "float32", "recipe": None, "group_size": 2}
    shared |= {"emulated": False, "layers": 1, "peak_allocated_bytes": None, "device_bytes": None}
    for row in data["rows"]:
        assert shared.items() <= row.items()
        assert 0 < row["forward_ms"] < row["step_ms"]
        for name in ("forward_ms", "step_ms"):
            assert len({run[name] for run in row["runs"]}) == 3
            assert row[name] == sorted(run[name] for run in row["runs"])[1]
    assert (free["exposed_beyond_no_communication_ms"], free["traced"]) == (None, None)
    for row in rows:
        assert row["exposed_beyond_no_communication_ms"] == pytest.approx(row["step_ms"] - free["step_ms"])
        assert row["traced"]["gemm_us"] > 0
        assert "exposed_us" not in row["traced"]
        assert 0 < row["traced"]["exposed_without_compute_us"] <= row["traced"]["transfer_us"]
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["stock, rank 0", "stock, rank 1", "planned, rank 0", "planned, rank 1"]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    stock, planned = ([e for e in slices if e["pid"] in pids and e["cat"] == "transfer"] for pids in ((0, 1), (2, 3)))
    # Per rank: three columns' gather, re-gather and scatter, two rows' scatter and gather; embedding two, loss three.
    assert len(stock) == 2 * (3 * 3 + 2 * 2 + 2 + 3)
    assert len([e for e in planned if e["name"].startswith("to rank")]) == 2 * (3 * 3 + 2 * 2 + 2)
    assert {e["name"] for e in planned if not e["name"].startswith("to rank")} == {"all-reduce"}
    gemms = [e for e in slices if e["pid"] == 2 and e["name"].startswith("GEMM")]
    assert 0 < len(gemms) < len([e for e in slices if e["pid"] == 0 and e["cat"] == "compute"]), "recorded twice"


def test_a_step_with_nothing_overlapped_is_refused_in_one_line(tmp_path: Path) -> None:
    config, folder = tmp_path / "sequential.yaml", tmp_path / "out"
    config.write_text("linear: {fprop: {path: sequential}, dgrad: {path: sequential}}\n", encoding="utf-8")
    asked = ("--step", "--seq", "32", "--layers", "1", "--rounds", "1", "--config", str(config))
    ran = run_on_ranks(2, "trace", *asked, *outputs_in(folder))
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "commfuse trace cannot run here: the plugin overlapped no layer: " in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not folder.exists()


SEES_NOTHING = """
import sys

from commfuse_megatron.tools.main import main
from commfuse_megatron.tools.trace.session import Session

finish = Session.finish
Session.finish = lambda session: [[] for _ in finish(session)]
sys.exit(main())
"""


@pytest.mark.parametrize(
    "asked", [("--path", "sequential", *SMALL), ("--step", "--seq", "32", "--layers", "1", "--rounds", "1")]
)
def test_a_recording_of_nothing_is_refused_before_a_file_is_made(asked: tuple[str, ...], tmp_path: Path) -> None:
    """Fails where the first rank is left to find that it has nothing to draw."""
    script, folder = tmp_path / "sees_nothing.py", tmp_path / "out"
    script.write_text(SEES_NOTHING, encoding="utf-8")
    ran = run_on_ranks(2, "trace", *asked, *outputs_in(folder), script=script)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "commfuse trace cannot run here: nothing was seen to run in " in ran.stderr
    assert "on the ranks [0, 1]" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""
    assert not folder.exists()


# --- building blocks --------------------------------------------------------------------------------------------------


def check_replaced_collectives(group: dist.ProcessGroup, device: torch.device) -> None:
    rank, size = group.rank(), group.size()
    own, original = torch.full((2, 3), float(rank + 1)), dist.all_gather_into_tensor
    gathered, summed = torch.zeros(2 * size, 3), torch.zeros(2, 3)
    partials = torch.arange(6.0 * size).view(2 * size, 3) + 100 * rank
    with local_copies():
        dist.all_gather_into_tensor(gathered, own, group=group)
        work = dist.reduce_scatter_tensor(summed, partials, group=group, async_op=True)
        work.wait()
        assert work.is_completed()
        exchanged = torch.zeros_like(partials)
        dist.all_to_all_single(exchanged, partials, group=group)
    assert torch.equal(exchanged, partials), "only copied"
    assert torch.equal(gathered, own.repeat(size, 1)), "only copied"
    assert torch.equal(summed, partials[:2])
    assert dist.all_gather_into_tensor is original
    recorder = Recorder(device)
    with recorded_calls(recorder):
        dist.all_gather_into_tensor(gathered, own, group=group)
        work = dist.all_reduce(summed.fill_(1), group=group, async_op=True)
        product = own @ own.t()
        work.wait()
    assert gathered[:, 0].tolist() == [float(r + 1) for r in range(size) for _ in range(2)], "really gathered"
    assert summed[0, 0] == size
    assert product.shape == (2, 2)
    found = recorder.intervals()
    assert [(i.name, i.track) for i in found] == [
        ("all-gather", "transfer"),
        ("all-reduce", "transfer"),
        ("GEMM 2x2x3", "compute"),
    ]
    assert found[1].start_us <= found[2].start_us <= found[2].end_us <= found[1].end_us


def check_gemms_that_widen() -> None:
    """Fails where the last arguments of a product are taken for its operands: GPUs also take a dtype for the result."""
    recorder = Recorder(torch.device("cpu"))
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((2, 3), (3, 4)))
    with recorded_calls(recorder):
        assert torch.mm(a, b, out_dtype=torch.float32).dtype == torch.float32
        torch.addmm(b[0], a, b)
        torch.bmm(a[None], b[None])
    assert [i.name for i in recorder.intervals()] == ["GEMM 2x4x3"] * 3


def check_record(group: dist.ProcessGroup, device: torch.device) -> None:
    x, weight = torch.randn(8, 1, 6), torch.randn(4, 6)
    with OverlapContext(group, OverlapConfig(record=True)) as context:
        ops.all_gather_linear(x, weight, context=context)  # not part of the recording
        with trace.record(context) as recorded:
            for _ in range(2):
                ops.all_gather_linear(x, weight, context=context)
        assert recorded.by_rank.keys() == set(range(group.size()))
        for intervals in recorded.by_rank.values():
            assert len({i.call for i in intervals}) == 2
            assert {i.track for i in intervals} == {"compute", "transfer"}
            assert 0 <= min(i.start_us for i in intervals) < 60e6, "not counted from the meeting"
        everyones: list[Any] = [None] * group.size()
        dist.all_gather_object(everyones, recorded.by_rank)
        assert everyones == [recorded.by_rank] * group.size()
    silent = OverlapContext(group, OverlapConfig())
    with pytest.raises(ConfigError, match="record=True"), trace.record(silent):
        pass
    silent.close()


def run_checks(group: dist.ProcessGroup, device: torch.device) -> None:
    check_replaced_collectives(group, device)
    check_gemms_that_widen()
    check_record(group, device)


@pytest.mark.parametrize("ranks", [2, 3])
def test_recording_and_replacing_on_real_groups(ranks: int) -> None:
    run_spawned(ranks, run_checks)
