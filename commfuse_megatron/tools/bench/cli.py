"""`commfuse bench`: our linears beside their lower bounds, stock and the peers, as a table, rows and a picture."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from commfuse_megatron.config import CONFIG_VARIABLE, config_file_from_environment
from commfuse_megatron.tools.bench import tables
from commfuse_megatron.tools.bench.figure import draw_rows
from commfuse_megatron.tools.bench.plans import require_plans_alone, run_write_plans
from commfuse_megatron.tools.bench.report import run_report
from commfuse_megatron.tools.bench.rows import Report, Row, load_report
from commfuse_megatron.tools.bench.summary import Summary, check_limits, parse_limits, summarize
from commfuse_megatron.tools.common.cases import CPU_SHRINK, FULL_M, KINDS, LINEARS, PASSES
from commfuse_megatron.tools.common.launch import launch
from commfuse_megatron.tools.common.options import add_rank_options, for_ranks, refuse_given, require_positive
from commfuse_megatron.tools.common.output import each_once, make_progress, results, say_count
from commfuse_megatron.tools.common.ranks import Rank, UsageError, choose_several_ranks, is_speaker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from commfuse_megatron.tools.bench.run import Outcome, Piece, Settings

SUMMARY = "time the linears beside their lower bounds, the stock ones and the peers; on the CPU, check them only"
EXAMPLE = """commfuse bench --models llama-8b --tokens 1024
  torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda --budget-s 300 --json rows.json
  torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda --write-plans plans.json"""

MAX_ROWS_SHOWN = 200
MAX_OFFENDERS_SHOWN = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `commfuse bench` takes besides ranks and device. Imports no torch."""
    add_rank_options(parser)
    add = parser.add_argument
    of_linears, _, of_attention, of_ulysses = (", ".join(kind.models) for kind in KINDS.values())
    models = f"of {of_linears}; with --attention of {of_attention}; with --ulysses of {of_ulysses}"
    known = each_once(model for kind in KINDS.values() for model in kind.models)
    add_kind = parser.add_mutually_exclusive_group().add_argument
    add_kind("--all-reduce", action="store_true", help="linears without sequence parallelism, in the pass that sends")
    add_kind("--attention", action="store_true", help="attention with its projection instead of linears")
    add_kind(
        "--ulysses", action="store_true", help="attention over a sequence split over all ranks, between its linears"
    )
    add("--models", nargs="+", choices=known, metavar="MODEL", help=models)
    add("--linears", nargs="+", choices=LINEARS, default=list(LINEARS), metavar="L", help=f"of {', '.join(LINEARS)}")
    add("--tokens", nargs="+", type=int, metavar="M", help="of the whole sequence; the paper's cases have their own")
    add(
        "--passes",
        nargs="+",
        choices=PASSES,
        default=list(PASSES),
        metavar="P",
        help="fprop, backward (default both; of blocks with attention in emulated groups fprop)",
    )
    what = "only variants whose names begin with such words, and the lower bounds"
    add("--variants", nargs="+", default=[], metavar="NAME", help=what)
    what = (
        "chunks or splits per shard, or groups of heads, forced, with all variants in every case (default 1 2 4; of"
        f" linears at M {' and '.join(map(str, FULL_M))} only)"
    )
    add("--chunks", nargs="+", type=int, default=[], metavar="m", help=what)
    what = "configurations of yours, each one more variant (default: $COMMFUSE_CONFIG)"
    add("--config", nargs="+", default=[], metavar="FILE", help=what)
    add("--virtual-ranks", nargs="+", type=int, default=[], metavar="V", help="emulate groups of V on two ranks")
    add("--rounds", type=int, default=9, help="samples of every variant (default 9)")
    add("--case-s", type=float, default=1.5, help="about how long the rounds of a case may take (default 1.5)")
    add("--budget-s", type=float, metavar="S", help="start no case that would end S seconds after the first began")
    add("--shrink", type=int, metavar="F", help=f"divide all sizes by F (default 1; {CPU_SHRINK} on the CPU)")
    add("--figure", metavar="FILE", help="draw the rows into FILE (.png or .svg); missing folders are made")
    add("--resume", action="store_true", help="keep the rows of --json FILE and run what is not in there")
    add("--check", nargs="+", default=[], metavar="NAME=MOST", help="exit 1 if a figure is larger, e.g. ideal=1.1")
    what = (
        "time nothing else: plan both passes of every case of --models and keep the plans in FILE, for jobs with"
        " `plan.file`; missing folders are made. A model of your own fills its file itself: run a job of it once with"
        " `plan.file`"
    )
    add("--write-plans", metavar="FILE", help=what)
    what = "measure nothing: make the tables of these Markdown files anew, each from the file of rows that it names"
    add("--report", nargs="+", metavar="FILE", help=what)
    add("--commit", help="written into the rows (default: asked from git)")


