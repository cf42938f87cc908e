"""`Planner`: chooses a context's plans, asking the cost model and, where that cannot tell, a trial.

Everything that makes it collective is here. Ranks must take the same turns, so it asks the other ranks whether they
plan the same problem before it measures anything, and measures nothing while a CUDA graph is captured.
"""

import dataclasses
import functools
import logging
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from commfuse_megatron.config import OverlapConfig, PlanConfig
from commfuse_megatron.plan.candidates import Candidates, buffer_needs, list_candidates, merge_needs, settings_of
from commfuse_megatron.plan.choose import (
    choose_by_default,
    choose_measured,
    choose_only,
    choose_predicted,
    predict,
    select_for_trial,
)
from commfuse_megatron.plan.cost_model import choose_details, is_link_slow
from commfuse_megatron.plan.machine import MachineModel, Traits, assumed_machine
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import GemmProblem, Problem, UlyssesProblem
from commfuse_megatron.runtime.calibrate import calibrate
from commfuse_megatron.runtime.prepared import PassContext, TryOut
from commfuse_megatron.runtime.stopwatch import Stopwatch
from commfuse_megatron.version import __version__

logger = logging.getLogger(__name__)

# Sequence lengths that change at every call must not be planned one by one: numbers of tokens within this factor share
# a decision, and when a layer has had so many trials, the model decides.
_SAME_LENGTH = 1.125
_MOST_TRIALS_OF_A_LAYER = 8


