"""What the benchmark asks of everything that it times, whoever wrote it.

A variant is one way to run a pass. It keeps what outlives a case (contexts, buffers) and builds, for one piece of work,
something `Ready` to be checked and timed. Beware: building and calling are collective, so whatever makes a variant
impossible must do so on all ranks alike, or before anything is sent.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, override

import torch

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.operands import Results, Work
from commfuse_megatron.tools.common.cases import PASSES


@dataclass(slots=True, kw_only=True)
class Ready:
    """One pass, ready to be called.

    read: finds in what a call returned what is compared; None where nothing is, as of lower bounds. before_burst: see
    `Timed`. path .. tail_ms: for the row, as far as they are known. gemm: what computes the slices.
    """

    call: Callable[[], Any]
    read: Callable[[Any], Results] | None = None
    before_burst: Callable[[int], None] | None = None
    path: str = "sequential"
    transport: str = "nccl"
    algorithm: str = ""
    chunks_per_shard: int | None = None
    reason: str = ""
    max_error: float | None = None
    host_us: float | None = None
    tail_ms: float | None = None
    gemm: str = ""

    def results(self) -> Results:
        """Run it once. What it computes, by name."""
        if self.before_burst is not None:
            self.before_burst(1)
        found = self.call()
        return {} if self.read is None else self.read(found)


class Variant(ABC):
    """One way to run a pass, named as in the rows.

    is_foreign: written by others; a failure of any kind leaves out this variant and nothing else.
    is_basic: run at every size, not only where all variants are.
    """

    name: str
    passes: tuple[str, ...] = PASSES
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


@dataclass(eq=False)
class Plain(Variant):
    """What keeps nothing between cases. make_call: what is timed, for one piece of work.

    path: "compute" or "slices", which send nothing; else the group's collectives do. is_compared: what a call returns
    are results; of a lower bound they are not. chunks_per_shard: of what is cut, which is not run at every size.
    """

    name: str
    path: str
    make_call: Callable[[Work], Callable[[], Any]]
    _: KW_ONLY
    passes: tuple[str, ...] = PASSES
    is_compared: bool = False
    chunks_per_shard: int | None = None

    def __post_init__(self) -> None:
        self.is_basic = self.chunks_per_shard is None

    @override
    def build(self, work: Work) -> Ready:
        return Ready(
            call=self.make_call(work),
            read=work.named if self.is_compared else None,
            path=self.path,
            transport="none" if self.path in ("compute", "slices") else collective_name(work.pool.device),
            chunks_per_shard=self.chunks_per_shard,
        )


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


def in_turn(*calls: Callable[[], object]) -> Callable[[], None]:
    """All of them, one after the other."""

    def call() -> None:
        for each in calls:
            each()

    return call


def differentiable(
    work: Work,
    forward: Callable[[], torch.Tensor],
    leaves: dict[str, torch.Tensor] | None = None,
    *,
    keeps_tensors: bool = True,
) -> Ready:
    """`forward` in a fprop pass, its backward pass (dgrad and wgrad) in a backward pass.

    leaves: what gets gradients, by the names of the case's operands; these by default. keeps_tensors: False for what
    frees its saved tensors: a forward pass for each backward pass then runs before the clock does.
    """
    if work.pass_name == "fprop":
        return Ready(call=torch.no_grad()(forward), read=work.named)
    inputs, grad_y = list((leaves or work.operands.leaves).values()), work.operands.grad_y
    ahead = [forward()] if keeps_tensors else []

    def run_ahead(calls: int) -> None:
        ahead[:] = [forward() for _ in range(calls)]

    def backward() -> tuple[torch.Tensor, ...]:
        y = ahead[0] if keeps_tensors else ahead.pop()
        return torch.autograd.grad(y, inputs, grad_y, retain_graph=keeps_tensors)

    return Ready(call=backward, read=work.named, before_burst=None if keeps_tensors else run_ahead)


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
