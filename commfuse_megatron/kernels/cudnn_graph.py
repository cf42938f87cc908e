"""Runs a built graph of cuDNN's Python front end on addresses, with as little host time as the front end allows.

Its public `execute` looks at every operand anew, in Python, at every call. Where its C++ part can be handed the sorted
addresses right away, that is done instead; where a version has no such entry, `execute` is called with integers.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any

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
