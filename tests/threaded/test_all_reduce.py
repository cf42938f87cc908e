"""The linears that all-reduce under their GEMMs: equal on all ranks to the bit, over gloo and over emulated copies."""

import dataclasses
import itertools

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.errors import ShapeError, TransportError, TransportTimeoutError
from tests.harness import on_ranks
from tests.harness.contexts import in_context
from tests.harness.emulated_gpu import capture_call, tapes_of
from tests.harness.linear_cases import ALL_REDUCES, Case, assert_equal, check_linear, draw_own, drawn, overlapped

RANDOM = {"exact": False, "N": 24, "K": 16, "dtype": torch.float32}
#: What is summed over ranks, which all have.
SUMMED = {"linear_all_reduce": "y", "linear_grad_all_reduce": "x.grad"}
SENDS = {"linear_all_reduce": "fprop", "linear_grad_all_reduce": "backward"}


def config_for(path="sliced", m=1, algorithm="direct", backend="auto", **transport) -> OverlapConfig:
    chosen = PassConfig(path=path, algorithm=algorithm, chunks_per_shard=m)
    return OverlapConfig(
        linear=LinearConfig(fprop=chosen, dgrad=chosen), transport=TransportConfig(backend=backend, **transport)
    )


def of_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


@pytest.mark.parametrize("op", ALL_REDUCES)
@pytest.mark.parametrize("over_copies", [False, True])
@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 3])
@in_context(
    "group_size", lambda m, over_copies: config_for(m=m, backend="copy_engine" if over_copies else "auto"),
    over_copies="over_copies",
)  # fmt: skip
def test_all_ranks_have_the_same_bits_in_every_run(group, context, op, group_size):
    for rows in (4 * group_size, 4 * group_size + 1, 2, 1):
        case = Case(op=op, rows=rows, **RANDOM)
        operands, expected = drawn(case, group)
        first = overlapped(case, operands, context)
        assert_equal(first, expected, atol=1e-4)  # sums of up to 96 products of numbers of about 1
        for found in of_all_ranks(first[SUMMED[op]], group):
            assert torch.equal(found, first[SUMMED[op]])
        for _ in range(3):
            assert_equal(overlapped(case, operands, context), first)
    paths = {record.pass_name: record.path for record in context.report()}
    assert paths == {"fprop": "local", "backward": "local"} | {SENDS[op]: "sliced"}


@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("stepwise", [None, 0, -1])
@in_context("group_size", lambda m: config_for(m=m, backend="copy_engine"), over_copies=True, stepwise="stepwise")
def test_new_data_at_every_call_over_copies(group, context, group_size, stepwise):
    sizes = ((32, 16, 8, True), (24, 8, 16, False), (13, 24, 8, True), (2, 8, 8, False), (0, 8, 8, True))
    for op, (rows, N, K, has_bias), seed in itertools.product(ALL_REDUCES, sizes, range(3)):
        check_linear(Case(op=op, rows=rows, N=N, K=K, has_bias=has_bias, seed=seed), group, context)
    tapes = tapes_of(context)
    assert bool(tapes) == (group_size > 1)
    assert None not in tapes
    modes = {mode for record in context.report() for mode in record.modes}
    assert modes == ({"graph"} if stepwise == -1 else modes | {"tape"}) or group_size == 1


@in_context(2, config_for(m=2, backend="copy_engine"), over_copies=True)
def test_the_result_is_no_memory_of_the_context(group, context):
    """Rows of others arrive in a window, which the next call writes into."""
    calls = [drawn(Case(op="linear_all_reduce", rows=8, N=8, K=8, seed=seed), group) for seed in range(3)]
    found = [ops.linear_all_reduce(o.x, o.weight, o.bias, context=context) for o, _ in calls]
    for y, (_, expected) in zip(found, calls, strict=True):
        assert torch.equal(y, expected["y"])


@pytest.mark.parametrize("op", ALL_REDUCES)
@in_context(3, config_for(m=2, backend="copy_engine"), over_copies=True)
def test_the_programs_own_graph_holds_either_pass(group, context, op):
    operands, expected = drawn(Case(op=op, rows=13, N=16, K=8, has_bias=False), group)
    x, weight = operands.x.requires_grad_(), operands.weight

    def call():
        y = getattr(ops, op)(x, weight, context=context)
        (grad_x,) = torch.autograd.grad(y, x, operands.grad_y)
        return y.detach() if op == "linear_all_reduce" else grad_x

    call()
    if op == "linear_grad_all_reduce":  # its forward pass is no part of a tape
        assert torch.equal(call(), expected["x.grad"])
        return
    with torch.no_grad():
        y, launch = capture_call(lambda: ops.linear_all_reduce(x, weight, context=context))
    for _ in range(3):
        y.fill_(-99)
        launch()
        assert torch.equal(y, expected["y"])


@pytest.mark.parametrize("path", ["sequential", "async", "bulk", "grouped"])
@pytest.mark.parametrize("op", ALL_REDUCES)
@in_context(3, lambda path: config_for(path))
def test_paths_that_are_forced(group, context, op, path):
    """What has no such path says what it takes instead."""
    check_linear(Case(op=op, rows=7), group, context)
    for frozen in ("x", "weight"):
        case = Case(op=op, rows=7, needs=tuple(name for name in ("x", "weight", "bias") if name != frozen))
        check_linear(case, group, context)
    sends = [record for record in context.report() if record.pass_name == SENDS[op] and record.path != "local"]
    is_whole = path == "async" and op == "linear_grad_all_reduce"
    expected = {"bulk": {"sliced"}, "grouped": {"sliced"}, "async": {"sequential"}}.get(path, {path})
    assert {record.path for record in sends} == (expected | {"async"} if is_whole else expected)
    remark = {"bulk": '"bulk" is not for', "grouped": '"grouped" is not for', "async": '"async" finds no GEMM'}
    for record in sends:
        assert remark.get(path, "") in record.reason or record.path == "async"


@pytest.mark.parametrize("op", ALL_REDUCES)
@in_context(2, config_for(algorithm="ring", m=2))
def test_a_ring_that_is_forced_is_direct_and_says_so(group, context, op):
    check_linear(Case(op=op, rows=9), group, context)
    (record,) = [record for record in context.report() if record.pass_name == SENDS[op]]
    assert (record.path, record.algorithm, record.chunks_per_shard) == ("sliced", "direct", 2)
    assert '"ring" is not for all-reduces: direct instead' in record.reason


@pytest.mark.parametrize("op", ALL_REDUCES)
@in_context(2, config_for())
def test_what_does_not_fit_raises_on_all_ranks(group, context, op):
    operands = draw_own(Case(op=op, rows=8), group)
    x = operands.x[..., 1:] if group.rank() == 1 else operands.x
    with pytest.raises(ShapeError, match="group rank 1"):
        getattr(ops, op)(x, operands.weight, operands.bias, context=context)
    check_linear(Case(op=op, rows=8), group, context)


@pytest.mark.parametrize("op", ALL_REDUCES)
@on_ranks(2)
def test_a_rank_that_does_not_come_is_missed(group, device, op):
    """Named by the other, within the timeout."""
    config = dataclasses.replace(config_for(timeout_s=2.0), check_agreement=False)  # it is missed in the transfers
    context = OverlapContext(group, config)
    case = Case(op=op, rows=8)
    operands = draw_own(case, group)
    overlapped(case, operands, context)
    group.barrier().wait()
    if group.rank() == 0:
        with pytest.raises((TransportTimeoutError, TransportError), match="group rank 1"):
            overlapped(case, operands, context)
        assert not context.is_usable
    group.barrier().wait()
