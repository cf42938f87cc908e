"""One call of an operation: its operands, what it gives forward and backward, and how far that may be off.

What `commfuse verify` and the tests draw and compare with. The oracle is `ops.reference`. Beware: every rank draws its
own operands, from the call's seed and its rank, but ids, and the bias of a sum for all, which all ranks share.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.ops.attention_arguments import AttentionInputs, state_attention_problem
from commfuse_megatron.ops.ulysses_attention import UlyssesInputs, state_ulysses_problem
from commfuse_megatron.problem import AttentionProblem, GemmProblem, UlyssesProblem, shard_range

#: The linears of sequence parallelism, those without, and all.
OPS = ("all_gather_linear", "linear_reduce_scatter")
ALL_REDUCES = ("linear_all_reduce", "linear_grad_all_reduce")
LINEARS = (*OPS, *ALL_REDUCES)

#: By name: "y", "x.grad", "weight.grad", "bias.grad"; None for a gradient that is not due.
Results = dict[str, torch.Tensor | None]

# Units of roundoff of the largest element that attention may be off. A value goes through about five roundings to the
# dtype and several sums; a split that is lost, doubled or sees one key too many errs by a fair part of that element.
_ALLOWED_UNITS = {torch.float64: 4096.0, torch.float32: 4096.0, torch.bfloat16: 64.0, torch.float16: 128.0}

_Shape = tuple[int, ...]


@dataclass
class Operands:
    """One rank's operands, and the gradient that arrives at the result.

    x: the input, in the form that the call's layout is a view of; of an embedding its ids; of attention queries, keys
    and values side by side, as a fused projection gives them.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad_y: torch.Tensor

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """By name, without a bias that there is not."""
        named = {"x": self.x, "weight": self.weight, "bias": self.bias}
        return {name: leaf for name, leaf in named.items() if leaf is not None}

    def copies(self, needs: tuple[str, ...] = ("x", "weight", "bias")) -> Self:
        """Leaves, of which these require gradients."""
        leaves = {name: leaf.detach().clone().requires_grad_(name in needs) for name, leaf in self.leaves.items()}
        return dataclasses.replace(self, **leaves)

    @torch.no_grad()
    def fill(self, data: Self) -> None:
        """Take over the numbers of `data`; addresses stay."""
        self.grad_y.copy_(data.grad_y)
        for name, leaf in self.leaves.items():
            leaf.copy_(data.leaves[name])

    def widened(self) -> Self:
        """The same numbers in fp64; ids are none."""
        tensors = {**self.leaves, "grad_y": self.grad_y}
        return dataclasses.replace(self, **{n: t.double() for n, t in tensors.items() if t.is_floating_point()})


@dataclass(frozen=True, kw_only=True)
class Call:
    """What all calls have. exact: small integers, whose sums are exact in every dtype. needs: what gets a gradient."""

    op: str
    rows: int
    batch: int = 2
    N: int = 6
    dtype: torch.dtype = torch.float32
    has_bias: bool = True
    exact: bool = True
    needs: tuple[str, ...] = ("x", "weight", "bias")
    seed: int = 0

    @property
    def reported_as(self) -> str:
        """The operation that the report names."""
        return self.op

    @property
    def bias_size(self) -> int:
        """Elements of a bias."""
        return self.N

    def draw(self, rank: int, group_size: int, device: torch.device) -> Operands:
        """This rank's operands."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)

        def tensor(*shape: int, limit: int = 1) -> torch.Tensor:
            if self.exact:
                return torch.randint(-limit, limit + 1, shape, generator=generator).to(device, self.dtype)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, self.dtype)

        x, weight, grad_y = self._shapes(shard_range(self.rows, group_size, rank).size)
        bias = tensor(self.bias_size) if self.has_bias else None
        return Operands(tensor(*x, limit=2), tensor(*weight), bias, tensor(*grad_y))

    def forward(self, op: Callable[..., torch.Tensor], operands: Operands, **where: Any) -> torch.Tensor:
        """What `op` gives for the operands."""
        raise NotImplementedError

    def allowed(self, group_size: int, expected: Results) -> dict[str, float]:
        """By result, the largest error allowed; nothing where all sums are exact."""
        return dict.fromkeys(expected, 0.0)

    def _shapes(self, own_rows: int) -> tuple[_Shape, _Shape, _Shape]:
        """Of x, the weight and the gradient that arrives, on a rank with so many rows of its own."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LinearCall(Call):
    """A call of one of `LINEARS`. layout: how x is seen, or the gradient arrives."""

    K: int = 5
    layout: Literal["contiguous", "x transposed", "x strided", "gradient expanded"] = "contiguous"

    def _shapes(self, own_rows: int) -> tuple[_Shape, _Shape, _Shape]:
        rows_in = own_rows if self.op == "all_gather_linear" else self.rows
        rows_out = own_rows if self.op == "linear_reduce_scatter" else self.rows
        x: _Shape = (rows_in, self.batch, self.K)
        if self.layout == "x transposed":
            x = (self.batch, rows_in, self.K)
        elif self.layout == "x strided":
            x = (rows_in, self.batch, 2 * self.K)
        grad_y = (1, 1) if self.layout == "gradient expanded" else (rows_out, self.batch)
        return x, (self.N, self.K), (*grad_y, self.N)

    def forward(self, op: Callable[..., torch.Tensor], operands: Operands, **where: Any) -> torch.Tensor:
        """Of x as the layout has it."""
        x = operands.x
        if self.layout == "x transposed":
            x = x.transpose(0, 1)
        elif self.layout == "x strided":
            x = x[..., ::2]
        total_rows = {"total_rows": self.rows} if self.op == "all_gather_linear" else {}
        return op(x, operands.weight, operands.bias, **total_rows, **where)

    def sends(self, pass_name: str) -> bool:
        """Whether ranks have anything to send each other in a pass."""
        names = {"x": "input", "weight": "weight"}
        needs = "+".join(names[leaf] for leaf in self.needs if leaf in names) if pass_name == "backward" else ""
        return GemmProblem(self.op, pass_name, self.rows, self.batch, self.N, self.K, "float32", 2, needs).sends

    def draw(self, rank: int, group_size: int, device: torch.device) -> Operands:
        """One bias for all ranks, where the one rank that adds it does so for all."""
        drawn = super().draw(rank, group_size, device)
        if self.op == "linear_all_reduce" and rank:
            drawn.bias = super().draw(0, group_size, device).bias
        return drawn

    def allowed(self, group_size: int, expected: Results) -> dict[str, float]:
        """By how many products (of numbers of standard deviation 1) each element sums, over all ranks."""
        tokens = max(1, self.rows * self.batch)
        is_row = self.op in ("linear_reduce_scatter", "linear_all_reduce")
        ranks_in_y, ranks_in_dx = (group_size, 1) if is_row else (1, group_size)
        terms = {"y": self.K * ranks_in_y + 1, "x.grad": self.N * ranks_in_dx}
        terms |= {"weight.grad": tokens, "bias.grad": tokens}
        return {name: tolerance(self, group_size, number) for name, number in terms.items()}


