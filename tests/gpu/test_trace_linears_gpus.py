"""`commfuse trace` of a linear on two GPUs: what the profiler saw, over every transport and the default way."""

import json
from collections import Counter

import pytest

from commfuse_megatron.tools import main as cli

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(300)]

# So long that kernels take longer than the host needs to launch them.
SIZES = ("--case", "llama-8b.proj", "--tokens", "8192", "--ranks", "2", "--device", "cuda", "--profiler")
CALLS = (1, 2, 3, 4, 5)


def traced(folder, *options):
    """(the --json file, rank -> call -> its slices)."""
    files = ("--output", str(folder), "--name", "x", "--json", str(folder / "out.json"))
    assert cli.main(["trace", *SIZES, *options, *files]) == 0
    assert (folder / "x.png").stat().st_size > 5000
    events = json.loads((folder / "x.json").read_text("utf-8"))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    calls = {
        rank: {call: [e for e in slices if (e["pid"], e["args"]["call"]) == (rank, call)] for call in CALLS}
        for rank in (0, 1)
    }
    assert sum(len(own) for by_call in calls.values() for own in by_call.values()) == len(slices)
    return json.loads((folder / "out.json").read_text("utf-8")), calls


def check(data, calls):
    """Every call of every rank has its own work and nobody else's."""
    assert (data["source"], data["calls"]) == ("profiler", len(CALLS))
    assert [row["rank"] for row in data["ranks"]] == [0, 1]
    for row in data["ranks"]:
        assert row["calls"] == len(CALLS)
        assert 0 < row["gemm_us"] <= row["compute_us"] <= row["span_us"]
        assert 0 <= row["exposed_us"] <= row["transfer_us"] <= row["span_us"]
        assert row["transfer_us"] > 0
        for own in calls[row["rank"]].values():
            assert [e for e in own if "GEMM" in e["name"]]
            assert [e for e in own if e["cat"] == "transfer"]
            assert not [e for e in own if "spin_kernel" in e["args"]["detail"]], "a mark"
        # How long calls take says nothing here: beside a profiler the host may stall in the middle of one.
        first, *others = (Counter(e["name"] for e in own) for own in calls[row["rank"]].values())
        assert others == [first] * len(others), "another's kernels, or without some of its own"


@pytest.mark.parametrize("transport", ["copy_engine", "nccl"])
@pytest.mark.parametrize("pass_name", ["fprop", "backward"])
def test_the_profiler_sees_products_and_transfers_of_every_call(transport, pass_name, tmp_path):
    """Fails where calls get each other's kernels, or none at all: nobody sees the launches of the driver's graphs."""
    m = 2
    way = ("--path", "sliced", "--algorithm", "direct", "--chunks", str(m), "--transport", transport)
    data, calls = traced(tmp_path, "--pass", pass_name, *way)
    record = data["record"]
    assert (record["path"], record["algorithm"], record["chunks_per_shard"]) == ("sliced", "direct", m)
    assert record["transport"] == transport
    check(data, calls)
    for own in (own for by_call in calls.values() for own in by_call.values()):
        transfers = [e for e in own if e["cat"] == "transfer"]
        if transport == "nccl":
            assert all(e["name"].startswith("NCCL") for e in transfers)
            continue
        assert {e["name"] for e in transfers} == {"copy to a peer"}
        assert len(transfers) >= m, "to the only peer; backward its own rows may count, copied beside what it gathers"
        # cuBLAS may split a product along K and add the parts by a kernel of its own.
        products = [e for e in own if "GEMM" in e["name"] and "reduce" not in e["args"]["detail"].lower()]
        assert len(products) == 2 * m + (pass_name == "backward")


@pytest.mark.parametrize("pass_name", ["fprop", "backward"])
def test_the_default_way_is_seen_whole_too(pass_name, tmp_path):
    check(*traced(tmp_path, "--pass", pass_name))
