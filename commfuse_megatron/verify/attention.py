"""The cases of `commfuse verify` for query-split attention, and their calls.

As in `cases`, all ranks build the same list in the same order. Results are named as a linear's are: "x" stands for
queries, keys and values together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import AttentionConfig, OverlapConfig, TransportConfig
from commfuse_megatron.problem import shard_range
from commfuse_megatron.verify.cases import TIMEOUT_S, TransportName

__all__ = ["AttentionCase", "attention_calls", "make_attention_cases"]

# Units of roundoff of the largest element that a result may be off. A value goes through about five roundings to the
# dtype and several sums; a split that is lost, doubled or sees one key too many errs by a fair part of that element.
_ALLOWED = {torch.float64: 4096.0, torch.float32: 4096.0, torch.bfloat16: 64.0, torch.float16: 128.0}

_SPLITS: tuple[tuple[int, Literal["query_split", "row_parallel"]], ...] = (
    (1, "query_split"),
    (2, "query_split"),
    (2, "row_parallel"),
)

Results = dict[str, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One or more calls in a row, forward and backward, under one configuration; see `cases.Case`."""

    variant: str
    chunks_per_shard: int
    backward: Literal["query_split", "row_parallel"] = "query_split"
    dtype: torch.dtype
    rows: tuple[int, ...]
    N: int
    group_size: int
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    causal: bool = True
    window: tuple[int, int] | None = None
    has_bias: bool = True
    transport: TransportName = "auto"
    op: str = "query_split_attention"
    algorithm: Literal["direct"] = "direct"
    exact: bool = False

    @property
    def K(self) -> int:
        """Input features of the projection on one rank."""
        return self.heads * self.head_dim

    @property
    def expected_path(self) -> str:
        """The path that the report must name; a group of one rank sends nothing."""
        return "local" if self.group_size == 1 else "query_split"

    @property
    def expected_backward_path(self) -> str:
        """The same of the backward pass."""
        return "local" if self.group_size == 1 else self.backward

    @property
    def dtype_name(self) -> str:
        """E.g. "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def config(self) -> OverlapConfig:
        """The configuration that a context for this case must have."""
        return OverlapConfig(
            attention=AttentionConfig(
                path="query_split", splits_per_shard=self.chunks_per_shard, backward=self.backward
            ),
            transport=TransportConfig(timeout_s=TIMEOUT_S, backend=self.transport),
        )


def make_attention_cases(
    group_size: int, device_type: str, dtype: torch.dtype | None = None, transport: TransportName = "auto"
) -> list[AttentionCase]:
    """All cases for a group (those of one dtype, if given) over `transport`, those of one configuration together."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    if device_type == "cpu":
        dtypes.insert(1, torch.float64)
    even = 8 * group_size
    variants: tuple[dict[str, Any], ...] = (
        {"variant": "causal", "rows": (even,)},
        {"variant": "full", "rows": (even,), "causal": False},
        {"variant": "causal window", "rows": (even,), "window": (5, 0)},
        {"variant": "window", "rows": (even,), "causal": False, "window": (3, 6)},
        {"variant": "one head per group", "rows": (even,), "kv_heads": 4},
        {"variant": "one group, no bias", "rows": (even,), "kv_heads": 1, "has_bias": False},
        {"variant": "uneven", "rows": (even + 1,)},
        {"variant": "one row", "rows": (1,)},
        {"variant": "S changes", "rows": (even, group_size, even + 1, 2, even)},
    )
    return [
        # Sizes of their own, so that the report tells them apart.
        AttentionCase(
            **variant,
            N=8 * number,
            chunks_per_shard=m,
            backward=backward,
            dtype=each,
            group_size=group_size,
            transport=transport,
        )
        for m, backward in _SPLITS
        for each in (dtypes if dtype is None else [dtype])
        for number, variant in enumerate(variants, start=1)
    ]


def attention_calls(
    case: AttentionCase, context: OverlapContext, device: torch.device
) -> Iterator[tuple[Results, Results, dict[str, float]]]:
    """Of every call what was found, what fp64 gives, and the errors allowed."""
    for number, rows in enumerate(case.rows):
        operands, grad = _draw(case, rows, number, context, device)
        wide = [None if tensor is None else tensor.double() for tensor in operands]
        found = _call(case, operands, grad, ops.query_split_attention, context=context)
        oracle = _call(case, wide, grad.double(), ops.reference.query_split_attention, group=context.group)
        unit = _ALLOWED[case.dtype] * torch.finfo(case.dtype).eps / 2
        allowed = {
            name: unit * max(1e-2, float(exact.abs().max()) if exact is not None and exact.numel() else 0.0)
            for name, exact in oracle.items()
        }
        yield found, oracle, allowed


def _draw(
    case: AttentionCase, rows: int, number: int, context: OverlapContext, device: torch.device
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Operands that differ between ranks and calls, and are the same in every run; and the output's gradient."""
    generator = torch.Generator().manual_seed(7919 * number + 101 * rows + context.group_rank)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, case.dtype)

    lead = (rows, case.batch)
    heads = [tensor(*lead, count, case.head_dim) for count in (case.heads, case.kv_heads, case.kv_heads)]
    own = shard_range(rows, context.group_size, context.group_rank).size
    operands = [*heads, tensor(case.N, case.K), tensor(case.N) if case.has_bias else None]
    return operands, tensor(own, case.batch, case.N)


def _call(
    case: AttentionCase,
    operands: list[torch.Tensor | None],
    grad: torch.Tensor,
    op: Callable[..., torch.Tensor],
    **where: Any,
) -> Results:
    leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in operands]
    y = op(*leaves, causal=case.causal, window=case.window, **where)
    y.backward(grad)
    gradients = [None if leaf is None else leaf.grad for leaf in leaves]
    inputs = torch.cat([gradient.flatten() for gradient in gradients[:3] if gradient is not None])
    return {"y": y.detach(), "x.grad": inputs, "weight.grad": gradients[3], "bias.grad": gradients[4]}
