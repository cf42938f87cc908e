"""A problem on a context: its plan, its programs and its count of calls, made once and replayed at every call.

And what the passes of a context share. Knows nothing of how a context is made, closed or renewed, nor what users see.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import distributed as dist

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels.attention import AttentionKernel
from commfuse_megatron.plan.choose import TrialTimes
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.plan.passes import bind_plan, lower_pass, tape_policy, tensor_policy
from commfuse_megatron.plan.ulysses import num_ulysses_lanes
from commfuse_megatron.problem import AttentionProblem, GemmProblem, Problem, UlyssesProblem, shard_range
from commfuse_megatron.runtime import hardware
from commfuse_megatron.runtime.buffers import PassBuffers
from commfuse_megatron.runtime.consensus import Consensus, Guard
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.lanes import choose_num_lanes
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.runtime.marks import without_marks
from commfuse_megatron.runtime.parts import CallInParts, Parts, PartsOnTensors
from commfuse_megatron.runtime.slots import Slots
from commfuse_megatron.runtime.stored_plans import StoredPlans
from commfuse_megatron.runtime.tape_program import TapeKernel, Tapes
from commfuse_megatron.runtime.tensor_program import Kernel, Means, TensorProgram
from commfuse_megatron.runtime.tensor_tape import TensorTape
from commfuse_megatron.schedule import Algorithm, Collective
from commfuse_megatron.schedule.binding import BoundSchedule
from commfuse_megatron.schedule.lower_linear import Asked, lower_transfers
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Program
from commfuse_megatron.transport.copy_steps import BoundOperation
from commfuse_megatron.transport.select import NcclSettings

# Scales that vary from call to call must not fill the memory; layers may have one each.
_MOST_WORKED_OUT = 64

_MOST_AGREED = 1024

# The guard of a group of one.
_ALONE = nullcontext()

#: By name, those of one call.
CallNumbers = tuple[tuple[str, float], ...]

#: Times some plans of one problem, collectively; or says why there are no times.
TryOut = Callable[[Sequence[PassPlan]], TrialTimes | str]


class PreparedPass:
    """What one pass of one operation works with.

    `with prepared:` surrounds one use of the context's buffers. Leaving that block through an exception marks
    the context failed: the peers have been sent part of an operation.
    """

    def __init__(self, context: "PassContext", problem: Problem, plan: PassPlan, gemm: SliceGemm) -> None:
        self.context = context
        self.group_rank: int = context.group_rank
        self.problem = problem
        self.plan = plan
        self.gemm = gemm
        self.calls = 0
        #: How many calls were run on tensors, from a tape, or as a graph.
        self.modes = {"stepped": 0, "tape": 0, "graph": 0}
        #: What differs between calls of this problem and was agreed on, call by call: see `begin`.
        self.agreed: set[CallNumbers] = set()
        #: What computes attention, for a problem that has some: `ops` sets it.
        self.attention: AttentionKernel | None = None
        #: Why no kernel that would be rather taken.
        self.attention_reason = ""
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self._worked_out: dict[Hashable, Any] = {}
        buffers = PassBuffers(context.slots, self.wire_features, self.dtype, gemm.own_dtype)
        self._means = Means(buffers, context.link, gemm, context.lanes, context.hardware)
        self._tapes = Tapes(lambda asked: self.lower(tape_policy(problem, plan), asked), self._means)
        self._programs: dict[Hashable, TensorProgram | TensorTape] = {}

    def run(
        self, asked: Asked, tensors: Mapping[str, torch.Tensor], *, kernels: Mapping[str, Kernel] | None = None
    ) -> None:
        """Run the program for what is asked, inside the with-block: from a tape where there is one.

        tensors: operands by name, in an order that follows from `asked`; see `TensorProgram.run`. kernels: by the kind
        of `Compute`; a program with such ops is run on tensors.
        """
        if not self.run_from_tape(asked, tensors):
            self.run_on_tensors(asked, tensors, kernels=kernels)

    def lower(self, policy: Policy, asked: Asked | str) -> Program:
        """The program of this rank; for a label, that of the all-gather's messages alone, which are called so."""
        if isinstance(asked, str):
            return lower_transfers(self.gather, policy, asked)
        if isinstance(self.problem, AttentionProblem):
            policy = dataclasses.replace(policy, lanes=self.num_attention_lanes)
        elif isinstance(self.problem, UlyssesProblem):
            lanes = num_ulysses_lanes(self.problem)
            policy = dataclasses.replace(policy, lanes=lanes if self.context.lanes.handles(lanes) else 0)
        return lower_pass(self.problem, self.plan, policy, asked, self.group_rank)

    def run_on_tensors(
        self, asked: Asked | str, tensors: Mapping[str, torch.Tensor], *, kernels: Mapping[str, Kernel] | None = None
    ) -> None:
        """The same, not from a tape."""
        self._program_on_tensors(asked, tensors).run(tensors, kernels or {})
        self.modes["stepped"] += 1

    def begin_in_parts(
        self,
        asked: Asked,
        tensors: Mapping[str, torch.Tensor],
        *,
        kernels: Mapping[str, Kernel],
        tape_kernels: Mapping[str, TapeKernel] | None,
        layout: Hashable,
    ) -> CallInParts:
        """A call whose parts the caller runs, in place of the with-block: from a tape where there is one, else on
        tensors. For programs with pauses.

        tape_kernels, layout: see `run_from_tape`; None: not from a tape.
        """

        def make() -> Parts:
            if tape_kernels is not None and self.can_replay:
                on_tape = self._tapes.in_parts(asked, tensors, tape_kernels, layout)
                if on_tape is not None:
                    return on_tape
            return PartsOnTensors(self._program_on_tensors(asked, tensors), tensors, kernels)

        call = self.context.under_way = CallInParts(self, make)
        self.modes[call.mode] += 1
        return call

    def _program_on_tensors(
        self, asked: Asked | str, tensors: Mapping[str, torch.Tensor]
    ) -> TensorProgram | TensorTape:
        program = self._programs.get(asked)
        if program is None or program.generation != self._means.buffers.generation:
            lowered = self.lower(self._tensor_policy, asked)
            # Who sends nothing has nothing on a tape.
            is_on_tape = self.context.link.transport.is_one_sided and lowered.schedules
            program = (TensorTape if is_on_tape else TensorProgram)(lowered, self._means, tensors)
            self._programs[asked] = program
        return program

    def run_transfers(self, shard: torch.Tensor, label: str) -> None:
        """The messages of the all-gather of `shard` [own rows, features] alone: what arrives is left in the buffer."""
        self.run_on_tensors(label, {"shard": shard})

    def run_from_tape(
        self,
        asked: Asked,
        tensors: Mapping[str, torch.Tensor],
        *,
        kernels: Mapping[str, TapeKernel] | None = None,
        layout: Hashable = None,
    ) -> bool:
        """The same if it is for a tape; False, and nothing done, otherwise.

        kernels: those of a tape. layout: what else it depends on.
        """
        if not self.can_replay:
            return False
        mode = self._tapes.run(asked, tensors, kernels, layout)
        if mode is None:
            return False
        self.modes[mode] += 1
        return True

    @property
    def wire_features(self) -> int:
        """Features of the rows that travel."""
        if isinstance(self.problem, UlyssesProblem):
            return self.problem.unit
        return self.problem.wire_features if isinstance(self.problem, GemmProblem) else self.problem.N

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

    @functools.cached_property
    def num_attention_lanes(self) -> int:
        """How many splits of an attention are to run at a time; 0 where there are no lanes."""
        problem, context = self.problem, self.context
        assert isinstance(problem, AttentionProblem)
        queries = -(-problem.rows // problem.group_size)
        largest = -(-queries // self.plan.chunks_per_shard)
        found = choose_num_lanes(largest, problem.batch * problem.heads, context.device)
        return found if context.lanes.handles(found) else 0

    @property
    def is_bulk(self) -> bool:
        """Whether the pass runs as few GEMMs as possible."""
        return self.plan.path == "bulk"

    @functools.cached_property
    def _tensor_policy(self) -> Policy:
        return tensor_policy(
            has_windows=self.context.link.transport.is_one_sided,
            adds_in_epilogue=self.gemm.adds_in_epilogue,
            keeps_own_apart=self.gemm.own_dtype != self.dtype,
        )

    @functools.cached_property
    def can_replay(self) -> bool:
        """Whether calls of this problem may be lists of driver and cuBLASLt calls: see `tape_program`."""
        context, plan = self.context, self.plan
        return (
            context.link.transport.is_one_sided
            and plan.path in ("sliced", "grouped", "bulk", "query_split", "overlapped")
            and plan.algorithm is Algorithm.DIRECT
            and context.config.kernel.gemm == "auto"
            and min(self.problem.rows, self.problem.batch, self.problem.N, self.problem.K) > 0
            and context.hardware.tapes_unavailable_reason(context.device, self.dtype) is None
        )

    @property
    def tapes(self) -> list[BoundOperation | None]:
        """The tapes made so far; None for layouts that none serves."""
        return self._tapes.operations

    @property
    def gemm_names(self) -> str:
        """What multiplied; before any call, what will on tensors."""
        if isinstance(self.problem, UlyssesProblem):
            return "none"
        names = [self.gemm.name] if self.modes["stepped"] or not any(self.modes.values()) else []
        return ", ".join([*names, *(["cuBLASLt"] if self.modes["tape"] or self.modes["graph"] else [])])

    def remember[T](self, key: Hashable, work_out: Callable[[], T]) -> T:
        """What `work_out` gives, of each key once; of keys that vary from call to call the last ones are kept."""
        found: T | None = self._worked_out.get(key)
        if found is None:
            if len(self._worked_out) >= _MOST_WORKED_OUT:
                self._worked_out.clear()
            found = self._worked_out[key] = work_out()
        return found

    def forget_programs(self) -> None:
        """Free the programs; the next call makes them anew."""
        self._programs.clear()
        self._tapes.forget()

    def begin(self, numbers: CallNumbers = ()) -> None:
        """Agree with the other ranks where due, and count the call; before anything is sent, and under a guard.

        numbers: by name, those that calls of one problem need not share, but the ranks in one call must.

        Raises ShapeError on all ranks when they bring different problems, and what made the context fail, if it did.
        """
        self.context.agree_on(self, numbers)
        self.context.latest_pass = self
        self.calls += 1

    def __enter__(self) -> None:
        self.context.enter(self.problem)

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
        return bind_plan(self.problem, self.plan, collective, self.group_rank)


class _Plans(Protocol):
    """What chooses plans: the planner. default_reason: why costs do not count here; None where they do."""

    default_reason: str | None

    def plan(self, problem: Problem, try_out: TryOut | None = None) -> PassPlan: ...


class PassContext:
    """What the passes of one context share, and where operations get them.

    planner: chooses the plans of new problems. stored_plans: None without `plan.file`.
    """

    planner: _Plans
    stored_plans: StoredPlans | None

    def __init__(
        self,
        config: OverlapConfig,
        group: dist.ProcessGroup,
        device: torch.device,
        nccl: NcclSettings,
        link: Link,
        consensus: Consensus,
    ) -> None:
        self.config, self.group, self.device, self.nccl = config, group, device, nccl
        self.hardware = hardware.current
        self._driver = self.hardware.driver
        self.group_size: int = group.size()
        self.group_rank: int = group.rank()
        self.link, self.consensus = link, consensus
        self.slots = Slots(device, link.transport.window)
        #: Side streams for work that may run beside other work of the same operation.
        self.lanes = self.hardware.lanes(device)
        self.attention_kernels = self.hardware.attention_kernels(device)
        self._prepared: dict[Problem, PreparedPass] = {}
        #: Of the call that began last.
        self.latest_pass: PreparedPass | None = None
        #: The call in parts that began last.
        self.under_way: CallInParts | None = None
        #: Calls whose arguments were seen before, by everything a check looks at: `ops.arguments` fills and reads it.
        self.known_calls: dict[Hashable, PreparedPass] = {}
        self._gemms: dict[tuple[torch.dtype, bool], SliceGemm] = {}
        self._last_stream = 0

    @property
    def transport_name(self) -> str:
        """ "gloo", "nccl" or "copy_engine"."""
        return self.link.transport.name

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self.consensus.is_capturing()

    def prepare(self, problem: Problem, try_out: TryOut | None = None) -> PreparedPass:
        """The plan and programs of `problem`; the same object at every call.

        try_out: times plans of this problem, where the planner wants it. What it raises, raises here.
        """
        prepared = self._prepared.get(problem)
        if prepared is None:
            prepared = self.make_pass(problem, self.planner.plan(problem, try_out))
            self._prepared[problem] = prepared
        return prepared

    def prepare_like(self, problem: Problem, plan: PassPlan, reason: str) -> PreparedPass:
        """The pass of `problem` under a plan that was made for another one."""
        prepared = self._prepared.get(problem)
        if prepared is None:
            plan = dataclasses.replace(plan, reason=reason, predicted_us=None, measured_us=None)
            prepared = self._prepared[problem] = self.make_pass(problem, plan)
        return prepared

    def make_pass(self, problem: Problem, plan: PassPlan) -> PreparedPass:
        """What `plan` works with; neither kept nor reported."""
        dtype = getattr(torch, problem.dtype)
        # Beside or between the group's own collectives, a GEMM takes what is fastest alone; where nothing is sent, too.
        is_sliced = plan.is_scheduled and problem.sends
        gemm = self.slice_gemm(dtype) if is_sliced else self._gemm(dtype, is_beside_transfers=False)
        return PreparedPass(self, problem, plan, gemm)

    def known_plan(self, problem: Problem) -> PassPlan | None:
        """What `prepare` would neither measure nor ask other ranks for; None if it would."""
        prepared = self._prepared.get(problem)
        return None if prepared is None else prepared.plan

    def has_run(self, problem: Problem) -> bool:
        """Whether a call of `problem` was made outside of CUDA graphs: planned, agreed on, its buffers large enough.

        A graph may then capture further calls: they need nothing of the host and of other ranks. Equal on all ranks,
        which make the same calls.
        """
        prepared = self._prepared.get(problem)
        return prepared is not None and bool(prepared.agreed) and prepared.calls > 0

    def slice_gemm(self, dtype: torch.dtype) -> SliceGemm:
        """The GEMM that runs beside this context's transfers."""
        return self._gemm(dtype, is_beside_transfers=True)

    def memory_for_gathered(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """`memory` as the operand in which a program leaves gathered rows to its caller, by its name: where peers can
        write into windows only, a copy of those; else where they arrive."""
        return {"kept" if self.link.transport.is_one_sided else "gathered": memory}

    def forget_programs(self) -> None:
        """Free what calls replay; it is made anew where it is needed again. What was agreed and counted stays."""
        self.known_calls.clear()
        for prepared in self._prepared.values():
            prepared.forget_programs()

    def agree_on(self, prepared: PreparedPass, numbers: CallNumbers) -> None:
        """Compare a problem with the other ranks', if it, or its numbers, are new or every call is to be compared."""
        self.link.require_usable()
        self._require_alone()
        is_known = numbers in prepared.agreed
        if (self.consensus.compares_every_call or not is_known) and self.group_size > 1:
            if self.is_capturing:  # what is captured now is agreed on at the first call outside
                return
            plan = prepared.plan
            of_call = "".join(f", {name} {number!r}" for name, number in numbers)
            how = f"{plan.path} {plan.algorithm} {plan.chunks_per_shard} {plan.details}".rstrip()
            statement = f"{prepared.problem}, {how}{of_call}"
            self.consensus.agree(statement, topic=prepared.problem.call)
        if not is_known:
            if len(prepared.agreed) >= _MOST_AGREED:  # on all ranks at the same call
                prepared.agreed.clear()
            prepared.agreed.add(numbers)

    def guard(self, what: object) -> AbstractContextManager[None]:
        """For a with-block around what all ranks do; left by an exception, this rank would be out of step.

        what: in words, or what gives them.
        """
        return Guard(self.link, what) if self.group_size > 1 else _ALONE

    def saved_tensors(self, ctx: Any, what: str) -> tuple[Any, ...]:
        """Those of `ctx`, for a backward pass. A program's hooks may raise here, and memory run out, on one rank only.

        Where every call is compared, ranks find that out at the next one; else this rank's context fails.
        """
        if self.consensus.compares_every_call:
            return _unmarked(ctx.saved_tensors)
        with self.guard(what):
            return _unmarked(ctx.saved_tensors)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record nothing inside the with-block."""
        recorder, self.link.recorder = self.link.recorder, None
        try:
            yield
        finally:
            self.link.recorder = recorder

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Record and count nothing inside the with-block: what runs there is no call of the user's. It leaves no
        buffers but windows, which shrink with the context only."""
        counted = {prepared: prepared.modes.copy() for prepared in self._prepared.values()}
        with self.unrecorded():
            yield
        self.slots.drop_local()
        for prepared in self._prepared.values():
            prepared.modes = counted.get(prepared) or dict.fromkeys(prepared.modes, 0)

    def enter(self, problem: Problem) -> None:
        """Start one operation's use of the buffers, ordered after the one before, whatever stream that ran on."""
        self._require_alone()
        link = self.link
        if link.last_done is not None:
            link.is_capturing, stream = self._driver.is_capturing(), self._driver.current_stream(self.device)
            if link.is_capturing:
                self.slots.note_capture()
            elif stream != self._last_stream:
                link.last_done.wait(stream)
                self._last_stream = stream
        if link.recorder is not None:
            link.recorder.begin_call(problem)

    def _require_alone(self) -> None:
        if self.under_way is not None:
            self.under_way.refuse_another()

    def leave(self) -> None:
        """End what `enter` began."""
        link = self.link
        if link.recorder is not None:
            link.recorder.end_call()
        done = link.release()
        if done is not None:
            link.last_done = done
        elif link.last_done is not None and not link.is_capturing:
            link.last_done.record(self._driver.current_stream(self.device))

    def _gemm(self, dtype: torch.dtype, *, is_beside_transfers: bool) -> SliceGemm:
        key = (dtype, is_beside_transfers)
        if key not in self._gemms:
            try:
                self._gemms[key] = SliceGemm(
                    self.config.kernel,
                    self.transport_name if is_beside_transfers else "none",
                    self.nccl.channels * self.nccl.communicators,
                    self.device,
                    dtype,
                    regains_sms=self.nccl.regains_sms,
                )
            except UnsupportedError as error:  # alike on all ranks, before anything is sent
                raise self.link.mark_raised_on_all_ranks(error) from None
        return self._gemms[key]


def _unmarked(saved: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    return tuple([each if each is None else without_marks(each) for each in saved])
