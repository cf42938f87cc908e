"""What the benchmark asks of everything that it times, whoever wrote it.

A variant is one way to run a pass. It keeps what outlives a case (contexts, buffers) and builds, for one piece of work,
something `Ready` to be checked and timed. Beware: building and calling are collective, so whatever makes a variant
impossible must do so on all ranks alike, or before anything is sent.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import override

import torch

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.operands import Work

Results = dict[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Ready:
    """One pass, ready to be called.

    results: runs it once and returns what it computes, to be compared; None where there is nothing to compare.
    before_burst: see `Timed`. path .. reason: for the row. is_op: whether it does all that the pass is for, so that its
    host time means something; lower bounds do not.
    """

    call: Callable[[], object]
    results: Callable[[], Results] | None = None
    before_burst: Callable[[int], None] | None = None
    path: str = "sequential"
    transport: str = "nccl"
    algorithm: str = ""
    chunks_per_shard: int | None = None
    reason: str = ""
    is_op: bool = True


class Variant(ABC):
    """One way to run a pass, named as in the rows.

    is_foreign: written by others; a failure of any kind leaves out this variant and nothing else.
    is_basic: run at every size, not only where all variants are.
    """

    name: str
    passes: tuple[str, ...] = ("fprop", "backward")
    is_foreign = False
    is_basic = False

    def serves(self, op: str, pass_name: str) -> bool:
        """Whether it runs this pass of this operation."""
        return pass_name in self.passes

    @abstractmethod
    def build(self, work: Work) -> Ready:
        """Make it ready for `work`. Raises UnsupportedError or ConfigError with the reason where it cannot run."""

    def check_path(self, work: Work, ready: Ready) -> None:  # noqa: B027  # most variants have but one path
        """After the first call: note the path taken in `ready`; VerificationError if it is not what was asked."""

    def close(self) -> None:  # noqa: B027  # most variants keep nothing
        """Free what was kept between cases."""


class WithContext(Variant):
    """What needs a context of ours under one configuration, made when it is first needed and kept for all cases.

    backend: who must carry its messages, over the link that the rows will name.
    """

    _context: OverlapContext | None = None

    def __init__(self, config: OverlapConfig, backend: str) -> None:
        self._config, self._backend = config, backend

    def context_for(self, work: Work) -> OverlapContext:
        """Collective the first time."""
        if self._context is None:
            require_own_link(work.pool.device, self._backend)
            self._context = OverlapContext(work.group, self._config)
        return self._context

    @override
    def close(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None


def differentiable(work: Work, forward: Callable[[], torch.Tensor]) -> Ready:
    """`forward` in a fprop pass, its backward pass (dgrad and wgrad) in a backward pass."""
    leaves, grad_y = work.operands.leaves, work.operands.grad_y
    if work.pass_name == "fprop":

        def call() -> torch.Tensor:
            with torch.no_grad():
                return forward()

        return Ready(call=call, results=lambda: {"y": call()})
    y = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, list(leaves.values()), grad_y, retain_graph=True)

    names = [f"{name}.grad" for name in leaves]
    return Ready(call=backward, results=lambda: dict(zip(names, backward(), strict=True)))


def backends_of(device: torch.device) -> tuple[str, ...]:
    """The transports of ours that carry its tensors."""
    return ("nccl", "copy_engine") if device.type == "cuda" else ("gloo",)


def collective_name(device: torch.device) -> str:
    """Who carries the group's own collectives."""
    return backends_of(device)[0]


def link_name(device: torch.device) -> str:
    """ "nvlink", "host" (NCCL told to go through host memory) or "gloo"."""
    if device.type != "cuda":
        return "gloo"
    return "host" if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0") else "nvlink"


def require_own_link(device: torch.device, backend: str) -> None:
    """Raise UnsupportedError where `backend` would not use the link that the rows will name."""
    if backend != "nccl" and link_name(device) == "host":
        raise UnsupportedError(
            f"NCCL_P2P_DISABLE=1 asks for the link through host memory, which {backend} does not use"
        )
