"""The tensors of one case, drawn once and shared by all variants, and the results that every variant must give."""

from dataclasses import dataclass

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import VerificationError
from commfuse_megatron.tools.common.cases import AttentionCase, LinearCase

# Two results in 16 bits of fp32 sums differ by about 3e-3 (bf16); a crossed or missing partial by order 1.
_TOLERANCE = 1e-2


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
    receive in, for lower bounds that compute nothing. k, v: of attention, whose queries are x [S, B, H * D].
    """

    x: torch.Tensor  # [S_r or S, B, K]
    weight: torch.Tensor  # [N, K]
    grad_y: torch.Tensor  # [S or S_r, B, N]
    x_full: torch.Tensor  # [M, K]
    grad_full: torch.Tensor  # [M, N]
    wire_shard: torch.Tensor  # [M_r, features that travel]
    wire_full: torch.Tensor  # [M, features that travel]
    k: torch.Tensor | None = None  # [S, B, H_kv, D]
    v: torch.Tensor | None = None

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """What gets gradients, by name."""
        named = {"x": self.x, "k": self.k, "v": self.v, "weight": self.weight}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(slots=True)
class Work:
    """One pass of one case on this rank: what a variant is built from. expected: results by name."""

    case: LinearCase
    pass_name: str
    group: dist.ProcessGroup
    pool: Pool
    operands: Operands
    expected: dict[str, torch.Tensor]

    @property
    def dtype_name(self) -> str:
        """As problems and rows have it."""
        return str(self.pool.dtype).removeprefix("torch.")


def draw(case: LinearCase, pool: Pool) -> Operands:
    """The operands of `case` on this rank."""
    rows, shard_rows = case.M // case.batch, case.M // case.batch // case.group_size
    x = pool.tensor("x", shard_rows if case.gathers else rows, case.batch, case.K)
    grad_y = pool.tensor("grad_y", rows if case.gathers else shard_rows, case.batch, case.N)
    features = case.shard_shape[1]
    keys: dict[str, torch.Tensor] = {}
    if isinstance(case, AttentionCase):
        shape = (case.rows, case.batch, case.kv_heads, case.head_dim)
        keys = {name: pool.tensor(name, *shape).detach().requires_grad_() for name in ("k", "v")}
    return Operands(
        x=x.detach().requires_grad_(),
        weight=pool.tensor("weight", case.N, case.K).detach().requires_grad_(),
        grad_y=grad_y,
        x_full=pool.tensor("x_full", case.M, case.K) if case.gathers else x.flatten(0, -2),
        grad_full=grad_y.flatten(0, -2) if case.gathers else pool.tensor("grad_full", case.M, case.N),
        wire_shard=pool.tensor("wire_shard", case.M // case.group_size, features),
        wire_full=pool.tensor("wire_full", case.M, features),
        **keys,
    )


def our_result(case: LinearCase, o: Operands, context: OverlapContext) -> torch.Tensor:
    """What our operation gives of these operands."""
    if isinstance(case, AttentionCase):
        queries = o.x.view(case.rows, case.batch, case.heads, case.head_dim)
        assert o.k is not None
        assert o.v is not None
        return ops.query_split_attention(queries, o.k, o.v, o.weight, context=context)
    return getattr(ops, case.op)(o.x, o.weight, context=context)


def make_work(case: LinearCase, pass_name: str, group: dist.ProcessGroup, pool: Pool) -> Work:
    """Operands, and the results of the sequential program on them."""
    operands = draw(case, pool)
    reference = getattr(ops.reference, case.op)
    if pass_name == "fprop":
        with torch.no_grad():
            expected = {"y": reference(operands.x, operands.weight, group=group)}
    else:
        y = reference(operands.x, operands.weight, group=group)
        grads = torch.autograd.grad(y, [operands.x, operands.weight], operands.grad_y)
        expected = dict(zip(("x.grad", "weight.grad"), grads, strict=True))
    return Work(case, pass_name, group, pool, operands, expected)


def check_results(work: Work, variant: str, found: dict[str, torch.Tensor]) -> float:
    """The largest relative difference from the sequential program. Raises VerificationError if one is too large."""
    worst = 0.0
    for name, expected in work.expected.items():
        tensor = found[name]
        if tensor.shape != expected.shape:
            shapes = f"{list(tensor.shape)}, expected {list(expected.shape)}"
            raise VerificationError(f"{work.case.name} {work.pass_name}, {variant}: {name} has shape {shapes}")
        error = (torch.dist(tensor, expected).float() / expected.norm().float()).item()
        if not error < _TOLERANCE:
            raise VerificationError(
                f"{work.case.name} {work.pass_name}, {variant}: {name} differs from the sequential program by "
                f"{error:.1e} relative"
            )
        worst = max(worst, error)
    return worst
