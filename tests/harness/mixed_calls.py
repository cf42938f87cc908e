"""Calls of many shapes, all forward passes before all backward ones, with nothing between that holds ranks back."""

import random
from collections.abc import Sequence

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapContext, ops
from tests.harness.linear_cases import OPS, Case, assert_equal, draw, reference
from tests.threaded.test_query_split_attention import Case as AttentionCase
from tests.threaded.test_query_split_attention import assert_close
from tests.threaded.test_query_split_attention import draw as draw_attention
from tests.threaded.test_query_split_attention import run as run_attention

__all__ = ["MixedCalls", "draw_cases"]

AnyCase = Case | AttentionCase


def draw_cases(group_size: int, count: int = 16, *, head_dim: int = 8) -> list[AnyCase]:
    """Linears and attention; some give some ranks no rows. Equal on all ranks."""
    chance = random.Random(group_size)
    cases: list[AnyCase] = []
    for seed in range(count):
        rows = chance.choice([1, 2, 3, group_size, group_size + 1, 3 * group_size])
        if chance.random() < 0.5:
            sizes = {"rows": rows, "batch": chance.choice([1, 2]), "N": chance.choice([8, 16])}
            dims = {"head_dim": head_dim, "value_dim": head_dim}
            cases.append(AttentionCase(dtype=torch.float32, seed=seed, **sizes, **dims))
        else:
            N, K = chance.choice([8, 16]), chance.choice([8, 24])
            cases.append(Case(op=chance.choice(OPS), rows=rows, N=N, K=K, seed=seed))
    return cases


class MixedCalls:
    """One rank's operands of all calls, and what the calls have to give: computed here, on the CPU."""

    def __init__(self, cases: Sequence[AnyCase], group: dist.ProcessGroup) -> None:
        self._cases = cases
        self._drawn: list[tuple[dict[str, torch.Tensor | None], torch.Tensor]] = []
        self._exact = []
        for case in cases:
            if isinstance(case, AttentionCase):
                self._drawn.append(draw_attention(case, group.rank(), group.size()))
                exact = run_attention(*self._drawn[-1], ops.reference.query_split_attention, group=group)
            else:
                given = draw(case, group.rank(), group.size(), torch.device("cpu"))
                self._drawn.append(({"x": given.x, "weight": given.weight, "bias": given.bias}, given.grad_y))
                exact = reference(case, given, group)
            self._exact.append(exact)

    def check(self, context: OverlapContext, *, dtype: torch.dtype | None = None, limit: float = 1e-5) -> None:
        """Make all calls on the context's device, and compare: linears are exact, attention is to `limit`."""
        found = self._run(context, dtype)
        for case, call, exact in zip(self._cases, found, self._exact, strict=True):
            call = {
                name: None if tensor is None else tensor.cpu().to(exact["y"].dtype) for name, tensor in call.items()
            }
            if isinstance(case, AttentionCase):
                assert_close(call, exact, limit)
            else:
                assert_equal(call, exact)

    def _run(self, context: OverlapContext, dtype: torch.dtype | None) -> list[dict[str, torch.Tensor | None]]:
        device, leaves, outputs = context.device, [], []
        for case, (operands, _) in zip(self._cases, self._drawn, strict=True):
            own = [
                None if t is None else t.detach().to(device, dtype, copy=True).requires_grad_()
                for t in operands.values()
            ]
            leaves.append(dict(zip(operands, own, strict=True)))
            if isinstance(case, AttentionCase):
                outputs.append(ops.query_split_attention(*own, context=context))
            elif case.op == "all_gather_linear":
                outputs.append(ops.all_gather_linear(*own, total_rows=case.rows, context=context))
            else:
                outputs.append(ops.linear_reduce_scatter(*own, context=context))
        for output, (_, grad_y) in reversed(list(zip(outputs, self._drawn, strict=True))):
            output.backward(grad_y.to(output))
        return [
            {"y": output.detach()} | {f"{name}.grad": None if leaf is None else leaf.grad for name, leaf in own.items()}
            for output, own in zip(outputs, leaves, strict=True)
        ]
