"""`commfuse simulate --step`: whole training steps from the planner's model, and its error on those that were measured.

Needs neither ranks nor rows: without rows the machine is the one that the planner assumes, and the measured steps come
with the package.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from commfuse_megatron.plan.machine import ASSUMED_DEVICE, Traits, assumed_machine
from commfuse_megatron.tools.common.cases import FREE, PLANNED, STEP_LAYERS, STOCK
from commfuse_megatron.tools.common.output import make_table, results, write_json
from commfuse_megatron.tools.common.ranks import UsageError
from commfuse_megatron.tools.simulate.fit import DTYPE, bandwidth_of, read_machines
from commfuse_megatron.tools.simulate.predict import say_errors
from commfuse_megatron.tools.simulate.predict_step import (
    SHIPPED,
    VARIANTS,
    MeasuredStep,
    StepMachine,
    StepPrediction,
    StepSizes,
    measured_steps,
    predict_step,
)

_HOST_BOUND = (
    "host-bound: the passes in which the device waits for the host, and of which variant; where that is forward alone, "
    "the backward pass begins late and takes the device's time. Host times lie amid those of three machines; a faster "
    "host shortens such steps. The plugin's can be shorter than the step without communication, since its calls are "
    "CUDA graphs"
)


class _Error(NamedTuple):
    """A figure of a measured step: `what` is a variant, or a quotient of two."""

    step: MeasuredStep
    what: str
    predicted: float
    measured: float
    is_host_bound: bool

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too long."""
        return self.predicted / self.measured - 1

    def as_json(self) -> dict[str, object]:
        figures = {name: getattr(self, name) for name in ("what", "predicted", "measured", "error", "is_host_bound")}
        return self.step.sizes._asdict() | {"run": self.step.run} | figures


def run_simulate_step(arguments: argparse.Namespace) -> int:
    """Predict, compare, print. 0: done."""
    machine, layers = _machine(arguments), arguments.layers or STEP_LAYERS[arguments.step]
    sizes = [(tokens, group_size) for tokens in arguments.tokens for group_size in arguments.ranks]
    sharing = arguments.context_parallel
    if sharing > 1 and machine.link != "nvlink":
        raise UsageError(
            f"--context-parallel {sharing}: exchanges are predicted over nvlink alone, not over {machine.link}: nothing"
            " is known of them there"
        )
    predictions = [predict_step(StepSizes(arguments.step, layers, *each, sharing), machine) for each in sizes]
    steps = [step for step in measured_steps(Path(arguments.against or SHIPPED)) if step.fits(machine)]
    if arguments.against and not steps:
        raise UsageError(
            f"--against {arguments.against}: it has no steps of {machine.device} over {machine.link}; steps of other "
            "machines are not compared"
        )
    errors = [error for step in steps for error in _errors(step, predict_step(step.sizes, machine))]
    if arguments.json:
        data = {
            "device": machine.device,
            "link": machine.link,
            "predictions": [prediction.as_json() for prediction in predictions],
            "against": [error.as_json() for error in errors],
        }
        write_json(arguments.json, data)
    _print_predictions(predictions, machine)
    _print_errors(errors, machine, max(arguments.ranks))
    if sharing > 1 and not any(step.sizes.context_parallel > 1 for step in steps):
        results().print("no step whose ranks share a sequence is among these: what exchanges take, they do not tell")
    return 0


def _machine(arguments: argparse.Namespace) -> StepMachine:
    """Where steps are predicted: on the machine of the rows, where there are some, else as the planner assumes it."""
    if arguments.rows is not None:
        machines, _ = read_machines(Path(arguments.rows), arguments.link)
        model = machines.by_transport.get("copy_engine", machines.any)
        return StepMachine(machines.device, machines.link, lambda group_size: model)
    if bandwidth_of(arguments.link) is not None:
        raise UsageError(f"--link {arguments.link}: of a bandwidth only --rows tells the rest; name such a file")
    link = arguments.link or "nvlink"
    traits = Traits(transport="copy_engine", adds_in_epilogue=True, replays=True)
    if link == "host":
        traits = Traits(transport="nccl", transfer_sms=4)
    return StepMachine(ASSUMED_DEVICE, link, lambda group_size: assumed_machine(traits, DTYPE, group_size=group_size))


