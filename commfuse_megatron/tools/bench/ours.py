"""Our operations as variants: every path that can be forced, and the planned one.

Beware: a forced path that fell back raises, and never becomes a row.
"""

from dataclasses import dataclass, replace
from typing import override

import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import PassConfig
from commfuse_megatron.errors import VerificationError
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.tools.bench.operands import Work, our_result
from commfuse_megatron.tools.bench.variant import Ready, WithContext, backends_of, differentiable
from commfuse_megatron.tools.common.cases import PLANNED
from commfuse_megatron.tools.common.options import choices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """One configuration of ours, as far as the benchmark varies it.

    chunks_per_shard: of attention, the splits of a shard's queries.
    """

    path: str
    backend: str = "auto"
    algorithm: str = "direct"
    chunks_per_shard: int = 1
    is_attention: bool = False

    @property
    def name(self) -> str:
        """As in the rows."""
        if self.path == "auto":
            return PLANNED
        ring = " ring" if self.algorithm == "ring" else ""
        chunks = f" m={self.chunks_per_shard}" if self.path in ("sliced", "query_split") else ""
        backend = "" if self.path in ("async", "sequential") else f" {self.backend}"
        return f"{self.path}{ring}{chunks}{backend}"

    def config(self, *, record: bool = False) -> OverlapConfig:
        """The configuration that forces this path (or leaves it all to the planner)."""
        settings: dict[str, object] = {"transport": {"backend": self.backend}, "record": record}
        sliced = {"path": "sliced", "algorithm": self.algorithm, "chunks_per_shard": self.chunks_per_shard}
        if self.is_attention:
            attention: dict[str, object] = {"path": self.path}
            if self.path == "query_split":
                attention |= {"splits_per_shard": self.chunks_per_shard, "backward": self.path}
            if self.path == "row_parallel":  # its projection
                settings["linear"] = {"fprop": sliced, "dgrad": sliced}
            return OverlapConfig.from_dict(settings | {"attention": attention})
        forced = sliced if self.path == "sliced" else {"path": self.path}
        # What covers the transfers of a backward pass only has no fprop; that is then the planner's.
        fprop = {"path": "sequential"} if self.path in _BACKWARD_PATHS else forced
        return OverlapConfig.from_dict(settings | {"linear": {"fprop": fprop, "dgrad": forced}})


_BACKWARD_PATHS = ("bulk", "async")
# No paths of ours to be forced: what the planner is for, and what `Sequential` measures.
_NOT_FORCED = ("auto", "sequential")


def forced_paths(device: torch.device, group_size: int, chunks: tuple[int, ...]) -> list[PathOptions]:
    """Every path that a configuration can force, over every transport of the device."""
    found = []
    for path in (path for path in choices_of(PassConfig, "path") if path not in _NOT_FORCED):
        for backend in ("auto",) if path == "async" else backends_of(device):
            options = PathOptions(path=path, backend=backend)
            found += [replace(options, chunks_per_shard=m) for m in chunks] if path == "sliced" else [options]
            if path == "sliced" and group_size > 2:  # in a group of two, ring and direct send the same
                found.append(replace(options, algorithm="ring", chunks_per_shard=2))
    return found


def attention_paths(device: torch.device, splits: tuple[int, ...]) -> list[PathOptions]:
    """The same of attention. splits: of one shard's queries, for query_split."""
    found = [PathOptions(path="sequential", is_attention=True)]
    for path in ("row_parallel", "query_split"):
        for backend in backends_of(device):
            counts = splits if path == "query_split" else (1,)
            found += [PathOptions(path=path, backend=backend, chunks_per_shard=m, is_attention=True) for m in counts]
    return found


class Ours(WithContext):
    """One of our operations under one configuration.

    config: what to run instead of what `options` says, under another name: a user's file.
    """

    def __init__(self, options: PathOptions, config: OverlapConfig | None = None, name: str | None = None) -> None:
        # What is left to the planner may take any link, and so may what names none.
        super().__init__(
            options.config() if config is None else config, "nccl" if options.backend == "auto" else options.backend
        )
        self.options = options
        self.name = options.name if name is None else name
        self.is_basic = self.name == PLANNED or config is not None or options.is_attention
        if options.path in _BACKWARD_PATHS:
            self.passes = ("backward",)
        self._is_free = config is not None or options.path == "auto"

    @override
    def serves(self, op: str, pass_name: str) -> bool:
        # A row's backward has no GEMM that its collective could run beside.
        return super().serves(op, pass_name) and (self.options.path != "async" or op == "all_gather_linear")

    @override
    def build(self, work: Work) -> Ready:
        context = self.context_for(work)
        ready = differentiable(work, lambda: our_result(work.case, work.operands, context))
        ready.transport = context.transport_name
        return ready

    @override
    def check_path(self, work: Work, ready: Ready) -> None:
        record = self._find_record(work, work.case.op)
        what = f"{work.case.name} {work.pass_name} M={work.case.M}, {self.name}"
        if record is None:
            raise VerificationError(f"{what}: the report does not list this call")
        if not self._is_free and record.path != self.options.path:
            raise VerificationError(f"{what}: fell back to {record.path}: {record.reason}")
        ready.path, ready.reason, ready.transport = record.path, record.reason, record.transport
        if record.attention:
            ready.reason += f"; kernel {record.attention}"
        if record.path in ("sliced", "query_split"):
            ready.algorithm, ready.chunks_per_shard = record.algorithm, record.chunks_per_shard
        if record.path == "row_parallel":
            ready.transport = (self._find_record(work, "linear_reduce_scatter") or record).transport

    def gemm_name(self, work: Work) -> str | None:
        """The GEMM that computes the slices; None before the first call."""
        record = self._find_record(work, work.case.op)
        return None if record is None else record.gemm

    def _find_record(self, work: Work, op: str) -> OpRecord | None:
        """Cases of as many tokens differ in their batch, which records do not say: the newest is this one's."""
        case = work.case
        wanted = (op, work.pass_name, case.M, case.N, case.K)
        for record in reversed([] if self._context is None else self._context.report()):
            if (record.op, record.pass_name, record.M, record.N, record.K) == wanted and record.calls:
                return record
        return None