@dataclass(frozen=True, kw_only=True)
class EmbeddingCall(Call):
    """A call of `embedding_reduce_scatter`, of a vocabulary that is `entries` on every rank; some ids are nobody's.

    Nothing may be off: of the summed partials all but one are zero, and gradients are small integers. K is 1: an
    element of the output is one product with a one-hot vector.
    """

    op: str = "embedding_reduce_scatter"
    has_bias: bool = False
    needs: tuple[str, ...] = ("weight",)
    entries: int = 12
    K: int = 1

    def draw(self, rank: int, group_size: int, device: torch.device) -> Operands:
        """Ids are the same on all ranks, but counted from each one's first entry."""
        shared = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(group_size * self.entries + 2, (self.batch, self.rows), generator=shared).to(device)
        return dataclasses.replace(super().draw(rank, group_size, device), x=ids - rank * self.entries)

    def _shapes(self, own_rows: int) -> tuple[_Shape, _Shape, _Shape]:
        return (0,), (self.entries, self.N), (own_rows, self.batch, self.N)

    def forward(self, op: Callable[..., torch.Tensor], operands: Operands, **where: Any) -> torch.Tensor:
        """Of ids that begin at this rank's first entry."""
        return op(operands.x, operands.weight, 0, **where)


@dataclass(frozen=True, kw_only=True)
class _HeadsCall(Call):
    """A call of an attention. is_fused: queries, keys and values are views into one projection."""

    exact: bool = False
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    causal: bool = True
    window: tuple[int, int] | None = None
    is_fused: bool = False

    @property
    def K(self) -> int:
        """Features of all heads of queries: of a projection behind them, its input."""
        return self.heads * self.head_dim

    @property
    def features(self) -> int:
        """Of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def allowed(self, group_size: int, expected: Results) -> dict[str, float]:
        """By the largest element."""
        unit = _ALLOWED_UNITS[self.dtype] * torch.finfo(self.dtype).eps / 2
        return {
            name: unit * max(1e-2, float(exact.abs().max()) if exact is not None and exact.numel() else 0.0)
            for name, exact in expected.items()
        }

    def _heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values."""
        heads = x.unflatten(-1, (-1, self.head_dim)).split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        return [head if self.is_fused else head.contiguous() for head in heads]


@dataclass(frozen=True, kw_only=True)
class UlyssesCall(_HeadsCall):
    """A call of `ulysses_attention`: x is this rank's rows of queries, keys and values, and there is no weight."""

    op: str = "ulysses_attention"
    has_bias: bool = False
    needs: tuple[str, ...] = ("x",)
    order: Literal["contiguous", "zigzag"] = "contiguous"

    def problem(self, group_size: int) -> UlyssesProblem:
        """The forward pass, as the operation states it."""
        own_rows = shard_range(self.rows, group_size, 0).size
        q, k, v = self._heads(torch.empty(own_rows, self.batch, self.features, dtype=self.dtype))
        inputs = UlyssesInputs(q, k, v, self.causal, self.order, self.window, None, 0.0, total_rows=self.rows)
        return state_ulysses_problem(inputs, group_size)

    def _shapes(self, own_rows: int) -> tuple[_Shape, _Shape, _Shape]:
        return (own_rows, self.batch, self.features), (0, 0), (own_rows, self.batch, self.K)

    @property
    def keywords(self) -> dict[str, Any]:
        """What an operation is told of the attention."""
        return {"causal": self.causal, "window": self.window, "order": self.order, "total_rows": self.rows}

    def forward(self, op: Callable[..., torch.Tensor], operands: Operands, **where: Any) -> torch.Tensor:
        """Without a projection."""
        return op(*self._heads(operands.x), **self.keywords, **where)