def _errors(step: MeasuredStep, prediction: StepPrediction) -> Iterator[_Error]:
    for name, measured_ms in step.step_ms.items():
        yield _Error(step, name, prediction.step_ms[name], measured_ms, name in prediction.host_bound)
    if {STOCK, PLANNED} <= step.step_ms.keys():
        predicted, measured = (ms[PLANNED] / ms[STOCK] for ms in (prediction.step_ms, step.step_ms))
        yield _Error(step, "plugin / stock", predicted, measured, bool({STOCK, PLANNED} & {*prediction.host_bound}))


def _print_predictions(predictions: Sequence[StepPrediction], machine: StepMachine) -> None:
    what = _say_step(predictions[0].sizes)
    title = f"predicted, not measured: step of {what}, ms, {machine.device}, link {machine.link}"
    rows = [
        (
            str(each.sizes.tokens),
            str(each.sizes.group_size),
            *(f"{each.step_ms[name]:.1f}" for name in (STOCK, PLANNED)),
            f"{each.step_ms[PLANNED] / each.step_ms[STOCK]:.3f}",
            f"{each.step_ms[FREE]:.1f}",
            f"{each.forward_ms[PLANNED]:.1f}",
            _say_host_bound(each),
        )
        for each in predictions
    ]
    stock, plugin, free = VARIANTS.values()
    numbers = ("tokens", "ranks", stock, plugin, "/ stock", free, "forward, plugin")
    console = results()
    console.print(make_table(title, (*(f">{name}" for name in numbers), "host-bound"), rows))
    console.print("forward and backward of one sequence, no optimizer; all ranks on one host or NVLink domain")
    if any(each.host_bound for each in predictions):
        console.print(_HOST_BOUND)


def _say_step(sizes: StepSizes) -> str:
    sharing = f", context parallel {sizes.context_parallel}" if sizes.context_parallel > 1 else ""
    return f"{sizes.model}, {sizes.layers} layers{sharing}"


def _say_host_bound(prediction: StepPrediction) -> str:
    variants: dict[tuple[str, ...], list[str]] = {}
    for name, passes in prediction.host_bound.items():
        variants.setdefault(passes, []).append(VARIANTS[name])
    said = []
    for passes, names in variants.items():
        which = "all" if len(names) == len(VARIANTS) else ", ".join(names)
        said.append(f"{passes[0] if len(passes) == 1 else 'both'}: {which}")
    return "; ".join(said) or "none"


def _print_errors(errors: Sequence[_Error], machine: StepMachine, most_ranks: int) -> None:
    console = results()
    if not errors:
        console.print(f"no step was measured on {machine.device}, link {machine.link}: trust these accordingly")
        return
    rows = []
    for each in errors:
        sizes, digits = each.step.sizes, 1 if each.what in VARIANTS else 3
        row = (
            f"{_say_step(sizes)}, S {sizes.tokens}",
            each.step.run,
            str(sizes.group_size),
            VARIANTS.get(each.what, each.what),
            *(f"{value:.{digits}f}" for value in (each.predicted, each.measured)),
            f"{100 * each.error:+.1f} %",
            "yes" if each.is_host_bound else "no",
        )
        rows.append(row)
    columns = ("step", "run", ">ranks", "variant", ">predicted", ">measured", ">error", "host-bound")
    title = f"the same model on steps measured on {machine.device}, ms: predicted / measured - 1"
    console.print(make_table(title, columns, rows))
    console.print(say_errors(f"{len(errors)} figures", [each.error for each in errors]))
    measured_ranks = max(each.step.sizes.group_size for each in errors)
    if most_ranks > measured_ranks:
        bound = [100 * each.error for each in errors if each.is_host_bound]
        of_hosts = f", of host-bound ones {min(bound):+.1f} to {max(bound):+.1f} %" if bound else ""
        console.print(
            f"no step of more than {measured_ranks} ranks was measured: expect at least these errors{of_hosts}, and "
            "that more ranks wait for the host sooner"
        )
