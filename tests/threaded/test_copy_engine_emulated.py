"""The copy engine's flags, windows and tapes on the CPU: contract, every path, new data at every call."""

import dataclasses
import functools
import gc
import importlib
import itertools
import threading

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import AttentionConfig, LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.ops import WeightGradTarget
from commfuse_megatron.ops.trial import run_trial
from commfuse_megatron.runtime import buffers, prepared
from commfuse_megatron.runtime.buffers import PassBuffers
from commfuse_megatron.runtime.tape_program import TapeBinder
from commfuse_megatron.transport import mapped_window, tape_graphs
from commfuse_megatron.transport.base import Window
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from tests.harness import emulated_gpu, run_threads
from tests.harness.contexts import in_context
from tests.harness.emulated_gpu import capture_call, emulate_copy_engine, take_part, tapes_of
from tests.harness.linear_cases import (
    LINEARS,
    OPS,
    Case,
    assert_equal,
    check_linear,
    draw_own,
    drawn,
    overlapped,
    reference,
)
from tests.harness.mixed_calls import MixedCalls, draw_cases
from tests.harness.transport_contract import run_contract
from tests.threaded import test_query_split_attention as attention

PATHS = [("sliced", "direct", m) for m in (1, 2, 3)] + [("sliced", "ring", 2)]
PATHS += [(path, "direct", 1) for path in ("grouped", "bulk")]
COPIES = TransportConfig(backend="copy_engine")
#: Of fp32; a split that is lost, doubled or sees other rows errs by order 1.
LIMIT = 1e-5
in_copy_context = functools.partial(in_context, over_copies=True)


def config_for(path: str, algorithm: str = "direct", m: int = 1, **others) -> OverlapConfig:
    chosen = PassConfig(path=path, algorithm=algorithm, chunks_per_shard=m)
    fprop = dataclasses.replace(chosen, path="sliced" if path == "bulk" else path)
    return OverlapConfig(linear=LinearConfig(fprop=fprop, dgrad=chosen), **{"transport": COPIES, **others})


def of_attention(m=None, path="query_split", backward="auto") -> OverlapConfig:
    return OverlapConfig(attention=AttentionConfig(path=path, splits_per_shard=m, backward=backward), transport=COPIES)


def heads(rows=24, head_dim=8, value_dim=8, N=16, dtype=torch.float32, **others) -> attention.Case:
    return attention.Case(rows=rows, head_dim=head_dim, value_dim=value_dim, N=N, dtype=dtype, **others)


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
@in_copy_context("group_size", lambda path, algorithm, m: config_for(path, algorithm, m))
def test_linears_with_new_data_at_every_call(group, context, algorithm):
    sizes = ((32, 16, 8, True), (24, 8, 16, False), (13, 24, 8, True), (2, 8, 8, False))
    for op, (rows, N, K, has_bias), seed in itertools.product(OPS, sizes, range(3)):
        check_linear(Case(op=op, rows=rows, N=N, K=K, has_bias=has_bias, seed=seed), group, context)
    tapes = tapes_of(context)
    assert group.size() == 1 or bool(tapes) == (algorithm == "direct")
    assert None not in tapes


@pytest.fixture
def scarce_workspaces(monkeypatch):
    """Scratch memory of GEMMs grows by little; says to which address each GEMM, and whether that was alive then."""
    monkeypatch.setattr(buffers, "_WORKSPACE_STEP_BYTES", 64)
    alive, given, carve = set[int](), list[bool](), PassBuffers.workspace
    multiply, free = emulated_gpu._Matmul.__call__, Window.free

    def carved(self, lane, size_bytes):
        address = carve(self, lane, size_bytes)
        alive.add(address)
        return address

    def freed(self):
        alive.discard(self.tensor.data_ptr())
        free(self)

    def noted(self, stream, workspace_at, *addresses):
        given.append(workspace_at in alive)
        multiply(self, stream, workspace_at, *addresses)

    monkeypatch.setattr(PassBuffers, "workspace", carved)
    monkeypatch.setattr(Window, "free", freed)
    monkeypatch.setattr(emulated_gpu._Matmul, "__call__", noted)
    return given


@in_copy_context(4, lambda: config_for("grouped"))
def test_scratch_memory_may_grow_within_a_pass(group, context, scarce_workspaces):
    for rows in (16, 40, 24):
        check_linear(Case(op="all_gather_linear", rows=rows, N=16, K=8), group, context)
    assert scarce_workspaces
    assert all(scarce_workspaces)