class Planner:
    """Plans of one context, in the order in which problems are met; equal on all ranks."""

    def __init__(self, context: PassContext) -> None:
        # The context owns this.
        self._context: PassContext = weakref.proxy(context)
        #: Why costs do not count here; None where they do.
        self.default_reason = _default_reason(context)
        #: By dtype; measured when first needed, and kept.
        self.machines: dict[str, MachineModel] = {}
        self._buffers: dict[str, int] = {}
        #: Of every layer's pass, what was decided by cost for how many tokens.
        self._decided: dict[Hashable, list[tuple[int, PassPlan]]] = {}

    def plan(self, problem: Problem, try_out: TryOut | None = None) -> PassPlan:
        """The plan for a new problem. Collective where something is measured.

        Raises ShapeError on all ranks that meet different problems there, and what made the context fail.
        """
        config = self._context.config
        keeps = config.linear.wgrad.keep_gathered_input
        if problem.group_size == 1:
            return PassPlan("local", "the group has one rank: nothing to send", keep_gathered_input=keeps)
        if not problem.sends:
            return PassPlan("local", "this pass has nothing to send", keep_gathered_input=keeps)
        if problem.rows == 0:
            return PassPlan("sequential", "the sequence has no rows", keep_gathered_input=keeps)
        choose = functools.partial(self._choose, problem, try_out)
        stored = self._context.stored_plans
        if stored is None or self._context.is_capturing:
            plan = choose()
        else:
            possible = list_candidates(problem, config, held=self._buffers, is_link_slow=True).plans
            conditions = self._conditions(problem, stored.num_hosts)
            plan = stored.plan(self._context.consensus, conditions, problem, possible, choose)
        # By cost; while capturing, without measuring: no example for other lengths.
        if plan.predicted_us is not None and not self._context.is_capturing:
            self._decided.setdefault(_layer(problem), []).append((problem.M, plan))
        self._buffers = merge_needs(self._buffers, buffer_needs(problem, plan))
        return plan

    def _choose(self, problem: Problem, try_out: TryOut | None) -> PassPlan:
        config = self._context.config
        candidates = list_candidates(problem, config, held=self._buffers)
        if len(candidates.plans) == 1:
            return choose_only(self._with_details(problem, candidates))
        if self.default_reason is not None or not problem.M * problem.N * problem.K:
            reason = self.default_reason or "the problem has a size of zero"
            return choose_by_default(
                candidates, "forced by the configuration" if _is_forced(problem, config) else reason
            )
        if not isinstance(problem, GemmProblem) and not (_is_forced(problem, config) or self._may_measure):
            return choose_by_default(candidates, "default for attention where nothing is measured")
        return self._reuse(problem) or self._choose_by_cost(problem, try_out)

    def _with_details(self, problem: Problem, candidates: Candidates) -> Candidates:
        """The only candidate, with what costs decide of it where they count: nothing is measured for that."""
        if not isinstance(problem, GemmProblem) or self.default_reason is not None:
            return candidates
        machine = self.machines.get(problem.dtype)
        if machine is None:
            machine = assumed_machine(self._traits(getattr(torch, problem.dtype)), problem.dtype)
        plans = [choose_details(problem, plan, machine) for plan in candidates.plans]
        plans = [dataclasses.replace(plan, predicted_us=None) for plan in plans]  # of no other plan to compare with
        return dataclasses.replace(candidates, plans=tuple(plans))

    def _reuse(self, problem: Problem) -> PassPlan | None:
        """What was decided for about as many tokens, if it can be done for this many."""
        candidates = list_candidates(problem, self._context.config, held=self._buffers, is_link_slow=True)
        names = {plan.name for plan in candidates.plans}
        for tokens, plan in self._decided.get(_layer(problem), ()):
            is_near = max(tokens, problem.M) <= _SAME_LENGTH * min(tokens, problem.M)
            if is_near and plan.name in names:
                reason = f"as for M={tokens}, {plan.reason}"
                return dataclasses.replace(plan, reason=reason, predicted_us=None, measured_us=None)
        return None

    def _choose_by_cost(self, problem: Problem, try_out: TryOut | None) -> PassPlan:
        config = self._context.config
        may_measure = self._may_measure
        machine = self._machine(problem, may_measure=may_measure)
        slow = isinstance(problem, GemmProblem) and is_link_slow(problem, machine)
        # Rings are not replayed, but issued step by step, and each step waits for what the one before received. 4 H200:
        # with two chunks they lost to direct schedules in 48 of 48 passes, with one in 2 of 4 (6 % faster at best).
        rings = not machine.traits.replays
        candidates = list_candidates(problem, config, held=self._buffers, is_link_slow=slow, with_rings=rings)
        candidates = predict(problem, candidates, machine)
        num_trials = sum(plan.measured_us is not None for _, plan in self._decided.get(_layer(problem), ()))
        may_try = may_measure and num_trials < _MOST_TRIALS_OF_A_LAYER
        timed = select_for_trial(candidates, _trial_config(problem, config)) if may_try else ()
        if timed and try_out is not None:
            return self._measure(problem, candidates, timed, try_out, machine)
        if not isinstance(problem, GemmProblem) and not _is_forced(problem, config):
            return choose_by_default(candidates, "default for attention after many trials of other lengths")
        return choose_predicted(candidates, machine)

    @property
    def _may_measure(self) -> bool:
        return self._context.config.plan.measure != "never" and not self._context.is_capturing

    def _measure(
        self,
        problem: Problem,
        candidates: Candidates,
        timed: Sequence[PassPlan],
        try_out: TryOut,
        machine: MachineModel,
    ) -> PassPlan:
        context, held = self._context, self._buffers
        statement = f"timing {', '.join(plan.name for plan in timed)} for {problem}"
        context.consensus.agree(statement, topic=problem.call)
        for plan in timed:
            self._buffers = merge_needs(self._buffers, buffer_needs(problem, plan))
        found = try_out(timed)
        if isinstance(found, str):
            chosen = choose_predicted(candidates, machine, f"not measured: {found}")
        else:
            chosen = choose_measured(problem, timed, found, candidates.note)
        if chosen.path == "stock" and not context.slots.is_captured:  # what is large, and nobody else's as a rule
            context.slots.release()
            self._buffers = held
        if context.group_rank == 0:
            logger.info("%s: %s", problem, chosen.reason)
        return chosen

    def _machine(self, problem: Problem, *, may_measure: bool) -> MachineModel:
        """What this context can do. Measured once, if allowed; only what was measured is kept."""
        machine = self.machines.get(problem.dtype)
        if machine is not None:
            return machine
        context, dtype = self._context, getattr(torch, problem.dtype)
        traits = self._traits(dtype)
        if not may_measure:
            return assumed_machine(traits, problem.dtype)
        context.consensus.agree(f"measuring the machine for {problem}", topic=problem.call)
        timings = calibrate(context, dtype, Stopwatch(context.device))
        if isinstance(timings, str):
            logger.warning("the machine was not measured: %s", timings)
            machine = assumed_machine(traits, problem.dtype)
        else:
            machine = timings.machine(traits, dtype.itemsize)
            held = {"gather": context.group_size * timings.message_bytes[1]}
            self._buffers = merge_needs(self._buffers, held)
        self.machines[problem.dtype] = machine
        if context.group_rank == 0:
            logger.info("machine, %s: %s", problem.dtype, machine)
        return machine

    def _conditions(self, problem: Problem, num_hosts: int) -> dict[str, Any]:
        """All that a choice depends on but the problem."""
        config, device = self._context.config, self._context.device
        traits = self._traits(getattr(torch, problem.dtype))
        found: dict[str, Any] = {"device": "cpu", "hosts": num_hosts, **dataclasses.asdict(traits)}
        # Where costs do not count, as with several ranks on one GPU, that is why.
        found |= {"default": self.default_reason, "commfuse_megatron": __version__, "torch": torch.__version__}
        if device.type == "cuda":
            found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
            found |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        parts: tuple[Any, ...] = (settings_of(problem, config), config.linear.wgrad)
        if not isinstance(problem, GemmProblem):
            parts = (config.attention, settings_of(problem, config))
            attention = problem.attention() if isinstance(problem, UlyssesProblem) else problem
            found["computed_by"] = self._context.attention_kernels.choose(attention, config.attention.kernel).name
        for part in (config.kernel, config.plan, *parts):
            found |= dataclasses.asdict(part)
        found |= {
            "max_buffer_mib": config.transport.max_buffer_mib,
            "graph_memory_mib": config.transport.graph_memory_mib,
        }
        del found["file"]
        return found

    def _traits(self, dtype: torch.dtype) -> Traits:
        context, config = self._context, self._context.config
        gemm = context.slice_gemm(dtype)
        uses_nccl = context.transport_name == "nccl"
        channels = context.nccl.channels * context.nccl.communicators
        reserved = channels if config.kernel.reserved_sms is None else config.kernel.reserved_sms
        num_sms = 132
        if context.device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(context.device).multi_processor_count
        is_one_sided = context.link.transport.is_one_sided
        no_tapes = context.hardware.tapes_unavailable_reason(context.device, dtype)
        replays = is_one_sided and config.kernel.gemm == "auto" and no_tapes is None
        return Traits(
            transport=context.transport_name,
            num_sms=num_sms,
            transfer_sms=reserved if uses_nccl else 0,
            regains_sms=uses_nccl and context.nccl.regains_sms,
            overlaps=not uses_nccl or gemm.is_persistent,
            adds_in_epilogue=gemm.adds_in_epilogue and is_one_sided,
            replays=replays,
        )


def _is_forced(problem: Problem, config: OverlapConfig) -> bool:
    return settings_of(problem, config).path != "auto"


def _trial_config(problem: Problem, config: OverlapConfig) -> PlanConfig:
    """Predictions for attention are not trusted to decide: they only rank what is timed."""
    if not isinstance(problem, GemmProblem) and config.plan.measure == "auto":
        return dataclasses.replace(config.plan, measure="always")
    return config.plan


def _layer(problem: Problem) -> Hashable:
    """All that matters for a choice but the number of tokens; uneven rows cost the collectives copies.

    Attention of as many tokens in fewer and longer sequences is another problem.
    """
    is_even = problem.rows % problem.group_size == 0
    batch = 0 if isinstance(problem, GemmProblem) else problem.batch
    return dataclasses.replace(problem, rows=0, batch=batch), is_even


def _default_reason(context: PassContext) -> str | None:
    if context.device.type != "cuda":
        return "default on the CPU: correctness, not speed"
    try:
        backend = context.group._get_backend(context.device).name()
    except RuntimeError:
        backend = "none"
    if backend != "nccl":  # neither comparable nor of use: several ranks on one GPU, as in tests
        return f"default where the group's own collectives do not run over NCCL (but {backend})"
    return None
