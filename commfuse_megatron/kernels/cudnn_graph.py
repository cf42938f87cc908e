"""Runs a built graph of cuDNN's Python front end on addresses, with as little host time as the front end allows.

Its public `execute` looks at every operand anew, in Python, at every call. Where its C++ part can be handed the sorted
addresses right away, that is done instead; where a version has no such entry, `execute` is called with integers.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["CudnnGraph", "StreamScratch"]

logger = logging.getLogger(__name__)


class CudnnGraph:
    """A graph whose operands have the numbers `uids`, ascending."""

    def __init__(self, graph: Any, uids: Sequence[int]) -> None:
        self.workspace_bytes: int = graph.get_workspace_size()
        self._graph = graph
        self._uids = tuple(uids)
        self._pack = (ctypes.c_void_p * len(self._uids))()
        self._pack_at = ctypes.addressof(self._pack)
        self._run_raw = _find_raw(graph, self._uids)

    def run(self, addresses: Sequence[int], workspace_at: int, handle: Any) -> None:
        """Launch on the stream of `handle`; addresses in the order of `uids`."""
        if self._run_raw is None:
            self._graph.execute(dict(zip(self._uids, addresses, strict=True)), workspace_at, handle=handle)
            return
        self._pack[:] = list(addresses)
        self._run_raw(self._pack_at, workspace_at, handle)


class StreamScratch:
    """Scratch memory of a device, for launches on a stream, which run one after the other: each may use it from its
    start. Those on another stream have other memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[int, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def address(self, stream: int, size_bytes: int) -> int:
        """Address of at least that many bytes, for the stream with this handle."""
        held = self._held.get(stream)
        if held is None or held.nbytes < size_bytes:
            if held is not None:  # launches that use it may be waiting on the stream, and graphs have its address
                self._outgrown.append(held)
            held = self._held[stream] = torch.empty(max(1, size_bytes), dtype=torch.uint8, device=self._device)
        return held.data_ptr()


def _find_raw(graph: Any, uids: tuple[int, ...]) -> Callable[[int, int, Any], None] | None:
    try:
        if graph.selected_engine is not None or tuple(graph._variant_pack_uids()) != uids:
            return None
        launch = graph._lowered_graph._execute_with_raw_ptrs
        plan = graph._materialize_backend_plan(graph._plan_index).cpp_index if graph._plans else None
    except (AttributeError, TypeError) as error:  # the front end's inner names, which differ between its versions
        logger.info("cuDNN's front end takes no addresses right away (%s): more host time per call", error)
        return None
    index, count = -1 if plan is None else plan, len(uids)
    return lambda pack_at, workspace_at, handle: launch(pack_at, count, workspace_at, handle.backend_handle, index)
