"""`commfuse simulate`: what larger groups and slower links would take, from rows that `commfuse bench` measured.

Needs no GPU and no ranks, only the file. No linear is predicted without measurements, and every prediction stands
beside the error that the same model makes on the rows it can be checked with. Whole steps are `step_cli`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from commfuse_megatron.tools.common.options import refuse_given, require_positive
from commfuse_megatron.tools.common.output import each_once, make_progress, make_table, results, write_json
from commfuse_megatron.tools.common.ranks import UsageError

if TYPE_CHECKING:
    from commfuse_megatron.plan.machine import Channel, HostTimes
    from commfuse_megatron.tools.bench.rows import Row
    from commfuse_megatron.tools.simulate.fit import Machines
    from commfuse_megatron.tools.simulate.predict import Comparison, Deviation, Prediction
    from commfuse_megatron.tools.simulate.predict_step import StepMachine

SUMMARY = "predict larger groups and slower links from measured rows, and say how wrong that is where measured"
EXAMPLE = """commfuse simulate --rows rows.json --ranks 8 16 64 --link 25
  commfuse simulate --step llama-70b --ranks 2 4 8 --tokens 4096 8192"""

RANKS_OF_A_NODE = 8
_RANKS, _RANKS_OF_STEPS = (8, 16, 64), (2, 4, 8, 16)

# NCCL's transfers take up to 20 of them.
_FEWEST_SMS = 40
_MOST_RANKS = 256

# An error that turns which of two ways is faster.
_ALARMING = 0.2


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `commfuse simulate`. Imports no torch."""
    from commfuse_megatron.tools.common.cases import LINEARS, STEP_LAYERS

    models = list(dict.fromkeys(name.split(".")[0] for name in _selectable_linears()))
    add = parser.add_argument
    rows = (
        "rows that `commfuse bench --json FILE` measured on GPUs; with --step, the machine that steps are predicted for"
    )
    add("--rows", metavar="FILE", help=f"{rows} (default: H200 and NVLink as the planner assumes them)")
    against = "rows of a larger group on such a machine: how wrong emulation and model are; with --step, of steps that"
    add("--against", metavar="FILE", help=f"{against} `commfuse trace --step --json FILE` measured (default: ours)")
    add(
        "--ranks",
        nargs="+",
        type=int,
        metavar="N",
        help="group sizes (default 8 16 64; with --step 2 4 8 16)",
    )
    add("--link", metavar="LINK", help="nvlink or host, as in the rows, or a bandwidth in GB/s per rank and direction")
    add("--models", nargs="+", choices=models, default=models, metavar="MODEL", help=f"of {', '.join(models)}")
    add("--linears", nargs="+", choices=LINEARS, default=list(LINEARS), metavar="L", help=f"of {', '.join(LINEARS)}")
    add("--tokens", nargs="+", type=int, default=[8192], metavar="M", help="of the whole sequence (default 8192)")
    add("--figure", metavar="FILE", help="draw the predictions into FILE (.png or .svg); missing folders are made")
    step = ", ".join(STEP_LAYERS)
    add(
        "--step",
        choices=STEP_LAYERS,
        metavar="MODEL",
        help=f"whole training steps of MODEL, of {step}, and the error on those that were measured; needs no rows",
    )
    add("--layers", type=int, metavar="N", help="with --step: layers of the model (default: as published)")


def _selectable_linears() -> list[str]:
    from commfuse_megatron.tools.common.cases import CASE_NAMES

    return [name for name in CASE_NAMES if not name.startswith("paper-mlp.")]


