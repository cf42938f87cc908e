"""A whole Megatron step, forward and backward: stock, planned by the plugin, without communication; timed, traced.

Without communication is the stock step with every all-gather, reduce-scatter and all-to-all replaced by a local copy
(`trace.collectives.local_copies`): its results are wrong on purpose, its time is a lower bound. What a step takes more
is its exposed communication. With Transformer Engine there is a fourth, Megatron's `tp_comm_overlap`, where it can run.
Beware: local layers, stock and overlapped, are one model switched by `config.commfuse`, so both have the same weights
and the second costs no memory; with Transformer Engine each variant is a model of its own.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.runtime.head_start import start_together
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.runtime.recorder import Interval, Recorder
from commfuse_megatron.tools.common.cases import FREE, PLANNED, STOCK
from commfuse_megatron.tools.common.models import Task, build_model, tensor_parallel_megatron
from commfuse_megatron.tools.common.turns import largest_of_ranks, meet, take_turns
from commfuse_megatron.tools.common.userbuffers import close_userbuffers, missing_userbuffers, open_userbuffers
from commfuse_megatron.tools.trace.collectives import local_copies, recorded_calls
from commfuse_megatron.tools.trace.kernels import gather_profile, profile_calls, split_calls
from commfuse_megatron.tools.trace.session import Session, gather_recording, require_work
from commfuse_megatron.tools.trace.step_memory import Builders, warm_up
from commfuse_megatron.tools.trace.summary import Summary, drop_nested, summarize, worst_of

USERBUFFERS = "stock with tp_comm_overlap"
MEGATRONS = "Megatron's GEMMs"

# The host is ahead when the clock starts, as it is behind the step before. Without it the first 5 ms of a step were
# gaps between small kernels (8B, 2 x H200), of every variant, and counted as exposed ones.
_HEAD_START_US = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepToTrace(Task):
    """What is traced. rounds: timed steps of each variant in a run, in random order, after `warm_up` steps of each."""

    config: OverlapConfig
    has_fusions: bool = False
    warm_up: int = 2
    rounds: int = 9
    runs: int = 1


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of one variant: medians over runs; of a run, (forward, step) over rounds, the slowest rank's.

    Bytes are the largest of all ranks, as if no other variant were there; 0 on the CPU. device_bytes: of the whole
    device, also what PyTorch keeps unused, and what it knows nothing of.
    """

    forward_ms: float
    step_ms: float
    runs: tuple[tuple[float, float], ...] = ()
    peak_allocated_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """Times by variant; one traced step, stock and with the plugin, by rank.

    layers: of the plugin's model, name -> why it took Megatron's own path in the plugin's step, None if it did not.
    ops: what its layers asked for, and the path that was chosen.
    """

    times: dict[str, StepTimes]
    runs: dict[str, dict[int, list[Interval]]]
    layers: dict[str, str | None]
    ops: tuple[OpRecord, ...]
    transport: str

    def exposed_ms(self, variant: str) -> float:
        """Step time beyond the step without communication."""
        return self.times[variant].step_ms - self.times[FREE].step_ms

    def summary(self, variant: str) -> Summary:
        """The traced step in numbers, each the largest of all ranks."""
        return worst_of([summarize(intervals, as_one_call=True) for intervals in self.runs[variant].values()])


def userbuffers_left_out(wanted: StepToTrace) -> str | None:
    """Why the step with `tp_comm_overlap` cannot be timed here, None if it will be."""
    if wanted.transformer_impl == "local":
        return "tp_comm_overlap is for Transformer Engine's layers"
    if wanted.context_parallel > 1:
        return "tp_comm_overlap is timed where all ranks are tensor parallel"
    return missing_userbuffers(torch.device(wanted.device_type))


def count_steps(wanted: StepToTrace) -> int:
    """How often `trace_step` will call its `on_step`."""
    return (3 if userbuffers_left_out(wanted) else 4) * (wanted.warm_up + wanted.rounds * wanted.runs)


