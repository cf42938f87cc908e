"""Everything there is to measure on one node, within a time budget: checks, benchmarks, the paper's MLP, training.

    python examples/measure_node.py --ranks 2 --device cpu --only grid --output trace_output/measured
    python examples/measure_node.py --ranks 4 --output measured --budget-s 900

Each part is a command of `commfuse` under torchrun, with a time limit of its own; its output and its rows go into files
of the folder. A part that fails or runs out of time does not stop the others; what was missed is said at the end, and a
second call with `--skip` or `--only` does the rest. The benchmark of two ranks that emulates the larger group
comes from the same node, so that emulation and model can be held against the group itself.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

# What Megatron sets under tensor parallelism; and multicast, which stays off for all systems alike.
MEGATRONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "UB_SKIPMC": "1"}
HEADLINE = ["--models", "llama-8b", "llama-70b", "--tokens", "8192"]
COMMFUSE = ("-m", "commfuse_megatron")
EXAMPLES = Path(__file__).resolve().parent

# Layers of an 8B model, tensor parallel by 2, the rest data parallel; Megatron's own overlap of gradients and weights.
TRAINING = """--tokenizer-type NullTokenizer --vocab-size 257 --tensor-model-parallel-size 2 --sequence-parallel
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --micro-batch-size 1 --lr 1e-4 --eval-iters 0 --eval-interval 1000
    --split 95,5,0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --log-interval 1"""
TRAINED = {
    "cuda": """--bf16 --num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
        --global-batch-size 8 --train-iters 16""",
    "cpu": """--cpu --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --seq-length 64
        --max-position-embeddings 64 --global-batch-size 4 --train-iters 4""",
}
#: In the output of training runs: milliseconds of a step.
ITERATION_MS = r"elapsed time per iteration \(ms\): ([\d.]+)"


@dataclass(frozen=True)
class Part:
    """One command. ranks 0: without torchrun. share: of the budget, at most."""

    name: str
    ranks: int
    arguments: list[str]
    share: float
    environment: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = COMMFUSE


def main() -> int:
    """Run the parts in order. 0: all ran and passed; 1: some did not."""
    chosen = parse()
    folder = Path(chosen.output)
    folder.mkdir(parents=True, exist_ok=True)
    known = parts_of(chosen, folder)
    parts = [part for part in known if (not chosen.only or part.name in chosen.only) and part.name not in chosen.skip]
    if not parts:
        print(f"nothing to do: there are {', '.join(part.name for part in known)}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + chosen.budget_s
    outcomes = [(part, *run(part, chosen, folder, deadline)) for part in parts]
    table = Table(title=f"{chosen.ranks} ranks, {folder}", title_justify="left")
    for column in ("part", "outcome", "s", "ms per step", "output"):
        table.add_column(column, no_wrap=True)
    for part, outcome, seconds in outcomes:
        table.add_row(part.name, outcome, f"{seconds:.0f}", step_ms(part, folder), f"{part.name}.txt")
    Console().print(table)
    return 0 if all(outcome == "passed" for _, outcome, _ in outcomes) else 1


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2, metavar="N", help="of the group (default 2)")
    add("--output", default="measured", metavar="DIR", help="where files go; made if missing (default measured)")
    add("--budget-s", type=float, default=900, metavar="S", help="time for everything (default 900)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only that everything runs")
    add("--only", nargs="+", default=[], metavar="PART", help="these parts")
    add("--skip", nargs="+", default=[], metavar="PART", help="all but these parts")
    add("--commit", default=None, help="recorded in the rows where there is no git")
    chosen = parser.parse_args()
    if chosen.ranks < 2:
        parser.error(f"--ranks must be at least 2, got {chosen.ranks}")
    if not chosen.budget_s > 0:
        parser.error(f"--budget-s must be above 0, got {chosen.budget_s:g}")
    return chosen


def parts_of(chosen: argparse.Namespace, folder: Path) -> list[Part]:
    """All parts for this group and device, what matters most first."""
    n, device = chosen.ranks, ["--device", chosen.device]
    commit = [] if chosen.commit is None else ["--commit", chosen.commit]

    def json(name: str) -> list[str]:
        return ["--json", str(folder / f"{name}.json")]

    def bench(name: str, ranks: int, share: float, *arguments: str, rows: str = "", **environment: str) -> Part:
        # The benchmark ends by itself, with what it has: most of the part's time is its budget.
        budget = ["--budget-s", f"{0.85 * share * chosen.budget_s:.0f}"]
        command = ["bench", *device, *json(rows or name), *budget, *commit, *arguments]
        return Part(name, ranks, command, share, MEGATRONS | environment)

    def training(name: str, *arguments: str) -> Part:
        words = [*TRAINING.split(), *TRAINED[chosen.device].split(), *arguments]
        words += ["--data-path", str(folder / "text"), "--data-cache-path", str(folder / "cache")]
        return Part(name, n, words, 0.12, MEGATRONS, (str(EXAMPLES / "pretrain_gpt.py"),))

    prepare = (str(EXAMPLES / "prepare_text.py"),)
    trainings = [
        Part("text", 0, ["--output", str(folder / "text"), "--max-mib", "4"], 0.1, program=prepare),
        training("training_stock"),
        training("training_plugin", "--commfuse"),
    ]
    if n % 2:
        trainings = []  # the model is cut in two
    if chosen.device == "cpu":
        return [
            Part("verify_gloo", n, ["verify", *device, "--dtype", "float32", *json("verify_gloo")], 0.5),
            bench("grid", n, 0.4, "--models", "llama-8b", "--tokens", "1024"),
            *trainings,
        ]
    attention = ["--attention", "--passes", "fprop", "--models", "paper", "llama-8b", "llama-70b"]
    paper = ["--models", "paper-mlp", "--passes", "fprop"]
    parts = [
        *(
            Part(name := f"verify_{transport}", n, ["verify", *device, "--transport", transport, *json(name)], 0.12)
            for transport in ("nccl", "copy_engine")
        ),
        bench("grid", n, 0.36, "--figure", str(folder / "grid.png")),
        bench("paper_nvlink", n, 0.08, *paper),
        bench("paper_host", n, 0.08, *paper, "--config", "configs/host_link.yaml", NCCL_P2P_DISABLE="1"),
        bench("attention_nvlink", n, 0.1, *attention),
        bench("attention_host", n, 0.1, *attention, NCCL_P2P_DISABLE="1"),
    ]
    if n > 2:
        rows, against = str(folder / "two_ranks.json"), str(folder / "grid.json")
        errors = ["simulate", "--rows", rows, "--ranks", str(n), "--against", against, *json("errors")]
        two = ["--passes", "fprop", "--chunks", "1", "2", *HEADLINE]
        parts += [
            bench("two_ranks", 2, 0.12, *two),
            # Into the same file: its rows are what the curves are fitted to.
            bench("two_ranks_emulating", 2, 0.12, *two, "--virtual-ranks", str(n), "--resume", rows="two_ranks"),
            Part("errors", 0, errors, 0.02),
        ]
    step = ["trace", "--step", "--model", "llama-8b", *device, "--transformer-impl", "transformer_engine"]
    parts.append(Part("step", n, [*step, "--output", str(folder), *json("step")], 0.1, MEGATRONS))
    return [*parts, *trainings]


def step_ms(part: Part, folder: Path) -> str:
    """Of a training run, the median of the second half; "" for other parts."""
    output = folder / f"{part.name}.txt"
    found = re.findall(ITERATION_MS, output.read_text(encoding="utf-8")) if output.exists() else []
    return f"{statistics.median(map(float, found[len(found) // 2 :])):.1f}" if found else ""


def run(part: Part, chosen: argparse.Namespace, folder: Path, deadline: float) -> tuple[str, float]:
    """(outcome, seconds) of one part."""
    started = time.monotonic()
    limit_s = min(part.share * chosen.budget_s, deadline - started)
    if limit_s < 1:
        return "no time left", 0.0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(part.ranks)]
    command = [sys.executable, *(launcher if part.ranks else []), *part.program, *part.arguments]
    shown = "commfuse" if part.program is COMMFUSE else Path(part.program[-1]).name
    print(f"{part.name} (at most {limit_s:.0f} s): {shown} {' '.join(part.arguments)}", file=sys.stderr, flush=True)
    with (folder / f"{part.name}.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | part.environment, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)  # torchrun ends its ranks
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            return "out of time", time.monotonic() - started
    return ("passed" if code == 0 else f"exit {code}"), time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
