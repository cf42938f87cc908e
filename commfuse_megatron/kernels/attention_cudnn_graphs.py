"""cuDNN's graphs of attention: built for every shape, layout and mask once, and kept, with the handles they run with.

Knows the front end, whose module it is given, and layouts; must not know what a split is. Beware: a handle belongs to
one stream, so there is one for each.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from commfuse_megatron.kernels.attention import BoundAttention
from commfuse_megatron.kernels.attention_pieces import Mask
from commfuse_megatron.kernels.cudnn_graph import CudnnGraph
from commfuse_megatron.kernels.support import raw_stream

# Sequence lengths that vary from call to call must not fill the memory.
_MOST_GRAPHS = 1024

# Tensors of a graph, by the numbers they are bound with.
_Q, _K, _V, _OUT, _STATS, _GRAD_OUT, _GRAD_Q, _GRAD_K, _GRAD_V = range(1, 10)
_OF_FORWARD, _OF_BACKWARD = range(_Q, _GRAD_OUT), range(_Q, _GRAD_V + 1)

_MASKS: dict[Mask, dict[str, bool]] = {
    Mask.NONE: {},
    Mask.TOP_LEFT: {"use_causal_mask": True},
    Mask.BOTTOM_RIGHT: {"use_causal_mask_bottom_right": True},
}


class Layout(NamedTuple):
    """Sizes and strides in cuDNN's order [B, H, S, D]."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """Of [S, B, H, D]."""
        order = (1, 2, 0, 3)
        return cls(tuple(tensor.size(dim) for dim in order), tuple(tensor.stride(dim) for dim in order))

    @classmethod
    def contiguous(cls, sizes: Sequence[int]) -> "Layout":
        """Of a contiguous [S, B, H, D], sizes in cuDNN's order."""
        batch, heads, _, features = sizes
        return cls(tuple(sizes), (heads * features, features, batch * heads * features, 1))

    @property
    def row_stride(self) -> int:
        """From one position of the sequence to the next, in elements."""
        return self.strides[2]

    def with_rows(self, rows: int) -> "Layout":
        """Of that many positions of the sequence."""
        batch, heads, _, features = self.sizes
        return self._replace(sizes=(batch, heads, rows, features))


