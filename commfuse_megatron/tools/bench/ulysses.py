"""Attention over a split sequence between its two linears, on one rank: operands, bounds, the classic ways, and ours.

compute_only          the same products as one rank computes them, nothing exchanged
comm_only collective  the group's own all-to-alls of what the pass exchanges, nothing computed
sequential            all-to-all, attention, all-to-all, by the kernel that our operation takes
transformer_engine    its own exchange, `cp_comm_type="a2a"`
overlapped m=C <...>  heads in C groups, one attended while the next travels
with_projections ...  the same, and beside the linears: a group is projected while the one before travels
planned               what the planner chooses

The sequence is in zigzag order, as Megatron deals it; queries and keys are contiguous, as a rotary embedding leaves
them. Results are held to the reference's attention between plain all-to-alls.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, override

import torch
from torch import distributed as dist
from torch.distributed.nn.functional import all_to_all_single

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.ops.split_attention import Heads, SplitAttention
from commfuse_megatron.tools.bench.attention import plain_attention, split_attention
from commfuse_megatron.tools.bench.operands import Results, Work, ulysses_block
from commfuse_megatron.tools.bench.variant import Ready, Variant, differentiable, in_turn
from commfuse_megatron.tools.common.cases import Case


def expected(work: Work) -> Results:
    """The results that every variant must give."""
    attend = partial(_attend_all, group=work.group)
    return differentiable(work, lambda: ulysses_block(work.case, work.operands, attend)).results()


def _attend_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The reference's attention between plain all-to-alls, rows in zigzag order."""
    size, rows = group.size(), q.size(0) * group.size()

    def exchanged(parts: torch.Tensor) -> torch.Tensor:
        return all_to_all_single(torch.empty_like(parts), parts, group=group)

    def to_heads(part: torch.Tensor) -> torch.Tensor:
        """[S_r, B, H, D] -> [S, B, heads of this rank, D], as ranks hold the rows."""
        return exchanged(part.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()).flatten(0, 1)

    dealt = dealt_rows(rows, size, q.device)
    order = torch.argsort(dealt)
    attended = plain_attention(*(to_heads(each)[order] for each in (q, k, v)))
    home = exchanged(attended[dealt].unflatten(0, (size, -1)).contiguous())  # [R, S_r, B, heads of a rank, D]
    return home.permute(1, 2, 0, 3, 4).flatten(2)


def dealt_rows(rows: int, num_ranks: int, device: torch.device) -> torch.Tensor:
    """The positions of the sequence in zigzag order, rank after rank: of 2R chunks rank r has r and 2R - 1 - r."""
    chunks = torch.arange(rows, device=device).chunk(2 * num_ranks)
    return torch.cat([part for rank in range(num_ranks) for part in (chunks[rank], chunks[-1 - rank])])


class _LocalAttention(torch.autograd.Function):
    """Attention of a rank's heads over the whole sequence, by the kernel that our operation takes."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: SplitAttention) -> torch.Tensor:
        attended = torch.empty_like(q)
        state = attention.forward(0, Heads(q, k, v), attended)
        ctx.attention, ctx.num_states = attention, len(state)
        ctx.save_for_backward(q, k, v, attended, *state)
        return attended

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, attended, *state = ctx.saved_tensors
        found = ctx.attention.gradients(0, Heads(q, k, v), attended, tuple(state), grad.contiguous())
        return *(each.to(grad.dtype) for each in found), None


def compute(work: Work) -> Callable[[], object]:
    """The block of one rank; its rows stand for its heads' share of all rows, so nothing is exchanged."""
    case, attention = work.case, split_attention(work, None)

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.reshape(case.rows, 1, -1, case.head_dim) for each in heads)
        return _LocalAttention.apply(q, k, v, attention).view(-1, 1, case.K)

    return differentiable(work, lambda: ulysses_block(case, work.operands, attend)).call


def all_to_alls(work: Work) -> Callable[[], None]:
    """The group's, of one pass, towards the heads and home; as many features travel in both passes."""
    full, shard = work.operands.wire_full, work.operands.wire_shard
    ways = [
        [wire.view(-1)[: wire.size(0) * features].view(-1, features) for wire in (full, shard)]
        for features in (work.case.qkv_features, work.case.K)
    ]
    return in_turn(*(partial(dist.all_to_all_single, target, source, group=work.group) for target, source in ways))


def with_projections(work: Work, context: OverlapContext) -> Ready:
    """The block as one operation of ours, whose weight has the rows of every head of keys together."""
    case, o = work.case, work.operands
    order = _rows_by_key_head(case, o.x.device)
    qkv = o.others["qkv"].detach()[order].requires_grad_()

    def forward() -> torch.Tensor:
        sizes = {"heads": case.heads, "kv_heads": case.kv_heads, "order": "zigzag"}
        return ops.ulysses_block(o.x, qkv, o.weight, context=context, to_heads=_contiguous, **sizes)

    def read(found: torch.Tensor | tuple[torch.Tensor, ...]) -> Results:
        results = work.named(found)
        if "qkv.grad" in results:
            results["qkv.grad"] = results["qkv.grad"][torch.argsort(order)]
        return results

    ready = differentiable(work, forward, {**o.leaves, "qkv": qkv})
    ready.read = read
    return ready


def _contiguous(part: ops.ProjectedHeads) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As a rotary embedding leaves them."""
    return part.q.contiguous(), None if part.k is None else part.k.contiguous(), part.v


def _rows_by_key_head(case: Case, device: torch.device) -> torch.Tensor:
    """Of the case's weight, whose rows are those of all queries, keys and values: head of keys after head of keys."""
    rows = torch.arange(case.qkv_features, device=device).view(-1, case.head_dim)
    q, k, v = rows.split([case.heads, case.kv_heads, case.kv_heads])
    queries = q.view(case.kv_heads, -1, case.head_dim)
    return torch.cat([queries, k.unsqueeze(1), v.unsqueeze(1)], dim=1).flatten()


class TransformerEngineExchange(Variant):
    """Transformer Engine's attention with its own all-to-alls, as Megatron's `cp_comm_type: a2a` calls it."""

    name = "transformer_engine"
    is_foreign = True
    is_basic = True

    def __init__(self, device: torch.device) -> None:
        # Before anything computes: its libraries of cuDNN do not load behind PyTorch's.
        if device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
            importlib.import_module("transformer_engine.pytorch")

    @override
    def build(self, work: Work) -> Ready:
        if work.pool.device.type != "cuda":
            raise UnsupportedError("Transformer Engine's context parallelism needs CUDA devices")
        if importlib.util.find_spec("transformer_engine") is None:
            raise UnsupportedError("Transformer Engine is not installed")
        from transformer_engine import pytorch as te

        case = work.case
        layer = te.DotProductAttention(
            num_attention_heads=case.heads,
            kv_channels=case.head_dim,
            num_gqa_groups=case.kv_heads,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
        )
        ranks = dist.get_process_group_ranks(work.group)
        layer.set_context_parallel_group(work.group, ranks, torch.cuda.Stream(), "a2a")
        ready = differentiable(work, lambda: ulysses_block(case, work.operands, layer), keeps_tensors=False)
        ready.path = "transformer_engine"
        return ready
