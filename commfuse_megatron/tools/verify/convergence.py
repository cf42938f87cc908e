"""Trains one small model several times, stock and overlapped, and holds the differences to what rounding explains.

Five runs from the same weights on the same batches:

    reference            stock, in a wider dtype
    stock, plugin        in the dtype under test; both write a checkpoint half way
    plugin after stock   goes on from stock's checkpoint, overlapped
    stock after plugin   goes on from the plugin's, stock

The measure is the mean distance of losses and gradient norms from the reference: what the dtype costs stock Megatron,
the plugin may cost too, up to a factor. Beware: equal numbers prove nothing if the plugin was not at work, so every
layer's calls are counted.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed as dist

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.tools.common.models import (
    OVERLAPPED,
    NormOutput,
    Task,
    build_model,
    stock_reasons,
    tensor_parallel_megatron,
)

#: The plugin's mean distance from the reference over stock's. Two equally good roundings have a ratio near 1.
ALLOWED_RATIO = 2.0

#: The same of the plugin's losses where ranks share sequences, as stock's do: asked for, and not a measure of rounding.
ASKED_RATIO = 1.05

#: Losses and norms come as float32 numbers in every run, and two right ones may round to neighbours: one unit of that,
#: relative, is no difference. It only matters where stock meets the reference exactly, as over a few steps on the CPU.
ROUNDING = 2.0**-23

QUANTITIES = ("loss", "grad_norm")

# Run -> the one from whose checkpoint it goes on.
_RUNS = dict.fromkeys(("reference", "stock", "plugin")) | {
    "plugin after stock": "stock",
    "stock after plugin": "plugin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvergenceTask(Task):
    """What is trained.

    exchange_at: the step after which checkpoints are written; the resumed runs begin with the next one.
    lora: train low-rank adapters at all linears, of a GPT whose own weights are frozen. The form (`testing.lora`) is
        the plugin's; stock always has "rows", the same function with other shards: Transformer Engine 2.20 leaves out
        the gradient of the norm's output that it returns gathered.
    context_parallel: so many ranks share sequences. The reference has whole ones, since Transformer Engine exchanges
        in 16 bits only; and so has stock where its layers cannot share (see `stock_shares`).
    """

    reference_dtype: torch.dtype
    exchange_at: int = 25
    config: OverlapConfig = OVERLAPPED
    lora: NormOutput | None = None

    @property
    def stock_shares(self) -> bool:
        """Whether stock's ranks share sequences where the plugin's do: Transformer Engine's on GPUs."""
        return self.transformer_impl == "transformer_engine" and self.device_type == "cuda"

    def sharing_of(self, run: str) -> int:
        """How many ranks share a sequence in a run."""
        shares = run != "reference" and (self.stock_shares or run.startswith("plugin"))
        return self.context_parallel if shares else 1

    @property
    def num_runs_steps(self) -> int:
        """Steps of all five runs together, for progress bars."""
        return 3 * self.num_steps + 2 * (self.num_steps - self.exchange_at)


@dataclass(slots=True)
class Curve:
    """One run: values of each step, the first of which is `first_step` (counted from 1)."""

    first_step: int = 1
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)

    def mean_distance(self, reference: Self, quantity: str, first_step: int) -> float:
        """Mean absolute difference from `reference` over the steps from `first_step` on."""
        found = getattr(self, quantity)[first_step - self.first_step :]
        expected = getattr(reference, quantity)[first_step - reference.first_step :]
        return sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(expected)


@dataclass(frozen=True, slots=True)
class Convergence:
    """Curves by run, and by run of the plugin what became of its linears: name -> why stock, None if overlapped.

    allowed_ratio: of the plugin's distance in losses.
    """

    curves: dict[str, Curve]
    layers: dict[str, dict[str, str | None]]
    allowed_ratio: float = ALLOWED_RATIO

    def allowed_of(self, run: str, quantity: str) -> float:
        """The ratio that is allowed of a run's distance to stock's."""
        return self.allowed_ratio if (run, quantity) == ("plugin", "loss") else ALLOWED_RATIO


