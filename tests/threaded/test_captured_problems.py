"""What a context knows of problems that a CUDA graph may capture; captures are pretended."""

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.errors import ShapeError
from commfuse_megatron.ops.attention_arguments import AttentionInputs
from commfuse_megatron.ops.stated import attention_problems, embedding_problems, linear_problems
from tests.harness import run_threads


def _operands(op, group_size, *, rows=4):
    """x and weight of this rank, both to get gradients."""
    shape = (rows, 2, 6) if op == "all_gather_linear" else (rows * group_size, 2, 6)
    return torch.randn(shape, requires_grad=True), torch.randn(8, 6, requires_grad=True)


@pytest.mark.parametrize("op", ["all_gather_linear", "linear_reduce_scatter"])
@pytest.mark.parametrize("frozen", [None, "input", "weight", "both"])
def test_a_linear_states_the_problems_that_its_call_meets(op, frozen):
    def body(group, device):
        with OverlapContext(group) as context:
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

    run_threads(2, body)


def test_an_embedding_states_the_problems_that_its_call_meets():
    def body(group, device):
        with OverlapContext(group) as context:
            ids, weight = torch.zeros(3, 4, dtype=torch.int64), torch.randn(5, 6, requires_grad=True)
            problems = embedding_problems(ids, weight, context)
            ops.embedding_reduce_scatter(ids, weight, 0, context=context).sum().backward()
            assert len(problems) == len(context.report()) == 2
            assert all(map(context.has_run, problems))

    run_threads(2, body)


@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
def test_an_attention_states_the_problems_that_its_call_meets(path):
    config = OverlapConfig.from_dict({"attention": {"path": path}})

    def body(group, device):
        with OverlapContext(group, config) as context:
            q, k, v = (torch.randn(8, 1, 2, 4, requires_grad=True) for _ in range(3))
            weight = torch.randn(6, 8, requires_grad=True)
            inputs = AttentionInputs(q, k, v, weight, None, True, None, None, None, 0.0)
            problems = attention_problems(inputs, context)
            assert not context.is_planned(problems[0])
            ops.query_split_attention(q, k, v, weight, context=context).sum().backward()
            assert len(problems) == 2
            assert all(map(context.is_planned, problems))
            assert all(map(context.has_run, problems))

    run_threads(2, body)


def test_what_ran_in_a_capture_alone_counts_as_new(monkeypatch):
    # No rank has compared it then; the first call outside must, or ranks with other sizes would hang.
    captured = []
    monkeypatch.setattr(OverlapContext, "is_capturing", property(lambda context: bool(captured)))

    def body(group, device):
        context = OverlapContext(group, OverlapConfig(check_agreement=False))
        x, weight = _operands("all_gather_linear", 2)
        if group.rank() == 0:
            captured.append(True)
        group.barrier().wait()
        with torch.no_grad():
            problems = linear_problems("all_gather_linear", x, weight, context)
            ops.all_gather_linear(x, weight, context=context)
        assert not context.has_run(problems[0])
        group.barrier().wait()
        captured.clear()
        group.barrier().wait()
        rows = 4 if group.rank() == 0 else 5
        with torch.no_grad(), pytest.raises(ShapeError, match="do not agree"):
            ops.all_gather_linear(_operands("all_gather_linear", 2, rows=rows)[0], weight, context=context)
        context.link.fail(ShapeError("done"))

    run_threads(2, body)
