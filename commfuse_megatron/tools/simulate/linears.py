"""Linears that nobody has measured: `commfuse simulate` fits, checks, predicts and prints."""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from commfuse_megatron.plan.machine import Channel
from commfuse_megatron.tools.bench.rows import Row, load_report
from commfuse_megatron.tools.common.output import each_once, make_progress, make_table, results, write_json
from commfuse_megatron.tools.common.ranks import UsageError
from commfuse_megatron.tools.simulate.fit import Machines, read_machines, require_dtype
from commfuse_megatron.tools.simulate.predict import (
    LIMITS,
    Comparison,
    Deviation,
    Prediction,
    cases_of,
    compare,
    deviations,
    median_size,
    predict,
    say_errors,
)

RANKS_OF_A_NODE = 8

# An error that turns which of two ways is faster.
_ALARMING = 0.2


def run_simulate_linears(arguments: argparse.Namespace, selectable: Collection[str]) -> int:
    """Of the `selectable` linears those that are asked for. 0: done."""
    machines, rows = read_machines(Path(arguments.rows), arguments.link)
    names = [f"{model}.{linear}" for model in each_once(arguments.models) for linear in each_once(arguments.linears)]
    cases = cases_of(names, arguments.tokens, arguments.ranks)
    found = deviations(rows, machines)
    comparisons = _compare(arguments.against, rows, machines, set(selectable) - set(names))
    predictions: list[list[Prediction]] = []
    with make_progress() as progress:
        for case in progress.track(cases, description="simulating"):
            predictions.append(predict(case, machines))
    if arguments.json:
        with_errors = [
            {**entry._asdict(), "emulation_error": entry.emulation_error, "prediction_error": entry.prediction_error}
            for entry in comparisons
        ]
        data = {
            "rows": str(arguments.rows),
            "machines": asdict(machines),
            "deviations": [{**deviation._asdict(), "error": deviation.error} for deviation in found],
            "against": with_errors,
            "predictions": [prediction.as_json() for ways in predictions for prediction in ways],
        }
        write_json(arguments.json, data)
    _print_machines(machines)
    _print_deviations(found)
    if arguments.against:
        _print_comparisons(comparisons, arguments.against)
    _print_predictions(predictions, machines)
    if arguments.figure:
        from commfuse_megatron.tools.simulate.figure import draw_predictions

        results().print(f"drawn: {draw_predictions(arguments.figure, predictions, machines.device)}")
    return 0


def _compare(path: str | None, rows: list[Row], machines: Machines, left_out: Collection[str]) -> list[Comparison]:
    if path is None:
        return []
    measured = load_report(Path(path))[1]
    require_dtype(measured, path)
    comparisons = compare(measured, rows, machines, left_out)
    if not comparisons:
        raise UsageError(
            f"--against {path}: of these models and linears no forward rows of {machines.device} over {machines.link} "
            "that were emulated or can be predicted; rows of other machines and links are not compared"
        )
    return comparisons


def _print_machines(machines: Machines) -> None:
    gemm, collective = machines.any.gemm, machines.any.collective
    models = {
        "GEMMs": f"{gemm.launch_us:.1f} us + waves of tiles at {gemm.tflops:.0f} TFLOP/s",
        **{f"messages, {name}": _say_channel(each.link) for name, each in machines.by_transport.items()},
        "the group's collectives": _say_channel(collective),
    }
    for name, each in machines.by_transport.items():
        host = each.replay if each.traits.replays else each.host
        times = f"GEMMs x {host.gemm_us:.0f} us + messages x {host.transfer_us:.0f} us"
        models[f"host, {name}"] = f"{host.call_us:.0f} us + {times}"
    rows = [
        (what, model, str(fit.num_rows), f"{100 * fit.error:.1f} %")
        for what, model in models.items()
        if (fit := machines.fits.get(what)) is not None
    ]
    title = f"the planner's model of {machines.device}, link {machines.link}"
    console = results()
    console.print(make_table(title, ("what", "model", ">rows", ">median error of the fit"), rows))
    if machines.assumed:
        console.print(f"assumed, as by the planner, since the rows do not tell: {'; '.join(machines.assumed)}")
    for name, reason in machines.left_out.items():
        console.print(f"[yellow]left out[/] {escape(f'transport {name}: {reason}')}")


