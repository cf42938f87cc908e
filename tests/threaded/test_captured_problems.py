"""What a context knows of problems that a CUDA graph may capture, and operations replayed in pieces between others;
captures are pretended."""

from collections.abc import Callable

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import LinearConfig, PassConfig
from commfuse_megatron.errors import ShapeError
from commfuse_megatron.ops.attention_arguments import AttentionInputs
from commfuse_megatron.ops.problems import attention_problems, embedding_problems, linear_problems, ulysses_problems
from commfuse_megatron.ops.ulysses_attention import UlyssesInputs
from commfuse_megatron.transport.base import MOST_FLAGS
from tests.harness import on_ranks
from tests.harness.contexts import in_context


def _operands(op, group_size, *, rows=4):
    """x and weight of this rank, both to get gradients."""
    shape = (rows, 2, 6) if op == "all_gather_linear" else (rows * group_size, 2, 6)
    return torch.randn(shape, requires_grad=True), torch.randn(8, 6, requires_grad=True)


@pytest.mark.parametrize("op", ["all_gather_linear", "linear_reduce_scatter"])
@pytest.mark.parametrize("frozen", [None, "input", "weight", "both"])
@in_context(2)
def test_a_linear_states_the_problems_that_its_call_meets(group, context, op, frozen):
    x, weight = _operands(op, group.size())
    x.requires_grad_(frozen not in ("input", "both"))
    weight.requires_grad_(frozen not in ("weight", "both"))
    bias = torch.zeros(8, requires_grad=True)
    problems = linear_problems(op, x, weight, context)
    assert len(problems) == (1 if frozen == "both" else 2)
    assert not any(map(context.has_run, problems))
    y = getattr(ops, op)(x, weight, bias, context=context)
    assert [context.has_run(problem) for problem in problems] == [True, False][: len(problems)]
    y.sum().backward()
    assert all(map(context.has_run, problems))
    assert len(context.report()) == len(problems), "it met no others"
    with torch.no_grad():
        assert linear_problems(op, x, weight, context) == problems[:1]


def expect_met(context, problems, y):
    """A call and its backward pass meet these two, and no others."""
    y.sum().backward()
    assert len(problems) == len(context.report()) == 2
    assert all(map(context.has_run, problems))


@in_context(2)
def test_an_embedding_states_the_problems_that_its_call_meets(group, context):
    ids, weight = torch.zeros(3, 4, dtype=torch.int64), torch.randn(5, 6, requires_grad=True)
    problems = embedding_problems(ids, weight, context)
    expect_met(context, problems, ops.embedding_reduce_scatter(ids, weight, 0, context=context))