def config_with_graphs(path: str, m: int, mib: int) -> OverlapConfig:
    return config_for(path, m=m, transport=dataclasses.replace(COPIES, graph_memory_mib=mib))


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("mib", [64, 0])
@pytest.mark.parametrize(("path", "m"), [("sliced", 1), ("sliced", 2), ("grouped", 1), ("bulk", 1)])
@in_copy_context("group_size", config_with_graphs, stepwise=0)  # malloc repeats itself less than the GPU's allocator
def test_calls_of_the_same_addresses_become_graphs_of_new_data(group, context, mib):
    for op in OPS:
        case = Case(op=op, rows=16, N=16, K=8, has_bias=True)
        kept = draw_own(case, group)
        out = [torch.empty(0)]
        for seed in range(12):
            operands = draw_own(dataclasses.replace(case, seed=seed), group)
            with torch.no_grad():
                kept.x.copy_(operands.x)
                kept.weight.copy_(operands.weight)
            assert_equal(overlapped(case, kept, context), reference(case, kept, group))
            with torch.no_grad():
                out[0] = torch.empty(0)  # the last result's memory is free for the next one
                out[0] = getattr(ops, op)(kept.x, kept.weight, kept.bias, context=context)
            assert torch.equal(out[0], getattr(ops.reference, op)(kept.x, kept.weight, kept.bias, group=group))
    records = context.report()
    assert all(sum(record.modes.values()) == record.calls for record in records)
    assert all({"tape"} <= set(record.modes) <= {"tape", "graph"} for record in records)
    assert any("graph" in record.modes for record in records) == bool(mib) == bool(number_of_graphs(context))
    assert {record.gemm for record in records} == {"cuBLASLt"}


def number_of_graphs(context) -> int:
    graphs = context.link.transport.graphs
    return 0 if graphs is None else graphs.num_alive


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize(("path", "m"), [("sliced", 1), ("sliced", 2), ("sliced", 3), ("bulk", 1)])
@in_copy_context("group_size", lambda path, m: config_for(path, m=m), stepwise=-1)
def test_graphs_of_linears_are_right_in_every_order(group, context, group_size):
    for op, seed, rows in itertools.product(LINEARS, range(6), (4 * group_size, 4 * group_size + 1, 2)):
        check_linear(Case(op=op, rows=rows, N=16, K=8, has_bias=seed % 2 == 0, seed=seed), group, context)
    assert number_of_graphs(context) > 0


@pytest.fixture
def lanes(num_lanes, monkeypatch):
    monkeypatch.setattr(prepared, "choose_num_lanes", lambda *arguments: num_lanes)


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize(("m", "num_lanes", "backward"), [
    (1, 2, "query_split"), (2, 3, "query_split"), (3, 2, "query_split"), (1, 4, "query_split"), (2, 4, "query_split"),
    (2, 2, "row_parallel"),
])  # fmt: skip
@pytest.mark.usefixtures("lanes")
@in_copy_context("group_size", lambda m, backward: of_attention(m, backward=backward), stepwise=-1)
def test_graphs_of_attention_are_right_in_every_order(group, context, group_size, num_lanes):
    # Every call's graph takes another order; what the call before left in the windows is of other data.
    sizes = itertools.product(range(2 * num_lanes), (6 * group_size, 6 * group_size + 1, 3, 1))
    drawn = [attention.draw_own(heads(rows, seed=seed), group) for seed, rows in sizes]
    exact = [attention.run(*each, ops.reference.query_split_attention, group=group) for each in drawn]
    for given, expected in 5 * list(zip(drawn, exact, strict=True)):
        attention.assert_close(attention.run(*given, ops.query_split_attention, context=context), expected, LIMIT)
    assert number_of_graphs(context) > 0


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 3])
@in_copy_context("group_size", lambda m: of_attention(m))
def test_attention_with_new_data_and_layouts_at_every_call(group, context, group_size):
    def fused(tensor):  # as views into one projection
        return torch.cat([tensor, tensor], dim=-1)[..., : tensor.size(-1)] if tensor.dim() == 4 else tensor

    cases = (
        heads(), heads(13, value_dim=4, N=8, kv_heads=2, has_bias=False),
        heads(3, batch=1, heads=1, kv_heads=1, head_dim=4, value_dim=4, N=4),
    )  # fmt: skip
    for case, view in itertools.product(cases, (None, fused)):
        for seed, keywords in enumerate(({}, {"causal": False}, {"scale": 0.3}, {"window": (2, 0)})):
            attention.check(dataclasses.replace(case, seed=seed, keywords=keywords), group, context, view, LIMIT)
    passes = [p for p in context._prepared.values() if p.problem.op == "query_split_attention"]
    tapes = [tape for p in passes for tape in p.tapes]
    assert bool(tapes) == (group_size > 1)
    assert None not in tapes
    assert group_size == 1 or {p.problem.pass_name for p in passes if p.tapes} == {"fprop", "backward"}