def run(arguments: argparse.Namespace) -> int:
    """Fit, check, predict, print. 0: done; 2: measurements are missing."""
    arguments.ranks = each_once(arguments.ranks or (_RANKS if arguments.step is None else _RANKS_OF_STEPS))
    arguments.tokens = each_once(arguments.tokens)
    _check_sizes(arguments)
    if arguments.step is not None:
        from commfuse_megatron.tools.simulate.step_cli import run_simulate_step

        refuse_given(arguments, ("models", "linears", "figure"), "--step predicts a whole model; leave out")
        return run_simulate_step(arguments, _step_machine(arguments))
    from commfuse_megatron.tools.simulate.predict import cases_of, deviations, predict

    refuse_given(arguments, ("layers",), "is for --step:")
    if arguments.rows is None:
        raise UsageError(
            "no measurements: name a file of rows with --rows FILE. On two or more GPUs of one host,\n"
            "  torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda --json FILE\n"
            "measures the GEMMs, messages and collectives that predictions start from."
        )
    machines, rows = _read_machines(Path(arguments.rows), arguments.link)
    names = [f"{model}.{linear}" for model in each_once(arguments.models) for linear in each_once(arguments.linears)]
    cases = cases_of(names, arguments.tokens, arguments.ranks)
    found = deviations(rows, machines)
    comparisons = _compare(arguments.against, rows, machines, set(_selectable_linears()) - set(names))
    predictions: list[list[Prediction]] = []
    with make_progress() as progress:
        task = progress.add_task("simulating", total=len(cases))
        for case in cases:
            predictions.append(predict(case, machines))
            progress.advance(task)
    if arguments.json:
        data = {
            "rows": str(arguments.rows),
            "machines": asdict(machines),
            "deviations": [deviation.as_json() for deviation in found],
            "against": [comparison.as_json() for comparison in comparisons],
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


def _check_sizes(arguments: argparse.Namespace) -> None:
    if min(arguments.ranks) < 2:
        raise UsageError(f"--ranks must be at least 2, got {min(arguments.ranks)}")
    if max(arguments.ranks) > _MOST_RANKS:
        largest = f"{_MOST_RANKS}, got {max(arguments.ranks)}"
        raise UsageError(f"--ranks must be at most {largest}: every step of a rank is simulated")
    require_positive(arguments, ("layers",))
    if min(arguments.tokens) < 1:
        raise UsageError(f"--tokens must be at least 1, got {min(arguments.tokens)}")


def _step_machine(arguments: argparse.Namespace) -> StepMachine:
    """Where steps are predicted: on the machine of the rows, where there are some, else as the planner assumes it."""
    from commfuse_megatron.plan.machine import ASSUMED_DEVICE, Traits, assumed_machine
    from commfuse_megatron.tools.simulate.fit import DTYPE
    from commfuse_megatron.tools.simulate.predict_step import StepMachine

    if arguments.rows is not None:
        machines, _ = _read_machines(Path(arguments.rows), arguments.link)
        model = machines.by_transport.get("copy_engine", machines.any)
        return StepMachine(machines.device, machines.link, lambda group_size: model)
    if _bandwidth(arguments.link) is not None:
        raise UsageError(f"--link {arguments.link}: of a bandwidth only --rows tells the rest; name such a file")
    link = arguments.link or "nvlink"
    traits = Traits(transport="copy_engine", adds_in_epilogue=True, replays=True)
    if link == "host":
        traits = Traits(transport="nccl", transfer_sms=4)
    return StepMachine(ASSUMED_DEVICE, link, lambda group_size: assumed_machine(traits, DTYPE, group_size=group_size))


def _read_machines(path: Path, link: str | None) -> tuple[Machines, list[Row]]:
    """The models for `link`, and the measured rows that they can be checked with."""
    from commfuse_megatron.errors import ConfigError
    from commfuse_megatron.tools.bench.rows import load_report
    from commfuse_megatron.tools.simulate.fit import fit_machines

    header, rows = load_report(path)
    rows = [row for row in rows if row.is_comparable]
    if not rows:
        raise ConfigError(f"{path} has no rows from GPUs: times from a CPU predict nothing")
    _require_dtype(rows, path)
    bandwidth_gb_s = _bandwidth(link)
    measured_links = sorted({row.link for row in rows}, reverse=True)
    base = measured_links[0] if link is None or bandwidth_gb_s is not None else link
    if base not in measured_links:
        raise ConfigError(f"--link {link}: {path} has rows of {', '.join(measured_links)} only; measure that link too")
    device = next(row.device for row in rows if row.link == base)
    sms = header.get("multiprocessors", 132)
    if not isinstance(sms, int) or sms < _FEWEST_SMS:
        raise ConfigError(f"{path} is of a GPU with {sms} SMs: what is predicted from takes {_FEWEST_SMS} and more")
    machines = fit_machines(rows, device=device, link=base, sms=sms)
    if bandwidth_gb_s is None:
        return machines, rows
    nccl = machines.by_transport.get("nccl")
    if nccl is None:
        why = machines.left_out.get("nccl", "it has no rows of it")
        raise ConfigError(f"--link {link}: nccl serves such links, and {path} gives no model for it: {why}")
    # GEMMs and latencies as measured; only the link is another. No measured row can check that.
    slow = dataclasses.replace(
        nccl,
        link=dataclasses.replace(nccl.link, bandwidth_gb_s=bandwidth_gb_s),
        collective=dataclasses.replace(nccl.collective, bandwidth_gb_s=bandwidth_gb_s),
    )
    return dataclasses.replace(machines, link=f"{bandwidth_gb_s:g} GB/s", by_transport={"nccl": slow}), rows


def _compare(path: str | None, rows: list[Row], machines: Machines, left_out: Collection[str]) -> list[Comparison]:
    from commfuse_megatron.tools.bench.rows import load_report
    from commfuse_megatron.tools.simulate.predict import compare

    if path is None:
        return []
    measured = load_report(Path(path))[1]
    _require_dtype(measured, path)
    comparisons = compare(measured, rows, machines, left_out)
    if not comparisons:
        raise UsageError(
            f"--against {path}: of these models and linears no forward rows of {machines.device} over {machines.link} "
            "that were emulated or can be predicted; rows of other machines and links are not compared"
        )
    return comparisons


def _require_dtype(rows: Iterable[Row], path: Path | str) -> None:
    from commfuse_megatron.errors import ConfigError
    from commfuse_megatron.tools.simulate.fit import DTYPE

    others = sorted({row.dtype for row in rows} - {DTYPE})
    if others:
        raise ConfigError(f"{path} has rows of {', '.join(others)}: what is predicted is {DTYPE}")


def _bandwidth(link: str | None) -> float | None:
    from commfuse_megatron.errors import ConfigError

    if link in (None, "nvlink", "host"):
        return None
    assert link is not None
    try:
        bandwidth_gb_s = float(link)
    except ValueError:
        bandwidth_gb_s = -1.0
    if not 0 < bandwidth_gb_s < float("inf"):
        raise ConfigError(f"--link {link}: write nvlink, host or a positive number of GB/s")
    return bandwidth_gb_s


def _print_machines(machines: Machines) -> None:
    gemm, collective = machines.any.gemm, machines.any.collective
    models = {
        "GEMMs": f"{gemm.launch_us:.1f} us + waves of tiles at {gemm.tflops:.0f} TFLOP/s",
        **{f"messages, {name}": _say_channel(each.link) for name, each in machines.by_transport.items()},
        "the group's collectives": _say_channel(collective),
    }
    for name, each in machines.by_transport.items():
        models[f"host, {name}"] = _say_host(each.replay if each.traits.replays else each.host)
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


def _say_host(host: HostTimes) -> str:
    return f"{host.call_us:.0f} us + GEMMs x {host.gemm_us:.0f} us + messages x {host.transfer_us:.0f} us"


def _say_channel(channel: Channel) -> str:
    return f"{channel.latency_us:.1f} us + bytes / {channel.bandwidth_gb_s:.0f} GB/s"


def _print_deviations(found: Sequence[Deviation]) -> None:
    from commfuse_megatron.tools.simulate.predict import median_size

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
        worst = max(members, key=lambda deviation: abs(deviation.error))
        figures = (f"{100 * value:+.1f} %" for value in (min(errors), max(errors)))
        size = f"{100 * median_size(errors):.1f} %"
        rows.append((*key, str(len(members)), size, *figures, f"{worst.case} M={worst.M}"))
    title = "the same model on what was measured: predicted / measured - 1"
    columns = ("variant", "ranks", ">rows", ">median size", ">lowest", ">highest", "worst case")
    console.print(make_table(title, columns, rows))
    real = [deviation for deviation in found if not deviation.emulated]
    if real:
        worst = max(real, key=lambda deviation: abs(deviation.error))
        size = f"{100 * median_size(deviation.error for deviation in real):.1f} %"
        console.print(
            f"median size of the error on {len(real)} measured rows: {size}; "
            f"the largest: {100 * worst.error:+.1f} %, {worst.variant} of {worst.case} M={worst.M}"
        )
        if abs(worst.error) > _ALARMING:
            console.print("which way is the best may be predicted wrongly where such cases lie: measure there")


def _print_comparisons(comparisons: Sequence[Comparison], path: str) -> None:
    from commfuse_megatron.tools.simulate.predict import median_size

    rows = [
        (
            entry.case,
            str(entry.M),
            str(entry.group_size),
            entry.variant,
            f"{entry.measured_ms:.3f}",
            *_say(entry.emulated_ms, entry.emulation_error),
            *_say(entry.predicted_ms, entry.prediction_error),
        )
        for entry in comparisons
    ]
    columns = ("case", ">M", ">ranks", "variant", ">measured ms", ">emulated", ">error", ">predicted", ">error")
    console = results()
    console.print(make_table(f"measured rows of {path}: error of the emulation, of the model", columns, rows))
    for name, errors in (
        ("emulation", [e.emulation_error for e in comparisons if e.emulation_error is not None]),
        ("model", [e.prediction_error for e in comparisons if e.prediction_error is not None]),
    ):
        if errors:
            size, largest = 100 * median_size(errors), 100 * max(map(abs, errors))
            console.print(f"median size of the error of the {name}: {size:.1f} %; the largest: {largest:.1f} %")


def _say(ms: float | None, error: float | None) -> tuple[str, str]:
    return ("", "") if ms is None or error is None else (f"{ms:.3f}", f"{100 * error:+.1f} %")


def _print_predictions(predictions: Sequence[Sequence[Prediction]], machines: Machines) -> None:
    from commfuse_megatron.tools.simulate.predict import LIMITS

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
