"""Times the candidates for one problem against each other, on scratch operands, as they would run.

Collective over the context's group. Every rank gets the same times (the slowest rank's), so every rank chooses the same
plan; and nothing is left behind but buffers that only a losing candidate needed.

Warm-up apart, every round takes one burst of every candidate, each round starting with another one; after a few
rounds only those go on that may still win, since what differs by 3 % needs more rounds than what differs by 30:

    round 0   [a a a][b b b][c c c]
    round 1   [b b b][c c c][a a a]   ...
    round 5   [a a a][c c c]
    round 6   [c c c][a a a]          ...
"""

import functools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from commfuse_megatron.errors import TransportError
from commfuse_megatron.plan.choose import TrialTimes
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import Problem
from commfuse_megatron.runtime.head_start import start_together
from commfuse_megatron.runtime.prepared import PassContext, PreparedPass
from commfuse_megatron.runtime.stopwatch import Stopwatch

#: Operands of a call, None for those that it does without.
Given = Sequence[torch.Tensor | None]

#: Makes scratch operands for one problem, of a linear from those `given`; returns what runs a pass of it on them.
Rehearse = Callable[..., Callable[[PreparedPass], object]]

_WARM_UP_CALLS = 3
_ROUNDS = 5
_MORE_ROUNDS = 8
# Who is slower by more than this after the first rounds is out: single bursts differ by some 6 %. With 3 rounds and
# 1.08 one of eight trials of attention chose what was 3 % slower (70B, S 8192, 2 x H200).
_MAY_WIN = 1.1
# A burst is about this long, so that what happens at its ends does not count.
_BURST_US = 2000.0
_LEAST_CALLS, _MOST_CALLS = 3, 20
_MOST_HEAD_START_US = 50_000.0
# Standard error of the median of normal samples, times the square root of their number, over the distance of their
# quartiles: 1.253 / 1.349.
_ERROR_OF_QUARTILES = 0.929


def run_trial(
    rehearse: Rehearse, context: PassContext, problem: Problem, plans: Sequence[PassPlan]
) -> TrialTimes | str:
    """Microseconds per call of every plan, median over rounds, of the slowest rank; infinite for what runs out of
    memory on all ranks. Or why there are none.

    Beside a plan of the caller's own ("stock") times are those of the device, which counts where the host is ahead; of
    a plan that compares worse where the host is not, so much more.

    Raises TransportError on all ranks, and the context has failed, where one ran out of memory and others did not.
    """
    with torch.no_grad(), context.rehearsing():
        run = context.consensus.make_together(lambda: rehearse(problem, context), "operands of a trial")
        if isinstance(run, str):
            return run
        if problem.pass_name == "backward":
            run = _by_engine(run, context.device)
        calls = [functools.partial(run, context.make_pass(problem, plan)) for plan in plans]
        bursts = _Bursts(calls, [_burst_length(plan) for plan in plans], context)
        fitting = [index for index, plan in enumerate(plans) if bursts.warm_up(index, plan)]
        if not fitting:
            return "every plan ran out of memory"
        found = _compare(bursts, fitting)
        stock = next((index for index in fitting if plans[index].path == "stock"), None)
        if stock is not None:
            bursts.give_head_starts(found.us)
            found = _worse_of(found, _compare(bursts, fitting), stock)
    return found


