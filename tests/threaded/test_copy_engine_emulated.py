"""The copy engine's flags, windows and tapes on the CPU: contract, every path, new data at every call."""

import dataclasses
import functools
import gc
import importlib
import itertools
import threading

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import AttentionConfig, LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.ops import (
    WeightGradTarget,
    all_gather_linear,
    linear_reduce_scatter,
    query_split_attention,
)
from commfuse_megatron.ops import (
    reference as references,
)
from commfuse_megatron.ops.trial import run_trial
from commfuse_megatron.runtime import prepared
from commfuse_megatron.runtime.tape_program import TapeBinder
from commfuse_megatron.transport import mapped_window, tape_graphs
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from tests.harness import run_threads
from tests.harness.emulated_gpu import capture_call, emulate_copy_engine, on_copy_engine, take_part, tapes_of
from tests.harness.linear_cases import OPS, Case, assert_equal, check_linear, draw, overlapped, reference
from tests.harness.mixed_calls import MixedCalls, draw_cases
from tests.harness.transport_contract import run_contract
from tests.threaded.test_query_split_attention import Case as AttentionCase
from tests.threaded.test_query_split_attention import assert_close, run
from tests.threaded.test_query_split_attention import draw as draw_attention

PATHS = [("sliced", "direct", m) for m in (1, 2, 3)] + [("sliced", "ring", 2), ("bulk", "direct", 1)]


def config_for(path: str, algorithm: str, m: int, **others) -> OverlapConfig:
    chosen = PassConfig(path=path, algorithm=algorithm, chunks_per_shard=m)
    fprop = dataclasses.replace(chosen, path="sliced")
    transport = TransportConfig(backend="copy_engine")
    return OverlapConfig(linear=LinearConfig(fprop=fprop, dgrad=chosen), transport=transport, **others)


@pytest.mark.parametrize("group_size", [2, 3])
def test_contract(group_size, monkeypatch):
    machine = emulate_copy_engine(monkeypatch)

    def body(group, device):
        with take_part(group):
            transport = CopyEngineTransport(group, device, driver=machine.driver)
            run_contract(transport, group.rank(), group.size(), device)
            transport.close()

    run_threads(group_size, body)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("path", "algorithm", "m"), PATHS)
@on_copy_engine("group_size")
def test_linears_with_new_data_at_every_call(group, device, group_size, path, algorithm, m):
    with OverlapContext(group, config_for(path, algorithm, m)) as context:
        for op in OPS:
            for rows, N, K, has_bias in (
                (32, 16, 8, True),
                (24, 8, 16, False),
                (13, 24, 8, True),
                (2, 8, 8, False),
            ):
                for seed in range(3):
                    check_linear(Case(op=op, rows=rows, N=N, K=K, has_bias=has_bias, seed=seed), group, context)
        tapes = tapes_of(context)
        if group_size > 1:
            assert bool(tapes) == (algorithm == "direct")
        assert None not in tapes


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("mib", [64, 0])
@pytest.mark.parametrize(("path", "m"), [("sliced", 1), ("sliced", 2), ("bulk", 1)])
def test_calls_of_the_same_addresses_become_graphs_of_new_data(group_size, mib, path, m, monkeypatch):
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", 0)  # malloc repeats itself less than the allocator for GPUs
    chosen = config_for(path, "direct", m)
    chosen = dataclasses.replace(chosen, transport=dataclasses.replace(chosen.transport, graph_memory_mib=mib))

    def body(group, device):
        with take_part(group), OverlapContext(group, chosen) as context:
            for op, operation in zip(OPS, (all_gather_linear, linear_reduce_scatter), strict=True):
                case = Case(op=op, rows=16, N=16, K=8, has_bias=True)
                kept = draw(case, group.rank(), group.size(), device)
                out = [torch.empty(0)]
                for seed in range(12):
                    operands = draw(dataclasses.replace(case, seed=seed), group.rank(), group.size(), device)
                    with torch.no_grad():
                        kept.x.copy_(operands.x)
                        kept.weight.copy_(operands.weight)
                    assert_equal(overlapped(case, kept, context), reference(case, kept, group))
                    with torch.no_grad():
                        out[0] = torch.empty(0)  # the last result's memory is free for the next one
                        out[0] = operation(kept.x, kept.weight, kept.bias, context=context)
                    assert torch.equal(out[0], getattr(references, op)(kept.x, kept.weight, kept.bias, group=group))
            records = context.report()
            assert all(sum(record.modes.values()) == record.calls for record in records)
            assert all({"tape"} <= set(record.modes) <= {"tape", "graph"} for record in records)
            assert any("graph" in record.modes for record in records) == bool(mib)
            assert {record.gemm for record in records} == {"cuBLASLt"}
            return number_of_graphs(context)

    for graphs in run_threads(group_size, body):
        assert bool(graphs) == bool(mib)