def trace_step(wanted: StepToTrace, *, on_step: Callable[[], object] = lambda: None) -> StepTrace:
    """Build, warm up, time and trace on all ranks of the default group. Collective.

    Raises UnsupportedError where Transformer Engine is asked for and missing, where the plugin overlapped nothing, and
    where nothing was seen to run in a traced step.
    """
    with tensor_parallel_megatron(wanted.device_type, wanted.context_parallel), ExitStack() as stack:
        from commfuse_megatron.plugin.contexts import open_contexts
        from commfuse_megatron.plugin.support import PLANNED as PLANNED_AS

        device = wanted.device
        shape, generator = (wanted.batch, wanted.sequence + 1), torch.Generator().manual_seed(11)
        tokens = torch.randint(wanted.vocab_size, shape, generator=generator).to(device)
        steps: dict[str, _Step] = {}

        def run(name: str, model: Any) -> None:
            steps[name] = _Step(name, model, tokens, wanted.with_mask)
            with steps[name].prepared():
                steps[name]()
            on_step()

        memory = warm_up(_builders(wanted, stack), run, wanted.warm_up, device)
        layers = _layers(steps[PLANNED].model)
        if all(reason is not None and not reason.startswith(PLANNED_AS) for reason in layers.values()):
            raise UnsupportedError(
                f"the plugin overlapped no layer: {'; '.join(sorted({str(r) for r in layers.values()}))}"
            )
        runs_ms = [_time(steps, wanted.rounds, device, on_step, seed) for seed in range(wanted.runs)]
        times = {}
        for name in steps:
            of_runs = tuple(each[name] for each in runs_ms)
            times[name] = StepTimes(*_medians(of_runs), of_runs, *map(int, largest_of_ranks(memory[name], device)))
        del steps[FREE]
        runs = _profiled(steps, device) if device.type == "cuda" else _recorded(steps, device)
        for name, recording in runs.items():
            require_work(f"the step of {name}", [recording])
        return StepTrace(
            times=times,
            runs=runs,
            layers=layers,
            ops=tuple(record for context in open_contexts() for record in context.report()),
            transport=", ".join(dict.fromkeys(context.transport_name for context in open_contexts())),
        )


def _layers(model: Any) -> dict[str, str | None]:
    from commfuse_megatron.plugin import model_report
    from commfuse_megatron.plugin.support import SWITCHED_OFF

    found: dict[str, str | None] = {}
    for layer in model_report(model).layers:
        reasons = [reason for reason in layer.reasons if reason != SWITCHED_OFF]  # the stock steps of the same model
        reasons += layer.sequential_reasons
        found[layer.name] = "; ".join(reasons) or (None if layer.overlapped_calls else "it was not called")
    return found


# --- the models -------------------------------------------------------------------------------------------------------


def _builders(wanted: StepToTrace, stack: ExitStack) -> Builders:
    """What builds each variant's model, stock's first; None: it is stock's. What must be closed enters `stack`."""
    from commfuse_megatron.testing.gpt import missing_transformer_engine

    overlap = dataclasses.replace(wanted.config, record=wanted.device_type == "cpu")  # on GPUs the profiler looks
    why_no_te = missing_transformer_engine()
    options: dict[str, Any] = {}
    if wanted.has_fusions:
        options = dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion"), True)
        options["apply_rope_fusion"] = why_no_te is None
    if wanted.transformer_impl == "local":
        return {STOCK: lambda: build_model(wanted, overlap=overlap, **options), PLANNED: None, FREE: None}
    if why_no_te is not None:
        raise UnsupportedError(why_no_te)

    def build_over_userbuffers() -> Any:
        open_userbuffers((wanted.sequence * wanted.batch, wanted.hidden_size), dist.get_world_size(), wanted.dtype)
        stack.callback(close_userbuffers)
        return build_model(wanted, overlap=False, tp_comm_overlap=True, **options)

    builders: Builders = {
        STOCK: lambda: build_model(wanted, overlap=False, **options),
        PLANNED: lambda: build_model(wanted, overlap=overlap, **options),
    }
    if userbuffers_left_out(wanted) is None:
        builders[USERBUFFERS] = build_over_userbuffers
    return builders | {FREE: None}


