"""Calls of a test in a CUDA graph: of one rank, or as programs do it, rehearsed on a side stream by all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["CapturedStep", "capture"]

_REHEARSALS = 3


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What has been called once before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


class CapturedStep:
    """`results` are the tensors that `step` returned while it was captured: every replay fills them.

    options: of `torch.cuda.graph`. Delete it before the context that the step uses is closed.
    """

    def __init__(self, step: Callable[[], Sequence[torch.Tensor]], **options: Any) -> None:
        self._step = step
        self._side = torch.cuda.Stream()
        for _ in range(_REHEARSALS):
            self.run()
        torch.cuda.current_stream().wait_stream(self._side)
        torch.cuda.synchronize()
        dist.barrier()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, **options):
            self.results = step()

    def replay(self) -> None:
        """Fill `results` anew, in the current stream's order."""
        self._graph.replay()

    def run(self) -> Sequence[torch.Tensor]:
        """What the step returns outside of the graph. After what is on the current stream: a context sees no replay."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            return self._step()
