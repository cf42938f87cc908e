"""A call as a CUDA graph: what the GPU does of it, without the host time of its Python."""

from collections.abc import Callable

import torch

_WARM_UPS = 3


def as_graph[T](call: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """`call` captured, to be replayed on the same memory: its results are overwritten by every replay.

    On the CPU `call` itself. Collective where `call` is.
    """
    if device.type != "cuda":
        return call
    current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            call()
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):  # libraries keep a handle for each stream, made at its first call
        result = call()

    def replay() -> T:
        graph.replay()
        return result

    return replay