@dataclass(frozen=True, slots=True)
class _Step:
    """Forward and backward of one variant on the same batch. Gradients are dropped: no optimizer moves the weights."""

    variant: str
    model: Any
    tokens: torch.Tensor
    with_mask: bool

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Inside the with-block a call is this variant's step and nothing else: no time goes into switching."""
        for module in self.model.modules():
            if hasattr(module, "config"):
                module.config.commfuse = self.variant == PLANNED
        with local_copies() if self.variant == FREE else contextlib.nullcontext():
            yield
        self.model.zero_grad(set_to_none=True)

    def __call__(self, between: Callable[[], object] = lambda: None) -> None:
        """Run one step, while `prepared`; `between` is called after the forward pass."""
        from commfuse_megatron.testing.gpt import loss_of

        loss = loss_of(self.model, self.tokens, with_mask=self.with_mask)
        between()
        loss.backward()


# --- times ------------------------------------------------------------------------------------------------------------


def _time(
    steps: dict[str, _Step], rounds: int, device: torch.device, on_step: Callable[[], object], seed: int
) -> dict[str, tuple[float, float]]:
    """A run: (forward, step), medians over rounds of the slowest rank; turns are shuffled, by all ranks alike."""

    def sample(step: _Step) -> list[float]:
        with step.prepared():
            meet(None, device)
            found_ms = _one_step_ms(step, device)
        on_step()
        return found_ms

    samples = take_turns({name: partial(sample, step) for name, step in steps.items()}, rounds, seed)
    return {name: _medians(largest_of_ranks(rows, device)) for name, rows in samples.items()}


def _medians(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    forward_ms, step_ms = (statistics.median(column) for column in zip(*samples, strict=True))
    return forward_ms, step_ms


def _one_step_ms(step: _Step, device: torch.device) -> list[float]:
    """[forward, whole step] in milliseconds."""
    if device.type != "cuda":
        marks_s = [time.perf_counter()]
        step(between=lambda: marks_s.append(time.perf_counter()))
        marks_s.append(time.perf_counter())
        return [1e3 * (mark - marks_s[0]) for mark in marks_s[1:]]
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start_together(None, device, _HEAD_START_US)
    start.record()
    step(between=middle.record)
    end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(middle), start.elapsed_time(end)]


# --- traces -----------------------------------------------------------------------------------------------------------


def _profiled(steps: dict[str, _Step], device: torch.device) -> dict[str, dict[int, list[Interval]]]:
    """One step of each, as the profiler saw it."""
    with ExitStack() as stack:

        def prepare(number: int) -> None:
            step = list(steps.values())[number - 1]
            with step.prepared():
                step()
            stack.close()
            stack.enter_context(step.prepared())
            meet(None, device)

        own = profile_calls(list(steps.values()), prepare=prepare)
    return dict(zip(steps, split_calls(gather_profile(own), len(steps)), strict=True))


def _recorded(steps: dict[str, _Step], device: torch.device) -> dict[str, dict[int, list[Interval]]]:
    """One step of each on the CPU: collectives and GEMMs watched from outside, and what our operations record."""
    from commfuse_megatron.plugin.contexts import open_contexts

    runs = {}
    for name, step in steps.items():
        outside = Recorder(device)
        outside.begin_call(MEGATRONS)

        def recorders(outside: Recorder = outside) -> Sequence[Recorder]:
            return [outside, *(c.recorder for c in open_contexts() if c.recorder is not None)]

        session = Session(recorders)
        with recorded_calls(outside), step.prepared():
            step()
            session.start(None, device)
            step()
            watched, *from_contexts = session.finish()
        own = [interval for intervals in from_contexts for interval in intervals]
        runs[name] = gather_recording([*own, *drop_nested(watched, own)])
    return runs