def run(arguments: argparse.Namespace) -> int:
    """Run the grid. 0: all that ran was right; 1: a result was wrong, a path not taken, a limit missed; 2: none ran."""
    if arguments.report:
        return run_report(arguments)

    import torch

    from commfuse_megatron.tools.bench.run import Settings, require_work

    num_ranks = choose_several_ranks(arguments.ranks)
    _require_sense(arguments, num_ranks)
    limits = parse_limits(arguments.check)
    is_gpu, kind = arguments.device == "cuda", _kind_of(arguments)
    asked: dict[str, Any] = {name: each_once(v) if isinstance(v, list) else v for name, v in vars(arguments).items()}
    asked |= {
        "kind": kind,
        "models": asked["models"] or KINDS[kind].models,
        "tokens": asked["tokens"] or KINDS[kind].tokens,
        "config_files": () if arguments.write_plans else each_once(_config_files(arguments)),
        "rounds": arguments.rounds if is_gpu else 1,
        "shrink": arguments.shrink or (1 if is_gpu else CPU_SHRINK),
    }
    settings = Settings(**{field.name: asked[field.name] for field in fields(Settings)})
    require_work(settings, torch.device(arguments.device), num_ranks)
    if arguments.write_plans:
        return run_write_plans(arguments, settings, num_ranks)
    if arguments.resume and is_speaker() and Path(arguments.json).exists():
        _require_same_columns(settings, num_ranks, load_report(Path(arguments.json))[0], arguments.json)
    options = for_ranks(arguments, settings=settings, limits=limits)
    return launch(_bench_on_rank, options, num_ranks=num_ranks, device_type=arguments.device)


