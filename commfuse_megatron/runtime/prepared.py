"""One problem on one context: its plan, its programs and its count of calls. Made once, replayed at every call."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from commfuse_megatron.kernels.attention import AttentionKernel
from commfuse_megatron.kernels.blas import blas_unavailable_reason
from commfuse_megatron.plan.linear_plan import LinearPlan
from commfuse_megatron.problem import Problem, shard_range
from commfuse_megatron.runtime.buffers import PassBuffers
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.runtime.tape_program import TapeKernel, Tapes
from commfuse_megatron.runtime.tensor_program import Kernel, TensorProgram
from commfuse_megatron.schedule import Algorithm, Collective
from commfuse_megatron.schedule.binding import BoundSchedule, bind
from commfuse_megatron.schedule.lower_linear import lower_transfers
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Program
from commfuse_megatron.transport.copy_tape import BoundOperation

if TYPE_CHECKING:
    from commfuse_megatron.runtime.context import OverlapContext

__all__ = ["Lower", "PreparedPass"]

# Lanes for the GEMMs of a forward pass, of up to so many FLOP each. 2 x H200, two lanes against none, M 8192, over the
# larger of GEMM and transfer: 8B qkv 1.051 (1.072), proj 1.260 (1.330), 70B proj 1.063 (1.076), fc1 1.038 (1.016).
# Backward passes gained nothing, and pay for it in host time.
_NUM_LANES = 2
_MOST_FLOP = 4e11

_ANY_NUMBER = 1 << 30

#: Makes the program of a pass, for what a call asks of it.
Lower = Callable[["PreparedPass", Policy, Any], Program]


class PreparedPass:
    """What one pass of one operation works with.

    `with prepared as link:` surrounds one use of the context's buffers. Leaving that block through an exception marks
    the context failed: the peers have been sent part of an operation.
    """

    def __init__(self, context: "OverlapContext", problem: Problem, plan: LinearPlan, gemm: SliceGemm) -> None:
        self.context = context
        self.group_rank: int = context.group_rank
        self.problem = problem
        self.plan = plan
        self.gemm = gemm
        self.calls = 0
        #: How many calls were run on tensors, from a tape, or as a graph.
        self.modes = {"stepped": 0, "tape": 0, "graph": 0}
        self.is_agreed = False
        #: What computes attention, for a problem that has some: `ops` sets it.
        self.attention: AttentionKernel | None = None
        #: Why no kernel that would be rather taken.
        self.attention_reason = ""
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        #: What an operation works out once for this pass.
        self.memo: dict[Any, Any] = {}
        self._buffers = PassBuffers(context.slots, self.wire_features, self.dtype, gemm.own_dtype)
        self._tapes = Tapes(self._lower_for_tape, self._buffers, context.lanes)
        self._programs: dict[Hashable, TensorProgram] = {}

    def run(
        self,
        link: Link,
        lower: Lower,
        asked: Hashable,
        tensors: Mapping[str, torch.Tensor],
        *,
        kernels: Mapping[str, Kernel] | None = None,
        tape_kernels: Mapping[str, TapeKernel] | None = None,
        layout: Hashable = None,
    ) -> None:
        """Run the program that `lower` makes for what is asked, inside the with-block: from a tape where there is one.

        tensors: operands by name, in an order that follows from `asked`; see `TensorProgram.run`. kernels,
        tape_kernels: by the kind of `Compute`, of the one way and of the other. layout: what else a tape depends on.
        """
        if not self.run_from_tape(link, lower, asked, tensors, kernels=tape_kernels, layout=layout):
            self.run_on_tensors(link, lower, asked, tensors, kernels=kernels)

    def lower(self, lower: Lower, policy: Policy, asked: Any) -> Program:
        """The program of this rank."""
        return lower(self, policy, asked)

    def run_on_tensors(
        self,
        link: Link,
        lower: Lower,
        asked: Hashable,
        tensors: Mapping[str, torch.Tensor],
        *,
        kernels: Mapping[str, Kernel] | None = None,
    ) -> None:
        """The same, not from a tape."""
        key = (lower, asked)
        program = self._programs.get(key)
        if program is None or program.generation != self._buffers.generation:
            lowered = self.lower(lower, self._tensor_policy, asked)
            lanes = self.context.lanes
            program = TensorProgram(lowered, self._buffers, link, self.gemm, lanes, frozenset(tensors))
            self._programs[key] = program
        program.run(tensors, kernels or {})
        self.modes["stepped"] += 1

    def run_transfers(self, link: Link, shard: torch.Tensor, label: str) -> None:
        """The messages of the all-gather of `shard` [own rows, features] alone: what arrives is left in the buffer."""
        self.run_on_tensors(link, _lower_transfers, label, {"shard": shard})

    def run_from_tape(
        self,
        link: Link,
        lower: Lower,
        asked: Hashable,
        tensors: Mapping[str, torch.Tensor],
        *,
        kernels: Mapping[str, TapeKernel] | None = None,
        layout: Hashable = None,
    ) -> bool:
        """The same if it is for a tape; False, and nothing done, otherwise."""
        if not self.can_replay:
            return False
        mode = self._tapes.run(lower, asked, link, tensors, kernels, layout)
        if mode is None:
            return False
        self.modes[mode] += 1
        return True

    @property
    def wire_features(self) -> int:
        """Features of the rows that travel: those of x for an all-gather linear, of y for a reduce-scatter linear."""
        return self.problem.K if self.problem.op == "all_gather_linear" else self.problem.N

    @functools.cached_property
    def own_rows(self) -> int:
        """Positions of the sequence that this rank keeps."""
        return shard_range(self.problem.rows, self.problem.group_size, self.group_rank).size

    @functools.cached_property
    def gather(self) -> BoundSchedule:
        """The all-gather of this problem's rows."""
        return self._bind(Collective.ALL_GATHER)

    @functools.cached_property
    def scatter(self) -> BoundSchedule:
        """The reduce-scatter of this problem's rows."""
        return self._bind(Collective.REDUCE_SCATTER)

    @property
    def is_bulk(self) -> bool:
        """Whether the pass runs as few GEMMs as possible."""
        return self.plan.path == "bulk"

    @functools.cached_property
    def _tensor_policy(self) -> Policy:
        return Policy(
            has_windows=self.context.link.transport.is_one_sided,
            most_adds=_ANY_NUMBER if self.gemm.can_fold else 0,
            keeps_own_apart=self.gemm.own_dtype != self.dtype,
        )

    @functools.cached_property
    def _tape_policy(self) -> Policy:
        problem = self.problem
        rows = -(-problem.rows // (problem.group_size * self.plan.chunks_per_shard)) * problem.batch
        is_small = 2.0 * rows * problem.N * problem.K <= _MOST_FLOP
        lanes = _NUM_LANES if problem.pass_name == "fprop" and is_small and self.context.lanes.handles() else 0
        return Policy(has_windows=True, most_adds=1, adds_bias_too=True, lanes=lanes, is_tape=True)

    @functools.cached_property
    def can_replay(self) -> bool:
        """Whether calls of this problem may be lists of driver and cuBLASLt calls: see `tape_program`."""
        context, plan = self.context, self.plan
        return (
            context.link.transport.is_one_sided
            and plan.path in ("sliced", "bulk", "query_split")
            and plan.algorithm is Algorithm.DIRECT
            and context.link.recorder is None
            and context.config.kernel.gemm == "auto"
            and min(self.problem.rows, self.problem.batch, self.problem.N, self.problem.K) > 0
            and blas_unavailable_reason(context.device, self.dtype) is None
        )

    @property
    def tapes(self) -> list[BoundOperation | None]:
        """The tapes made so far; None for layouts that none serves."""
        return self._tapes.operations

    @property
    def gemm_names(self) -> str:
        """What multiplied; before any call, what will on tensors."""
        names = [self.gemm.name] if self.modes["stepped"] or not any(self.modes.values()) else []
        return ", ".join([*names, *(["cuBLASLt"] if self.modes["tape"] or self.modes["graph"] else [])])

    @property
    def has_programs(self) -> bool:
        """Whether anything is kept for the next call to replay."""
        return bool(self._programs or self._tapes.operations)

    def _lower_for_tape(self, lower: Lower, asked: Hashable) -> Program:
        return self.lower(lower, self._tape_policy, asked)

    def forget_programs(self) -> None:
        """Free the programs; the next call makes them anew."""
        self._programs.clear()
        self._tapes.forget()

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
        plan, problem = self.plan, self.problem
        sizes = (
            collective,
            plan.algorithm,
            problem.group_size,
            self.group_rank,
            plan.chunks_per_shard,
            problem.rows,
            problem.batch,
        )
        order = plan.scatter_order if collective is Collective.REDUCE_SCATTER else plan.gather_order
        return bind(*sizes) if order is None else bind(*sizes, order=order)


def _lower_transfers(p: PreparedPass, policy: Policy, label: str) -> Program:
    return lower_transfers(p.gather, policy, label)