@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
@in_copy_context(2, lambda path: of_attention(path=path))
def test_trials_of_attention_run_as_calls_do(group, context):
    operation = importlib.import_module("commfuse_megatron.ops.query_split_attention")._OPERATION
    attention.check(heads(), group, context, limit=LIMIT)
    (forward,) = (p for p in context.known_calls.values() if p.problem.op == "query_split_attention")
    assert forward.problem.needs
    (time,) = run_trial(operation.rehearse, context, forward.problem, [forward.plan]).us
    assert time > 0
    windows = sum(buffer.tensor.numel() for buffer in map(context.slots.window, ("gather", "receive")))
    assert context.buffer_bytes == windows  # what only a losing candidate needs is freed
    attention.check(heads(), group, context, limit=LIMIT)


@pytest.mark.parametrize("path", ["sliced", "bulk"])
@in_copy_context(2, lambda path: config_for(path))
def test_without_features_or_batch(group, context):
    for op, (N, K) in itertools.product(LINEARS, ((0, 4), (4, 0), (0, 0), (8, 8))):
        check_linear(Case(op=op, rows=8, N=N, K=K, has_bias=False), group, context)


@in_copy_context(2, config_for("sliced", m=2))
def test_what_tapes_do_not_serve_goes_step_by_step(group, context):
    for op in OPS:
        check_linear(Case(op=op, rows=8, N=6, K=5), group, context)  # rows of 20 and 24 bytes
    assert all(record.modes == {"stepped": record.calls} for record in context.report())
    assert {record.gemm for record in context.report()} == {"torch"}
    assert set(tapes_of(context)) == {None}


@pytest.mark.parametrize("path", ["sliced", "bulk"])
@in_copy_context(2, lambda path: config_for(path))
def test_weight_gradients_are_added_where_they_are_wanted(group, context):
    for op in LINEARS:
        operands, expected = drawn(Case(op=op, rows=16, N=8, K=8, dtype=torch.bfloat16, has_bias=False), group)
        main_grad = torch.zeros(8, 8)
        for count in (1, 2):
            leaves = operands.copies()
            target = WeightGradTarget(main_grad, lambda: None)
            y = getattr(ops, op)(leaves.x, leaves.weight, context=context, weight_grad=target)
            y.backward(operands.grad_y)
            assert leaves.weight.grad is None
            assert torch.equal(main_grad, count * expected["weight.grad"].float())


@in_copy_context(3, config_for("sliced", m=2))
def test_windows_grow_and_tapes_are_recorded_again(group, context):
    for rows, op in itertools.product((8, 64, 8, 128, 64), LINEARS):
        check_linear(Case(op=op, rows=rows, N=16, K=16, seed=rows), group, context)


def test_windows_that_were_outgrown_or_closed_are_freed_at_once(monkeypatch):
    """Though their views were in tapes, programs and graphs, and though nobody collects garbage."""
    emulate_copy_engine(monkeypatch)
    monkeypatch.setattr(tape_graphs, "_STEPWISE", 0)
    monkeypatch.setattr(mapped_window, "_mapped", set())
    config = config_for("sliced", m=2, attention=AttentionConfig(path="query_split", splits_per_shard=2))

    def count(group):
        group.barrier().wait()
        number = len(mapped_window._mapped)
        group.barrier().wait()
        return number

    def body(group, device):
        sizes = set()
        with take_part(group), OverlapContext(group, config) as context:
            for rows in (8, 16, 64):
                for op in LINEARS:
                    case = Case(op=op, rows=rows, N=16, K=8, has_bias=True)
                    operands = draw_own(case, group)
                    for _ in range(4):
                        overlapped(case, operands, context)
                leaves, grad_y = attention.draw(attention.Case(rows=rows, dtype=torch.float32), group.rank(), 3)
                for _ in range(4):
                    attention.run(leaves, grad_y, ops.query_split_attention, context=context)
                sizes.add(count(group))
        assert len(sizes) == 1
        assert count(group) == 3  # every rank's flags, which its context keeps

    gc.disable()
    try:
        run_threads(3, body)
    finally:
        gc.enable()