def number_of_graphs(context) -> int:
    graphs = context.link.transport.graphs
    return 0 if graphs is None else graphs.num_alive


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize(("path", "m"), [("sliced", 1), ("sliced", 2), ("sliced", 3), ("bulk", 1)])
def test_graphs_of_linears_are_right_in_every_order(group_size, path, m, monkeypatch):
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", -1)  # every call is one

    def body(group, device):
        with take_part(group), OverlapContext(group, config_for(path, "direct", m)) as context:
            for op in OPS:
                for seed, rows in itertools.product(range(6), (4 * group_size, 4 * group_size + 1, 2)):
                    check_linear(Case(op=op, rows=rows, N=16, K=8, has_bias=seed % 2 == 0, seed=seed), group, context)
            return number_of_graphs(context)

    assert min(run_threads(group_size, body)) > 0


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize(("m", "num_lanes", "backward"), [
    (1, 2, "query_split"), (2, 3, "query_split"), (3, 2, "query_split"), (1, 4, "query_split"), (2, 4, "query_split"),
    (2, 2, "row_parallel"),
])  # fmt: skip
def test_graphs_of_attention_are_right_in_every_order(group_size, m, num_lanes, backward, monkeypatch):
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(prepared, "choose_num_lanes", lambda *arguments: num_lanes)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", -1)
    attention = AttentionConfig(path="query_split", splits_per_shard=m, backward=backward)
    config = OverlapConfig(attention=attention, transport=TransportConfig(backend="copy_engine"))

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            for seed, rows in itertools.product(range(10 * num_lanes), (6 * group_size, 6 * group_size + 1, 3, 1)):
                case = AttentionCase(rows=rows, head_dim=8, value_dim=8, N=16, dtype=torch.float32, seed=seed)
                operands, grad_y = draw_attention(case, group.rank(), group.size())
                found = run(operands, grad_y, query_split_attention, context=context)
                exact = run(operands, grad_y, references.query_split_attention, group=group)
                assert_close(found, exact, 1e-5)
            return number_of_graphs(context)

    assert min(run_threads(group_size, body)) > 0


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 3])
@on_copy_engine("group_size")
def test_attention_with_new_data_and_layouts_at_every_call(group, device, group_size, m):
    attention = AttentionConfig(path="query_split", splits_per_shard=m)
    config = OverlapConfig(attention=attention, transport=TransportConfig(backend="copy_engine"))

    def fused(tensor):  # as views into one projection
        return torch.cat([tensor, tensor], dim=-1)[..., : tensor.size(-1)] if tensor.dim() == 4 else tensor

    with OverlapContext(group, config) as context:
        for case in (
            AttentionCase(rows=24, head_dim=8, value_dim=8, N=16, dtype=torch.float32),
            AttentionCase(rows=13, head_dim=8, value_dim=4, N=8, kv_heads=2, dtype=torch.float32, has_bias=False),
            AttentionCase(rows=3, batch=1, heads=1, kv_heads=1, head_dim=4, value_dim=4, N=4, dtype=torch.float32),
        ):
            for seed, keywords in enumerate(({}, {"causal": False}, {"scale": 0.3}, {"window": (2, 0)})):
                for view in (None, fused):
                    given = dataclasses.replace(case, seed=seed, keywords=keywords)
                    operands, grad_y = draw_attention(given, group.rank(), group.size())
                    found = run(operands, grad_y, query_split_attention, view, context=context, **keywords)
                    exact = run(operands, grad_y, references.query_split_attention, group=group, **keywords)
                    assert_close(found, exact, 1e-5)
        passes = [p for p in context._prepared.values() if p.problem.op == "query_split_attention"]
        tapes = [tape for p in passes for tape in p.tapes]
        assert bool(tapes) == (group_size > 1)
        assert None not in tapes
        if group_size > 1:
            assert {p.problem.pass_name for p in passes if p.tapes} == {"fprop", "backward"}


@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
def test_trials_of_attention_run_as_calls_do(path, monkeypatch):
    emulate_copy_engine(monkeypatch)
    config = OverlapConfig(attention=AttentionConfig(path=path), transport=TransportConfig(backend="copy_engine"))
    operation = importlib.import_module("commfuse_megatron.ops.query_split_attention")._OPERATION

    def body(group, device):
        with take_part(group), OverlapContext(group, config) as context:
            case = AttentionCase(rows=24, head_dim=8, value_dim=8, N=16, dtype=torch.float32)
            operands, grad_y = draw_attention(case, group.rank(), group.size())
            run(operands, grad_y, query_split_attention, context=context)
            (forward,) = (p for p in context.known_calls.values() if p.problem.op == "query_split_attention")
            assert forward.problem.needs
            times = run_trial(operation.rehearse, context, forward.problem, [forward.plan])
            assert len(times) == 1
            assert times[0] > 0

    run_threads(2, body)


