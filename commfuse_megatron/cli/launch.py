"""Runs a function on every rank: under torchrun in this process, else in local ranks that it starts itself.

Owns process start, rendezvous, failure and clean-up. The contract that bites: a body that returns must return the same
exit code on all ranks, or its caller sees the largest; a body that raises on one rank ends all ranks.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, NoReturn

__all__ = [
    "CannotRunError",
    "Rank",
    "RankFailedError",
    "UsageError",
    "choose_num_ranks",
    "is_speaker",
    "launch",
    "leave_it_to_the_first_rank",
    "require_launcher",
    "why_device_cannot_run",
]

DEFAULT_RANKS = 2
_GRACE_S = 5.0
_CONSEQUENCES_S = 1.0
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


def _read_launcher() -> dict[str, int] | None:
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
    for name in _NUMBERS:
        text = os.environ.get(name)
        if text is None:
            continue
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
        if _read_launcher() is not None:
            return
        reason = f"the ranks are missing; start it with: torchrun --nproc-per-node 2 {shlex.join(sys.argv)}"
    except UsageError as error:
        reason = str(error)
    print(f"{os.path.basename(sys.argv[0])}: error: {reason}", file=sys.stderr)
    sys.exit(2)


def is_speaker() -> bool:
    """Whether this process speaks for all: the first rank does, and everyone where a launcher's variables are wrong."""
    try:
        return (_read_launcher() or {"RANK": 0})["RANK"] == 0
    except UsageError:
        return True


def leave_it_to_the_first_rank() -> None:
    """Return at once on the first rank, so that it can say what all ranks have met; late or never on the others.

    The launcher ends the others when the first one ends. A rank that is still there after some seconds has met alone
    what it met, and must say it itself.
    """
    if not is_speaker():
        time.sleep(_FIRST_RANK_SPEAKS_S)


def choose_num_ranks(requested: int | None) -> int:
    """The number of ranks that a command will run on.

    Raises UsageError if `--ranks` contradicts the launcher, or the launcher's variables each other.
    """
    if requested is not None and requested < 1:
        raise UsageError(f"--ranks must be at least 1, got {requested}")
    numbers = _read_launcher()
    if numbers is None:
        return requested or DEFAULT_RANKS
    world_size = numbers["WORLD_SIZE"]
    if requested not in (None, world_size):
        raise UsageError(f"--ranks {requested} under a launcher that started {world_size} ranks; leave --ranks out")
    return world_size


def why_device_cannot_run(device_type: str, num_ranks: int) -> str | None:
    """Why `num_ranks` ranks cannot run on this machine's `device_type`, None if they can."""
    import torch
    from torch import distributed as dist

    if not dist.is_available():
        return "this PyTorch was built without torch.distributed"
    if device_type == "cpu":
        return None if dist.is_gloo_available() else "--device cpu needs gloo, which this PyTorch was built without"
    if not torch.cuda.is_available():
        return "--device cuda needs a CUDA device and driver, and PyTorch found none; try --device cpu"
    if not dist.is_nccl_available():
        return "--device cuda needs NCCL, which this PyTorch was built without"
    num_local = (_read_launcher() or {}).get("LOCAL_WORLD_SIZE", num_ranks)
    if torch.cuda.device_count() < num_local:
        return (
            f"NCCL takes one rank per GPU: {num_local} ranks on this machine, {torch.cuda.device_count()} GPUs;"
            " use --ranks with fewer, or --device cpu"
        )
    return None


def launch(body: Body, options: Any, *, num_ranks: int, device_type: str, timeout_s: float = 600.0) -> int:
    """The exit code of `body(rank, options)`: this rank's under torchrun, else the largest of `num_ranks` local ranks.

    Args:
        body: a module-level function; local ranks are spawned, so it and `options` are pickled.
        timeout_s: how long the ranks may take to meet, and the timeout of the default group's collectives.

    Raises:
        CannotRunError: the device cannot run here (before anything starts), or a local rank found that it cannot run.
        UsageError: a launcher's variables are wrong (before anything starts), or a local rank found a wrong option.
        RankFailedError: a local rank raised anything else or died. All others are stopped first.
    """
    reason = why_device_cannot_run(device_type, num_ranks)
    if reason is not None:
        raise CannotRunError(reason)
    numbers = _read_launcher()
    if numbers is not None:
        rank = Rank(numbers["RANK"], numbers["WORLD_SIZE"], device_type)
        with _process_group(rank, numbers.get("LOCAL_RANK", rank.global_rank), None, timeout_s):
            return body(rank, options)
    return _launch_local(body, options, num_ranks, device_type, timeout_s)


@contextmanager
def _process_group(rank: Rank, local_rank: int, store: Any, timeout_s: float) -> Iterator[None]:
    """The default process group, spanning all ranks; `store` None means that the environment says where to meet."""
    import torch
    from torch import distributed as dist

    if rank.device_type == "cuda":
        torch.cuda.set_device(local_rank)
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


# --- local ranks: the starting process --------------------------------------------------------------------------------


class _Report(NamedTuple):
    """What a local rank says at its end.

    failure: its traceback. refusal: what to raise in its place, where it did not fail but refused. own_error: what else
    is surely no consequence of another rank's failure.
    """

    exit_code: int = 0
    failure: str | None = None
    failed_at_s: float = 0.0
    refusal: CannotRunError | UsageError | None = None
    own_error: str | None = None


