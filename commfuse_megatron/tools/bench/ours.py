"""Our operations as variants: every path that can be forced, and the planned one.

One context per configuration, made when it is first needed and kept for all cases. The contract that bites: a forced
path that fell back raises, and never becomes a row.
"""

import typing
from dataclasses import dataclass, replace
from typing import override

import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import PassConfig
from commfuse_megatron.errors import VerificationError
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.variant import Ready, Variant, differentiable, require_own_link

PLANNED = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One configuration of ours, as far as the benchmark varies it."""

    path: str
    backend: str = "auto"
    algorithm: str = "direct"
    chunks_per_shard: int = 1

    @property
    def name(self) -> str:
        """As in the rows."""
        if self.path == "auto":
            return PLANNED
        ring = " ring" if self.algorithm == "ring" else ""
        chunks = f" m={self.chunks_per_shard}" if self.path == "sliced" else ""
        backend = "" if self.path in ("async", "sequential") else f" {self.backend}"
        return f"{self.path}{ring}{chunks}{backend}"

    def config(self, *, record: bool = False) -> OverlapConfig:
        """The configuration that forces this way (or leaves it all to the planner)."""
        forced: dict[str, object] = {"path": self.path}
        if self.path == "sliced":
            forced |= {"algorithm": self.algorithm, "chunks_per_shard": self.chunks_per_shard}
        # What covers the transfers of a backward pass only has no fprop; that is then the planner's.
        fprop = {"path": "sequential"} if self.path in _BACKWARD_PATHS else forced
        return OverlapConfig.from_dict(
            {
                "linear": {"fprop": fprop, "dgrad": forced},
                "transport": {"backend": self.backend},
                "record": record,
            }
        )


_BACKWARD_PATHS = ("bulk", "async")
# Not a way of ours to be forced: what the planner is for, and what `Sequential` measures.
_NO_WAYS = ("auto", "sequential")


def planned() -> "Ours":
    """What the planner chooses."""
    return Ours(Way(path="auto"))


def forced_ways(device: torch.device, group_size: int, chunks: tuple[int, ...]) -> list[Way]:
    """Every path that a configuration can force, over every transport of the device."""
    backends = ("nccl", "copy_engine") if device.type == "cuda" else ("gloo",)
    paths = typing.get_args(typing.get_type_hints(PassConfig)["path"])
    ways = []
    for path in (path for path in paths if path not in _NO_WAYS):
        for backend in ("auto",) if path == "async" else backends:
            way = Way(path=path, backend=backend)
            ways += [replace(way, chunks_per_shard=m) for m in chunks] if path == "sliced" else [way]
            if path == "sliced" and group_size > 2:  # in a group of two, ring and direct send the same
                ways.append(replace(way, algorithm="ring", chunks_per_shard=2))
    return ways


class Ours(Variant):
    """One of our operations under one configuration.

    config: what to run instead of what `way` says, under another name: a user's file.
    """

    def __init__(self, way: Way, config: OverlapConfig | None = None, name: str | None = None) -> None:
        self.way = way
        self.name = way.name if name is None else name
        self.is_basic = self.name == PLANNED or config is not None
        if way.path in _BACKWARD_PATHS:
            self.passes = ("backward",)
        self._config = way.config() if config is None else config
        self._is_free = config is not None or way.path == "auto"
        self._context: OverlapContext | None = None

    @override
    def serves(self, op: str, pass_name: str) -> bool:
        # A row's backward has no GEMM that its collective could run beside.
        return super().serves(op, pass_name) and (self.way.path != "async" or op == "all_gather_linear")

    @override
    def build(self, work: Work) -> Ready:
        if self._context is None:
            if self.way.backend == "copy_engine":
                require_own_link(work.pool.device, "copy_engine")
            self._context = OverlapContext(work.group, self._config)
        context, operands = self._context, work.operands
        operation = getattr(ops, work.case.op)
        ready = differentiable(work, lambda: operation(operands.x, operands.weight, context=context))
        ready.transport = context.transport_name
        return ready

    @override
    def check_path(self, work: Work, ready: Ready) -> None:
        assert self._context is not None
        record = find_record(self._context, work)
        if record is None:
            raise VerificationError(
                f"{work.case.name} {work.pass_name}, {self.name}: the report does not list this call"
            )
        if not self._is_free and record.path != self.way.path:
            raise VerificationError(
                f"{work.case.name} {work.pass_name} M={work.case.M}, {self.name}: fell back to {record.path}: "
                f"{record.reason}"
            )
        ready.path, ready.reason = record.path, record.reason
        ready.transport = record.transport
        if record.path == "sliced":
            ready.algorithm, ready.chunks_per_shard = record.algorithm, record.chunks_per_shard

    def gemm_name(self, work: Work) -> str | None:
        """The GEMM that computes this way's slices; None before the first call."""
        record = None if self._context is None else find_record(self._context, work)
        return None if record is None else record.gemm

    @override
    def close(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None


def find_record(context: OverlapContext, work: Work) -> OpRecord | None:
    """The report's line for the pass of `work`."""
    case = work.case
    wanted = (case.op, work.pass_name, case.M, case.N, case.K)
    for record in context.report():
        if (record.op, record.pass_name, record.M, record.N, record.K) == wanted and record.calls:
            return record
    return None