def compare_runs(task: ConvergenceTask, *, on_step: Callable[[], object] = lambda: None) -> Convergence:
    """Train on all ranks of the default group: tensor-parallel ones, and those that share sequences.

    Collective; equal on all ranks.
    """
    is_asked = task.context_parallel > 1 and task.stock_shares
    converged = Convergence({}, {}, ASKED_RATIO if is_asked else ALLOWED_RATIO)
    group_size, weights = dist.get_world_size() // task.context_parallel, dict[str, torch.Tensor]()
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="convergence-"))]
        dist.broadcast_object_list(folders)  # one for all ranks: they write one checkpoint together
        for sharing, runs in itertools.groupby(_RUNS, task.sharing_of):
            shared = dataclasses.replace(task, context_parallel=sharing)
            with tensor_parallel_megatron(task.device_type, sharing, group_size=group_size):
                for run in runs:
                    converged.curves[run], model = _train(shared, run, weights, Path(folders[0]), on_step)
                    if run.startswith("plugin"):
                        converged.layers[run] = stock_reasons(model)
                    del model  # before the next one is built
        dist.barrier()  # the folder goes with the first rank
    return converged


def ratios_of(converged: Convergence) -> dict[tuple[str, str], tuple[float, float]]:
    """(run, quantity) -> (its mean distance from the reference, stock's over the same steps)."""
    curves = converged.curves
    found = {}
    for run in ("plugin", "plugin after stock", "stock after plugin"):
        first = curves[run].first_step
        for quantity in QUANTITIES:
            found[run, quantity] = (
                curves[run].mean_distance(curves["reference"], quantity, first),
                curves["stock"].mean_distance(curves["reference"], quantity, first),
            )
    return found


def complaints_of(converged: Convergence) -> list[str]:
    """Everything that makes the comparison fail: runs too far from the reference, linears that were not overlapped."""
    complaints = []
    for (run, quantity), (distance, allowed) in ratios_of(converged).items():
        values = getattr(converged.curves["reference"], quantity)
        rounding = ROUNDING * max(map(abs, values))
        ratio = converged.allowed_of(run, quantity)
        if not distance <= ratio * allowed + rounding:
            complaints.append(
                f"{run}: mean {quantity} differs from the reference's by {distance:.3g}, stock's by {allowed:.3g};"
                f" allowed is {ratio:g} times as much"
            )
    for run, layers in converged.layers.items():
        if not layers:
            complaints.append(f"{run}: the model has no tensor-parallel linear")
        complaints += [f"{run}: {name}: {reason}" for name, reason in layers.items() if reason is not None]
    return complaints


def _train(
    task: ConvergenceTask, run: str, weights: dict[str, torch.Tensor], folder: Path, on_step: Callable[[], object]
) -> tuple[Curve, Any]:
    """The curve and the model of a run. weights: what all begin with; filled by the first. folder: of checkpoints."""
    from commfuse_megatron.testing.training import Training

    is_ours = run.startswith("plugin")
    lora = task.lora if is_ours else task.lora and "rows"
    dtype = task.reference_dtype if run == "reference" else task.dtype
    model = build_model(task, overlap=is_ours and task.config, dtype=dtype, lora=lora)
    _begin_with_the_same_weights(model, weights)
    training, curve, source = Training(model, lr=task.lr, with_mask=task.with_mask), Curve(), _RUNS[run]
    if source is not None:
        training.load(folder / source)
        curve.first_step = task.exchange_at + 1
    for step in range(curve.first_step, task.num_steps + 1):
        curve.loss.append(training.step(task.batch_of(step).to(task.device)))
        curve.grad_norm.append(training.grad_norm())
        if step == task.exchange_at and run in _RUNS.values():
            training.save(folder / run)
        on_step()
    return curve, model


def _begin_with_the_same_weights(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Copy the first model's weights, which are the widest ones; the names must be the same."""
    named = dict(model.named_parameters())
    if not weights:
        weights |= {name: parameter.detach().clone() for name, parameter in named.items()}
    if named.keys() != weights.keys():
        differing = ", ".join(sorted(named.keys() ^ weights.keys()))
        raise RuntimeError(f"stock and overlapped models have parameters of different names: {differing}")
    with torch.no_grad():
        for name, parameter in named.items():
            weight = weights[name]
            if weight.shape != parameter.shape:  # replicated in the form of adapters that stock has
                weight = weight.chunk(dist.get_world_size())[dist.get_rank()]
            parameter.copy_(weight)