@dataclass(frozen=True, kw_only=True)
class BlockCall(UlyssesCall):
    """A call of `ulysses_block`: the rows of the weight are the projection's to heads, then those of the one behind.

    The bias is that of the first. x has as many features as all heads of queries have.
    """

    op: str = "ulysses_block"
    has_bias: bool = True
    needs: tuple[str, ...] = ("x", "weight", "bias")

    @property
    def reported_as(self) -> str:
        """What exchanges."""
        return "ulysses_attention"

    @property
    def bias_size(self) -> int:
        """One for each feature of queries, keys and values."""
        return self.features

    def draw(self, rank: int, group_size: int, device: torch.device) -> Operands:
        """With weights that keep the size of what they multiply."""
        drawn = super().draw(rank, group_size, device)
        return dataclasses.replace(drawn, weight=drawn.weight / self.K**0.5)

    def _shapes(self, own_rows: int) -> tuple[_Shape, _Shape, _Shape]:
        return (own_rows, self.batch, self.K), (self.features + self.N, self.K), (own_rows, self.batch, self.N)

    def forward(self, op: Callable[..., torch.Tensor], operands: Operands, **where: Any) -> torch.Tensor:
        """With its two projections."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads}
        if "group" in where:
            sizes["head_dim"] = self.head_dim  # the reference does not find it by itself
        weights = operands.weight.split((self.features, self.N))
        return op(operands.x, *weights, operands.bias, **sizes, **self.keywords, **where)


@dataclass(frozen=True, kw_only=True)
class AttentionCall(_HeadsCall):
    """A call of `query_split_attention`."""

    op: str = "query_split_attention"

    def problem(self, group_size: int) -> AttentionProblem:
        """The forward pass, as the operation states it."""
        drawn = self.draw(0, group_size, torch.device("cpu"))
        q, k, v = self._heads(drawn.x)
        inputs = AttentionInputs(q, k, v, drawn.weight, drawn.bias, self.causal, self.window, None, None, 0.0)
        return state_attention_problem(inputs, group_size)

    def _shapes(self, own_rows: int) -> tuple[_Shape, _Shape, _Shape]:
        return (self.rows, self.batch, self.features), (self.N, self.K), (own_rows, self.batch, self.N)

    def forward(self, op: Callable[..., torch.Tensor], operands: Operands, **where: Any) -> torch.Tensor:
        """With its projection."""
        heads = self._heads(operands.x)
        return op(*heads, operands.weight, operands.bias, causal=self.causal, window=self.window, **where)


def tolerance(call: Call, group_size: int, terms: int) -> float:
    """The largest error allowed in a sum of `terms` products of standard normal numbers; 0 for exact inputs.

    Such a sum has standard deviation sqrt(terms) and stays below 6 of them. Every rounding to the dtype costs at most
    its unit roundoff times that: one per hop of a ring or per arrived partial, one for the result, one for a bias. A
    partial GEMM accumulates in fp32 (fp64) at least: at most one such roundoff per term. In bfloat16 on 8 ranks this
    is 0.24 standard deviations, while a missing or doubled shard shows as more than one somewhere.
    """
    if call.exact:
        return 0.0
    roundoff = torch.finfo(call.dtype).eps / 2
    accumulator = torch.finfo(torch.float64 if call.dtype == torch.float64 else torch.float32).eps / 2
    return 6 * math.sqrt(terms) * ((group_size + 2) * roundoff + terms * accumulator)


def run_on(call: Call, operands: Operands, op: Callable[..., torch.Tensor], **where: Any) -> Results:
    """Forward and backward on these leaves, which keep no gradients."""
    y = call.forward(op, operands, **where)
    y.backward(operands.grad_y.expand_as(y))
    results: Results = {"y": y.detach(), "bias.grad": None}
    for name, leaf in operands.leaves.items():
        results[f"{name}.grad"], leaf.grad = leaf.grad, None
    return results


def run(call: Call, operands: Operands, op: Callable[..., torch.Tensor], **where: Any) -> Results:
    """Forward and backward on copies of the operands."""
    return run_on(call, operands.copies(call.needs), op, **where)


def overlapped(call: Call, operands: Operands, context: OverlapContext) -> Results:
    """What the operation gives."""
    return run(call, operands, getattr(ops, call.op), context=context)


def reference(call: Call, operands: Operands, group: dist.ProcessGroup) -> Results:
    """What it has to give. Collective."""
    return run(call, operands, getattr(ops.reference, call.op), group=group)