@pytest.fixture
def bound(monkeypatch) -> dict[int, list[str]]:
    """By thread, which copies and GEMMs were put on tapes."""
    logs: dict[int, list[str]] = {}

    def logged(name, call):
        def wrapped(*args, **keywords):
            logs.setdefault(threading.get_ident(), []).append(name)
            return call(*args, **keywords)

        return wrapped

    monkeypatch.setattr(TapeBinder, "_add_copy", logged("copy", TapeBinder._add_copy))
    monkeypatch.setattr(TapeBinder, "matmul", logged("gemm", TapeBinder.matmul))
    return logs


@pytest.mark.parametrize(
    ("op", "path", "m"), [(op, "sliced", m) for op in OPS for m in (1, 2, 4)] + [("linear_reduce_scatter", "bulk", 1)]
)
@in_copy_context(3, lambda path, m: config_for(path, m=m))
def test_own_rows_are_copied_beside_the_last_gemm(group, context, op, bound):
    """With one hardware queue, GEMMs behind the copy would wait for all transfers before it."""
    case = Case(op=op, rows=24, N=16, K=8)
    overlapped(case, draw_own(case, group), context)
    log = bound[threading.get_ident()]
    assert log.count("copy") == 1
    assert log[-3:] == ["copy", "gemm", "gemm"]


_RING = PassConfig(path="sliced", algorithm="ring", chunks_per_shard=2)
_SPLIT = AttentionConfig(path="query_split")


@pytest.mark.parametrize("stepwise", [None, -1])
@pytest.mark.parametrize("group_size", [3, 4, 6])
@pytest.mark.parametrize("config", [
    of_attention(), config_for("sliced", m=2), config_for("sliced", "ring", attention=_SPLIT),
    OverlapConfig(linear=LinearConfig(fprop=_RING, dgrad=config_for("sliced").linear.dgrad), transport=COPIES),
], ids=["attention", "direct", "ring", "ring, then direct"])  # fmt: skip
@in_copy_context("group_size", "config", stepwise="stepwise")
def test_calls_of_other_shapes_follow_at_once(group, context, group_size):
    calls = MixedCalls(draw_cases(group_size), group)
    for _ in range(3):  # the first time all ranks agree on each problem, which holds them together
        calls.check(context)


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("m", [1, 2])
@in_copy_context("group_size", lambda m: config_for("sliced", m=m))
def test_calls_in_the_programs_graph_are_right_in_every_order(group, context, group_size):
    """Megatron captures layers so. Also where some ranks have no rows, and with tapes that were not made before."""
    first = Case(op="all_gather_linear", rows=group_size, N=8, K=8)
    overlapped(first, draw_own(first, group), context)
    for op, rows in itertools.product(LINEARS[:3], (4 * group_size, group_size + 1, 2, 1)):  # the last sends nothing
        operands, expected = drawn(Case(op=op, rows=rows, N=16, K=8, has_bias=False, seed=rows), group)
        more = {"total_rows": rows} if op == "all_gather_linear" else {}
        with torch.no_grad():
            call = functools.partial(getattr(ops, op), operands.x, operands.weight, context=context, **more)
            call()  # windows grow
            y, launch = capture_call(call)
        for _ in range(5):
            y.fill_(-99)
            launch()
            assert torch.equal(y, expected["y"])


@pytest.mark.parametrize("op", OPS)
@in_copy_context(3, config_for("sliced"))
def test_who_has_not_come_is_named_also_where_no_message_is_due(group, context, op):
    rank, link = group.rank(), context.link
    case = Case(op=op, rows=1, N=8, K=8, has_bias=False)
    overlapped(case, draw_own(case, group), context)
    operations = tapes_of(context)
    assert len(operations) == 2
    group.barrier().wait()
    for operation in operations:
        peers = {key[0] for key in operation.keys} - {-1}
        assert peers == {0, 1, 2} - {rank}, "from each a message, or that there is none"
        said = str(link._overdue_error(operation))  # nothing is set between operations
        assert said.startswith(f"group rank {rank} ") or f": group rank {rank} " in said
        assert sum(f"group rank {peer} " in said for peer in peers) >= 1
        link.transport.has_arrived = lambda key: key[0] >= 0
        said = str(link._overdue_error(operation))
        sends = {key[2] for key in operation.keys} - {-1, rank}
        assert ("could not deliver to" in said) == bool(sends)
        link.transport.has_arrived = lambda key: True
        assert "something else holds up its stream" in str(link._overdue_error(operation))
        del link.transport.has_arrived
    group.barrier().wait()