class CudnnGraphs:
    """Of one device. cudnn: the front end's module."""

    def __init__(self, cudnn: Any, device: torch.device) -> None:
        self.device = device
        self._cudnn = cudnn
        self._handles: dict[int, Any] = {}
        self._graphs: dict[tuple, CudnnGraph] = {}

    def forward(
        self, layouts: tuple[Layout, ...], dtype: torch.dtype, mask: Mask, scale: float, stats_rows: int | None = None
    ) -> CudnnGraph:
        """The graph of `build_forward`, kept."""
        key = ("forward", layouts, dtype, mask, scale, stats_rows)
        return self._find(key, lambda: self.build_forward(layouts, dtype, mask, scale, stats_rows))

    def backward(
        self,
        layouts: tuple[Layout, ...],
        dtype: torch.dtype,
        mask: Mask,
        scale: float,
        gradients: tuple[Layout, ...] | None = None,
    ) -> CudnnGraph:
        """The graph of `build_backward`, kept."""
        key = ("backward", layouts, dtype, mask, scale, torch.are_deterministic_algorithms_enabled(), gradients)
        return self._find(key, lambda: self.build_backward(layouts, dtype, mask, scale, gradients))

    def _find(self, key: tuple, build: Callable[[], CudnnGraph]) -> CudnnGraph:
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.clear()
            graph = self._graphs[key] = build()
        return graph

    def build_forward(
        self,
        layouts: Sequence[Layout],
        dtype: torch.dtype,
        mask: Mask,
        scale: float,
        stats_rows: int | None = None,
    ) -> CudnnGraph:
        """Runs on q, k, v, out, stats. layouts: of all but stats, which is an fp32 [B, H, S_q, 1], contiguous, or
        rows of a contiguous one with `stats_rows` of them.

        Raises what the front end does, where it refuses.
        """
        graph = self._new_graph(dtype)
        q, k, v, out = layouts
        bound = {
            name: self._tensor(graph, uid, layout) for name, uid, layout in (("q", _Q, q), ("k", _K, k), ("v", _V, v))
        }
        result, stats = graph.sdpa(**bound, generate_stats=True, attn_scale=scale, **_MASKS[mask])
        result.set_uid(_OUT).set_output(True).set_dim(list(out.sizes)).set_stride(list(out.strides))
        result.set_data_type(self._io_type(dtype))
        sizes = [*out.sizes[:3], 1]
        whole = sizes if stats_rows is None else [*sizes[:2], stats_rows, 1]
        stats.set_uid(_STATS).set_output(True).set_dim(sizes).set_stride(_dense(whole))
        stats.set_data_type(self._cudnn.data_type.FLOAT)
        return self._finish(graph, _OF_FORWARD)

    def build_backward(
        self,
        layouts: Sequence[Layout],
        dtype: torch.dtype,
        mask: Mask,
        scale: float,
        gradients: Sequence[Layout] | None = None,
    ) -> CudnnGraph:
        """Runs on q, k, v, out, stats, grad_out and the gradients of q, k, v, which are contiguous [S, B, H, D].

        layouts: of q, k, v, out, grad_out. gradients: of those, where they are not contiguous. Deterministic if PyTorch
        is told to be now. Raises as `build_forward` does.
        """
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
        results = graph.sdpa_backward(
            **bound,
            stats=stats,
            attn_scale=scale,
            use_deterministic_algorithm=torch.are_deterministic_algorithms_enabled(),
            **_MASKS[mask],
        )
        stored_as = gradients or [Layout.contiguous(layout.sizes) for layout in (q, k, v)]
        for gradient, uid, stored in zip(results, (_GRAD_Q, _GRAD_K, _GRAD_V), stored_as, strict=True):
            gradient.set_uid(uid).set_output(True).set_dim(list(stored.sizes)).set_stride(list(stored.strides))
            gradient.set_data_type(self._io_type(dtype))
        return self._finish(graph, _OF_BACKWARD)

    def execute(self, graph: CudnnGraph, addresses: Sequence[int]) -> None:
        """Launch on the current stream."""
        # From the allocator of that stream: the next call there may have the same memory.
        workspace = torch.empty(max(1, graph.workspace_bytes), dtype=torch.uint8, device=self.device)
        graph.run(addresses, workspace.data_ptr(), self._handle())

    def bind(self, graph: CudnnGraph) -> BoundAttention:
        """The launch of a graph on any stream."""
        handle_of = self.handle_of

        def run(stream: int, workspace_at: int, *addresses: int) -> None:
            graph.run(addresses, workspace_at, handle_of(stream))

        return BoundAttention(run, graph.workspace_bytes)

    def handle_of(self, stream: int) -> Any:
        """The handle of a stream, for `CudnnGraph.run`."""
        handle = self._handles.get(stream)
        if handle is None:
            with torch.cuda.device(self.device):
                handle = self._handles[stream] = self._cudnn.create_handle()
            self._cudnn.set_stream(handle=handle, stream=stream)
        return handle

    def _handle(self) -> Any:
        """The handle of the current stream."""
        return self.handle_of(raw_stream(self.device.index))

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
    def _tensor(graph: Any, uid: int, layout: Layout) -> Any:
        return graph.tensor(name=f"tensor_{uid}", dim=list(layout.sizes), stride=list(layout.strides), uid=uid)

    def _finish(self, graph: Any, uids: Sequence[int]) -> CudnnGraph:
        modes = self._cudnn.heur_mode
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return CudnnGraph(graph, uids)


def _dense(sizes: Sequence[int]) -> list[int]:
    batch_stride = sizes[1] * sizes[2] * sizes[3]
    return [batch_stride, sizes[2] * sizes[3], sizes[3], 1]
