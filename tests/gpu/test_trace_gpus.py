"""`commfuse trace` on two GPUs: what the profiler saw of a linear and of attention, and what the recorder does.

Sizes are so long that kernels take longer than the host needs to launch them. How long calls take says nothing here:
beside a profiler the host may stall in the middle of one.
"""

import json
from collections import Counter

import pytest

from commfuse_megatron.tools import main as cli

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(300)]

LINEAR = ("--case", "llama-8b.proj", "--tokens", "8192", "--profiler")
CALLS = (1, 2, 3, 4, 5)
ATTENTION = ("--attention", "--case", "llama-8b.attention", "--seq", "8192")
PATHS = ("sequential", "row_parallel", "query_split")
PASSES = pytest.mark.parametrize("pass_name", ["fprop", "backward"])
TRANSPORTS = pytest.mark.parametrize("transport", ["copy_engine", "nccl"])


def traced(folder, *options):
    """(the --json file, the events of the trace)."""
    files = ("--output", str(folder), "--name", "x", "--json", str(folder / "out.json"))
    assert cli.main(["trace", "--ranks", "2", "--device", "cuda", *options, *files]) == 0
    assert (folder / "x.png").stat().st_size > 5000
    events = json.loads((folder / "x.json").read_text("utf-8"))["traceEvents"]
    return json.loads((folder / "out.json").read_text("utf-8")), events


# --- linears ---


def check_calls(data, events):
    """Every call of every rank has its own work and nobody else's; the slices of each."""
    slices = [event for event in events if event["ph"] == "X"]
    calls = {
        rank: [[e for e in slices if (e["pid"], e["args"]["call"]) == (rank, call)] for call in CALLS]
        for rank in (0, 1)
    }
    assert sum(len(own) for by_call in calls.values() for own in by_call) == len(slices)
    assert (data["source"], data["calls"]) == ("profiler", len(CALLS))
    assert [row["rank"] for row in data["ranks"]] == [0, 1]
    for row in data["ranks"]:
        assert row["calls"] == len(CALLS)
        assert 0 < row["gemm_us"] <= row["compute_us"] <= row["span_us"]
        assert 0 <= row["exposed_us"] <= row["transfer_us"] <= row["span_us"]
        assert row["transfer_us"] > 0
        for own in calls[row["rank"]]:
            assert [e for e in own if "GEMM" in e["name"]]
            assert [e for e in own if e["cat"] == "transfer"]
            assert not [e for e in own if "spin_kernel" in e["args"]["detail"]], "a mark"
        first, *others = (Counter(e["name"] for e in own) for own in calls[row["rank"]])
        assert others == [first] * len(others), "another's kernels, or without some of its own"
    return [own for by_call in calls.values() for own in by_call]


@TRANSPORTS
@PASSES
def test_the_profiler_sees_products_and_transfers_of_every_call(transport, pass_name, tmp_path):
    """Fails where calls get each other's kernels, or none at all: nobody sees the launches of the driver's graphs."""
    m = 2
    way = ("--path", "sliced", "--algorithm", "direct", "--chunks", str(m), "--transport", transport)
    data, events = traced(tmp_path, *LINEAR, "--pass", pass_name, *way)
    record = data["record"]
    assert (record["path"], record["algorithm"], record["chunks_per_shard"]) == ("sliced", "direct", m)
    assert record["transport"] == transport
    for own in check_calls(data, events):
        transfers = [e for e in own if e["cat"] == "transfer"]
        if transport == "nccl":
            assert all(e["name"].startswith("NCCL") for e in transfers)
            continue
        assert {e["name"] for e in transfers} == {"copy to a peer"}
        assert len(transfers) >= m, "to the only peer; backward its own rows may count, copied beside what it gathers"
        # cuBLAS may split a product along K and add the parts by a kernel of its own.
        products = [e for e in own if "GEMM" in e["name"] and "reduce" not in e["args"]["detail"].lower()]
        assert len(products) == 2 * m + (pass_name == "backward")


