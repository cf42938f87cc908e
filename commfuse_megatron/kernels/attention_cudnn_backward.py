"""The backward pass of one split through cuDNN: the pieces that `attention_pieces` says, and the sum that joins them.

Both pieces run on all queries; each writes the gradients of its own keys in place. The queries' gradient of the second
one goes to scratch memory and is added in fp32:

    stream  [rectangle: grad_q, grad_k, grad_v rows][square: scratch, grad_k, grad_v rows][grad_q += scratch]
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from commfuse_megatron.kernels.attention import BoundAttention
from commfuse_megatron.kernels.attention_cudnn_graphs import CudnnGraphs, Layout
from commfuse_megatron.kernels.attention_pieces import Piece, SplitSizes, backward_pieces, one_piece
from commfuse_megatron.kernels.cudnn_graph import CudnnGraph
from commfuse_megatron.kernels.sum_partials import bind_sum, sum_partials

__all__ = ["BackwardSplit", "CudnnBackward"]

# Where the gradient of the queries is among a backward pass's addresses, scratch memory aside.
_GRAD_Q = 6

_ALIGNMENT = 256  # of a workspace behind other scratch memory, as the allocator's


class BackwardSplit(NamedTuple):
    """What graphs are chosen by. layouts: of q, k, v, out and the gradient of out."""

    layouts: tuple[Layout, ...]
    dtype: torch.dtype
    sizes: SplitSizes
    scale: float


class _Part(NamedTuple):
    """One call. offsets: of what it is given from the addresses of the whole split, in bytes."""

    graph: CudnnGraph
    offsets: tuple[int, ...]

    def addresses(self, of_split: Sequence[int], grad_q_at: int) -> list[int]:
        """Where this call's tensors are."""
        found = [at + offset for at, offset in zip(of_split, self.offsets, strict=True)]
        found[_GRAD_Q] = grad_q_at
        return found


class CudnnBackward:
    """Of one device; the graphs are the kernel's."""

    def __init__(self, graphs: CudnnGraphs) -> None:
        self._graphs = graphs

    def probe(self, split: BackwardSplit) -> None:
        """Build what `run` and `bind` would, keeping nothing. Raises what the front end does, where it refuses."""
        for piece in backward_pieces(split.sizes):
            self._graphs.build_backward(_layouts(split, piece), split.dtype, piece.mask, split.scale)

    def run(self, split: BackwardSplit, loaded: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Fill the gradients of q, k and v. loaded: q, k, v, out, stats, the gradient of out."""
        grad_q = gradients[0]
        addresses = [tensor.data_ptr() for tensor in (*loaded, *gradients)]
        first, *others = self._parts(split, backward_pieces(split.sizes))
        self._graphs.execute(first.graph, first.addresses(addresses, grad_q.data_ptr()))
        for part in others:
            partial = torch.empty_like(grad_q)
            self._graphs.execute(part.graph, part.addresses(addresses, partial.data_ptr()))
            total = grad_q.view(grad_q.size(0), -1)
            sum_partials(total, partial.view(1, *total.shape), out=total)

    def bind(self, split: BackwardSplit, gradients: tuple[Layout, ...] | None = None) -> BoundAttention:
        """`run` on addresses. Where no kernel of ours adds, it is one call, of whatever number `run` makes.

        gradients: where they are not contiguous. Then it is one call, too.
        """
        pieces = backward_pieces(split.sizes)
        if gradients is not None:
            piece = pieces[0] if len(pieces) == 1 else one_piece(split.sizes)
            graph = self._graphs.backward(_layouts(split, piece), split.dtype, piece.mask, split.scale, gradients)
            return self._graphs.bind(graph)
        parts = self._parts(split, pieces)
        if len(parts) == 2:
            like = torch.empty(split.sizes.queries, _grad_q_row(split), dtype=split.dtype, device="meta")
            add = bind_sum(like, like.unsqueeze(0), bias=None, out=like, device=self._graphs.device)
            if add is not None:
                return self._bind_two(parts[0], parts[1], add, like.nbytes)
            parts = self._parts(split, (one_piece(split.sizes),))
        ((graph, _),) = parts
        return self._graphs.bind(graph)

    def _bind_two(
        self, first: _Part, second: _Part, add: Callable[[int, int, int, int | None, int], None], partial_bytes: int
    ) -> BoundAttention:
        handle_of = self._graphs.handle_of
        # The partial gradient, then the workspace of the call that runs.
        workspace_start = -(-partial_bytes // _ALIGNMENT) * _ALIGNMENT
        workspace_bytes = max(first.graph.workspace_bytes, second.graph.workspace_bytes)

        def run(stream: int, partial_at: int, *addresses: int) -> None:
            grad_q_at, workspace_at, handle = addresses[_GRAD_Q], partial_at + workspace_start, handle_of(stream)
            first.graph.run(first.addresses(addresses, grad_q_at), workspace_at, handle)
            second.graph.run(second.addresses(addresses, partial_at), workspace_at, handle)
            add(stream, grad_q_at, partial_at, None, grad_q_at)

        return BoundAttention(run, workspace_start + workspace_bytes)

    def _parts(self, split: BackwardSplit, pieces: Sequence[Piece]) -> list[_Part]:
        _, k, v, _, _ = split.layouts
        parts = []
        for piece in pieces:
            graph = self._graphs.backward(_layouts(split, piece), split.dtype, piece.mask, split.scale)
            starts = [
                piece.keys.start * layout.row_stride * split.dtype.itemsize
                for layout in (k, v, Layout.contiguous(k.sizes), Layout.contiguous(v.sizes))
            ]
            parts.append(_Part(graph, (0, *starts[:2], 0, 0, 0, 0, *starts[2:])))
        return parts


def _layouts(split: BackwardSplit, piece: Piece) -> tuple[Layout, ...]:
    q, k, v, out, grad_out = split.layouts
    return q, k.with_rows(piece.keys.size), v.with_rows(piece.keys.size), out, grad_out


def _grad_q_row(split: BackwardSplit) -> int:
    """Elements of one row; a multiple of 8, so rows begin on 16 bytes, as sums are bound for."""
    return split.sizes.batch * split.sizes.heads * split.sizes.head_dim