def _launch_local(body: Body, options: Any, num_ranks: int, device_type: str, timeout_s: float) -> int:
    from torch import distributed as dist

    # The store takes a free port itself and keeps it, so that nobody can take it between choice and use.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    grace_s = 0.0
    try:
        with _terminate_as_interrupt(), _environment_of_ranks(num_ranks):
            for global_rank in range(num_ranks):
                reader, writer = spawn.Pipe(duplex=False)
                rank = Rank(global_rank, num_ranks, device_type)
                process = spawn.Process(
                    target=_run_rank,
                    args=(body, options, rank, store.port, timeout_s, writer, logging.getLogger().level),
                    name=f"commfuse-rank-{global_rank}",
                    daemon=True,
                )
                process.start()
                writer.close()
                processes.append(process)
                pipes.append(reader)
            exit_code = _wait_for_all(processes, pipes)
        grace_s = _GRACE_S
        return exit_code
    finally:
        _stop(processes, grace_s=grace_s)
        for pipe in pipes:
            pipe.close()


def _wait_for_all(processes: list[SpawnProcess], pipes: list[Connection]) -> int:
    """The worst exit code that the bodies returned; raises RankFailedError as soon as one rank fails.

    What the others report soon after is mostly a broken connection, so failures are listed in the order in which they
    happened, silent deaths first. Where the first one was a refusal, that is raised, with what else is no consequence:
    CannotRunError or UsageError.
    """
    exit_codes: dict[int, int] = {}
    refusals: dict[int, CannotRunError | UsageError] = {}
    own_errors: dict[int, str] = {}
    failures: list[tuple[float, int, str]] = []
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=_CONSEQUENCES_S if failures else None)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                report = pipe.recv()
            except EOFError:
                report = _Report(failure=_cause_of_death(processes[rank]))
            if report.failure is None:
                exit_codes[rank] = report.exit_code
                continue
            failures.append((report.failed_at_s, rank, report.failure))
            if report.refusal is not None:
                refusals[rank] = report.refusal
            elif report.own_error is not None:
                own_errors[rank] = report.own_error
        if failures and not ready:
            break
    if failures:
        failures.sort()
        first = failures[0][1]
        if first in refusals:
            others = [f"rank {rank}: {own_errors[rank]}" for _, rank, _ in failures[1:] if rank in own_errors]
            raise type(refusals[first])("\n".join([str(refusals[first]), *others]))
        raise RankFailedError("\n".join(f"rank {rank} {failure}" for _, rank, failure in failures))
    # A check that failed (1) counts for more than a rank that could not run it (2).
    codes = set(exit_codes.values())
    return 1 if 1 in codes else max(codes)


def _cause_of_death(process: SpawnProcess) -> str:
    process.join(_GRACE_S)
    code = process.exitcode
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code} before its work was done"


def _stop(processes: list[SpawnProcess], *, grace_s: float) -> None:
    """Let the processes end for `grace_s`, then make them; leaves no zombie."""
    deadline_s = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.exitcode is None:
            process.terminate()
    for process in processes:
        process.join(_GRACE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()


@contextmanager
def _environment_of_ranks(num_ranks: int) -> Iterator[None]:
    """What local ranks inherit: their share of the cores, and the loopback interface for gloo; set only where unset."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    added = {"OMP_NUM_THREADS": str(max(1, cores // num_ranks))}
    if sys.platform == "linux":
        added["GLOO_SOCKET_IFNAME"] = "lo"
    added = {name: value for name, value in added.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that the ranks are stopped on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


# --- local ranks: a started process -----------------------------------------------------------------------------------


def _run_rank(
    body: Body, options: Any, rank: Rank, port: int, timeout_s: float, report: Connection, log_level: int
) -> None:
    """Run the body; send (exit code, None, 0, None), or what `_describe` says of a failure, to the starting process."""
    from commfuse_megatron.cli.output import configure_logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the starting process stops us
    _end_with_the_starting_process()
    configure_logging(log_level, rank=rank.global_rank)
    try:
        from torch import distributed as dist

        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
        with _process_group(rank, rank.global_rank, store, timeout_s):
            try:
                exit_code = body(rank, options)
            except BaseException as error:
                # Before the group goes: the others then fail because of us, and should be seen to.
                report.send(_describe(error))
                return
        sys.stdout.flush()
        report.send(_Report(exit_code))
    except BaseException as error:
        with suppress(OSError):  # the starting process has gone, or has heard enough
            report.send(_describe(error))
    finally:
        report.close()


def _describe(error: BaseException) -> _Report:
    from commfuse_megatron.errors import (
        CommFuseError,
        ConfigError,
        TransportError,
        TransportTimeoutError,
        UnsupportedError,
    )

    text, cause = f"{type(error).__name__}: {error}", error.__cause__
    refusal: CannotRunError | UsageError | None = None
    own_error = None
    if isinstance(error, CannotRunError | UsageError | ConfigError | UnsupportedError):
        why = str(error)
        if cause is not None and str(cause) not in why:
            why += f" ({type(cause).__name__}: {cause})"
        refusal = UsageError(why) if isinstance(error, UsageError | ConfigError) else CannotRunError(why)
    elif isinstance(error, CommFuseError) and not isinstance(error, TransportError | TransportTimeoutError):
        own_error = text
    return _Report(0, f"raised\n{traceback.format_exc()}", time.time(), refusal, own_error)


def _end_with_the_starting_process() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="commfuse-parent-watch", daemon=True).start()