@pytest.mark.parametrize("path", ["sliced", "bulk"])
@on_copy_engine(2)
def test_without_features_or_batch(group, device, path):
    with OverlapContext(group, config_for(path, "direct", 1)) as context:
        for op in OPS:
            for N, K in ((0, 4), (4, 0), (0, 0), (8, 8)):
                check_linear(Case(op=op, rows=8, N=N, K=K, has_bias=False), group, context)


@on_copy_engine(2)
def test_what_tapes_do_not_serve_goes_step_by_step(group, device):
    with OverlapContext(group, config_for("sliced", "direct", 2)) as context:
        for op in OPS:
            check_linear(Case(op=op, rows=8, N=6, K=5), group, context)  # rows of 20 and 24 bytes
        assert all(record.modes == {"stepped": record.calls} for record in context.report())
        assert {record.gemm for record in context.report()} == {"torch"}
        tapes = tapes_of(context)
        assert tapes
        assert set(tapes) == {None}


@pytest.mark.parametrize("path", ["sliced", "bulk"])
@on_copy_engine(2)
def test_weight_gradients_are_added_where_they_are_wanted(group, device, path):
    with OverlapContext(group, config_for(path, "direct", 1)) as context:
        for op, function in zip(OPS, (all_gather_linear, linear_reduce_scatter), strict=True):
            case = Case(op=op, rows=16, N=8, K=8, dtype=torch.bfloat16, has_bias=False)
            operands = draw(case, group.rank(), group.size(), device)
            expected = reference(case, operands, group)["weight.grad"]
            main_grad = torch.zeros(8, 8)
            for count in (1, 2):
                leaves = operands.copies()
                target = WeightGradTarget(main_grad, lambda: None)
                function(leaves.x, leaves.weight, context=context, weight_grad=target).backward(operands.grad_y)
                assert leaves.weight.grad is None
                assert torch.equal(main_grad, count * expected.float())


@on_copy_engine(3)
def test_windows_grow_and_tapes_are_recorded_again(group, device):
    with OverlapContext(group, config_for("sliced", "direct", 2)) as context:
        for rows in (8, 64, 8, 128, 64):
            for op in OPS:
                check_linear(Case(op=op, rows=rows, N=16, K=16, seed=rows), group, context)


def test_windows_that_were_outgrown_or_closed_are_freed_at_once(monkeypatch):
    """Though their views were in tapes, programs and graphs, and though nobody collects garbage."""
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", 0)
    monkeypatch.setattr(mapped_window, "_mapped", set())
    attention = AttentionConfig(path="query_split", splits_per_shard=2)

    def body(group, device):
        everyone = group.size()
        with take_part(group):
            config = dataclasses.replace(config_for("sliced", "direct", 2), attention=attention)
            with OverlapContext(group, config) as context:
                sizes = []
                for rows in (8, 16, 64):
                    for op in OPS:
                        case = Case(op=op, rows=rows, N=16, K=8, has_bias=True)
                        operands = draw(case, group.rank(), group.size(), device)
                        for _ in range(4):
                            overlapped(case, operands, context)
                    heads = AttentionCase(rows=rows, dtype=torch.float32)
                    leaves, grad_y = draw_attention(heads, group.rank(), everyone)
                    for _ in range(4):
                        run(leaves, grad_y, query_split_attention, context=context)
                    group.barrier().wait()
                    sizes.append(len(mapped_window._mapped))
                    group.barrier().wait()
            group.barrier().wait()
            return sizes, len(mapped_window._mapped)

    gc.disable()
    try:
        found = run_threads(3, body)
    finally:
        gc.enable()
    for sizes, after in found:
        assert len(set(sizes)) == 1
        assert after == 3  # every rank's flags, which its context keeps


