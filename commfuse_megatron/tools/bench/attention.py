"""Attention with its projection, one rank's heads: operands, lower bounds, the classic variants, and our operation.

compute_only             attention at once by the fastest kernel, then one GEMM: free of communication
comm_only ...            as of a linear whose result is scattered
sequential               the same, then the plain collective
slicing C=c              c pieces, the collective of one beside the attention of the next (forward)
row_parallel <transport> attention at once, then the projection over our reduce-scatter
query_split m=C <...>    the queries of one owner after the other
planned                  what the planner chooses

Results are held to the reference's attention, computed in pieces.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from commfuse_megatron import ops
from commfuse_megatron.kernels.attention_choice import AttentionKernels
from commfuse_megatron.ops.split_attention import Heads, SplitAttention
from commfuse_megatron.problem import RowRange, chunk_ranges
from commfuse_megatron.tools.bench.bounds import products, require_equal_pieces
from commfuse_megatron.tools.bench.operands import Results, Work
from commfuse_megatron.tools.bench.variant import differentiable, in_turn

PIECES = (2, 4)

# Of the reference, in fp32: half a GiB, of which its backward pass has some copies.
_SCORES_AT_ONCE = 2**27


def heads_of(work: Work) -> Heads:
    """Queries, keys and values, without a history."""
    case, o = work.case, work.operands
    queries = o.x.detach().view(case.rows, case.batch, case.heads, case.head_dim)
    return Heads(queries, o.others["k"].detach(), o.others["v"].detach())


def split_attention(work: Work, splits_per_shard: int | None) -> SplitAttention:
    """Attention of the case in splits, or in one (None), by the kernel that our operation would take."""
    case, problem = work.case, work.case.attention(work.dtype_name)
    splits = [RowRange(0, case.rows)]
    if splits_per_shard is not None:
        splits = [chunk for shard in chunk_ranges(case.rows, case.group_size, splits_per_shard) for chunk in shard]
    kernel = AttentionKernels(work.pool.device).choose(problem, "auto")
    return SplitAttention(problem, kernel, splits, case.head_dim**-0.5, None, None)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The reference's, causal, of [S, B, H, D] and [S, B, H_kv, D]: [S, B, H, D].

    In pieces of one head of keys and some queries, as all scores would not fit. No kernel that is measured has a part
    in it, nor PyTorch's own attention, which may run the same one.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32  # gradients of pieces are added up in it, too
    rows, shared_by = q.size(0), q.size(2) // k.size(2)
    step = max(1, _SCORES_AT_ONCE // (rows * q.size(1) * shared_by))
    attended = []
    of_heads = (tensor.to(wide).split(number, dim=2) for tensor, number in ((q, shared_by), (k, 1), (v, 1)))
    for queries, keys, values in zip(*of_heads, strict=True):
        pieces = []
        for start in range(0, rows, step):
            end = min(start + step, rows)
            given = (queries[start:end], keys[:end], values[:end])
            pieces.append(checkpoint(ops.reference.attend, *given, use_reentrant=False))
        attended.append(torch.cat(pieces))
    return torch.cat(attended, dim=2).to(q.dtype)


def expected(work: Work) -> Results:
    """The results that every variant must give."""
    case, o = work.case, work.operands

    def forward() -> torch.Tensor:
        queries = o.x.view(case.rows, case.batch, case.heads, case.head_dim)
        attended = plain_attention(queries, o.others["k"], o.others["v"]).flatten(2)
        return ops.reference.linear_reduce_scatter(attended, o.weight, group=work.group)

    return differentiable(work, forward).results()


def compute(work: Work) -> Callable[[], None]:
    """The block of one rank, un-split, without a sum over ranks."""
    heads, attention = heads_of(work), split_attention(work, None)
    attended = torch.empty_like(heads.q)
    state = attention.forward(0, heads, attended)
    first, *wgrad = (partial(torch.mm, a, b, out=out) for a, b, out in products(work, attended.view(-1, work.case.K)))
    if work.pass_name == "fprop":
        return in_turn(partial(attention.forward, 0, heads, attended), first)
    grad_attended = first.keywords["out"].view(attended.shape)
    return in_turn(first, partial(attention.gradients, 0, heads, attended, state, grad_attended), *wgrad)


class Pieces:
    """The block in pieces that hold the same rows of every rank's shard, so that each has a collective of its own.

    Sequences of the batch where there are enough, else queries: that takes an attention kernel for each rank's rows.
    """

    def __init__(self, work: Work, num_pieces: int) -> None:
        case = work.case
        self._case, self._num_pieces, self._heads = case, num_pieces, heads_of(work)
        self._weight = work.operands.weight.detach()
        self._cuts_batch = case.batch % num_pieces == 0
        if not self._cuts_batch:
            require_equal_pieces(case.rows // case.group_size, num_pieces)
        self._attention = split_attention(work, None if self._cuts_batch else num_pieces)
        self._attended = torch.empty_like(self._heads.q)

    def partial(self, piece: int) -> torch.Tensor:
        """This rank's part of the output of one piece [M / pieces, N], owner after owner."""
        case, pieces = self._case, self._num_pieces
        if self._cuts_batch:
            part = self._sequences(piece)
            attended = torch.empty_like(self._heads.q[:, part], memory_format=torch.contiguous_format)
            self._attention.forward(0, Heads(*(tensor[:, part] for tensor in self._heads)), attended)
            return attended.view(-1, case.K) @ self._weight.t()
        for owner in range(case.group_size):
            self._attention.forward(owner * pieces + piece, self._heads, self._attended)
        rows = self._attended.view(case.group_size, pieces, -1, case.K)[:, piece]
        return torch.bmm(rows, self._weight.t().expand(case.group_size, case.K, case.N)).flatten(0, 1)

    def of_result(self, y: torch.Tensor, piece: int) -> torch.Tensor:
        """The part of y [S_r, B, N] that one piece's collective gives."""
        return y[:, self._sequences(piece)] if self._cuts_batch else y.chunk(self._num_pieces)[piece]

    def _sequences(self, piece: int) -> slice:
        width = self._case.batch // self._num_pieces
        return slice(piece * width, (piece + 1) * width)


def sliced(work: Work, num_pieces: int) -> Callable[[], torch.Tensor]:
    """Data slicing: the collective of a piece runs beside what comes after it; the last one is exposed."""
    case, pieces = work.case, Pieces(work, num_pieces)
    shape = (case.rows // case.group_size, case.batch, case.N)

    def call() -> torch.Tensor:
        y = work.operands.wire_shard.new_empty(shape)
        arriving = []
        for piece in range(num_pieces):
            partial = pieces.partial(piece)
            target = torch.empty_like(pieces.of_result(y, piece), memory_format=torch.contiguous_format)
            done = dist.reduce_scatter_tensor(target.flatten(0, 1), partial, group=work.group, async_op=True)
            arriving.append((piece, target, done))
        for piece, target, done in arriving:
            done.wait()
            pieces.of_result(y, piece).copy_(target)
        return y

    return call
