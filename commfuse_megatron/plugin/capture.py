"""What may be captured in a CUDA graph: calls whose problems have run before, forward and backward.

A problem that is new costs what a capture forbids: a plan that the ranks measure and agree on, buffers that peers map,
communicators. Megatron runs each layer before it captures it, and captures the backward pass when nothing can be
decided any more; so both passes are judged when the forward pass is captured. The answer is the same on every rank,
since ranks make the same calls.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import FunctionCtx

from commfuse_megatron import OverlapContext
from commfuse_megatron.problem import Problem

NO_CONTEXT = (
    "a CUDA graph is being captured and no layer of this group has been overlapped before: run it once outside first"
)

#: One operation, forward and backward in one graph, is captured and replayed right. Of Megatron's graphs, one forward
#: and one backward for each layer, the first was not captured within 40 s.
OVER_NCCL = (
    "a CUDA graph is being captured and messages go over NCCL: capturing Megatron's layers then did not come to an end"
    " on 2 x H200; over the copy engine it does"
)

#: Splits draw from seeds of their own, on the host.
REPEATED_DROPOUT = "attention dropout under CUDA graphs: every replay would drop what the capture dropped"


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether what is done with `tensor` now goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def reason_not_to_capture(context: OverlapContext | None, problems: Sequence[Problem]) -> str | None:
    """Why a call that states `problems` takes Megatron's own path while a graph is captured; None if it need not."""
    if context is None:
        return NO_CONTEXT
    if context.transport_name == "nccl":
        return OVER_NCCL
    missing = next((problem for problem in problems if not context.has_run(problem)), None)
    if missing is None:
        return None
    return f"a CUDA graph is being captured and has not run before: {missing}; run it once outside first"


def announce_saved(tensor: torch.Tensor) -> None:
    """Say that the backward pass will read `tensor`, which torch's kernels save unseen.

    Where Transformer Engine is installed, Megatron's local CUDA graphs give the memory of a layer's input to the next
    capture, unless they see `save_for_backward` keep it: the backward graph would then read what others wrote there.
    They watch the method of Python's autograd functions; called on nobody's behalf it does nothing else.
    """
    if not torch.compiler.is_compiling():
        FunctionCtx().save_for_backward(tensor)
