"""One problem on one context: its plan, its programs and its count of calls. Made once, replayed at every call."""

import functools
from typing import TYPE_CHECKING, Any

import torch

from commfuse_megatron.kernels.attention import AttentionKernel
from commfuse_megatron.kernels.blas import blas_unavailable_reason
from commfuse_megatron.plan.linear_plan import LinearPlan
from commfuse_megatron.problem import Problem, shard_range
from commfuse_megatron.runtime.binding import BoundSchedule, bind
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.runtime.program import GatherProgram, ScatterProgram
from commfuse_megatron.schedule import Algorithm, Collective

if TYPE_CHECKING:
    from commfuse_megatron.runtime.context import OverlapContext

__all__ = ["PreparedPass"]


class PreparedPass:
    """What one pass of one operation works with.

    `with prepared as link:` surrounds one use of the context's buffers. Leaving that block through an exception marks
    the context failed: the peers have been sent part of an operation.
    """

    def __init__(self, context: "OverlapContext", problem: Problem, plan: LinearPlan, gemm: SliceGemm) -> None:
        self.context = context
        self.problem = problem
        self.plan = plan
        self.gemm = gemm
        self.calls = 0
        self.is_agreed = False
        #: What computes attention, for a problem that has some: `ops` sets it.
        self.attention: AttentionKernel | None = None
        #: Why no kernel that would be rather taken.
        self.attention_reason = ""
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        #: Bound operations by layouts of the operands: `ops.replay` fills and reads it.
        self.tapes: dict[Any, Any] = {}
        #: What an operation works out once for this pass.
        self.memo: dict[Any, Any] = {}
        self._gather: GatherProgram | None = None
        self._scatter: ScatterProgram | None = None

    @property
    def wire_features(self) -> int:
        """Features of the rows that travel: those of x for an all-gather linear, of y for a reduce-scatter linear."""
        return self.problem.K if self.problem.op == "all_gather_linear" else self.problem.N

    @functools.cached_property
    def own_rows(self) -> int:
        """Positions of the sequence that this rank keeps."""
        return shard_range(self.problem.rows, self.context.group_size, self.context.group_rank).size

    @property
    def gather(self) -> GatherProgram:
        """The all-gather of this problem's rows."""
        if self._gather is None:
            bound = self._bind(Collective.ALL_GATHER)
            self._gather = GatherProgram(self.context.slots, bound, self.wire_features, self._dtype)
        return self._gather

    @property
    def scatter(self) -> ScatterProgram:
        """The reduce-scatter of this problem's rows."""
        if self._scatter is None:
            bound = self._bind(Collective.REDUCE_SCATTER)
            self._scatter = ScatterProgram(
                self.context.slots,
                bound,
                self.wire_features,
                self._dtype,
                self.gemm.own_dtype,
                folds_arrivals=self._folds_arrivals,
            )
        return self._scatter

    @property
    def is_bulk(self) -> bool:
        """Whether the pass runs as few GEMMs as possible."""
        return self.plan.path == "bulk"

    @property
    def has_cover(self) -> bool:
        """Whether an own GEMM may come after the arrival of what is added to it.

        With one chunk per shard that would leave the last transfer uncovered, unless something else is computed in
        between; and where transfers are slower than GEMMs, waiting for them with GEMMs still to do costs more than a
        pass over the output at the end.
        """
        is_fast = self.context.link.transport.is_one_sided
        return is_fast and (self.is_bulk or self.plan.chunks_per_shard > 1)

    @functools.cached_property
    def can_replay(self) -> bool:
        """Whether calls of this problem may be bound lists of driver and cuBLASLt calls: see `ops.replay`."""
        context, plan = self.context, self.plan
        return (
            context.link.transport.is_one_sided
            and plan.path in ("sliced", "bulk", "query_split")
            and plan.algorithm is Algorithm.DIRECT
            and context.link.recorder is None
            and context.config.kernel.gemm == "auto"
            and min(self.problem.rows, self.problem.batch, self.problem.N, self.problem.K) > 0
            and blas_unavailable_reason(context.device, self._dtype) is None
        )

    @property
    def _folds_arrivals(self) -> bool:
        return self.gemm.can_fold and self.plan.algorithm is Algorithm.DIRECT and self.has_cover

    def forget_programs(self) -> None:
        """Free the programs; the next call makes them anew."""
        self._gather = self._scatter = None
        self.tapes.clear()

    def begin(self) -> None:
        """Agree with the other ranks where due, and count the call; before anything is sent, and under a guard.

        Raises ShapeError on all ranks when they bring different problems, and what made the context fail, if it did.
        """
        self.context.agree_on(self)
        self.context.latest_pass = self
        self.calls += 1

    def __enter__(self) -> Link:
        return self.context.enter(self.problem)

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.context.link.note_interruption(self.problem, error)
            return
        try:
            self.context.leave()
        except BaseException as raised:  # flags are set that the next call would take for its own
            self.context.link.note_interruption(self.problem, raised)
            raise

    def _bind(self, collective: Collective) -> BoundSchedule:
        context, plan, problem = self.context, self.plan, self.problem
        sizes = (
            collective,
            plan.algorithm,
            context.group_size,
            context.group_rank,
            plan.chunks_per_shard,
            problem.rows,
            problem.batch,
        )
        order = plan.scatter_order if collective is Collective.REDUCE_SCATTER else plan.gather_order
        return bind(*sizes) if order is None else bind(*sizes, order=order)
