"""`commfuse simulate --step`: whole training steps from the planner's model, and its error on those that were measured.

Needs neither ranks nor rows: without rows the model is the planner's assumed machine. Of the device's time alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commfuse_megatron.tools.common.output import make_table, results, write_json
from commfuse_megatron.tools.common.ranks import UsageError

if TYPE_CHECKING:
    from commfuse_megatron.plan.machine import MachineModel
    from commfuse_megatron.tools.simulate.predict_step import MeasuredStep, StepPrediction


_HOST_BOUND = "host-bound: the host is likely to take longer than the device; by how much is not predicted"


def run_simulate_step(arguments: argparse.Namespace, machine: MachineModel) -> int:
    """Predict, compare, print. 0: done."""
    from commfuse_megatron.tools.common.cases import STEP_LAYERS
    from commfuse_megatron.tools.simulate.predict_step import measured_steps, predict_step

    model, layers = arguments.step, arguments.layers or STEP_LAYERS[arguments.step]
    sizes = [(tokens, group_size) for tokens in arguments.tokens for group_size in arguments.ranks]
    predictions = [predict_step(model, layers, *each, machine) for each in sizes]
    pairs: list[tuple[MeasuredStep, StepPrediction]] = []
    if arguments.against is not None:
        steps = [step for step in measured_steps(Path(arguments.against)) if step.model == model]
        if not steps:
            raise UsageError(f"--against {arguments.against}: it has no steps of {model}")
        pairs = [(each, predict_step(model, each.layers, each.tokens, each.group_size, machine)) for each in steps]
    if arguments.json:
        data = {
            "predictions": [prediction.as_json() for prediction in predictions],
            "against": [_compared(*pair) for pair in pairs],
        }
        write_json(arguments.json, data)
    _print_predictions(predictions, machine)
    if pairs:
        _print_errors(pairs, arguments.against)
    return 0


def _compared(measured: MeasuredStep, prediction: StepPrediction) -> dict[str, object]:
    predicted_ms = prediction.step_ms[measured.variant]
    sizes = {"model": measured.model, "layers": measured.layers, "tokens": measured.tokens}
    return {
        **sizes,
        "group_size": measured.group_size,
        "variant": measured.variant,
        "measured_ms": measured.step_ms,
        "predicted_ms": predicted_ms,
        "error": predicted_ms / measured.step_ms - 1,
        "is_host_bound": prediction.is_host_bound,
    }


def _print_predictions(predictions: Sequence[StepPrediction], machine: MachineModel) -> None:
    from commfuse_megatron.tools.common.cases import FREE, PLANNED, STOCK

    first = predictions[0]
    title = f"predicted, not measured: step of {first.model}, {first.layers} layers, ms, machine as {machine.source}"
    rows = [
        (
            str(each.tokens),
            str(each.group_size),
            *(f"{each.step_ms[name]:.1f}" for name in (STOCK, PLANNED)),
            f"{each.step_ms[PLANNED] / each.step_ms[STOCK]:.3f}",
            f"{each.step_ms[FREE]:.1f}",
            f"{each.forward_ms[PLANNED]:.1f}",
            "host-bound" if each.is_host_bound else "",
        )
        for each in predictions
    ]
    numbers = ("tokens", "ranks", "stock", "with the plugin", "/ stock", "without communication", "forward, plugin")
    console = results()
    console.print(make_table(title, (*(f">{name}" for name in numbers), ""), rows))
    console.print("forward and backward of one sequence, no optimizer; the device's time, on one NVLink domain")
    if any(each.is_host_bound for each in predictions):
        console.print(_HOST_BOUND)


def _print_errors(pairs: Sequence[tuple[MeasuredStep, StepPrediction]], path: str) -> None:
    rows, errors = [], []
    for measured, prediction in pairs:
        predicted_ms = prediction.step_ms[measured.variant]
        error = predicted_ms / measured.step_ms - 1
        if not prediction.is_host_bound:
            errors.append(error)
        row = (
            str(measured.layers),
            str(measured.tokens),
            str(measured.group_size),
            measured.variant,
            f"{measured.step_ms:.1f}",
            f"{predicted_ms:.1f}",
            f"{100 * error:+.1f} %",
            "host-bound" if prediction.is_host_bound else "",
        )
        rows.append(row)
    columns = (">layers", ">tokens", ">ranks", "variant", ">measured ms", ">predicted", ">error", "")
    console = results()
    console.print(make_table(f"measured steps of {path}: predicted / measured - 1", columns, rows))
    if errors:
        sizes = [abs(error) for error in errors]
        console.print(
            f"median size of the error of {len(sizes)} steps that are not host-bound: "
            f"{100 * statistics.median(sizes):.1f} %; the largest: {100 * max(sizes):.1f} %"
        )
    if len(errors) < len(pairs):
        console.print(_HOST_BOUND)
