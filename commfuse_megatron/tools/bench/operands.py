"""The tensors of one case, drawn once and shared by all variants, and what is held against the results expected."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import VerificationError
from commfuse_megatron.tools.common.cases import Case

# Two results in 16 bits of fp32 sums differ by about 3e-3 (bf16); a crossed or missing partial by order 1.
_TOLERANCE = 1e-2

#: "y", or the gradients by the names of the operands: "x.grad".
Results = dict[str, torch.Tensor]


class Pool:
    """Random tensors by name, as views of buffers that only ever grow: nothing is allocated from case to case."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        self._buffers: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """[*shape] of random values; invalid once a larger one of the same name is asked for."""
        size = torch.Size(shape).numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self._buffers.pop(name, None)
            buffer = torch.randn(size, generator=self._generator, device=self.device, dtype=self.dtype)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


@dataclass(slots=True)
class Operands:
    """What a rank brings to one case.

    x, weight, grad_y: arguments of the operation and the gradient of its result. x_full, grad_full: stand for the
    gathered input and the complete gradient where a lower bound needs them. wire_shard, wire_full: to send from and
    receive in, for lower bounds that compute nothing.
    others: "k" and "v" [S, B, H_kv, D] of attention, whose queries are x [S, B, H * D]; "qkv" [features, hidden], the
    weight in front of attention over a split sequence.
    """

    x: torch.Tensor  # [S_r or S, B, K]
    weight: torch.Tensor  # [N, K]
    grad_y: torch.Tensor  # [S or S_r, B, N]
    x_full: torch.Tensor  # [M, K]
    grad_full: torch.Tensor  # [M, N]
    wire_shard: torch.Tensor  # [M_r, features that travel]
    wire_full: torch.Tensor  # [M, features that travel]
    others: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """What gets gradients, by name."""
        return {"x": self.x, **self.others, "weight": self.weight}


@dataclass(slots=True)
class Work:
    """One pass of one case on this rank: what a variant is built from."""

    case: Case
    pass_name: str
    group: dist.ProcessGroup
    pool: Pool
    operands: Operands
    expected: Results = field(default_factory=dict)

    @property
    def dtype_name(self) -> str:
        """As problems and rows have it."""
        return str(self.pool.dtype).removeprefix("torch.")

    def named(self, found: torch.Tensor | tuple[torch.Tensor, ...]) -> Results:
        """The result of a forward pass, or the gradients of all operands in their order, by name."""
        if isinstance(found, torch.Tensor):
            return {"y": found}
        return {f"{name}.grad": gradient for name, gradient in zip(self.operands.leaves, found, strict=True)}


def draw(case: Case, pool: Pool) -> Operands:
    """The operands of `case` on this rank."""
    if case.op == "ulysses_attention":
        return _draw_split(case, pool)
    shard_rows, features = case.rows // case.group_size, case.shard_shape[1]
    x = pool.tensor("x", shard_rows if case.gathers else case.rows, case.batch, case.K)
    has_all_of_y = case.gathers or case.all_reduces
    grad_y = pool.tensor("grad_y", case.rows if has_all_of_y else shard_rows, case.batch, case.N)
    heads = (case.rows, case.batch, case.kv_heads, case.head_dim)
    return Operands(
        x=x.detach().requires_grad_(),
        weight=pool.tensor("weight", case.N, case.K).detach().requires_grad_(),
        grad_y=grad_y,
        x_full=pool.tensor("x_full", case.M, case.K) if case.gathers else x.flatten(0, -2),
        grad_full=grad_y.flatten(0, -2) if has_all_of_y else pool.tensor("grad_full", case.M, case.N),
        wire_shard=pool.tensor("wire_shard", case.M // case.group_size, features),
        wire_full=pool.tensor("wire_full", case.M, features),
        others={n: pool.tensor(n, *heads).detach().requires_grad_() for n in ("k", "v")} if case.heads else {},
    )


def _draw_split(case: Case, pool: Pool) -> Operands:
    rows, scale = case.M // case.group_size, case.N**-0.5
    x, grad_y = pool.tensor("x", rows, 1, case.N), pool.tensor("grad_y", rows, 1, case.N)
    # Of a token queries, keys and values travel one way, what is attended to the other.
    travelling = (rows, case.qkv_features + case.K)
    return Operands(
        x=x.detach().requires_grad_(),
        # Scaled, so that scores are as large as a model's.
        weight=(pool.tensor("weight", case.N, case.K) * scale).requires_grad_(),
        grad_y=grad_y,
        x_full=x.flatten(0, 1),
        grad_full=grad_y.flatten(0, 1),
        wire_shard=pool.tensor("wire_shard", *travelling),
        wire_full=pool.tensor("wire_full", *travelling),
        others={"qkv": (pool.tensor("qkv", case.qkv_features, case.N) * scale).requires_grad_()},
    )


def ulysses_block(case: Case, o: Operands, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Both linears of the case around `attend(q, k, v)` of this rank's rows: [S_r, B, H, D] of each -> [S_r, B, K]."""
    mixed = torch.nn.functional.linear(o.x, o.others["qkv"])
    numbers = (case.heads, case.kv_heads, case.kv_heads)
    parts = mixed.split([number * case.head_dim for number in numbers], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, case.head_dim)) for part in parts)
    return torch.nn.functional.linear(attend(q.contiguous(), k.contiguous(), v), o.weight)


def our_result(case: Case, o: Operands, context: OverlapContext) -> torch.Tensor:
    """What our operation gives of these operands."""
    if case.op == "ulysses_attention":
        return ulysses_block(case, o, functools.partial(ops.ulysses_attention, order="zigzag", context=context))
    if case.op == "query_split_attention":
        queries = o.x.view(case.rows, case.batch, case.heads, case.head_dim)
        return ops.query_split_attention(queries, o.others["k"], o.others["v"], o.weight, context=context)
    return getattr(ops, case.op)(o.x, o.weight, context=context)


def check_results(work: Work, variant: str, found: Results) -> float:
    """The largest relative difference from the sequential program. Raises VerificationError if one is too large."""
    worst, what = 0.0, f"{work.case.name} {work.pass_name}, {variant}"
    for name, expected in work.expected.items():
        tensor = found[name]
        if tensor.shape != expected.shape:
            shapes = f"{list(tensor.shape)}, expected {list(expected.shape)}"
            raise VerificationError(f"{what}: {name} has shape {shapes}")
        error = (torch.dist(tensor, expected).float() / expected.norm().float()).item()
        if not error < _TOLERANCE:
            raise VerificationError(f"{what}: {name} differs from the sequential program by {error:.1e} relative")
        worst = max(worst, error)
    return worst
