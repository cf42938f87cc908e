"""Runs the operations against their meaning: forward and every gradient, in fp64, on every rank, in every mode.

The oracle is `ops.reference` on the same inputs widened to fp64. Exact inputs (small integers) must agree with no
tolerance, random ones within `Call.allowed`. Over the copy engine a case runs in each mode that it can take (see
`cases.modes_of`), in a context for each. Beware: a case that took another path than it asked for, or did not run in a
mode that it can take, fails, however right its numbers are.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.runtime import hardware
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.tools.common.modes import MODES, Mode, badness, describe_modes, with_mode
from commfuse_megatron.tools.verify.calls import Operands, Results, reference, run_on
from commfuse_megatron.tools.verify.cases import Case, modes_of

# How often a call is made with the same addresses before others come between: a graph is made at the fourth time, and
# an allocator may need a call or two to repeat itself.
_CALLS_IN_A_ROW = 6

PASSES = ("fprop", "backward")

#: S of a call, where its operands lie (0, or elsewhere), and the seed of its numbers.
_Step = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The largest error of one tensor of a case beside what is allowed; of all calls and ranks the worst."""

    tensor: str
    max_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is allowed; NaN is not."""
        return self.max_error <= self.allowed

    @property
    def fraction(self) -> float:
        """Error in units of what is allowed; infinite where nothing is allowed but something was found."""
        if self.max_error == 0:
            return 0.0
        return self.max_error / self.allowed if self.allowed > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What became of a case. `paths` are those that its calls took, on any rank; `complaints` say why it failed.

    modes: how many passes of calls ran in each mode, on the first rank.
    """

    case: Case
    deviations: tuple[Deviation, ...]
    paths: tuple[str, ...]
    transport: str
    gemms: tuple[str, ...]
    modes: dict[str, int]
    complaints: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every tensor is right and the path is the one asked for."""
        return not self.complaints

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = ("passed", "paths", "transport", "gemms", "modes", "complaints")
        deviations = {d.tensor: {"max_error": d.max_error, "allowed": d.allowed} for d in self.deviations}
        return self.case.to_dict() | {name: getattr(self, name) for name in names} | {"deviations": deviations}


def verify_ops(
    group: dist.ProcessGroup,
    device: torch.device,
    cases: Iterable[Case],
    *,
    on_case_done: Callable[[], None] = lambda: None,
) -> list[CaseResult]:
    """The result of every case, equal on all ranks of `group`: each one's worst over the ranks.

    Collective over `group`. A failed comparison is a result; an error that an operation raises is raised.
    """
    own = run_cases(group, device, cases, on_case_done=on_case_done)
    everyones: list[list[CaseResult]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyones, own, group=group)
    return [worst_of(results) for results in zip(*everyones, strict=True)]


def run_cases(
    group: dist.ProcessGroup,
    device: torch.device,
    cases: Iterable[Case],
    *,
    on_case_done: Callable[[], None] = lambda: None,
) -> list[CaseResult]:
    """The results as this rank sees them. Collective over `group`."""
    own: list[CaseResult] = []
    # Shared by all contexts: cuDNN takes longer to build its graphs than all calls together.
    kernels = hardware.current.attention_kernels(device)
    for config, neighbours in itertools.groupby(cases, Case.config):
        with ExitStack() as stack:

            @functools.cache
            def context_of(mode: Mode, config: OverlapConfig = config, stack: ExitStack = stack) -> OverlapContext:
                context = stack.enter_context(OverlapContext(group, with_mode(config, mode)))
                context.attention_kernels = kernels
                return context

            for case in neighbours:
                own.append(_CaseOnRank(case, context_of).run())
                on_case_done()
    return own


def compare(name: str, found: torch.Tensor | None, expected: torch.Tensor | None, allowed: float) -> Deviation:
    """The largest difference of two tensors; infinite if only one is there, or their shapes or placement differ."""
    if found is None or expected is None:
        error = 0.0 if found is expected else math.inf
    elif found.shape != expected.shape:
        error = math.inf
    else:
        difference = (found.double() - expected.double()).abs()
        error = float(difference.max()) if difference.numel() else 0.0
    return Deviation(tensor=name, max_error=error, allowed=allowed)


# --- one case on one rank ---------------------------------------------------------------------------------------------


class _Data(NamedTuple):
    """Numbers of a call, what has to come of them, and how far off that may be."""

    operands: Operands
    expected: Results
    allowed: dict[str, float]


class _CaseOnRank:
    """What a case works on, on this rank, and what was found. context_of: by the fastest mode that calls may run in."""

    def __init__(self, case: Case, context_of: Callable[[Mode], OverlapContext]) -> None:
        self._case, self._context_of = case, context_of
        default = context_of("graph")
        group, device, self._transport = default.group, default.device, default.transport_name
        self._rank, group_size = group.rank(), group.size()
        self._modes = {
            (pass_name, rows): modes_of(case, pass_name, rows, self._transport, device)
            for pass_name in PASSES
            for rows in case.rows
        }
        self._orders: dict[Mode, list[_Step]] = {"graph": _order_of(case, "stepped")}  # all that there is, by default
        if any("tape" in modes for modes in self._modes.values()):
            self._orders = {mode: _order_of(case, mode) for mode in MODES}
        # By S and seed, but leaves by S and place.
        self._data: dict[tuple[int, int], _Data] = {}
        self._leaves: dict[tuple[int, int], Operands] = {}
        for rows, place, seed in dict.fromkeys(each for order in self._orders.values() for each in order):
            if (rows, seed) not in self._data:
                call = case.call_of(rows, seed)
                operands = call.draw(self._rank, group_size, device)
                expected = reference(call, operands.widened(), group)
                self._data[rows, seed] = _Data(operands, expected, call.allowed(group_size, expected))
            if (rows, place) not in self._leaves:
                data = self._data[rows, seed].operands
                leaves = data.copies(case.call.needs)
                self._leaves[rows, place] = dataclasses.replace(leaves, grad_y=data.grad_y.clone())
        self._deviations: dict[str, Deviation] = {}
        self._records: list[OpRecord] = []
        self._ran: Counter[str] = Counter()
        self._mode_complaints: list[str] = []

    def run(self) -> CaseResult:
        for limit, order in self._orders.items():
            self._run_in(limit, order)
        complaints = [
            f"{d.tensor}: error {d.max_error:.3g}, allowed {d.allowed:.3g} (group rank {self._rank})"
            for d in self._deviations.values()
            if not d.passed
        ]
        if not self._records:
            complaints.append("the report shows no call")
        complaints += [
            f"took the path {record.path!r} in {record.pass_name}, asked for {expected!r}: {record.reason}"
            for record in self._records
            if record.path != (expected := self._case.expected_path(record.pass_name))
        ]
        return CaseResult(
            case=self._case,
            deviations=tuple(self._deviations.values()),
            paths=_sorted_once(record.path for record in self._records),
            transport=self._transport,
            gemms=_sorted_once(name for record in self._records for name in record.gemm.split(", ")),
            modes={mode: self._ran[mode] for mode in MODES if self._ran[mode]},
            complaints=(*dict.fromkeys(complaints), *self._mode_complaints),
        )

    def _run_in(self, limit: Mode, order: list[_Step]) -> None:
        context = self._context_of(limit)
        before = context.report()
        for step in order[:-1]:
            self._check(context, step)
        before_last = context.report()
        self._check(context, order[-1])
        after = context.report()
        # A report grows at its end; its lines do not tell problems apart that differ in the gradients that are due.
        pairs, name = itertools.zip_longest(after, before), self._case.call.reported_as
        self._records += [r for r, old in pairs if r.op == name and r.calls > (0 if old is None else old.calls)]
        for pass_name in PASSES:
            # Of each call the fastest mode up to `limit` that it can take; None where it has none.
            fastest = MODES.index(limit) + 1
            dues = [next(reversed(self._modes[pass_name, rows][:fastest]), None) for rows, _, _ in order]
            ran = _modes_in(after, pass_name) - _modes_in(before, pass_name)
            last = _modes_in(after, pass_name) - _modes_in(before_last, pass_name)
            self._ran += ran
            complaint = _complain(ran, Counter(due for due in dues if due), last, dues[-1])
            if complaint is not None:
                self._mode_complaints.append(f"{pass_name}, up to {limit}: {complaint} (group rank {self._rank})")

    def _check(self, context: OverlapContext, step: _Step) -> None:
        """One call. Nothing of it is left when this returns: the next one is to find the memory as it was."""
        rows, place, seed = step
        leaves, data = self._leaves[rows, place], self._data[rows, seed]
        leaves.fill(data.operands)
        found = run_on(self._case.call_of(rows, seed), leaves, getattr(ops, self._case.op), context=context)
        for name, expected in data.expected.items():
            deviation = compare(name, found[name], expected, data.allowed[name])
            self._deviations[name] = _worst([self._deviations.get(name, deviation), deviation])


def _order_of(case: Case, mode: Mode) -> list[_Step]:
    """The calls of a case in a context where `mode` is the fastest.

    The largest buffers are made first: one that grew later would take the graphs with it.
    """
    usual = (case.call.rows, 0)
    others = [(rows, 0) for rows in sorted(case.other_rows, reverse=True)]
    calls = [*others, usual]
    if mode != "stepped":
        calls += [usual] * (_CALLS_IN_A_ROW - 1) if mode == "graph" else []
        calls += [(case.call.rows, 1), *others, usual]
    return [(rows, place, number % 2) for number, (rows, place) in enumerate(calls)]


def _modes_in(report: list[OpRecord], pass_name: str) -> Counter[str]:
    """How many calls ran in which mode: those of attention's projection are among them."""
    total: Counter[str] = Counter()
    for record in report:
        if record.pass_name == pass_name:
            total.update(record.modes)
    return total


