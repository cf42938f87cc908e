"""What a training step costs, stock and with the plugin, of a trained model and of a frozen one with adapters.

    saved   what autograd keeps from the forward pass for the backward pass: each storage once, parameters left out
    peak    the most that is allocated in a step, beyond what was before it; GPUs only
    time    of a step with its optimizer, as the slowest rank took it: the median, variants in turns

Beware: in its first steps the plugin plans and makes its buffers, and the optimizer its state. So all models have run
before anything is measured, and are there together.
"""

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from commfuse_megatron.tools.common.models import build_model, stock_reasons, tensor_parallel_megatron
from commfuse_megatron.tools.common.turns import largest_of_ranks, meet, take_turns
from commfuse_megatron.tools.verify.convergence import ConvergenceTask

WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Of one model; bytes are the largest of all ranks. layers: as in `Convergence`, None for stock."""

    saved_bytes: int
    peak_bytes: int | None
    step_ms: float
    layers: dict[str, str | None] | None


def measure_steps(
    task: ConvergenceTask, *, on_step: Callable[[], object] = lambda: None
) -> dict[tuple[str, str], StepCosts]:
    """By (weights, run): `task.num_steps` steps of each after `WARM_UP` more, on one batch. Collective.

    Adapters have the form of the task, else "rows", in stock as well: no result is compared.
    """
    with tensor_parallel_megatron(task.device_type):
        from commfuse_megatron.testing.gpt import loss_of
        from commfuse_megatron.testing.training import Training

        forms = {"trained": None, "frozen, adapters": task.lora or "rows"}
        models = {
            (weights, run): build_model(task, overlap=run == "plugin" and task.config, lora=lora)
            for weights, lora in forms.items()
            for run in ("stock", "plugin")
        }
        tokens, with_mask = task.batch_of(1).to(task.device), task.with_mask
        trainings = {name: Training(model, lr=task.lr, with_mask=with_mask) for name, model in models.items()}
        for training in trainings.values():
            for _ in range(WARM_UP):
                training.step(tokens)
                on_step()
        saved = {
            name: _saved_bytes(model, partial(loss_of, model, tokens, with_mask=with_mask))
            for name, model in models.items()
        }

        def sample(name: tuple[str, str]) -> list[float]:
            one = _one_step(trainings[name], tokens)
            on_step()
            return [saved[name], *one]

        samples = take_turns({name: partial(sample, name) for name in models}, task.num_steps)
        found = {}
        for name, model in models.items():
            saved_bytes, peak_bytes, step_ms = zip(*largest_of_ranks(samples[name], task.device), strict=True)
            found[name] = StepCosts(
                saved_bytes=int(saved_bytes[0]),
                peak_bytes=int(max(peak_bytes)) if task.device_type == "cuda" else None,
                step_ms=statistics.median(step_ms),
                layers=stock_reasons(model) if name[1] == "plugin" else None,
            )
        return found


def _saved_bytes(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Of what is still kept when `forward` has returned."""
    kept: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alias = tensor.detach()  # the result of an operation, kept as itself, would keep the operation and never go
        kept.append(weakref.ref(alias))
        return alias

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    storages = [tensor.untyped_storage() for each in kept if (tensor := each()) is not None]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    del loss  # until here, what it keeps was alive
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for address, size in sizes.items() if address not in parameters)


def _one_step(training: Any, tokens: torch.Tensor) -> list[float]:
    """[bytes at the peak, milliseconds]."""
    is_cuda = tokens.is_cuda
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    meet(None, tokens.device)
    start_s = time.perf_counter()
    training.step(tokens)
    if is_cuda:
        torch.cuda.synchronize()
    step_ms = 1e3 * (time.perf_counter() - start_s)
    return [float(torch.cuda.max_memory_allocated() - before) if is_cuda else 0.0, step_ms]
