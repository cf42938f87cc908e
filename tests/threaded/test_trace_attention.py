"""One attention block, traced by the recorder on ranks as threads: what ran, in which order, in which call."""

import dataclasses
from collections import Counter

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.runtime.meter import COMPUTE, TRANSFER
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.trace.kernels import Profile
from commfuse_megatron.tools.trace.operation import BlockToTrace, BlockTrace, attention_us, trace_block
from commfuse_megatron.tools.trace.summary import is_attention, is_gemm
from tests.harness import on_ranks, run_threads
from tests.harness.contexts import in_context
from tests.threaded.test_query_split_attention import Case, attention_config, draw, run

BLOCK = BlockToTrace(
    pass_name="fprop", rows=24, batch=2, heads=4, kv_heads=2, head_dim=6, N=10, dtype=torch.float64, calls=3, warm_up=1
)


def traced(ranks, config, **changes) -> BlockTrace:
    """The trace of a block, which all ranks agree on."""

    def body(group, device):
        return trace_block(dataclasses.replace(BLOCK, **changes), config, group)

    results = run_threads(ranks, body)
    assert [found.calls for found in results] == [results[0].calls] * ranks
    return results[0]


@pytest.mark.parametrize(("ranks", "m"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("pass_name", ["fprop", "backward"])
def test_query_split_shows_attention_and_product_of_every_split(ranks, m, pass_name):
    """Fails where one interval spans both: backward it was called a multiplication."""
    found = traced(ranks, attention_config(m=m), pass_name=pass_name)
    assert (found.record.path, found.record.chunks_per_shard, found.projection) == ("query_split", m, None)
    assert len(found.calls) == len(found.durations_us) == BLOCK.calls
    verb, whats, rest = "attend", ["attend", "multiply"], {"sum": m}
    if pass_name == "backward":
        verb, whats, rest = "attend backward", ["attend backward", "multiply", "add gradients"], {"wgrad": 1}
    for recording in found.calls:
        assert sorted(recording) == list(range(ranks))
        for rank, intervals in recording.items():
            computed = [i.name for i in intervals if i.track == COMPUTE]
            expected = {f"{what} {split}": 1 for what in whats for split in range(ranks * m)} | rest
            assert Counter(computed) == expected
            order = [name.split()[-1] for name in computed if name.startswith("attend")]
            if pass_name == "fprop":  # own queries come last
                assert order[-m:] == [str(rank * m + index) for index in range(m)]
            else:
                assert order[:m] == [str(rank * m + index) for index in range(m)]
            assert len([i for i in intervals if i.track == TRANSFER]) >= (ranks - 1) * m
            kinds = {i.name.rstrip("0123456789 "): i.op for i in intervals if i.track == COMPUTE}
            assert kinds == {
                verb: "attention",
                "multiply": "GEMMs",
                **({"sum": "sums and other kernels"} if "sum" in rest else {"wgrad": "GEMMs"}),
                **({"add gradients": "sums and other kernels"} if pass_name == "backward" else {}),
            }
            attentions, products = ([i for i in intervals if is_it(i)] for is_it in (is_attention, is_gemm))
            for one, other in ((a, p) for a in attentions for p in products):
                assert one.end_us <= other.start_us or other.end_us <= one.start_us, "recorded twice"


def test_a_backward_pass_at_once_after_splits_is_traced():
    """It was refused as the wrong path."""
    base = attention_config(m=2)
    config = dataclasses.replace(base, attention=dataclasses.replace(base.attention, backward="row_parallel"))
    found = traced(2, config, pass_name="backward")
    assert found.record.path == "row_parallel"
    for recording in found.calls:
        for intervals in recording.values():
            assert len([i for i in intervals if is_attention(i)]) == 1
    assert traced(2, config).record.path == "query_split"


@pytest.mark.parametrize("pass_name", ["fprop", "backward"])
def test_row_parallel_shows_attention_and_how_projection_ran(pass_name):
    """Fails where attention is not recorded: only the projection was seen."""
    found = traced(2, attention_config("row_parallel"), pass_name=pass_name)
    assert (found.record.path, found.projection.path) == ("row_parallel", "sliced")
    for recording in found.calls:
        for intervals in recording.values():
            (attention,) = [i for i in intervals if is_attention(i)]
            others = [i for i in intervals if i is not attention]
            assert {i.track for i in others} == {COMPUTE, TRANSFER}
            if pass_name == "fprop":
                assert attention.end_us <= min(i.start_us for i in others)
            else:
                assert max(i.end_us for i in others) <= attention.start_us


def test_the_typical_call_has_the_median_duration():
    found = traced(2, attention_config(), calls=4)
    assert found.duration_us == sorted(found.durations_us)[1]
    everything = [i for intervals in found.typical.values() for i in intervals]
    assert found.duration_us == max(i.end_us for i in everything) - min(i.start_us for i in everything)
    for rank, summary in found.summaries.items():
        assert summary.calls == 1
        assert 0 < attention_us(found.typical[rank]) + summary.gemm_us <= summary.compute_us + 1e-6
        assert summary.span_us <= found.duration_us


def a_profiler(monkeypatch, intervals_of):
    """In place of the profiler on GPUs: run the calls, give what `intervals_of(calls)` says; collects the contexts."""
    contexts = []

    class Watched(OverlapContext):
        def __init__(self, group, config):
            super().__init__(group, config)
            contexts.append(self)

    def profile(calls, *, prepare, are_apart):
        assert are_apart
        for number, call in enumerate(calls, 1):
            prepare(number)
            call()
        return Profile(1_000_000, tuple(intervals_of(len(calls))))

    monkeypatch.setattr("commfuse_megatron.tools.trace.operation.OverlapContext", Watched)
    monkeypatch.setattr("commfuse_megatron.tools.trace.operation.profile_calls", profile)
    return contexts


def kernel(name, start_us, call, track=COMPUTE, op="x kernels"):
    return Interval(name, track, start_us, start_us + 10 * call, None, op, call, "stream 7", "full name")


def test_kernels_of_the_profiler_go_to_their_calls_and_kinds(monkeypatch):
    def intervals(calls):
        for call in range(1, calls + 1):
            names = ("attention", "GEMM, 112 SMs", "nvjet GEMM", "sum")
            yield from (kernel(name, 1000 * call + 100 * at, call) for at, name in enumerate(names))
            yield kernel("copy to a peer", 1000 * call + 400, call, TRANSFER)

    contexts = a_profiler(monkeypatch, intervals)
    found = traced(2, attention_config(), is_profiled=True)
    assert found.durations_us == [400 + 10 * call for call in (1, 2, 3)]
    assert found.duration_us == 420
    for intervals_of_rank in found.typical.values():
        kinds = [i.op for i in intervals_of_rank]
        assert kinds == ["attention", "GEMMs", "GEMMs", "sums and other kernels", "transfers"]
        assert attention_us(intervals_of_rank) == 20
    assert len(contexts) == 2
    for context in contexts:
        assert context.recorder is None, "what records is not replayed"
        assert context.config.transport.graph_memory_mib == 0
        assert [record.calls for record in context.report()] == [BLOCK.warm_up + BLOCK.calls]


@on_ranks(2)
def test_a_profiler_that_saw_nothing_is_refused_on_all_ranks(group, device, monkeypatch):
    a_profiler(monkeypatch, lambda calls: [kernel("attention", 1000 * call, call) for call in range(2, calls + 1)])
    with pytest.raises(UnsupportedError, match=r"nothing was seen to run .* on the ranks \[0, 1\]"):
        trace_block(dataclasses.replace(BLOCK, is_profiled=True), attention_config(), group)


@on_ranks(2)
def test_another_way_than_asked_for_is_refused_on_all_ranks(group, device):
    config = attention_config(transport=TransportConfig(max_buffer_mib=1))
    large = dataclasses.replace(BLOCK, rows=1024, batch=1, heads=1, kv_heads=1, N=512)
    said = r"path query_split was asked for and sequential taken: .*max_buffer"
    with pytest.raises(UnsupportedError, match=said):
        trace_block(large, config, group)


@pytest.mark.parametrize(("forced", "pass_name", "taken"), [
    (LinearConfig(fprop=PassConfig(path="bulk")), "fprop", "path bulk was asked for and sliced taken"),
    (LinearConfig(dgrad=PassConfig(path="async")), "backward", "path async was asked for and sequential taken"),
])  # fmt: skip
@on_ranks(2)
def test_another_way_of_the_projection_than_asked_is_refused(group, device, forced, pass_name, taken):
    """Else the row of row_parallel would show another way under its name. A configuration may mean other linears."""
    config = attention_config("row_parallel", linear=forced)
    wanted = dataclasses.replace(BLOCK, pass_name=pass_name)
    with pytest.raises(UnsupportedError, match=f"the projection's {taken}"):
        trace_block(dataclasses.replace(wanted, forces_projection=True), config, group)
    if "sequential" not in taken:  # whose collective is watched, which takes processes
        found = trace_block(wanted, config, group)
        assert found.projection.path == "sliced"
        assert "for backward passes" in found.projection.reason


@in_context(2, attention_config("row_parallel", record=True))
def test_the_report_does_not_say_attentions_exposed_time_alone(group, context):
    """Its projection's transfers are those of another record."""
    operands, grad_y = draw(Case(), group.rank(), group.size())
    run(operands, grad_y, ops.query_split_attention, context=context)
    exposed = {(r.op, r.pass_name): r.exposed_comm_us for r in context.report()}
    assert exposed["query_split_attention", "fprop"] is exposed["query_split_attention", "backward"] is None
    assert exposed["linear_reduce_scatter", "fprop"] >= 0
