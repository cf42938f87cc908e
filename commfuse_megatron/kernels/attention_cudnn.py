"""cuDNN's attention through its own Python front end (package nvidia-cudnn-frontend): the fastest there is on Hopper.

A graph is built for every shape and layout, once, and then replayed on addresses: Transformer Engine's module, which
wraps the same kernels, takes 0.4 ms of host time per call (2 x H200, November 2026). The package is imported when a
kernel is first asked for.
"""

import importlib
import logging
from collections.abc import Sequence

import torch

from commfuse_megatron.kernels.attention import (
    AttentionKernel,
    BoundAttention,
    Dropout,
    MathAttention,
    Operands,
    SplitMask,
)
from commfuse_megatron.kernels.attention_cudnn_backward import BackwardSplit, CudnnBackward
from commfuse_megatron.kernels.attention_cudnn_graphs import CudnnGraphs, Layout
from commfuse_megatron.kernels.attention_pieces import SplitSizes, forward_piece
from commfuse_megatron.kernels.cudnn_graph import CudnnGraph
from commfuse_megatron.problem import AttentionProblem, RowRange, chunk_ranges

logger = logging.getLogger(__name__)

_MOST_FEATURES = 128

# Queries and keys, values: latent attention's usual sizes, which cuDNN takes on some GPUs (on an H200: yes). Whether on
# this one, forward and backward, its own check says when a graph is built.
_WIDE_HEADS = (192, 128)

_LEAST_CAPABILITY = (8, 0)


def cudnn_attention_unavailable_reason(problem: AttentionProblem, device: torch.device) -> str | None:
    """Why cuDNN's attention cannot compute `problem` on `device`, None if it should; `CudnnAttention.probe` tries."""
    if device.type != "cuda":
        return f"cudnn attention runs on CUDA devices, this is {device}"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "cudnn attention needs compute capability 8.0"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"cudnn attention takes bfloat16 and float16, this is {problem.dtype}"
    sizes = (problem.head_dim, problem.value_dim)
    for features in () if sizes == _WIDE_HEADS else sizes:
        if features % 8 or features > _MOST_FEATURES:
            return (
                f"cudnn attention takes heads of a multiple of 8 up to {_MOST_FEATURES} features, or of"
                f" {_WIDE_HEADS[0]} with values of {_WIDE_HEADS[1]}; one has {features}"
            )
    if problem.has_mask:
        return "cudnn attention takes no mask tensor"
    if problem.has_dropout:
        return "cudnn attention takes no dropout with a causal mask aligned bottom right"
    if problem.left is not None or problem.right not in (None, 0):
        return "windows are not given to cudnn attention"
    try:
        importlib.import_module("cudnn")
    except (ImportError, OSError, RuntimeError) as error:
        return f"cuDNN's Python front end cannot be imported ({error}): pip install nvidia-cudnn-frontend"
    return None


