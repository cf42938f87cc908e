"""Our operations as variants: every path that can be forced, and the planned one.

Beware: a forced path that fell back raises, and never becomes a row.
"""

from dataclasses import dataclass, replace
from typing import Any, override

import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import PassConfig
from commfuse_megatron.errors import VerificationError
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.tools.bench.operands import Work, our_result
from commfuse_megatron.tools.bench.ulysses import with_projections
from commfuse_megatron.tools.bench.variant import Ready, WithContext, backends_of, differentiable
from commfuse_megatron.tools.common.cases import PLANNED
from commfuse_megatron.tools.common.options import choices_of

_BACKWARD_PATHS = ("bulk", "async")
_WITH_PROJECTIONS = "with_projections"  # overlapped, as `ops.ulysses_block`
_IN_CHUNKS = ("sliced", "query_split", "overlapped", _WITH_PROJECTIONS)
# Of linears, no paths of ours to be forced: what the planner is for, and what `sequential` measures.
_NOT_FORCED = ("auto", "sequential")
_PATHS = {
    "linears": tuple(path for path in choices_of(PassConfig, "path") if path not in _NOT_FORCED),
    "all-reduce": ("sliced", "async"),
    "attention": ("sequential", "row_parallel", "query_split"),
    "ulysses": ("sequential", "overlapped", _WITH_PROJECTIONS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOptions:
    """One configuration of ours, as far as the benchmark varies it.

    kind: what is timed, as in `Settings`. chunks_per_shard: of attention, the splits of a shard's queries; of a split
    sequence, the groups of heads.
    """

    path: str
    backend: str = "auto"
    algorithm: str = "direct"
    chunks_per_shard: int = 1
    kind: str = "linears"

    @property
    def name(self) -> str:
        """As in the rows."""
        if self.path == "auto":
            return PLANNED
        ring = " ring" if self.algorithm == "ring" else ""
        chunks = f" m={self.chunks_per_shard}" if self.path in _IN_CHUNKS else ""
        backend = "" if self.path in ("async", "sequential") else f" {self.backend}"
        return f"{self.path}{ring}{chunks}{backend}"

    def config(self, *, record: bool = False) -> OverlapConfig:
        """The configuration that forces this path (or leaves it all to the planner)."""
        settings: dict[str, Any] = {"transport": {"backend": self.backend}, "record": record}
        forced: dict[str, Any] = {"path": self.path}
        sliced = {"path": "sliced", "algorithm": self.algorithm, "chunks_per_shard": self.chunks_per_shard}
        if self.path == "sliced":
            forced = sliced
        elif self.path == "query_split":
            forced |= {"splits_per_shard": self.chunks_per_shard, "backward": self.path}
        elif self.path in ("overlapped", _WITH_PROJECTIONS):
            forced = {"path": "overlapped", "head_groups": self.chunks_per_shard}
        elif self.path == "row_parallel":  # its projection
            settings["linear"] = {"fprop": sliced, "dgrad": sliced}
        if self.kind in ("linears", "all-reduce"):
            # What covers the transfers of a backward pass only has no fprop; that is then the planner's.
            fprop = {"path": "sequential"} if self.path in _BACKWARD_PATHS else forced
            settings["linear"] = {"fprop": fprop, "dgrad": forced}
        else:
            settings[self.kind] = forced
        return OverlapConfig.from_dict(settings)


def forced_paths(kind: str, device: torch.device, group_size: int, chunks: tuple[int, ...]) -> list[PathOptions]:
    """Every path that a configuration can force, over every transport of the device."""
    found = []
    for path in _PATHS[kind]:
        if path == "grouped" and group_size < 3:  # the same as "sliced"
            continue
        for backend in ("auto",) if path in ("async", "sequential") else backends_of(device):
            options = PathOptions(path=path, backend=backend, kind=kind)
            found += [replace(options, chunks_per_shard=m) for m in (chunks if path in _IN_CHUNKS else (1,))]
            if (
                path == "sliced" and group_size > 2 and kind == "linears"
            ):  # in a group of two, ring and direct send the same
                found.append(replace(options, algorithm="ring", chunks_per_shard=2))
    return found


class Ours(WithContext):
    """One of our operations under one configuration.

    config: what to run instead of what `options` says, under another name: a user's file.
    """

    def __init__(self, options: PathOptions, config: OverlapConfig | None = None, name: str | None = None) -> None:
        # What is left to the planner may take any link, and so may what names none.
        backend = "nccl" if options.backend == "auto" else options.backend
        super().__init__(config or options.config(), backend)
        self.options = options
        self.name = name or options.name
        self.is_basic = self.name == PLANNED or config is not None or options.kind != "linears"
        if options.path in _BACKWARD_PATHS:
            self.passes = ("backward",)

    @override
    def serves(self, op: str, pass_name: str) -> bool:
        # A row's backward has no GEMM that its collective could run beside.
        has_async = op in ("all_gather_linear", "linear_grad_all_reduce")
        return super().serves(op, pass_name) and (self.options.path != "async" or has_async)

    @override
    def build(self, work: Work) -> Ready:
        context = self.context_for(work)
        if self.options.path == _WITH_PROJECTIONS:
            ready = with_projections(work, context)
        else:
            ready = differentiable(work, lambda: our_result(work.case, work.operands, context))
        ready.transport = context.transport_name
        return ready

    @override
    def check_path(self, work: Work, ready: Ready) -> None:
        record = self._find_record(work, work.case.op)
        what = f"{work.case.name} {work.pass_name} M={work.case.M}, {self.name}"
        if record is None:
            raise VerificationError(f"{what}: the report does not list this call")
        expected = "overlapped" if self.options.path == _WITH_PROJECTIONS else self.options.path
        if expected not in ("auto", record.path):
            raise VerificationError(f"{what}: fell back to {record.path}: {record.reason}")
        ready.path, ready.reason, ready.transport = record.path, record.reason, record.transport
        ready.gemm = record.gemm
        if record.attention:
            ready.reason += f"; kernel {record.attention}"
        if record.path in _IN_CHUNKS:
            ready.algorithm, ready.chunks_per_shard = record.algorithm, record.chunks_per_shard
        if record.path == "row_parallel":
            ready.transport = (self._find_record(work, "linear_reduce_scatter") or record).transport

    def _find_record(self, work: Work, op: str) -> OpRecord | None:
        """Cases of as many tokens differ in their batch, which records do not say: the newest is this one's."""
        case = work.case
        wanted = (op, work.pass_name, case.M, case.N, case.K)
        for record in reversed([] if self._context is None else self._context.report()):
            if (record.op, record.pass_name, record.M, record.N, record.K) == wanted and record.calls:
                return record
        return None