@pytest.mark.parametrize(
    ("op", "path", "m"),
    [(op, "sliced", m) for op in OPS for m in (1, 2, 4)] + [("linear_reduce_scatter", "bulk", 1)],
)
def test_own_rows_are_copied_beside_the_last_gemm(op, path, m, monkeypatch):
    """With one hardware queue, GEMMs behind the copy would wait for all transfers before it."""
    emulate_copy_engine(monkeypatch)
    logs: dict[int, list[str]] = {}

    def logged(name, call):
        def wrapped(*args, **keywords):
            logs.setdefault(threading.get_ident(), []).append(name)
            return call(*args, **keywords)

        return wrapped

    monkeypatch.setattr(TapeBinder, "_add_copy", logged("copy", TapeBinder._add_copy))
    monkeypatch.setattr(TapeBinder, "matmul", logged("gemm", TapeBinder.matmul))

    def body(group, device):
        with take_part(group), OverlapContext(group, config_for(path, "direct", m)) as context:
            case = Case(op=op, rows=24, N=16, K=8)
            overlapped(case, draw(case, group.rank(), group.size(), device), context)
        return logs[threading.get_ident()]

    for log in run_threads(3, body):
        assert log.count("copy") == 1
        assert log[-3:] == ["copy", "gemm", "gemm"]


@pytest.mark.parametrize("is_in_graphs", [False, True])
@pytest.mark.parametrize("group_size", [3, 4, 6])
def test_calls_of_other_shapes_follow_at_once(group_size, is_in_graphs, monkeypatch):
    emulate_copy_engine(monkeypatch)
    if is_in_graphs:
        monkeypatch.setattr(tape_graphs, "_STEPWISE", -1)
    attention = AttentionConfig(path="query_split")
    ring = PassConfig(path="sliced", algorithm="ring", chunks_per_shard=2)
    direct = config_for("sliced", "direct", 1)
    configs = [
        OverlapConfig(attention=attention, transport=TransportConfig(backend="copy_engine")),
        config_for("sliced", "direct", 2),
        dataclasses.replace(config_for("sliced", "ring", 1), attention=attention),
        dataclasses.replace(direct, linear=dataclasses.replace(direct.linear, fprop=ring)),
    ]

    def body(group, device):
        calls = MixedCalls(draw_cases(group_size), group)
        for config in configs:
            with take_part(group), OverlapContext(group, config) as context:
                for _ in range(3):  # the first time all ranks agree on each problem, which holds them together
                    calls.check(context)

    run_threads(group_size, body)


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("m", [1, 2])
@on_copy_engine("group_size")
def test_calls_in_the_programs_graph_are_right_in_every_order(group, device, group_size, m):
    """Megatron captures layers so. Also where some ranks have no rows, and with tapes that were not made before."""
    with OverlapContext(group, config_for("sliced", "direct", m)) as context:
        first = Case(op="all_gather_linear", rows=group_size, N=8, K=8)
        overlapped(first, draw(first, group.rank(), group.size(), device), context)
        for op, rows in itertools.product(OPS, (4 * group_size, group_size + 1, 2, 1)):
            case = Case(op=op, rows=rows, N=16, K=8, has_bias=False, seed=rows)
            operands = draw(case, group.rank(), group.size(), device)
            expected = reference(case, operands, group)["y"]
            more = {"total_rows": rows} if op == "all_gather_linear" else {}
            function = getattr(importlib.import_module("commfuse_megatron.ops"), op)
            with torch.no_grad():
                call = functools.partial(function, operands.x, operands.weight, context=context, **more)
                call()  # windows grow
                y, launch = capture_call(call)
            for _ in range(5):
                y.fill_(-99)
                launch()
                assert torch.equal(y, expected)


@pytest.mark.parametrize("op", OPS)
def test_who_has_not_come_is_named_also_where_no_message_is_due(op, monkeypatch):
    emulate_copy_engine(monkeypatch)

    def body(group, device):
        rank = group.rank()
        with take_part(group), OverlapContext(group, config_for("sliced", "direct", 1)) as context:
            case = Case(op=op, rows=1, N=8, K=8, has_bias=False)
            overlapped(case, draw(case, rank, group.size(), device), context)
            link, transport = context.link, context.link.transport
            operations = tapes_of(context)
            assert len(operations) == 2
            group.barrier().wait()
            for operation in operations:
                peers = {key[0] for key in operation.keys} - {-1}
                assert peers == {0, 1, 2} - {rank}, "from each a message, or that there is none"
                said = str(link._overdue_error(operation))  # nothing is set between operations
                assert said.startswith(f"group rank {rank} ") or f": group rank {rank} " in said
                assert sum(f"group rank {peer} " in said for peer in peers) >= 1
                transport.has_arrived = lambda key: key[0] >= 0
                said = str(link._overdue_error(operation))
                sends = {key[2] for key in operation.keys} - {-1, rank}
                assert ("could not deliver to" in said) == bool(sends)
                transport.has_arrived = lambda key: True
                assert "something else holds up its stream" in str(link._overdue_error(operation))
                del transport.has_arrived
            group.barrier().wait()

    run_threads(3, body)
