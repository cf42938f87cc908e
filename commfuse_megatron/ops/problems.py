"""The problems that a call would state, forward and backward, for whoever has to know them before it is made.

Reads what the operations read: sizes, dtypes, autocast, and who asks for gradients. The arguments must fit together.
"""

import dataclasses

import torch

from commfuse_megatron.ops.arguments import state_problem
from commfuse_megatron.ops.attention_arguments import AttentionInputs, state_attention_problem
from commfuse_megatron.ops.embedding_reduce_scatter import state_look_up
from commfuse_megatron.ops.ulysses_attention import UlyssesInputs, state_ulysses_problem
from commfuse_megatron.problem import Problem
from commfuse_megatron.runtime.context import OverlapContext


def linear_problems(op: str, x: torch.Tensor, weight: torch.Tensor, context: OverlapContext) -> tuple[Problem, ...]:
    """Those of `all_gather_linear` without `total_rows`, or of `linear_reduce_scatter`."""
    problem = dataclasses.replace(state_problem(op, x, weight, None, context), dtype=_dtype_of(x, context))
    needs = [name for name, tensor in (("input", x), ("weight", weight)) if tensor.requires_grad]
    return _both_passes(problem, "+".join(needs))


def embedding_problems(ids: torch.Tensor, weight: torch.Tensor, context: OverlapContext) -> tuple[Problem, ...]:
    """Those of `embedding_reduce_scatter`."""
    return _both_passes(state_look_up(ids, weight, context.group_size), "weight" if weight.requires_grad else "")


def attention_problems(inputs: AttentionInputs, context: OverlapContext) -> tuple[Problem, ...]:
    """Those of `query_split_attention`, and, once planned, of the linear that its backward pass may be made of."""
    stated = state_attention_problem(inputs, context.group_size)
    problem = dataclasses.replace(stated, dtype=_dtype_of(inputs.q, context))
    problems = _both_passes(problem, problem.needs)
    plan = context.known_plan(problem)
    if len(problems) == 2 and plan is not None and plan.backward_path is not None:
        problems += (dataclasses.replace(problem, pass_name="backward").projection,)
    return problems


def ulysses_problems(inputs: UlyssesInputs, context: OverlapContext) -> tuple[Problem, ...]:
    """Those of `ulysses_attention`."""
    stated = state_ulysses_problem(inputs, context.group_size)
    problem = dataclasses.replace(stated, dtype=_dtype_of(inputs.q, context))
    return _both_passes(problem, problem.needs)


def _both_passes(forward: Problem, needs: str) -> tuple[Problem, ...]:
    if not needs or not torch.is_grad_enabled():
        return (forward,)
    return forward, dataclasses.replace(forward, pass_name="backward", needs=needs)


def _dtype_of(x: torch.Tensor, context: OverlapContext) -> str:
    kind = context.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return str(torch.get_autocast_dtype(kind) if is_cast else x.dtype).removeprefix("torch.")
