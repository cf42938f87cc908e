"""Ranks as commands and scripts know them: how many there are, who speaks for all, and what keeps them from running.

Knows the environment that a launcher such as torchrun makes; must not start processes.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import util
from typing import Any

DEFAULT_RANKS = 2
#: Each is a process with a PyTorch of its own.
MOST_LOCAL_RANKS = 64
#: How long the first rank may take to say why no rank can run; a busy machine imports PyTorch in so many seconds.
_FIRST_RANK_SPEAKS_S = 10.0

_MEETING_POINT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")

Body = Callable[["Rank", Any], int]


class CannotRunError(Exception):
    """This machine cannot run it; the message says what is missing. Becomes exit code 2."""


class UsageError(Exception):
    """What was asked for makes no sense on any machine; the message says what does. Becomes exit code 2."""


class RankFailedError(Exception):
    """A rank raised or died; the message holds its traceback or the signal that ended it."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a body runs. The default process group is initialised and spans all ranks."""

    global_rank: int
    world_size: int
    device_type: str  # "cpu" or "cuda"; on "cuda" the current device is set

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.global_rank == 0

    @property
    def device(self) -> Any:
        """This rank's `torch.device`."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def device_name(self) -> str:
        """E.g. "NVIDIA H200"; "cpu" without one."""
        import torch

        return torch.cuda.get_device_name() if self.device_type == "cuda" else "cpu"

    @property
    def group(self) -> Any:
        """The process group of all ranks."""
        from torch import distributed as dist

        assert dist.group.WORLD is not None
        return dist.group.WORLD


def read_launcher() -> dict[str, int] | None:
    """The numbers that a launcher such as torchrun has put into this rank's environment; None without a launcher.

    Raises UsageError where they are incomplete or contradict each other.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    advice = "start it with torchrun, or unset them and let commfuse start its own ranks"
    missing = [name for name in _MEETING_POINT if name not in os.environ]
    if missing:
        given = [name for name in _MEETING_POINT if name in os.environ]
        raise UsageError(
            f"the environment is that of half a launcher: it has {', '.join(given)}, not {', '.join(missing)}; {advice}"
        )
    numbers: dict[str, int] = {}
    for name in (name for name in _NUMBERS if name in os.environ):
        text = os.environ[name]
        try:
            numbers[name] = int(text)
        except ValueError:
            raise UsageError(f"the environment has {name}={text!r}, which is not an integer; {advice}") from None
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and size in numbers and not 0 <= numbers[rank] < numbers[size]:
            values = f"{rank}={numbers[rank]} and {size}={numbers[size]}"
            raise UsageError(f"the environment has {values}; ranks count from 0; {advice}")
    return numbers


def require_launcher() -> None:
    """For scripts that are ranks: exit with 2, saying how to start them, where no launcher has started this one."""
    try:
        if read_launcher() is not None:
            return
        reason = f"the ranks are missing; start it with: torchrun --nproc-per-node 2 {shlex.join(sys.argv)}"
    except UsageError as error:
        reason = str(error)
    print(f"{os.path.basename(sys.argv[0])}: error: {reason}", file=sys.stderr)
    sys.exit(2)


def is_speaker() -> bool:
    """Whether this process speaks for all: the first rank does, and everyone where a launcher's variables are wrong."""
    try:
        return (read_launcher() or {"RANK": 0})["RANK"] == 0
    except UsageError:
        return True


def leave_it_to_the_first_rank() -> None:
    """Return at once on the first rank, so that it can say what all ranks have met; late or never on the others.

    The launcher ends the others when the first one ends. A rank that is still there after some seconds has met alone
    what it met, and must say it itself.
    """
    if not is_speaker():
        time.sleep(_FIRST_RANK_SPEAKS_S)


def require_megatron() -> None:
    """Raise CannotRunError where Megatron-Core is not installed. Imports nothing."""
    if util.find_spec("megatron") is None:
        raise CannotRunError("Megatron-Core is not installed: pip install megatron-core")


def require_transformer_engine() -> None:
    """The same of Transformer Engine."""
    if util.find_spec("transformer_engine") is None:
        raise CannotRunError("Transformer Engine is not installed: pip install 'commfuse-megatron[te]'")


def choose_several_ranks(requested: int | None) -> int:
    """The same, of commands that look at what ranks send each other: raises UsageError for one rank, too."""
    num_ranks = choose_num_ranks(requested)
    if num_ranks < 2:
        raise UsageError("one rank has nothing to communicate; use --ranks 2 or more")
    return num_ranks


def choose_num_ranks(requested: int | None) -> int:
    """The number of ranks that a command will run on.

    Raises UsageError if `--ranks` contradicts the launcher, or the launcher's variables each other.
    """
    if requested is not None and requested < 1:
        raise UsageError(f"--ranks must be at least 1, got {requested}")
    numbers = read_launcher()
    if numbers is None:
        if (requested or 0) > MOST_LOCAL_RANKS:
            raise UsageError(
                f"--ranks {requested}: as many processes would start here; at most {MOST_LOCAL_RANKS} do, torchrun"
                " starts more"
            )
        return requested or DEFAULT_RANKS
    world_size = numbers["WORLD_SIZE"]
    if requested not in (None, world_size):
        raise UsageError(f"--ranks {requested} under a launcher that started {world_size} ranks; leave --ranks out")
    return world_size


@contextmanager
def process_group(rank: Rank, local_rank: int, store: Any, timeout_s: float) -> Iterator[None]:
    """The default process group, spanning all ranks; `store` None means that the environment says where to meet."""
    import torch
    from torch import distributed as dist

    if rank.device_type == "cuda":
        from commfuse_megatron.transport.select import take_gpu

        take_gpu(local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if rank.device_type == "cuda" else "gloo",
        store=store,
        rank=rank.global_rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    # gloo connects each pair of ranks: one that is done and gone by then would make the other fail.
    dist.all_reduce(torch.zeros(1))
    yield
    # Not after an error: NCCL would wait for ranks that wait for this one elsewhere, and nobody would see the error.
    dist.destroy_process_group()