def _config_files(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The files of `--config`, else the environment's."""
    from_environment = config_file_from_environment()
    kind = _kind_of(arguments)
    if from_environment and (kind != "linears" or arguments.virtual_ranks):
        option = "--virtual-ranks" if kind == "linears" else f"--{kind}"
        raise UsageError(
            f"{CONFIG_VARIABLE} is {from_environment}; {option} has fixed variants, none of a configuration: unset it"
        )
    return tuple(arguments.config) or ((from_environment,) if from_environment else ())


def _require_sense(arguments: argparse.Namespace, num_ranks: int) -> None:
    """Before any rank starts: what could only end in an error later."""
    require_positive(arguments, ("tokens", "chunks", "rounds", "shrink", "virtual_ranks"))
    for option, seconds in (("--case-s", arguments.case_s), ("--budget-s", arguments.budget_s)):
        if seconds is not None and not 0 <= seconds < math.inf:
            raise UsageError(f"{option} must be a time in seconds, got {seconds}")
    if arguments.virtual_ranks and (num_ranks != 2 or min(arguments.virtual_ranks) < 2):
        raise UsageError("--virtual-ranks emulates groups of 2 and more on exactly two ranks: use --ranks 2")
    if arguments.virtual_ranks:
        _require_emulated(arguments)
    if arguments.write_plans:
        require_plans_alone(arguments)
    _require_models(arguments)
    if arguments.resume and not arguments.json:
        raise UsageError("--resume needs the --json FILE to go on with")
    if arguments.device == "cpu" and (arguments.check or arguments.figure):
        raise UsageError("times from a CPU are neither compared nor drawn: --check and --figure need --device cuda")


def _require_emulated(arguments: argparse.Namespace) -> None:
    if arguments.all_reduce:
        raise UsageError("--all-reduce: no larger groups are emulated for it; leave it or --virtual-ranks out")
    if arguments.config:
        raise UsageError("--config: an emulated group runs fixed variants; leave it or --virtual-ranks out")
    if _kind_of(arguments) != "linears" and "fprop" not in arguments.passes:
        raise UsageError(
            f"--passes: an emulated group runs --{_kind_of(arguments)} forward only; add fprop, or leave"
            " --virtual-ranks out"
        )
    if arguments.chunks and not (arguments.ulysses or (arguments.attention and arguments.device == "cuda")):
        raise UsageError(
            "--chunks: emulated groups run one per shard, but for --ulysses, and --attention on --device cuda; leave it"
            " or --virtual-ranks out"
        )


def _kind_of(arguments: argparse.Namespace) -> str:
    """What is timed, as in `Settings`."""
    given = [kind for kind in KINDS if getattr(arguments, kind.replace("-", "_"), None) is True]
    return given[0] if given else "linears"


def _require_models(arguments: argparse.Namespace) -> None:
    kind = _kind_of(arguments)
    known = KINDS[kind].models
    unknown = [model for model in arguments.models or () if model not in known]
    if unknown:
        what = "linears" if kind in ("linears", "all-reduce") else "attention blocks"
        raise UsageError(f"there are no {what} of {', '.join(unknown)}; known are {', '.join(known)}")
    if arguments.tokens and all(model.startswith("paper") for model in arguments.models or ("any",)):
        raise UsageError("--tokens: the paper's cases have their own; leave it out, or name another model")
    if kind != "linears":
        of_linears = ["check", "figure"] + ["config"] * (not arguments.write_plans)
        of_linears += ["linears"] * (kind != "all-reduce")
        refuse_given(arguments, of_linears, f"{{}}: for linears, not for --{kind}")


def _require_same_columns(settings: Settings, num_ranks: int, header: dict[str, Any], file: str) -> None:
    """Raise UsageError where the cases of `file` were measured with other variants, which would count as done, or are
    of another kind or number of ranks, which its header says of all."""
    before = header.get("settings", {})
    compared: list[tuple[str, Any, Any]] = [
        ("cases of", before.get("kind", settings.kind), settings.kind),
        ("--ranks", header.get("ranks", num_ranks), num_ranks),
    ]
    for name, option in (("variants", "--variants"), ("chunks", "--chunks"), ("config_files", "--config")):
        compared.append((option, before.get(name, ()), getattr(settings, name)))
    for option, *values in compared:
        found, asked = (list(each) if isinstance(each, list | tuple) else [each] for each in values)
        if found != asked:
            was, now = (" ".join(map(str, values)) or "none" for values in (found, asked))
            raise UsageError(
                f"--resume: {file} has {option} {was}, and this is {option} {now}: go on with the same,"
                " or write another file"
            )


def _bench_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    from torch import distributed as dist

    from commfuse_megatron.tools.bench.assemble import run_header, this_commit
    from commfuse_megatron.tools.bench.run import Piece, grid, run_grid

    device, settings = rank.device, options.settings
    path = None if options.json is None else Path(options.json)
    # All ranks must skip the same pieces, but only the first one's file counts.
    goes_on = rank.is_first and options.resume and path is not None and path.exists()
    kept: list[Any] = [load_report(path) if goes_on and path is not None else ({}, [])]
    dist.broadcast_object_list(kept)
    before, rows_before = kept[0]
    header = run_header(device, rank.world_size, settings.commit or this_commit())
    here = (settings.shrink, header["link"], header["device"])
    done = {
        Piece(row.case, row.M * row.shrink, row.pass_name, row.group_size, row.emulated)
        for row in rows_before
        if (row.shrink, row.link, row.device) == here
    }
    pieces = [piece for piece in grid(settings, rank.world_size) if piece not in done]
    waiting = {str(piece): f"{piece}: not reached" for piece in pieces}
    still_missing = [text for text in before.get("missing", []) if text.partition(":")[0] not in waiting]
    header["settings"] = _settings_of_all(settings, before.get("settings", {}))
    # Until the end, for whoever interrupts this.
    header["missing"] = [*still_missing, *waiting.values()]
    header["left_out"], header["failures"] = before.get("left_out", {}), before.get("failures", [])
    report = Report(path if rank.is_first else None, header, rows_before)
    with make_progress(is_shown=rank.is_first) as progress:
        task = progress.add_task("measuring" if device.type == "cuda" else "checking", total=len(pieces))

        def add_rows(piece: Piece, rows: list[Row]) -> None:
            waiting.pop(str(piece), None)
            header["missing"] = [*still_missing, *waiting.values()]
            report.add(rows)
            progress.update(task, advance=1, description=str(piece))

        def note(text: str) -> None:
            if rank.is_first:
                progress.console.print(escape(text))

        outcome = run_grid(pieces, rank.group, device, settings, on_rows=add_rows, on_note=note)
    failures: list[Any] = [None] * rank.world_size
    dist.all_gather_object(failures, outcome.failures)
    outcome.failures = list(each_once(failure for own in [header["failures"], *failures] for failure in own))
    outcome.missing = [*still_missing, *outcome.missing]
    outcome.left_out = header["left_out"] | outcome.left_out
    header |= asdict(outcome)
    report.write()
    # Every rank has the same rows, so all come to the same exit code; the first one says why.
    exit_code = _conclude(report.rows, outcome, options, is_first=rank.is_first)
    not_run = configurations_without_rows(settings.config_files, report.rows) if pieces else []
    if not_run and rank.is_first:
        results().print(f"[red]not run[/] {escape(', '.join(not_run))}: see what was left out", soft_wrap=True)
    is_empty = bool(pieces) and len(report.rows) == len(rows_before)
    return exit_code or (2 if is_empty or not_run else 0)


def _settings_of_all(settings: Settings, before: dict[str, Any]) -> dict[str, Any]:
    """Of the rows that there will be: what lists name was measured by this call or by those before it."""
    return {
        name: each_once([*before.get(name, ()), *value]) if isinstance(value, tuple) else value
        for name, value in asdict(settings).items()
    }


def configurations_without_rows(config_files: Iterable[str], rows: Iterable[Row]) -> list[str]:
    """Names of a user's configurations, as in the rows, of which nothing ran."""
    found = {row.variant for row in rows}
    return [name for name in (Path(file).stem for file in config_files) if name not in found]


def _conclude(rows: list[Row], outcome: Outcome, options: argparse.Namespace, *, is_first: bool) -> int:
    summary = summarize(rows)
    complaints = check_limits(summary, options.limits)
    if is_first:
        _print_rows(rows, summary)
        _print_outcome(rows, outcome)
        _print_each("[red]missed[/]", complaints)
        if options.figure:
            results().print(f"drawn: {draw_rows(options.figure, rows)}")
    return 1 if outcome.failures or complaints else 0


def _print_rows(rows: list[Row], summary: Summary) -> None:
    console = results()
    timed = [row for row in rows if row.is_comparable]
    if len(timed) < len(rows):
        console.print(tables.checked_table([row for row in rows if not row.is_comparable]))
    if timed and len(timed) <= MAX_ROWS_SHOWN:
        console.print(tables.rows_table(timed))
    of_blocks = {"query_split_attention": tables.attention_table, "ulysses_attention": tables.ulysses_table}
    for op, make_its_table in of_blocks.items():
        blocks = [row for row in timed if row.op == op]
        if blocks:
            console.print(make_its_table(blocks))
    linears = [row for row in timed if row.is_linear]
    if linears:
        console.print(tables.overview_table(linears))
        console.print(tables.summary_table(summary))
        slower = [(ratio, row) for ratio, row in summary.offenders if ratio > 1]
        console.print(f"planned is slower than stock in {len(slower)} of {len(summary.offenders)} cases")
        for ratio, row in slower[:MAX_OFFENDERS_SHOWN]:
            console.print(f"    {ratio:.3f}  {row.case} M={row.M} {row.pass_name}: {row.path}, {escape(row.reason)}")


def _print_outcome(rows: list[Row], outcome: Outcome) -> None:
    _print_each("[yellow]left out[/]", (f"{variant}: {reason}" for variant, reason in outcome.left_out.items()))
    _print_each("[yellow]missing[/]", outcome.missing)
    _print_each("[red]failed[/]", outcome.failures)
    shrunk = sorted({row.shrink for row in rows} - {1})
    if shrunk:
        results().print(f"sizes are the models' divided by {' and '.join(map(str, shrunk))} (--shrink)")
    results().print(
        f"{say_count(len(rows), 'row')} of {say_count(len({row.problem for row in rows}), 'case')},"
        f" {len(outcome.missing)} missing, {say_count(len(outcome.left_out), 'variant')} left out,"
        f" {len(outcome.failures)} failed"
    )


def _print_each(word: str, texts: Iterable[str]) -> None:
    for text in texts:
        results().print(f"{word} {escape(text)}")
