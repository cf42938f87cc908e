"""Which gradients one backward pass was asked for: fewer than could be, under `autograd.grad` or `backward(inputs=)`.

An operation computes what is asked for and no more, for a gradient that is added straight into a tensor would otherwise
count although nobody wanted it, and ranks compare what they were asked for by their problems.
"""

from typing import Any

import torch


def gradients_asked_for(ctx: Any, count: int) -> list[bool]:
    """Of the first `count` inputs of the function of `ctx`, whose gradients are due; in its `backward`.

    All of them must be tensors, but for the last ones, which may be None.
    """
    due = [node is not None and _will_run(node) for node, _ in ctx.next_functions[:count]]
    return due + [False] * (count - len(due))


def _will_run(node: Any) -> bool:
    """Whether what takes a gradient is part of this run of autograd's engine."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that autograd.grad was asked for; or no engine runs, and who calls wants everything
        return True
