"""Every example runs as its first lines say and shows what they promise."""

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.harness import run_on_ranks, run_python
from tests.megatron.pretraining_runs import load_example

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
PROMISED = {
    "measure_node.py": "passed", "look_at_a_schedule.py": "chunks per shard 4",
    "overlap_linears.py": "equal the sequential program's", "trace_a_step.py": "rank 1: 4 operations",
    "check_training.py": "stock after plugin", "swap_layers_in_gpt.py": f"{'output_layer':43}  overlapped\n",
}  # fmt: skip
#: Run in ranks that torchrun need not start: others show that it can.
IN_PLACE = {"check_training.py", "swap_layers_in_gpt.py", "trace_a_step.py"}
#: Run by `test_pretraining_examples.py`: one needs what the other writes.
IN_A_ROW = {"prepare_text.py", "pretrain_gpt.py", "compare_curves.py"}
#: Without a GPU it says what is missing.
NEEDS_GPU = {"probe_fp8.py"}


def test_every_example_is_run() -> None:
    assert {script.name for script in SCRIPTS} == PROMISED.keys() | IN_A_ROW | NEEDS_GPU


@pytest.mark.parametrize(("arguments", "words"), [
    ((), "probe_fp8.py: a Hopper GPU is needed"), (("--rows", "100"), "--rows [100]: multiples of 1024"),
])  # fmt: skip
def test_a_probe_says_what_it_needs(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["examples/probe_fp8.py", *arguments])
    code = None
    try:
        code = load_example("probe_fp8").main()
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert words in capsys.readouterr().err


def is_a_rank(script: Path) -> bool:
    """Whether a launcher starts it."""
    return "init_process_group(" in script.read_text("utf-8") or script.name == "pretrain_gpt.py"


def command_of(script: Path) -> list[str]:
    """The command line in the script's docstring, for this interpreter."""
    found = re.search(
        rf"^    ((?:torchrun|python) .*examples/{script.name}.*)$", script.read_text("utf-8"), re.MULTILINE
    )
    assert found, f"{script.name} does not say how to start it"
    program, *arguments = shlex.split(found[1])
    return [*(["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else []), *arguments]


RANKS = [script.stem for script in SCRIPTS if is_a_rank(script)]


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_without_a_launcher_says_how_to_start_it(name, monkeypatch, capsys):
    """Fails without the check: a traceback of torch's rendezvous."""
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py"])
    with pytest.raises(SystemExit) as ended:
        load_example(name).main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"start it with: torchrun --nproc-per-node 2 examples/{name}.py")


@pytest.mark.filterwarnings("ignore")  # of what Megatron imports
@pytest.mark.parametrize("name", [script.stem for script in SCRIPTS])
def test_every_example_has_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails without parsers, and where a help text of Megatron's holds a lone %."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        load_example(name).main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py [-h]")


def test_what_the_command_lines_write_is_ignored() -> None:
    """Results of a newcomer's first steps are not offered to be committed."""
    if shutil.which("git") is None or not (EXAMPLES.parent / ".git").exists():
        pytest.skip("no git checkout")
    documents = [EXAMPLES.parent / "README.md", *EXAMPLES.iterdir(), *(EXAMPLES.parent / "docs").rglob("*.md")]
    options = "json|output|loss-log|report|picture|figure|data-cache-path|data-path|save"
    written = {
        place.rstrip("`.,)")
        for document in documents
        if document.is_file()
        for place in re.findall(rf"--(?:{options}) ([a-z][\w./-]*)", document.read_text(encoding="utf-8"))
    } | {"demo_output/x", "trace_output/x", "measured/x"}
    assert {"rows.json", "check.json", "stock.jsonl", "curves.png", "text/stdlib"} <= written
    kept = {place for place in written if not is_ignored(place) and not is_ignored(f"{place}/x")}
    assert kept == {"docs/figures"}, "which holds the pictures in the tree; traces are written beside them"
    assert is_ignored("docs/figures/x.json")


def is_ignored(place: str) -> bool:
    command = ["git", "check-ignore", "--quiet", "--no-index", place]
    return subprocess.run(command, cwd=EXAMPLES.parent, timeout=20).returncode == 0


def test_the_readme_lists_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [f"`{script.name}`" in text for script in SCRIPTS] == [True] * len(SCRIPTS)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", PROMISED)
def test_the_example_runs(name: str) -> None:
    command = command_of(EXAMPLES / name)
    if name in IN_PLACE:
        ranks, script = (command.index(word) + 1 for word in ("--nproc-per-node", f"examples/{name}"))
        run_on_forked_ranks(int(command[ranks]), name, *command[script:])
    else:
        run_example(command, PROMISED[name])


def run_on_forked_ranks(ranks: int, name: str, *arguments: str) -> None:
    ran = run_on_ranks(ranks, *arguments, script=EXAMPLES / name)
    assert ran.returncode == 0, ran.stderr
    assert PROMISED[name] in ran.stdout


def run_example(command: list[str], promised: str) -> None:
    ran = run_python(*command, cwd=EXAMPLES.parent, timeout_s=140)
    assert ran.returncode == 0, ran.stderr
    assert promised in ran.stdout


def print_schedule(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(EXAMPLES / "look_at_a_schedule.py", *arguments)


def test_the_schedule_in_the_design_is_what_the_example_prints() -> None:
    grid, _, _ = print_schedule().stdout.partition("\n\n  [2]")
    assert grid.startswith("direct reduce-scatter: 4 ranks")
    assert textwrap.indent(grid, "    ") in (EXAMPLES.parent / "docs" / "design.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_any_schedule_can_be_looked_at(collective: str, algorithm: str) -> None:
    """Fails without the arguments."""
    ran = print_schedule(collective, algorithm, "--ranks", "3", "--chunks", "5")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{algorithm} {collective}: 3 ranks, 5 chunks per shard")
    assert "chunks per shard 5: " in ran.stdout


def test_an_impossible_schedule_is_wrong_usage() -> None:
    ran = print_schedule("--ranks", "0")
    assert ran.returncode == 2
    assert "group_size=0" in ran.stderr
    assert "usage: " in ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_linears_agree_with_the_sequential_program() -> None:
    """Fails without scaled weights: outputs far from 1 differ by more than assert_close allows in fp32."""
    run_on_forked_ranks(3, "overlap_linears.py")
