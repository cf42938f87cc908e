"""cuDNN's attention through its own Python front end (package nvidia-cudnn-frontend): the fastest there is on Hopper.

A graph is built for every shape and layout, once, and then replayed on addresses: Transformer Engine's module, which
wraps the same kernels, takes 0.4 ms of host time per call (2 x H200, November 2026). The package is imported when a
kernel is first asked for. The contract that bites: a handle belongs to one stream, so there is one for each.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from commfuse_megatron.kernels.attention import BoundBackward, BoundForward, Dropout, MathAttention, SplitMask
from commfuse_megatron.kernels.cudnn_graph import CudnnGraph
from commfuse_megatron.problem import AttentionProblem, RowRange, VisibleKeys, chunk_ranges

__all__ = ["CudnnAttention", "cudnn_attention_unavailable_reason"]

logger = logging.getLogger(__name__)

_MOST_FEATURES = 128

# Queries and keys, values: latent attention's usual sizes, which cuDNN takes on some GPUs (on an H200: yes). Whether on
# this one, forward and backward, its own check says when a graph is built.
_WIDE_HEADS = (192, 128)

_LEAST_CAPABILITY = (8, 0)

# Sequence lengths that vary from call to call must not fill the memory.
_MOST_GRAPHS = 1024

# Tensors of a graph, by the numbers they are bound with.
_Q, _K, _V, _OUT, _STATS, _GRAD_OUT, _GRAD_Q, _GRAD_K, _GRAD_V = range(1, 10)
_OF_FORWARD, _OF_BACKWARD = range(_Q, _GRAD_OUT), range(_Q, _GRAD_V + 1)


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


class _Layout(NamedTuple):
    """Sizes and strides in cuDNN's order [B, H, S, D]."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class CudnnAttention:
    """See `AttentionKernel`. Keeps its graphs and handles; one object per context.

    Its backward pass may add up the queries' gradients in another order from run to run, unless PyTorch is told to be
    deterministic. What it refuses at any size, one query that sees one key, is computed by the formula.
    """

    name = "cudnn"

    def __init__(self, device: torch.device) -> None:
        self._cudnn: Any = importlib.import_module("cudnn")
        self._device = device
        self._handles: dict[int, Any] = {}
        self._graphs: dict[tuple, CudnnGraph] = {}
        self._of_one_key = MathAttention()
        self._workspaces: dict[int, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def probe(self, problem: AttentionProblem) -> str | None:
        """Why the first or the last shard's queries cannot be computed, forward and backward; None if they can."""
        shards = [
            chunk for chunks in chunk_ranges(problem.rows, problem.group_size, 1) for chunk in chunks if chunk.size
        ]
        return next(
            (reason for queries in shards[:: max(1, len(shards) - 1)] if (reason := self._try(problem, queries))), None
        )

    def _try(self, problem: AttentionProblem, queries: RowRange) -> str | None:
        band = problem.visible_keys(queries)
        if queries.size == band.keys.size == 1:
            return None
        dtype: torch.dtype = getattr(torch, problem.dtype)

        def layout(rows: int, heads: int, features: int) -> _Layout:
            strides = (heads * features, features, problem.batch * heads * features, 1)
            return _Layout((problem.batch, heads, rows, features), strides)

        q = layout(queries.size, problem.heads, problem.head_dim)
        k = layout(band.keys.size, problem.kv_heads, problem.head_dim)
        v = layout(band.keys.size, problem.kv_heads, problem.value_dim)
        out = layout(queries.size, problem.heads, problem.value_dim)
        try:
            self._build_forward((q, k, v, out), dtype, band, 1.0)
            is_deterministic = torch.are_deterministic_algorithms_enabled()
            self._build_backward((q, k, v, out, out), dtype, band, 1.0, is_deterministic=is_deterministic)
        except Exception as error:  # the front end's own exceptions, which differ between its versions
            return f"cudnn attention refuses it: {error}"
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        mask: SplitMask,
        scale: float,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, ...]:
        """Fill `out`; returns the statistics of the softmax [B, H, S_q, 1]."""
        if q.size(0) == k.size(0) == 1:
            return self._of_one_key.forward(q, k, v, out, mask, scale, dropout)
        graph = self._forward_graph(q, k, v, out, mask, scale)
        stats = q.new_empty(q.size(1), q.size(2), q.size(0), 1, dtype=torch.float32)
        self._execute(graph, (q, k, v, out, stats))
        return (stats,)

    def bind_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, mask: SplitMask, scale: float
    ) -> BoundForward | None:
        """See `AttentionKernel`. The state is `forward`'s, contiguous."""
        if q.size(0) == k.size(0) == 1:
            return None
        graph = self._forward_graph(q, k, v, out, mask, scale)

        def run(stream: int, q_at: int, k_at: int, v_at: int, out_at: int, state_at: int) -> None:
            workspace_at = self._workspace_at(stream, graph.workspace_bytes)
            graph.run((q_at, k_at, v_at, out_at, state_at), workspace_at, self._handle_of(stream))

        return run

    def _forward_graph(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, mask: SplitMask, scale: float
    ) -> CudnnGraph:
        layouts = tuple(map(_layout, (q, k, v, out)))
        key = ("forward", layouts, q.dtype, mask.band.left, mask.band.right, scale)
        return self._find(key, lambda: self._build_forward(layouts, q.dtype, mask.band, scale))

    def backward(
        self,
        grad_out: torch.Tensor,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        state: tuple[torch.Tensor, ...],
        mask: SplitMask,
        scale: float,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients in the dtype of the operands."""
        q, k, v, out = operands
        if q.size(0) == k.size(0) == 1:
            return self._of_one_key.backward(grad_out, operands, state, mask, scale, dropout)
        (stats,) = state
        graph = self._backward_graph(grad_out, operands, mask, scale)
        grad_q, grad_k, grad_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        self._execute(graph, (q, k, v, out, stats, grad_out, grad_q, grad_k, grad_v))
        return grad_q, grad_k, grad_v

    def bind_backward(
        self,
        grad_out: torch.Tensor,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        mask: SplitMask,
        scale: float,
    ) -> BoundBackward | None:
        """See `AttentionKernel`. Deterministic if PyTorch is told to be now."""
        q, k, _, _ = operands
        if q.size(0) == k.size(0) == 1:
            return None
        graph = self._backward_graph(grad_out, operands, mask, scale)

        def run(stream: int, *addresses: int) -> None:
            workspace_at = self._workspace_at(stream, graph.workspace_bytes)
            graph.run(addresses, workspace_at, self._handle_of(stream))

        return run

    def _backward_graph(
        self,
        grad_out: torch.Tensor,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        mask: SplitMask,
        scale: float,
    ) -> CudnnGraph:
        layouts = tuple(map(_layout, (*operands, grad_out)))
        dtype, band, is_deterministic = grad_out.dtype, mask.band, torch.are_deterministic_algorithms_enabled()
        key = ("backward", layouts, dtype, band.left, band.right, scale, is_deterministic)
        return self._find(
            key, lambda: self._build_backward(layouts, dtype, band, scale, is_deterministic=is_deterministic)
        )

    def stale_reason(self) -> str | None:
        """None: nothing that it depends on changes."""
        return None

    def _find(self, key: tuple, build: Callable[[], CudnnGraph]) -> CudnnGraph:
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.clear()
            graph = self._graphs[key] = build()
        return graph

    def _build_forward(
        self, layouts: Sequence[_Layout], dtype: torch.dtype, band: VisibleKeys, scale: float
    ) -> CudnnGraph:
        graph = self._new_graph(dtype)
        q, k, v, out = layouts
        bound = {
            name: self._tensor(graph, uid, layout) for name, uid, layout in (("q", _Q, q), ("k", _K, k), ("v", _V, v))
        }
        result, stats = graph.sdpa(**bound, generate_stats=True, attn_scale=scale, **self._mask(band))
        result.set_uid(_OUT).set_output(True).set_dim(list(out.sizes)).set_stride(list(out.strides))
        result.set_data_type(self._io_type(dtype))
        sizes = [*out.sizes[:3], 1]
        stats.set_uid(_STATS).set_output(True).set_dim(sizes).set_stride(_dense(sizes))
        stats.set_data_type(self._cudnn.data_type.FLOAT)
        return self._finish(graph, _OF_FORWARD)

    def _build_backward(
        self,
        layouts: Sequence[_Layout],
        dtype: torch.dtype,
        band: VisibleKeys,
        scale: float,
        *,
        is_deterministic: bool,
    ) -> CudnnGraph:
        graph = self._new_graph(dtype)
        q, k, v, out, grad_out = layouts
        bound = {
            name: self._tensor(graph, uid, layout)
            for name, uid, layout in (
                ("q", _Q, q),
                ("k", _K, k),
                ("v", _V, v),
                ("o", _OUT, out),
                ("dO", _GRAD_OUT, grad_out),
            )
        }
        sizes = [*out.sizes[:3], 1]
        float_type = self._cudnn.data_type.FLOAT
        stats = graph.tensor(name="stats", dim=sizes, stride=_dense(sizes), data_type=float_type, uid=_STATS)
        gradients = graph.sdpa_backward(
            **bound,
            stats=stats,
            attn_scale=scale,
            use_deterministic_algorithm=is_deterministic,
            **self._mask(band),
        )
        for gradient, uid, layout in zip(gradients, (_GRAD_Q, _GRAD_K, _GRAD_V), (q, k, v), strict=True):
            sizes = list(layout.sizes)
            gradient.set_uid(uid).set_output(True).set_dim(sizes).set_stride(_sequence_first(sizes))
            gradient.set_data_type(self._io_type(dtype))
        return self._finish(graph, _OF_BACKWARD)

    def _new_graph(self, dtype: torch.dtype) -> Any:
        types = self._cudnn.data_type
        return self._cudnn.pygraph(
            handle=self._handle(),
            io_data_type=self._io_type(dtype),
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
        )

    def _io_type(self, dtype: torch.dtype) -> Any:
        types = self._cudnn.data_type
        return types.BFLOAT16 if dtype == torch.bfloat16 else types.HALF

    @staticmethod
    def _tensor(graph: Any, uid: int, layout: _Layout) -> Any:
        return graph.tensor(name=f"tensor_{uid}", dim=list(layout.sizes), stride=list(layout.strides), uid=uid)

    def _mask(self, band: VisibleKeys) -> dict[str, Any]:
        return {"use_causal_mask_bottom_right": True} if band.is_causal else {}

    def _finish(self, graph: Any, uids: Sequence[int]) -> CudnnGraph:
        modes = self._cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return CudnnGraph(graph, uids)

    def _execute(self, graph: CudnnGraph, tensors: Sequence[torch.Tensor]) -> None:
        # From the allocator of the current stream: the next call there may have the same memory.
        workspace = torch.empty(max(1, graph.workspace_bytes), dtype=torch.uint8, device=self._device)
        graph.run([tensor.data_ptr() for tensor in tensors], workspace.data_ptr(), self._handle())

    def _workspace_at(self, stream: int, size_bytes: int) -> int:
        """Address of scratch memory for launches on `stream`, which run one after the other."""
        held = self._workspaces.get(stream)
        if held is None or held.nbytes < size_bytes:
            if held is not None:  # launches that use it may be waiting on the stream
                self._outgrown.append(held)
            held = torch.empty(max(1, size_bytes), dtype=torch.uint8, device=self._device)
            self._workspaces[stream] = held
        return held.data_ptr()

    def _handle(self) -> Any:
        """The handle of the current stream."""
        return self._handle_of(torch._C._cuda_getCurrentRawStream(self._device.index))

    def _handle_of(self, stream: int) -> Any:
        handle = self._handles.get(stream)
        if handle is None:
            with torch.cuda.device(self._device):
                handle = self._handles[stream] = self._cudnn.create_handle()
            self._cudnn.set_stream(handle=handle, stream=stream)
        return handle


def _layout(tensor: torch.Tensor) -> _Layout:
    """Of [S, B, H, D] in the order [B, H, S, D]."""
    order = (1, 2, 0, 3)
    return _Layout(tuple(tensor.size(dim) for dim in order), tuple(tensor.stride(dim) for dim in order))


def _dense(sizes: Sequence[int]) -> list[int]:
    batch_stride = sizes[1] * sizes[2] * sizes[3]
    return [batch_stride, sizes[2] * sizes[3], sizes[3], 1]


def _sequence_first(sizes: Sequence[int]) -> list[int]:
    """Strides in the order [B, H, S, D] of a contiguous [S, B, H, D]."""
    batch, heads, _, features = sizes
    return [heads * features, features, batch * heads * features, 1]
