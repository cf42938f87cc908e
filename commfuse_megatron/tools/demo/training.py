"""Trains the same Megatron GPT, stock and overlapped, on the same text, and says how far losses and gradients part.

All models start from the same weights and see the same batches, step by step in turn: the stock one, and an overlapped
one for each mode that calls can run in. In the end all have the stock model's weights once more, and the gradients of
one batch are compared. Beware: equal losses prove nothing if the plugin was not at work, so `complaints_of` also counts
the calls of every layer and op, and how they ran.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.common.models import OVERLAPPED, Task, build_model, tensor_parallel_megatron
from commfuse_megatron.tools.common.modes import MODES, Mode, badness, describe_modes, with_mode
from commfuse_megatron.tools.trace.session import record

# From how many steps on graphs must have been made: in the first one the optimizer takes its memory, the fifth call
# with the same addresses is a graph.
_STEPS_FOR_GRAPHS = 8


def task_for(device_type: str, *, dtype: torch.dtype, num_steps: int, text: bytes) -> Task:
    """A small Llama over bytes; sizes per device, since a GPU idles on a CPU's.

    At a rate of 1e-3 the loss of the wider model jumps between 3.9 and 8.3 in the first steps, which amplifies rounding
    twice as much as the limits allow (2 x H200, float32).
    """
    sizes: dict[str, Any] = (
        {"hidden_size": 256, "ffn_hidden_size": 512, "sequence": 256, "batch": 4, "lr": 1e-3}
        if device_type == "cpu"
        else {"hidden_size": 1024, "ffn_hidden_size": 4096, "sequence": 1024, "batch": 4, "lr": 3e-4}
    )
    return Task(device_type=device_type, dtype=dtype, num_steps=num_steps, text=text, **sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One overlapped model: its losses, what its layers and ops report, and the gradient that is farthest from stock's.

    gradient_error: as `gradient_limit` has it.
    """

    loss: tuple[float, ...]
    ops: tuple[dict[str, Any], ...]
    layers: tuple[dict[str, Any], ...]
    gradient: str
    gradient_error: float

    def sliced_calls(self, pass_name: str) -> int:
        """Of all operations together."""
        return sum(op["calls"] for op in self.ops if op["pass_name"] == pass_name and op["path"] == "sliced")

    @property
    def modes(self) -> dict[str, int]:
        """How many passes ran in which mode."""
        total: Counter[str] = Counter()
        for op in self.ops:
            total.update(op["modes"])
        return dict(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Losses of the stock run, the others by the fastest mode of their calls, and what ran when in the last step of
    the last of these, by rank."""

    stock_loss: tuple[float, ...]
    runs: dict[Mode, Run]
    recording: dict[int, list[Interval]]

    @property
    def recorded(self) -> Run:
        """The run that was recorded."""
        return list(self.runs.values())[-1]

    def differences(self, mode: Mode) -> tuple[float, ...]:
        """Absolute difference of the losses, per step."""
        return tuple(abs(a - b) for a, b in zip(self.stock_loss, self.runs[mode].loss, strict=True))

    @property
    def max_loss_difference(self) -> float:
        """The largest of all runs."""
        return max(difference for mode in self.runs for difference in self.differences(mode))


class LossLimit(NamedTuple):
    """The losses of steps first..last (counted from 1) may differ by at most `limit`."""

    first: int
    last: int
    limit: float


def loss_limits(dtype: torch.dtype, num_steps: int, group_size: int) -> list[LossLimit]:
    """How far the losses may part. Both runs round differently, and training amplifies what rounding begins.

    Measured over 20 steps on the CPU, November 2026, largest difference in steps 1-5 / 6-20:
        float32   2 ranks 0 / 0 (two terms have one sum), 4 ranks 4.8e-7 / 7.2e-7; one unit of a loss above 4 is 4.8e-7
        float64   2 ranks 0 / 0
        bfloat16  4 ranks 3.2e-4 / 1.0e-3
    float32 and float64 are allowed 1e-6 / 1e-4 and 1e-10 for two ranks and as much again for every further rank, whose
    partial is one more to be rounded; bfloat16 some 15 times what was measured. A layer that drops or doubles a shard
    changes the first losses by more than any of these. After 20 steps rounding has grown too far to tell it from a
    fault; there the limit only catches runs that fall apart.
    """
    early, late = {
        torch.float32: (1e-6 * (group_size - 1), 1e-4 * (group_size - 1)),
        torch.float64: (1e-10 * (group_size - 1), 1e-10 * (group_size - 1)),
        torch.bfloat16: (5e-3, 1.5e-2),
    }[dtype]
    limits = [LossLimit(first=1, last=min(5, num_steps), limit=early)]
    if num_steps > 5:
        limits.append(LossLimit(first=6, last=min(20, num_steps), limit=late))
    if num_steps > 20:
        limits.append(LossLimit(first=21, last=num_steps, limit=0.2))
    return limits


def gradient_limit(dtype: torch.dtype) -> float:
    """How far a gradient may be from stock's by the same weights: the norm of the difference over stock's norm.

    Measured on the CPU after 1 and 6 steps, 2 and 4 ranks, November 2026: float32 at most 3.4e-7, float64 1.2e-15,
    bfloat16 6.3e-3, and 7.1e-2 of the embedding, which adds up many tokens of one kind in that dtype. A shard of 8 that
    is lost or doubled makes some 0.35 of the gradient.
    """
    return {torch.float32: 1e-4, torch.float64: 1e-12, torch.bfloat16: 0.25}[dtype]


def complaints_of(comparison: Comparison, limits: list[LossLimit], limit: float) -> list[str]:
    """Everything that makes the comparison fail: losses and gradients too far apart, calls that were not overlapped or
    did not run in the mode that is the run's.

    limit: of gradients.
    """
    complaints = []
    for mode, run in comparison.runs.items():
        found = []
        for steps in limits:
            worst = max(comparison.differences(mode)[steps.first - 1 : steps.last], key=badness)
            if not worst <= steps.limit:
                found.append(
                    f"losses of steps {steps.first}-{steps.last} differ by {worst:.3g}, allowed {steps.limit:g}"
                )
        if not run.gradient_error <= limit:
            found.append(f"the gradient of {run.gradient} differs by {run.gradient_error:.3g}, allowed {limit:g}")
        found += _complaints_about_calls(run)
        if len(comparison.runs) > 1:
            found += _complaints_about_modes(run, mode)
        complaints += [f"{mode}: {complaint}" for complaint in found]
    return complaints


def _complaints_about_calls(run: Run) -> Iterator[str]:
    num_steps = len(run.loss)
    for layer in run.layers:
        if layer["path"] != "overlapped" or layer["overlapped_calls"] != num_steps:
            reasons = "; ".join((*layer["reasons"], *layer["sequential_reasons"])) or "no reason given"
            yield (
                f"{layer['name']}: {layer['overlapped_calls']} of {num_steps} forward passes were overlapped"
                f" (path: {layer['path']}; {reasons})"
            )
    expected = num_steps * len(run.layers)
    for pass_name in ("fprop", "backward"):
        calls = run.sliced_calls(pass_name)
        if calls != expected or not expected:
            yield f"{calls} {pass_name} calls ran sliced, expected {expected}"


def _complaints_about_modes(run: Run, mode: Mode) -> Iterator[str]:
    """Of a run whose linears can take all modes, and whose embedding looks up on tensors."""
    for op in run.ops:
        modes, what = op["modes"], f"{op['op']} {op['pass_name']}, N {op['N']} K {op['K']}"
        is_look_up = op["op"] == "embedding_reduce_scatter" and op["pass_name"] == "fprop"
        due = "stepped" if is_look_up else mode
        counted = {"stepped": ("stepped",), "tape": ("tape",), "graph": ("tape", "graph")}[due]
        ran = sum(modes.get(each, 0) for each in counted)
        if ran != op["calls"]:
            yield f"{what}: of {op['calls']} calls ran {describe_modes(modes)}, as {due} {ran}"
        elif due == "graph" and len(run.loss) >= _STEPS_FOR_GRAPHS and not modes.get("graph"):
            yield f"{what}: no call became a graph"


def train_both(task: Task, *, on_step: Callable[[], object] = lambda: None) -> Comparison:
    """Train on all ranks of the default group, which is the tensor-parallel group. Collective; losses are equal on all
    ranks.
    """
    with tensor_parallel_megatron(task.device_type):
        from commfuse_megatron.plugin import model_report
        from commfuse_megatron.plugin.contexts import open_contexts
        from commfuse_megatron.testing.training import Training

        # Drawn on the CPU a seed gives all of them the same weights.
        configs: dict[Any, OverlapConfig | Literal[False]] = {"stock": False, **_configs_of(task)}
        trainings = {
            name: Training(build_model(task, overlap=config, use_cpu_initialization=True), lr=task.lr)
            for name, config in configs.items()
        }
        losses: dict[str, list[float]] = {name: [] for name in trainings}
        stock = trainings.pop("stock")
        # Always in the same place, so that graphs find their addresses again.
        tokens = task.batch_of(0).to(task.device)
        for step in range(task.num_steps):
            tokens.copy_(task.batch_of(step))
            losses["stock"].append(stock.step(tokens))
            with ExitStack() as stack:
                if step == task.num_steps - 1:
                    recorded = stack.enter_context(record(open_contexts, device=task.device))
                else:
                    for context in open_contexts():
                        stack.enter_context(context.unrecorded())
                for mode, training in trainings.items():
                    losses[mode].append(training.step(tokens))
            on_step()
        reports = {mode: model_report(training.wrapped) for mode, training in trainings.items()}
        tokens.copy_(task.batch_of(task.num_steps))
        stock.backward(tokens)
        runs = {}
        for mode, report in reports.items():
            gradient, error = _worst_gradient(stock, trainings[mode], tokens)
            ops, layers = (tuple(map(dataclasses.asdict, each)) for each in (report.ops, report.layers))
            runs[mode] = Run(loss=tuple(losses[mode]), ops=ops, layers=layers, gradient=gradient, gradient_error=error)
        return Comparison(stock_loss=tuple(losses["stock"]), runs=runs, recording=recorded.by_rank)


def _configs_of(task: Task) -> dict[Mode, OverlapConfig]:
    """Of the overlapped models, by the fastest mode of their calls. The last one's context, which is made here, can
    record."""
    from megatron.core import parallel_state

    from commfuse_megatron.plugin.contexts import context_for

    group, recording = parallel_state.get_tensor_model_parallel_group(), dataclasses.replace(OVERLAPPED, record=True)
    if context_for(group, recording).transport_name != "copy_engine" or task.dtype.itemsize != 2:
        return {"stepped": recording}
    return {mode: recording if mode == MODES[-1] else with_mode(OVERLAPPED, mode) for mode in MODES}


def _worst_gradient(stock: Any, run: Any, tokens: torch.Tensor) -> tuple[str, float]:
    """The gradient of `run` that is farthest from what `stock` has just computed for `tokens`, both with stock's
    weights: its name, and how far. NaN stays NaN, equal zeros have no error, and what should be zero and is not has an
    infinite one."""
    theirs, ours = (dict(each.wrapped.named_parameters()) for each in (stock, run))
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name])
    run.backward(tokens)
    errors = {}
    for name, parameter in ours.items():
        expected = theirs[name].main_grad
        difference, norm = (expected - parameter.main_grad).norm().item(), expected.norm().item()
        errors[name] = difference / norm if norm else math.inf if difference else 0.0
    return max(errors.items(), key=lambda item: badness(item[1]))
