"""Ranks that a command starts itself, on this machine: their start, their failures and their end.

Beware: a body that raises on one rank ends all ranks, and no process outlives the one that started it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, NoReturn

from commfuse_megatron.tools.common.ranks import Body, CannotRunError, Rank, RankFailedError, UsageError, process_group

_GRACE_S = 5.0
_CONSEQUENCES_S = 1.0


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


def launch_local(body: Body, options: Any, *, num_ranks: int, device_type: str, timeout_s: float) -> int:
    """`launch` where no launcher has started this process."""
    from torch import distributed as dist

    # The store takes a free port itself and keeps it, so that nobody can take it between choice and use.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    ranks: list[tuple[SpawnProcess, Connection]] = []
    grace_s = 0.0
    try:
        with _terminate_as_interrupt(), _environment_of_ranks(num_ranks):
            with _no_interrupt_while_starting():
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
                    ranks.append((process, reader))
            exit_code = _conclude(_wait_for_all(ranks))
        grace_s = _GRACE_S
        return exit_code
    finally:
        _stop([process for process, _ in ranks], grace_s=grace_s)
        for _, pipe in ranks:
            pipe.close()


def _wait_for_all(ranks: list[tuple[SpawnProcess, Connection]]) -> dict[int, _Report]:
    """What the ranks report, by number: all of them, or once one has failed what the others report soon after."""
    reports: dict[int, _Report] = {}
    open_pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while open_pipes:
        has_failed = any(report.failure is not None for report in reports.values())
        ready = wait(list(open_pipes), timeout=_CONSEQUENCES_S if has_failed else None)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                reports[rank] = pipe.recv()
            except EOFError:
                reports[rank] = _Report(failure=_cause_of_death(ranks[rank][0]))
    return reports


def _conclude(reports: dict[int, _Report]) -> int:
    """The worst exit code that the bodies returned; raises RankFailedError if one rank failed.

    What the others report soon after is mostly a broken connection, so failures are listed in the order in which they
    happened, silent deaths first. Where the first one was a refusal, that is raised, with what else is no consequence:
    CannotRunError or UsageError.
    """
    failed = [rank for rank, report in reports.items() if report.failure is not None]
    failed.sort(key=lambda rank: (reports[rank].failed_at_s, rank))
    if failed:
        refusal = reports[failed[0]].refusal
        if refusal is not None:
            others = [f"rank {rank}: {reports[rank].own_error}" for rank in failed[1:] if reports[rank].own_error]
            raise type(refusal)("\n".join([str(refusal), *others]))
        raise RankFailedError("\n".join(f"rank {rank} {reports[rank].failure}" for rank in failed))
    # A check that failed (1) counts for more than a rank that could not run it (2).
    codes = {report.exit_code for report in reports.values()}
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


@contextmanager
def _no_interrupt_while_starting() -> Iterator[None]:
    """Raise KeyboardInterrupt for Ctrl-C or SIGTERM at the end: no process may be started and not yet known.

    Ctrl-C reaches the whole group, and processes that are started inherit that it waits: until `_run_rank` ignores it,
    which is seconds later, it would end their imports with a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # starting it later would unblock the signal
    came: list[int] = []
    stops = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    # Blocked or not: another thread may take the signal, and this one then handles it.
    previous = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in stops}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


# --- a started process ------------------------------------------------------------------------------------------------


def _run_rank(
    body: Body, options: Any, rank: Rank, port: int, timeout_s: float, report: Connection, log_level: int
) -> None:
    """Run the body; send its exit code, or what `_describe` says of a failure, to the starting process."""
    from commfuse_megatron.tools.common.output import configure_logging

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the starting process stops us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked since `_no_interrupt_while_starting`
    _end_with_the_starting_process()
    configure_logging(log_level, rank=rank.global_rank)
    try:
        from torch import distributed as dist

        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
        with process_group(rank, rank.global_rank, store, timeout_s):
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
    from commfuse_megatron import errors

    failure, at_s, cause = f"raised\n{traceback.format_exc()}", time.time(), error.__cause__
    if isinstance(error, CannotRunError | UsageError | errors.ConfigError | errors.UnsupportedError):
        why = str(error)
        if cause is not None and str(cause) not in why:
            why += f" ({type(cause).__name__}: {cause})"
        is_usage = isinstance(error, UsageError | errors.ConfigError)
        return _Report(0, failure, at_s, refusal=UsageError(why) if is_usage else CannotRunError(why))
    is_of_peers = isinstance(error, errors.TransportError | errors.TransportTimeoutError)
    is_own = isinstance(error, errors.CommFuseError) and not is_of_peers
    return _Report(0, failure, at_s, own_error=f"{type(error).__name__}: {error}" if is_own else None)


def _end_with_the_starting_process() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="commfuse-parent-watch", daemon=True).start()