def _say_channel(channel: Channel) -> str:
    return f"{channel.latency_us:.1f} us + bytes / {channel.bandwidth_gb_s:.0f} GB/s"


def _print_deviations(found: Sequence[Deviation]) -> None:
    console = results()
    if not found:
        console.print("no measured rows of this link to check the predictions with: trust them accordingly")
        return
    groups: dict[tuple[str, str], list[Deviation]] = {}
    for deviation in found:
        ranks = f"{deviation.group_size} emulated" if deviation.emulated else str(deviation.group_size)
        groups.setdefault((deviation.variant, ranks), []).append(deviation)
    rows = []
    for key, members in groups.items():
        errors = [deviation.error for deviation in members]
        figures = (f"{100 * value:+.1f} %" for value in (min(errors), max(errors)))
        worst = _worst(members)
        rows.append((*key, str(len(members)), median_size(errors), *figures, f"{worst.case} M={worst.M}"))
    title = "the same model on what was measured: predicted / measured - 1"
    columns = ("variant", "ranks", ">rows", ">median size", ">lowest", ">highest", "worst case")
    console.print(make_table(title, columns, rows))
    real = [deviation for deviation in found if not deviation.emulated]
    if real:
        worst = _worst(real)
        console.print(
            f"median size of the error on {len(real)} measured rows: {median_size(each.error for each in real)}; "
            f"the largest: {100 * worst.error:+.1f} %, {worst.variant} of {worst.case} M={worst.M}"
        )
        if abs(worst.error) > _ALARMING:
            console.print("which way is the best may be predicted wrongly where such cases lie: measure there")


def _worst(found: Sequence[Deviation]) -> Deviation:
    return max(found, key=lambda deviation: abs(deviation.error))


def _print_comparisons(comparisons: Sequence[Comparison], path: str) -> None:
    rows = []
    for entry in comparisons:
        row = [entry.case, str(entry.M), str(entry.group_size), entry.variant, f"{entry.measured_ms:.3f}"]
        for ms, error in ((entry.emulated_ms, entry.emulation_error), (entry.predicted_ms, entry.prediction_error)):
            row += ["", ""] if ms is None or error is None else [f"{ms:.3f}", f"{100 * error:+.1f} %"]
        rows.append(row)
    columns = ("case", ">M", ">ranks", "variant", ">measured ms", ">emulated", ">error", ">predicted", ">error")
    console = results()
    console.print(make_table(f"measured rows of {path}: error of the emulation, of the model", columns, rows))
    for name, found in (
        ("emulation", [entry.emulation_error for entry in comparisons]),
        ("model", [entry.prediction_error for entry in comparisons]),
    ):
        errors = [error for error in found if error is not None]
        if errors:
            console.print(say_errors(f"the {name}", errors))


def _print_predictions(predictions: Sequence[Sequence[Prediction]], machines: Machines) -> None:
    rows = [
        (
            best.case,
            str(best.M),
            str(best.group_size),
            *(f"{ms:.3f}" for ms in (best.compute_ms, best.comm_ms, best.sequential_ms, best.ms)),
            f"{best.ms / best.sequential_ms:.3f}",
            f"{100 * max(best.compute_ms, best.comm_ms) / best.ms:.1f} %",
            best.variant,
            best.limit,
        )
        for best, *_ in predictions
    ]
    numbers = ("M", "ranks", "compute", "comm", "sequential", "best", "/ sequential", "of ideal")
    columns = ("case", *(f">{name}" for name in numbers), "best way", "limited by")
    title = f"predicted, not measured: forward pass, ms per call, {machines.device}, link {machines.link}"
    console = results()
    console.print(make_table(title, columns, rows))
    console.print(
        "compute: one un-split GEMM; comm: transfers alone; best: the fastest way; of ideal: the longer of compute and"
        " comm / best\nlimited by, what the best way's time is made of:"
    )
    limits = {ways[0].limit for ways in predictions}
    for limit, meaning in LIMITS.items():
        if limit in limits:
            console.print(f"  - {limit}: {meaning}")
    if "copy_engine" in machines.by_transport and any(ways[0].group_size > RANKS_OF_A_NODE for ways in predictions):
        console.print("the copy engine and this link beyond one node assume that all ranks share one NVLink domain")
