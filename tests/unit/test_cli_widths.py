"""What the commands print, on narrow terminals, into a pipe and in other encodings: every value, whole.

The commands are run as one rank runs them, with results at hand in place of those that ranks would find.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import distributed as dist

from commfuse_megatron import OpRecord, OverlapConfig
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools import main as cli
from commfuse_megatron.tools.bench import cli as bench
from commfuse_megatron.tools.bench.rows import Report, Row
from commfuse_megatron.tools.bench.run import Outcome, Settings
from commfuse_megatron.tools.common import output
from commfuse_megatron.tools.common.cases import FREE, PLANNED, STOCK, attention_case, linear_case
from commfuse_megatron.tools.common.ranks import Rank
from commfuse_megatron.tools.demo import report as demo
from commfuse_megatron.tools.demo.training import Comparison, Run
from commfuse_megatron.tools.doctor.gpus import Gpu, GpuLink
from commfuse_megatron.tools.doctor.machine import Ability, Machine, Setting
from commfuse_megatron.tools.trace import reports as trace
from commfuse_megatron.tools.trace.operation import BlockTrace, LinearTrace
from commfuse_megatron.tools.trace.whole_step import StepTimes, StepTrace
from commfuse_megatron.tools.verify import report as verify
from commfuse_megatron.tools.verify.cases import make_cases
from commfuse_megatron.tools.verify.megatron_models import ModelResult
from commfuse_megatron.tools.verify.ops import CaseResult, Deviation
from tests.unit.test_cli import subcommands
from tests.unit.test_predictions import a_row, measured_rows

# --- commands that have their results already -------------------------------------------------------------------------

FIRST = Rank(0, 1, "cpu")
INTERVALS = {
    0: [
        Interval("multiply", "compute", 0.0, 123456.7, 0, "attention", 1),
        Interval("send", "transfer", 1.0, 234567.8, 0, "transfer", 1),
    ]
}
Set = Callable[[str, object], None]


def a_record(**changes: object) -> OpRecord:
    values = {
        "op": "linear_reduce_scatter", "pass_name": "backward", "M": 131072, "N": 28672, "K": 28672,
        "dtype": "bfloat16", "group_size": 2, "path": "sliced", "reason": "asked for", "algorithm": "direct",
        "chunks_per_shard": 16, "transport": "copy_engine", "gemm": "persistent", "calls": 12345,
        "exposed_comm_us": 98765.0,
    }  # fmt: skip
    return OpRecord(**(values | changes))  # type: ignore[arg-type]


def run_verify(place: Path, put: Set) -> int:
    found = []
    for number, case in enumerate(make_cases(2, "cpu")):
        tensors = [
            Deviation(tensor=name, max_error=number % 7 + at, allowed=8.0) for at, name in enumerate(verify.TENSORS)
        ]
        complaints = ("x.grad is wrong",) if number % 50 == 0 else ()
        found.append(
            CaseResult(
                case=case,
                deviations=tuple(tensors),
                paths=("sliced", "sequential"),
                transport="gloo",
                gemms=("torch",),
                modes={"stepped": 1234, "tape": 567, "graph": 8901},
                complaints=complaints,
            )
        )
    put("commfuse_megatron.tools.verify.report.verify_ops", lambda *_, **__: found)
    options = argparse.Namespace(json=str(place / "out.json"), dtype=None, transport="auto")
    return verify.verify_ops_on_rank(FIRST, options)


def run_verify_megatron(place: Path, put: Set) -> int:
    values = {
        "layout": "TP2 x CP2 x PP2", "loss_error": 1.2e-15, "gradient_error": 3.4e-14, "num_gradients": 123,
        "gradient": "decoder.layers.0.mlp.experts.linear_fc1.weight", "parameter_error": None, "parameter": "",
        "overlapped": 1280, "backward": 1240, "stock": {"sequence_parallel is off": 40},
    }  # fmt: skip
    names = ("dense", "sequence_parallel_off", "mla_with_a_long_name_of_its_own")
    found = [ModelResult(name=name, **values) for name in names]  # type: ignore[arg-type]
    put("commfuse_megatron.testing.cpu_megatron", contextlib.nullcontext)
    put("commfuse_megatron.tools.verify.report.choose", lambda *_, **__: ["dense"])
    put("commfuse_megatron.tools.verify.report.verify_models", lambda *_, **__: found)
    options = argparse.Namespace(json=str(place / "out.json"), only=["dense"], lora=False, verbose=True)
    return verify.verify_models_on_rank(FIRST, options)


def run_demo(place: Path, put: Set) -> int:
    op = {name: getattr(a_record(), name) for name in OpRecord.__dataclass_fields__}
    stepped = Run(
        loss=(5.123456789, 4.987654323),
        ops=(op, op | {"pass_name": "fprop", "algorithm": "ring", "chunks_per_shard": 2}),
        layers=({"name": "decoder", "overlapped_calls": 3},),
        gradient="module.decoder.layers.1.self_attention.linear_qkv.weight",
        gradient_error=1.23e-4,
    )
    graph = dataclasses.replace(stepped, ops=(op | {"modes": {"tape": 321, "graph": 98765}},))
    found = Comparison(
        stock_loss=(5.123456789, 4.987654321), runs={"stepped": stepped, "graph": graph}, recording=INTERVALS
    )
    put("commfuse_megatron.tools.demo.report.train_both", lambda *_, **__: found)
    put("commfuse_megatron.tools.demo.report.complaints_of", lambda *_: [])
    options = argparse.Namespace(
        steps=2, dtype="float32", text=b"text" * 100, output=str(place), json=str(place / "out.json")
    )
    return demo.demo_on_rank(FIRST, options)


def traces(place: Path, **changes: object) -> argparse.Namespace:
    files = {"output": str(place), "name": "x", "json": str(place / "out.json")}
    return argparse.Namespace(dtype="float32", config=OverlapConfig(), calls=2, profiler=False, **files, **changes)


def run_trace(place: Path, put: Set) -> int:
    found = LinearTrace(recording=INTERVALS, record=a_record())
    put("commfuse_megatron.tools.trace.reports.trace_linear", lambda *_, **__: found)
    options = traces(place, op="linear_reduce_scatter", case=None, M=8, N=8, K=8, pass_name="backward")
    return trace.linear_on_rank(FIRST, options)


def run_trace_attention(place: Path, put: Set) -> int:
    found = BlockTrace(calls=(INTERVALS, INTERVALS), record=a_record(attention="flash"), projection=a_record())
    put("commfuse_megatron.tools.trace.reports.trace_block", lambda *_, **__: found)
    configs = dict.fromkeys(("sequential", "row_parallel", "query_split"), OverlapConfig())
    case = attention_case("llama-8b.attention", 8192, 2, 64)
    options = traces(place, case=case, pass_name="fprop", configs=configs, path=None)
    return trace.block_on_rank(FIRST, options)


def run_trace_step(place: Path, put: Set) -> int:
    times = {
        name: StepTimes(forward_ms=1234.5, step_ms=ms, peak_allocated_bytes=76543210987, device_bytes=98765432109)
        for name, ms in ((STOCK, 4567.8), (PLANNED, 3456.7), (FREE, 1.2))
    }
    found = StepTrace(
        times=times, runs={STOCK: INTERVALS, PLANNED: INTERVALS},
        layers={"decoder.layers.0.mlp.linear_fc1": "it is off"}, ops=(a_record(),), transport="gloo",
    )  # fmt: skip
    put("commfuse_megatron.tools.trace.reports.trace_step", lambda *_, **__: found)
    sizes = {"model": "demo", "layers": 2, "seq": 8, "batch": 1, "rounds": 1, "runs": 1}
    options = traces(place, transformer_impl="local", fusions=False, context_parallel=1, **sizes)
    return trace.step_on_rank(FIRST, options)


def bench_rows() -> list[Row]:
    case, block = linear_case("llama-70b.fc2", 8192, 2), attention_case("paper.attention-4x8192", 8192, 2)
    way = {"algorithm": "direct", "chunks_per_shard": 4, "transport": "copy_engine"}
    rows = [a_row(case, name, "sliced", 1.234, p95_ms=12.345, host_us=99.0, **way) for name in ("planned", "bulk m=4")]
    rows.append(a_row(case, "sequential", "sequential", 9.876, emulated=True, transport="nccl"))
    rows.append(a_row(case, "planned", "sliced", 9.876, device="cpu", max_error=1.5e-7, **way))
    for name, ms in (("sequential", 34.567), ("query_split m=4", 23.456), ("planned", 23.456)):
        rows.append(a_row(block, name, name.split()[0], ms, op="query_split_attention", **way))
    return rows


def run_bench(place: Path, put: Set) -> int:
    def grid(pieces, group, device, settings, *, on_rows, on_note) -> Outcome:
        on_rows("piece", bench_rows())
        return Outcome(missing=["llama-8b.qkv M=2048 fprop: no time left"], left_out={"async_tp": "not here"})

    put("commfuse_megatron.tools.bench.run.run_grid", grid)
    settings = Settings(models=("llama-8b",), commit="0123456")
    options = argparse.Namespace(settings=settings, limits={}, resume=False, figure=None, json=str(place / "out.json"))
    return bench._bench_on_rank(FIRST, options)


def run_simulate(place: Path, put: Set) -> int:
    way = {"transport": "copy_engine", "algorithm": "direct", "chunks_per_shard": 1}
    larger = a_row(linear_case("llama-70b.fc1", 8192, 4), "sliced m=1 copy_engine", "sliced", 2.0, **way)
    Report(place / "rows.json", {"multiprocessors": 132}, measured_rows()).write()
    Report(place / "four.json", {}, [larger]).write()
    files = ("--rows", str(place / "rows.json"), "--against", str(place / "four.json"))
    return cli.main(["simulate", *files, "--ranks", "4", "--models", "llama-70b", "--json", str(place / "out.json")])


def run_simulate_step(place: Path, put: Set) -> int:
    return cli.main(["simulate", "--step", "llama-70b", "--ranks", "2", "16", "--json", str(place / "out.json")])


def run_doctor(place: Path, put: Set) -> int:
    gpus = [
        Gpu(index=n, name="NVIDIA H200", memory_gib=139.8, multiprocessors=132, compute_capability="9.0")
        for n in range(2)
    ]
    machine = Machine(
        versions={"torch": "2.11.0+cu130.of.a.long.name.that.has.no.end", "megatron-core": None},
        gpus=tuple(gpus),
        links=(GpuLink(first=0, second=1, kind="nvlink", nvlinks=18, can_access_peer=True),),
        abilities=(
            Ability(name="gloo transport", needs="CPU tensors", missing=None),
            Ability(name="persistent GEMM", needs="GEMMs beside NCCL", missing="pip install 'x[y]' and a driver " * 3),
        ),
        settings=(Setting(name="CUDA_DEVICE_MAX_CONNECTIONS", value=None, meaning="streams may wait " * 5),),
    )
    put("commfuse_megatron.tools.doctor.machine.inspect_machine", lambda: machine)
    return cli.main(["doctor", "--json", str(place / "out.json")])


COMMANDS = {
    "verify": (run_verify, 1), "verify --megatron": (run_verify_megatron, 0), "demo": (run_demo, 0),
    "trace": (run_trace, 0), "trace --attention": (run_trace_attention, 0), "trace --step": (run_trace_step, 0),
    "bench": (run_bench, 0), "simulate": (run_simulate, 0), "simulate --step": (run_simulate_step, 0),
    "doctor": (run_doctor, 0),
}  # fmt: skip


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("commfuse_megatron.tools.trace.reports.missing_matplotlib", lambda: "it takes a second")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """Every table that is made."""
    made: list[Table] = []
    make = Table.__init__

    def note(self: Table, *arguments: object, **options: object) -> None:
        make(self, *arguments, **options)  # type: ignore[arg-type]
        if options.get("title"):
            made.append(self)

    monkeypatch.setattr(Table, "__init__", note)
    return made


# --- what is on the screen --------------------------------------------------------------------------------------------


def squeeze(text: str) -> str:
    return re.sub(r"\s", "", text)


def columns_of(table: Table) -> list[list[str]]:
    """Heading and cells of every column, without markup."""
    return [[Text.from_markup(str(text)).plain for text in (column.header, *column.cells)] for column in table.columns]


def columns_on_screen(out: str) -> list[list[str]]:
    """For every framed table, the texts of each column, in one piece and without spaces."""
    found: list[list[str]] = []
    is_inside = False
    for line in out.splitlines():
        if not re.match(r"[\u2502\u2503|]", line):
            is_inside = is_inside and re.match(r"[\u250f\u2521\u2514\u251c+]", line) is not None
            continue
        pieces = [squeeze(piece) for piece in re.split(r"[\u2502\u2503|]", line)[1:-1]]
        if set("".join(pieces)) <= set("-+"):
            continue
        if not is_inside:
            found.append([""] * len(pieces))
        is_inside = True
        found[-1] = [before + piece for before, piece in zip(found[-1], pieces, strict=True)]
    return found


def require_whole(table: Table, out: str) -> None:
    """Everything that `table` says is in `out`: in columns, or in sentences; values and short names unbroken."""
    columns = columns_of(table)
    assert columns, "a table without columns"
    if [squeeze("".join(texts)) for texts in columns] not in columns_on_screen(out):
        for row in zip(*(texts[1:] for texts in columns), strict=True):
            sentence = "".join(f"{texts[0]}{value}" for texts, value in zip(columns, row, strict=True) if value)
            assert squeeze(sentence) in squeeze(out.replace("|", "")), f"{table.title}: {row} is not in\n{out}"
    for column, (_, *cells) in zip(table.columns, columns, strict=True):
        for cell in cells:
            if column.justify == "right" or len(cell) <= 12:
                assert re.search(rf"(?<!\S){re.escape(cell)}(?!\S)", out), f"{table.title}: {cell} is not in\n{out}"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("width", "encoding"),
    [(60, "utf-8"), (60, "latin-1"), (80, "utf-8"), (100, "ascii"), (None, "utf-8"), (None, "latin-1")],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_value_is_on_the_screen(command, width, encoding, tmp_path, tables, monkeypatch):
    """Fails where rich divides the width: columns of values got none, or UnicodeEncodeError for an ellipsis."""
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    folder = tmp_path / "\u03a9"
    folder.mkdir()
    run, exit_code = COMMANDS[command]
    assert run(folder, monkeypatch.setattr) == exit_code
    screen.flush()
    out = screen.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert tables
    for table in tables:
        require_whole(table, out)
    if command in ("verify", "verify --megatron", "doctor"):  # the others name folders
        assert width is None or max(map(len, out.splitlines())) <= width, out
    assert json.loads((folder / "out.json").read_text("utf-8"))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("command", COMMANDS)
def test_results_are_in_the_file_before_any_is_printed(command, tmp_path, monkeypatch):
    """Fails where the file is written last: what stops the printing then loses the results."""

    class ScreenIsGoneError(Exception):
        pass

    def fail(console: Console, *_: object, **__: object) -> None:
        if not console.stderr:
            raise ScreenIsGoneError

    monkeypatch.setattr(Console, "print", fail)
    monkeypatch.setattr(type(output.results()), "print", fail)
    with pytest.raises(ScreenIsGoneError):
        COMMANDS[command][0](tmp_path, monkeypatch.setattr)
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))


def test_all_commands_are_looked_at() -> None:
    assert {name.split()[0] for name in COMMANDS} == set(subcommands())


def test_a_problem_that_was_only_planned_says_so() -> None:
    """Fails with "0 calls": layers that had run seemed not to."""
    assert str(a_record(calls=0)).endswith(" copy_engine, planned, never called (asked for)")
    assert str(a_record(calls=1, modes={"tape": 1})).endswith(" copy_engine, 1 call: 1 tape (asked for)")