@pytest.mark.parametrize("autocast", [False, True])
@in_context(2)
def test_a_split_sequence_states_the_problems_that_it_meets(group, context, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        heads = [torch.randn(4, 1, 2, 8, requires_grad=True) for _ in range(3)]
        problems = ulysses_problems(UlyssesInputs(*heads, True, "zigzag", None, None, 0.0, None), context)
        expect_met(context, problems, ops.ulysses_attention(*heads, order="zigzag", context=context))


@pytest.mark.parametrize(
    "attention",
    [{"path": "query_split"}, {"path": "query_split", "backward": "row_parallel"}, {"path": "row_parallel"}],
)
@in_context(2, lambda attention: OverlapConfig.from_dict({"attention": attention}))
def test_an_attention_states_the_problems_that_its_call_meets(group, context, attention):
    q, k, v = (torch.randn(8, 1, 2, 4, requires_grad=True) for _ in range(3))
    weight = torch.randn(6, 8, requires_grad=True)
    inputs = AttentionInputs(q, k, v, weight, None, True, None, None, None, 0.0)
    problems = attention_problems(inputs, context)
    assert context.known_plan(problems[0]) is None
    ops.query_split_attention(q, k, v, weight, context=context).sum().backward()
    assert len(problems) == 2
    # Once it is planned it is known to have a linear in its backward pass.
    known = attention_problems(inputs, context)
    assert known[:2] == problems
    assert [problem.op for problem in known[2:]] == ["linear_reduce_scatter"] * ("backward" in attention)
    assert all(context.known_plan(problem) is not None for problem in known)
    assert all(map(context.has_run, known))


@pytest.fixture
def captured(monkeypatch):
    """Whether something is: if there is anything in it."""
    found = []
    monkeypatch.setattr("commfuse_megatron.runtime.context._is_capturing", lambda device: bool(found))
    return found


@on_ranks(2)
def test_what_ran_in_a_capture_alone_counts_as_new(group, device, captured):
    # No rank has compared it then; the first call outside must, or ranks with other sizes would hang.
    context = OverlapContext(group, OverlapConfig(check_agreement=False))
    x, weight = _operands("all_gather_linear", 2)
    captured.append(True)
    group.barrier().wait()
    with torch.no_grad():
        problems = linear_problems("all_gather_linear", x, weight, context)
        ops.all_gather_linear(x, weight, context=context)
    assert not context.has_run(problems[0])
    group.barrier().wait()
    captured.clear()
    group.barrier().wait()
    x, _ = _operands("all_gather_linear", 2, rows=4 + group.rank())
    with torch.no_grad(), pytest.raises(ShapeError, match="do not agree"):
        ops.all_gather_linear(x, weight, context=context)
    context.link.fail(ShapeError("done"))


class _Graph:
    """The driver's and cuBLASLt's calls of `body`, on the addresses that it had; `replay` makes them again."""

    def __init__(self, context: OverlapContext, body: Callable) -> None:
        self._transport = transport = context.link.transport
        self._calls: list = []
        replay = transport.replay

        def record(tape, addresses, *, is_capturing, may_launch):
            self._calls.append((tape, addresses))
            return replay(tape, addresses, is_capturing=True, may_launch=False)

        context.slots.note_capture()  # buffers that are outgrown between replays must stay
        transport.replay = record
        try:
            self.outputs = body()
        finally:
            del transport.replay
        assert self._calls

    def replay(self) -> None:
        for tape, addresses in self._calls:
            for step in tape.captured:
                step(addresses, 0)
            self._transport._memory.run(0, tape.release)


def _whole_numbers(*shape):
    return torch.randint(-4, 5, shape).float()


def replayed_by(path: str) -> OverlapConfig:
    return OverlapConfig(
        linear=LinearConfig(
            fprop=PassConfig(path="sliced", algorithm="direct", chunks_per_shard=2),
            dgrad=PassConfig(path=path, algorithm="direct", chunks_per_shard=1),
        )
    )


@pytest.mark.parametrize("path", ["sliced", "bulk"])
@pytest.mark.parametrize("group_size", [2, 3])
@in_context("group_size", replayed_by, over_copies=True)
def test_graphs_of_single_passes_are_replayed_between_calls(group, context, group_size):
    """As Megatron does with its layers: all forward graphs, something eager, the backward graphs in reverse."""
    x, w1 = _whole_numbers(4, 2, 16).requires_grad_(), _whole_numbers(8, 16).requires_grad_()
    w2, grad_y = _whole_numbers(12, 8).requires_grad_(), _whole_numbers(4, 2, 12)
    first = _Graph(context, lambda: ops.all_gather_linear(x, w1, context=context))
    hidden = first.outputs.detach().requires_grad_()
    second = _Graph(context, lambda: ops.linear_reduce_scatter(hidden, w2, context=context))
    last = _Graph(context, lambda: torch.autograd.grad(second.outputs, [hidden, w2], grad_y))
    but_last = _Graph(context, lambda: torch.autograd.grad(first.outputs, [x, w1], last.outputs[0]))
    for _ in range(3):
        with torch.no_grad():
            for tensor in (x, w1, w2, grad_y):
                tensor.copy_(_whole_numbers(*tensor.shape))
        first.replay()
        second.replay()
        beside = _whole_numbers(6, 1, 8).requires_grad_()
        ops.all_gather_linear(beside, w2, context=context).sum().backward()
        last.replay()
        but_last.replay()
        h = ops.reference.all_gather_linear(x, w1, group=group)
        y = ops.reference.linear_reduce_scatter(h, w2, group=group)
        assert torch.equal(y, second.outputs)
        expected = torch.autograd.grad(y, [w2, x, w1], grad_y)
        for found, gradient in zip((last.outputs[1], *but_last.outputs), expected, strict=True):
            assert torch.equal(found, gradient)
    group.barrier().wait()  # between operations no flag tells of one
    flags = context.link.transport._flags.tensor
    assert flags.numel() > 2 * group_size * MOST_FLAGS
    assert not flags[:-group_size].any()
    assert flags[-group_size:].all()  # what may be sent
    group.barrier().wait()