class _Node(torch.autograd.Function):
    """A node of a graph whose backward pass is a call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[None, None]:
        ctx.call()
        return None, None


def engine_of(device: torch.device) -> Callable[[Callable[[], object]], object]:
    """What runs a call as PyTorch's engine does backward passes, since the host time of that counts.

    Of a backward pass that was timed without it at 0.33 ms a benchmark found 0.69: the host was the slower one.
    """
    chosen: list[Callable[[], object]] = []
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaf = torch.zeros((), device=device, requires_grad=True)
        y = _Node.apply(leaf, lambda: chosen[0]())
    grad = torch.zeros_like(y, requires_grad=False)

    def run(call: Callable[[], object]) -> object:
        chosen[:] = [call]
        try:
            return torch.autograd.grad(y, leaf, grad, retain_graph=True, allow_unused=True)
        finally:
            chosen.clear()  # and what the call holds

    return run


def _by_engine(run: Callable[[PreparedPass], object], device: torch.device) -> Callable[[PreparedPass], object]:
    engine = engine_of(device)
    return lambda prepared: engine(functools.partial(run, prepared))


class _Bursts:
    """The bursts of all candidates; `warm_up` comes before the first of each."""

    def __init__(self, calls: Sequence[Callable[[], object]], lengths: Sequence[int], context: PassContext) -> None:
        self._calls, self._lengths, self._context = calls, lengths, context
        self._stopwatch = Stopwatch(context.device)
        self.number = len(calls)
        self._samples: list[list[float]] = [[] for _ in calls]
        self._leads: list[Callable[[], None] | None] = [None] * self.number

    def warm_up(self, index: int, plan: PassPlan) -> bool:
        """Run calls of a candidate that are not timed; False if they run out of memory on all ranks."""
        context, complaint = self._context, ""
        try:
            for _ in range(_WARM_UP_CALLS):
                self._calls[index]()
        except torch.OutOfMemoryError as error:
            complaint = f"group rank {context.group_rank}: {str(error).partition('.')[0]}"
        complaints = [text for text in context.consensus.exchange(complaint, topic="memory for a trial") if text]
        if 0 < len(complaints) < context.group_size:  # the others may wait for what it has not sent
            found = f"{plan.name} was tried, and ran out of memory on some ranks only: {'; '.join(complaints)}"
            raise context.link.fail(TransportError(f"{found}; force another path, or leave more memory"))
        return not complaints

    def give_head_starts(self, times_us: Sequence[float]) -> None:
        """From now on the host has submitted a burst before the device begins with it: calls take so long at most."""
        self._samples = [[] for _ in self._calls]
        for index, time_us in enumerate(times_us):
            if math.isfinite(time_us):
                head_start_us = min(_MOST_HEAD_START_US, (self._lengths[index] + 1) * time_us + _BURST_US)
                self._leads[index] = functools.partial(
                    start_together, self._context.group, self._context.device, head_start_us
                )

    def run(self, of: Sequence[int], rounds: int) -> dict[int, list[float]]:
        """Run so many rounds of the candidates `of`; the times of all rounds that each has had, of the slowest rank."""
        for round_number in range(rounds):
            for position in range(len(of)):
                index = of[(round_number + position) % len(of)]
                burst = (self._calls[index], self._lengths[index], self._leads[index])
                self._samples[index].append(self._stopwatch.burst_us(*burst))
        own = json.dumps([self._samples[index] for index in of])
        everyone = [json.loads(text) for text in self._context.consensus.exchange(own, topic="times of a trial")]
        of_all = zip(of, zip(*everyone, strict=True), strict=True)
        return {index: [max(each) for each in zip(*ranks, strict=True)] for index, ranks in of_all}


def _compare(bursts: _Bursts, fitting: Sequence[int]) -> TrialTimes:
    first = {index: statistics.median(samples) for index, samples in bursts.run(fitting, _ROUNDS).items()}
    best_us = min(first.values())
    leaders = [index for index, time_us in first.items() if time_us <= _MAY_WIN * best_us]
    times, tie = first, 0.0
    if len(leaders) > 1:
        samples = bursts.run(leaders, _MORE_ROUNDS)
        again = {index: statistics.median(each) for index, each in samples.items()}
        # Who is out keeps its distance from the best: the device may have become slower since.
        times = {index: time_us * min(again.values()) / best_us for index, time_us in first.items()} | again
        tie = _unsureness(samples[min(again, key=lambda index: again[index])], list(samples.values()))
    return TrialTimes([times.get(index, math.inf) for index in range(bursts.number)], tie)


def _unsureness(best: list[float], samples: list[list[float]]) -> float:
    """By what fraction of the best's time another's may be wrong: two standard errors of the median of their ratio,
    round by round, which clocks that drift leave alone."""
    errors = []
    for each in samples:
        quartiles = statistics.quantiles([one / other for one, other in zip(each, best, strict=True)], n=4)
        errors.append(2 * _ERROR_OF_QUARTILES * (quartiles[2] - quartiles[0]) / math.sqrt(len(each)))
    return max(errors)


def _worse_of(submitted: TrialTimes, ahead: TrialTimes, stock: int) -> TrialTimes:
    """Of every plan the time that compares worse with the plan `stock`: as submitted, or with the host ahead."""
    scale = ahead.us[stock] / submitted.us[stock]
    times = [max(one, other * scale) for one, other in zip(ahead.us, submitted.us, strict=True)]
    return TrialTimes(times, max(submitted.tie, ahead.tie))


def _burst_length(plan: PassPlan) -> int:
    """Calls per burst; from the prediction, which is equal on all ranks."""
    if not plan.predicted_us:
        return _LEAST_CALLS
    return min(_MOST_CALLS, max(_LEAST_CALLS, math.ceil(_BURST_US / plan.predicted_us)))


class Scratch:
    """Makes operands like those of a model; the random state of the program is not touched.

    given: operands of the call for which candidates are timed, which only read them. They serve where they fit: others
    would raise the peak of memory of the step (of an output layer of a 70B model by 1385 MiB, 2 x H200, November 2026).
    """

    def __init__(self, problem: Problem, device: torch.device, given: Given = ()) -> None:
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._given = [each for each in given if each is not None and self._dtype == each.dtype]

    def draw(self, *shape: int) -> torch.Tensor:
        """Random numbers: GEMMs of zeros run faster than others do."""
        size, features = math.prod(shape), shape[-1]
        for number, given in enumerate(self._given):
            if given.is_contiguous() and given.numel() == size and given.size(-1) == features:
                return self._given.pop(number).detach().view(shape)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(generator=self._generator)