def _complain(ran: Counter[str], due: Counter[str], last: Counter[str], last_due: Mode | None) -> str | None:
    """What is wrong with how calls ran; those that are due as graphs are steps of a tape at first."""
    has_graphs = due["graph"] > 0
    is_right = ran["stepped"] == due["stepped"] and ran.total() == due.total() and (has_graphs or not ran["graph"])
    if not is_right:
        return f"ran {describe_modes(ran)}, should have run {describe_modes(due)}"
    if last_due == "graph" and not last["graph"]:
        return f"ran {describe_modes(ran)}; the last call, whose addresses had come before, was no graph"
    return None


def _worst(deviations: Iterable[Deviation]) -> Deviation:
    return max(deviations, key=lambda deviation: badness(deviation.fraction))


def _sorted_once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def worst_of(results: Sequence[CaseResult]) -> CaseResult:
    """One case's results of all ranks, as one."""
    return dataclasses.replace(
        results[0],
        deviations=tuple(map(_worst, zip(*(result.deviations for result in results), strict=True))),
        paths=_sorted_once(path for result in results for path in result.paths),
        gemms=_sorted_once(gemm for result in results for gemm in result.gemms),
        complaints=tuple(dict.fromkeys(complaint for result in results for complaint in result.complaints)),
    )