@PASSES
def test_the_default_way_is_seen_whole_too(pass_name, tmp_path):
    check_calls(*traced(tmp_path, *LINEAR, "--pass", pass_name))


# --- attention ---


def slices_of(events):
    """Of every process by its name, each with the row that it is in."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return {
        name: [{**e, "row": rows[pid, e["tid"]]} for e in events if e["ph"] == "X" and e["pid"] == pid]
        for pid, name in names.items()
    }


def span_us(events):
    return max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)


@TRANSPORTS
@PASSES
def test_the_profiler_sees_products_and_transfers_of_attention(transport, pass_name, tmp_path):
    """Fails where calls get each other's kernels, none at all, or copies that count as computations."""
    m = 2
    way = ("--path", "sliced", "--algorithm", "direct", "--chunks", "1", "--splits", str(m), "--transport", transport)
    data, events = traced(tmp_path, *ATTENTION, "--pass", pass_name, "--profiler", *way)
    slices = slices_of(events)
    assert data["source"] == "profiler"
    assert list(data["paths"]) == list(PATHS)
    assert list(slices) == [f"{path}, rank {rank}" for path in PATHS for rank in (0, 1)]
    sent = {"sequential": 1, "row_parallel": 1, "query_split": m}  # messages of a rank to its only peer
    kernels: dict[str, int] = {}
    for path, found in data["paths"].items():
        assert found["record"]["path"] == path
        assert found["record"]["attention"] in ("cudnn", "flash")
        assert found["record"]["transport"] == ("nccl" if path == "sequential" else transport)
        assert len(found["durations_us"]) == 5
        longest_us = 0.0
        for row in found["ranks"]:
            own = slices[f"{path}, rank {row['rank']}"]
            longest_us = max(longest_us, span_us(own))
            assert 0 < row["attention_us"] < row["compute_us"] <= row["span_us"] <= found["duration_us"] + 1
            assert 0 < row["gemm_us"] < row["compute_us"]
            assert 0 <= row["exposed_us"] <= row["transfer_us"]
            assert row["transfer_us"] > 0
            transfers = [e for e in own if e["cat"] == "transfer"]
            if path == "sequential" or transport == "nccl":
                assert any(e["name"].startswith("NCCL") for e in transfers)
            else:
                assert {e["name"] for e in transfers} == {"copy to a peer"}
                assert len(transfers) >= sent[path]
            attention = [e for e in own if e["args"]["op"] == "attention"]
            assert len(attention) >= (2 * m if path == "query_split" else 1)
            streams = {e["row"].split()[2] for e in attention}  # "compute, stream 7", or " 2" of it behind
            assert len(streams) == (2 if path == "query_split" else 1), "splits alternate over two lanes"
        assert longest_us <= found["duration_us"] + 1
        counts = [Counter(e["args"]["op"] for e in slices[f"{path}, rank {rank}"]) for rank in (0, 1)]
        assert counts[0] == counts[1], "another call's kernels, or without some of its own"
        kernels[path] = counts[0]["attention"]
    assert kernels["row_parallel"] == kernels["sequential"]
    assert kernels["query_split"] == 2 * m * kernels["sequential"], "of one call, split by split"


@PASSES
def test_the_recorder_sees_the_same_in_order(pass_name, tmp_path):
    data, events = traced(tmp_path, *ATTENTION, "--pass", pass_name, "--path", "sliced", "--splits", "2")
    assert data["source"] == "recorder"
    slices = slices_of(events)
    for rank in (0, 1):
        own = slices[f"query_split, rank {rank}"]
        assert len([e for e in own if e["args"]["op"] == "attention"]) == 4
        assert len([e for e in own if e["args"]["op"] == "GEMMs"]) == 4 + (pass_name == "backward")
        (alone,) = [e for e in slices[f"sequential, rank {rank}"] if e["args"]["op"] == "attention"]
        (transfer,) = [e for e in slices[f"sequential, rank {rank}"] if e["cat"] == "transfer"]
        first, second = (alone, transfer) if pass_name == "fprop" else (transfer, alone)
        assert first["ts"] + first["dur"] <= second["ts"]
