"""The README's commands and scripts, run as they stand but for what a machine without a GPU cannot do.

Ranks are forked; `spawned/test_pretraining_examples.py` starts some by torchrun.
"""

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from tests.harness import run_on_ranks
from tests.megatron.pretraining_runs import load_example

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# What only a GPU has: the device of the rank and NCCL. Megatron itself runs under the shims.
ON_THE_CPU = {"torch.cuda.set_device(": "int(", '"nccl"': '"gloo"'}
ENTER = "from commfuse_megatron.testing import cpu_megatron\nshims = cpu_megatron()\nshims.__enter__()\n"
ONCE = "import builtins, os\nprint = builtins.print if os.environ['RANK'] == '0' else lambda *_: None\n"

# Megatron's own, which starts a process of multiprocessing's.
SAVE = """from megatron.core import dist_checkpointing
os.makedirs("saved", exist_ok=True)
dist_checkpointing.save(model.sharded_state_dict(), "saved")
print("saved")
"""

# Sizes that a CPU trains at once; of a flag given twice the last counts.
SMALL = (
    "--cpu --hidden-size 32 --num-attention-heads 4 --num-layers 2 --seq-length 32 --max-position-embeddings 32"
    " --train-iters 2"
)


def block_with(word: str) -> str:
    """The indented block that holds `word`."""
    blocks = [block for block in re.findall(r"(?:^    .*\n|^\n)+", README, re.MULTILINE) if word in block]
    assert len(blocks) == 1, f"{len(blocks)} blocks with {word}"
    return re.sub(r"^    ", "", blocks[0], flags=re.MULTILINE).strip() + "\n"


def session() -> tuple[str, str]:
    """(what is typed, what is printed) in the block with prompts."""
    (block,) = re.findall(r"^```python\n(>>> .*?)^```$", README, re.DOTALL | re.MULTILINE)
    lines = block.splitlines()
    typed = [line.removeprefix(">>> ") for line in lines if line.startswith(">>> ")]
    return "\n".join(typed), "\n".join(lines[len(typed) :])


def run(folder: Path, script: str, *arguments: str) -> str:
    """What both ranks print."""
    ran = run_on_ranks(2, *arguments, script=folder / script)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if len(line) > 120] == []
    assert len(block_with("import apply_to_spec").splitlines()) <= 15


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_script_builds_a_model_and_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checkpoint below: hangs without the guard, since the writer's process ran the script again."""
    typed, shown = session()
    script = block_with("import apply_to_spec")
    for words, instead in ON_THE_CPU.items():
        assert script.count(words) == 1
        script = script.replace(words, instead)
    below = textwrap.indent(f"{typed}\n{SAVE}", "    ")
    (tmp_path / "script.py").write_text(f"{ENTER}{ONCE}{script}{below}")
    monkeypatch.chdir(tmp_path)
    printed = [line for line in run(tmp_path, "script.py").splitlines() if not re.match("(WARNING|INFO):", line)]
    assert "\n".join(printed).strip().endswith(f"{shown}\nsaved")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_trains_with_every_linear_overlapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, train = block_with("pretrain_gpt.py").replace("\\\n", " ").splitlines()
    python, script, *arguments = shlex.split(prepare)
    assert (python, script) == ("python", "examples/prepare_text.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script, *arguments])
    assert load_example("prepare_text").main() == 0
    variable, torchrun, *options = shlex.split(train)
    assert (variable, torchrun) == ("CUDA_DEVICE_MAX_CONNECTIONS=1", "torchrun")
    monkeypatch.setenv(*variable.split("="))
    assert options[:3] == ["--nproc-per-node", "2", "examples/pretrain_gpt.py"]
    printed = run(ROOT, *options[2:], *SMALL.split())
    assert len(re.findall(r"iteration +\d+/ +2 .*lm loss: \d", printed)) == 2, "a line for every step"
    assert re.search(r"10 layers \(0 of them stock\): [1-9]\d* forward passes overlapped, 0 sequential, 0 on", printed)