class CudnnAttention(AttentionKernel):
    """See `AttentionKernel`. Keeps its graphs and handles; one object per context.

    Its backward pass may add up the queries' gradients in another order from run to run, unless PyTorch is told to be
    deterministic. What it refuses at any size, one query that sees one key, is computed by the formula.
    """

    name = "cudnn"
    can_bind = True

    def __init__(self, device: torch.device) -> None:
        self._graphs = CudnnGraphs(importlib.import_module("cudnn"), device)
        self._backward = CudnnBackward(self._graphs)
        self._of_one_key = MathAttention()

    def probe(self, problem: AttentionProblem) -> str | None:
        """Why the first or the last shard's queries, or all at once, cannot be computed, forward and backward; None if
        they can."""
        shards = [
            chunk for chunks in chunk_ranges(problem.rows, problem.group_size, 1) for chunk in chunks if chunk.size
        ]
        tried = [*shards[:: max(1, len(shards) - 1)], RowRange(0, problem.rows)] if shards else []
        return next((reason for queries in tried if (reason := self._try(problem, queries))), None)

    def _try(self, problem: AttentionProblem, queries: RowRange) -> str | None:
        band = problem.visible_keys(queries)
        if queries.size == band.keys.size == 1:
            return None
        dtype: torch.dtype = getattr(torch, problem.dtype)

        def layout(rows: int, heads: int, features: int) -> Layout:
            return Layout.contiguous((problem.batch, heads, rows, features))

        q = layout(queries.size, problem.heads, problem.head_dim)
        k = layout(band.keys.size, problem.kv_heads, problem.head_dim)
        v = layout(band.keys.size, problem.kv_heads, problem.value_dim)
        out = layout(queries.size, problem.heads, problem.value_dim)
        sizes = _sizes_of((q, k, v, out), SplitMask(band))
        try:
            self._graphs.build_forward((q, k, v, out), dtype, forward_piece(sizes).mask, 1.0)
            self._backward.probe(BackwardSplit((q, k, v, out, out), dtype, sizes, 1.0))
        except Exception as error:  # the front end's own exceptions, which differ between its versions
            return f"cudnn attention refuses it: {error}"
        return None

    def forward(
        self, operands: Operands, mask: SplitMask, scale: float, dropout: Dropout | None
    ) -> tuple[torch.Tensor, ...]:
        """Fill `out`; returns the statistics of the softmax [B, H, S_q, 1]."""
        if _is_of_one_key(operands):
            return self._of_one_key.forward(operands, mask, scale, dropout)
        graph, q = self._forward_graph(operands, mask, scale), operands[0]
        stats = q.new_empty(q.size(1), q.size(2), q.size(0), 1, dtype=torch.float32)
        self._graphs.execute(graph, [tensor.data_ptr() for tensor in (*operands, stats)])
        return (stats,)

    def bind_forward(
        self, operands: Operands, mask: SplitMask, scale: float, state_rows: int | None = None
    ) -> BoundAttention | None:
        """See `AttentionKernel`. The state is `forward`'s."""
        if _is_of_one_key(operands):
            return None
        try:
            graph = self._forward_graph(operands, mask, scale, state_rows)
        except Exception as error:  # the front end's own exceptions, which differ between its versions
            if state_rows is None:  # it was probed
                raise
            logger.info("cudnn attention does not leave its state among others': %s", error)
            return None
        return self._graphs.bind(graph)

    def _forward_graph(
        self, operands: Operands, mask: SplitMask, scale: float, state_rows: int | None = None
    ) -> CudnnGraph:
        layouts = tuple(map(Layout.of, operands))
        piece = forward_piece(_sizes_of(layouts, mask))
        return self._graphs.forward(layouts, operands[0].dtype, piece.mask, scale, state_rows)

    def backward(
        self,
        grad_out: torch.Tensor,
        operands: Operands,
        state: tuple[torch.Tensor, ...],
        mask: SplitMask,
        scale: float,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients in the dtype of the operands."""
        if _is_of_one_key(operands):
            return self._of_one_key.backward(grad_out, operands, state, mask, scale, dropout)
        (stats,) = state
        grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in operands[:3])
        split = _split_of(grad_out, operands, mask, scale)
        self._backward.run(split, (*operands, stats, grad_out), (grad_q, grad_k, grad_v))
        return grad_q, grad_k, grad_v

    def bind_backward(
        self,
        grad_out: torch.Tensor,
        operands: Operands,
        mask: SplitMask,
        scale: float,
        gradients: Sequence[torch.Tensor] | None = None,
    ) -> BoundAttention | None:
        """See `AttentionKernel`. Deterministic if PyTorch is told to be now."""
        if _is_of_one_key(operands):
            return None
        split = _split_of(grad_out, operands, mask, scale)
        if gradients is None:
            return self._backward.bind(split)
        try:
            return self._backward.bind(split, tuple(map(Layout.of, gradients)))
        except Exception as error:  # the front end's own exceptions, which differ between its versions
            logger.info("cudnn attention does not leave gradients among others': %s", error)
            return None


def _is_of_one_key(operands: Operands) -> bool:
    return operands[0].size(0) == operands[1].size(0) == 1


def _split_of(
    grad_out: torch.Tensor, operands: tuple[torch.Tensor, ...], mask: SplitMask, scale: float
) -> BackwardSplit:
    layouts = tuple(map(Layout.of, (*operands, grad_out)))
    return BackwardSplit(layouts, grad_out.dtype, _sizes_of(layouts, mask), scale)


def _sizes_of(layouts: Sequence[Layout], mask: SplitMask) -> SplitSizes:
    """layouts: of q, k, v, first."""
    (batch, heads, queries, head_dim), (_, _, keys, value_dim) = layouts[0].sizes, layouts[2].sizes
    return SplitSizes(queries, keys, batch, heads, head_dim, value_dim, mask.band.is_causal)
