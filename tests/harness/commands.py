"""Commands and scripts on ranks that have imported everything: what torchrun makes of them, without its start.

Every rank has a launcher's environment and the store of a launcher to meet at. What this cannot show: what they
import, and how a command starts ranks itself.
"""

import importlib
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed as dist

from tests.harness.spawned import fork_ranks

__all__ = ["Ran", "run_on_ranks", "run_python"]


class Ran(NamedTuple):
    """What a command has left. returncode: the largest of all ranks. stdout, stderr: of all ranks, in their order."""

    returncode: int
    stdout: str
    stderr: str


def run_python(
    *arguments: str | Path, ranks: int | None = None, timeout_s: float = 55, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process of this interpreter with these arguments, or, with `ranks`, what torchrun starts with them."""
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *launcher, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, env=environment)


def run_on_ranks(world_size: int, *arguments: str, script: Path | None = None) -> Ran:
    """Run `commfuse`, or a script, with these arguments on CPU ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        fork_ranks(world_size, _run, world_size, store.port, folder, script, arguments)
        files = [Path(folder, f"{rank}") for rank in range(world_size)]
        codes = [int(file.with_suffix(".code").read_text("utf-8")) for file in files]
        out, err = (
            "".join(file.with_suffix(suffix).read_text("utf-8") for file in files) for suffix in (".out", ".err")
        )
    return Ran(max(codes), out, err)


def _run(rank: int, world_size: int, port: int, folder: str, script: Path | None, arguments: tuple[str, ...]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    # As torchrun says it: the store is there already.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    torch.set_num_threads(1)
    file = Path(folder, f"{rank}")
    for suffix, stream in ((".out", sys.stdout), (".err", sys.stderr)):
        with file.with_suffix(suffix).open("wb") as target:
            os.dup2(target.fileno(), stream.fileno())
    code = 0
    try:
        if script is None:
            code = importlib.import_module("commfuse_megatron.tools.main").main(list(arguments))
        else:
            sys.argv = [str(script), *arguments]
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    file.with_suffix(".code").write_text(str(code), encoding="utf-8")
