"""Ranks as processes with torch.distributed initialised: what a user has.

Importing PyTorch and Megatron takes a process 7 s, forking one that has imported them 0.05 s (2 cores, 11/2026). So
rank r of every group is forked from one process, the r-th source, which imports and never runs a test. Each rank number
has a source of its own since ranks of users differ in hash seeds and addresses: an order of a set in which all ranks
must agree has hung groups before. A process that has asked for CUDA must not be forked: see `gpu_ranks`.
"""

import atexit
import contextlib
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.testing import cpu_pretraining
from tests.harness.gpu_ranks import run_on_gpu_ranks, wait_for_ranks

__all__ = ["fork_ranks", "on_processes", "run_spawned"]


def run_spawned(world_size: int, body: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """Run the module-level function `body(group, device, *args)` in `world_size` processes; results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        job = (world_size, backend, folder, body, args)
        if torch.cuda.is_available():
            run_on_gpu_ranks(*job)
        else:
            fork_ranks(world_size, _enter, *job)
        return [torch.load(f"{folder}/result-{rank}", weights_only=False) for rank in range(world_size)]


def on_processes(
    world_size: int | str, *, backend: str = "nccl"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test `test(group, device, ...)` that so many processes run, each as one rank; a text names the
    parameter with their number."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            number = given[world_size] if isinstance(world_size, str) else world_size
            run_spawned(number, body, given, backend=backend)

        def body(group: dist.ProcessGroup, device: torch.device, given: dict[str, Any]) -> None:
            test(group, device, **given)

        # Ranks find it by its name in the module of the test.
        body.__module__, body.__name__ = test.__module__, f"_{test.__name__}_on_a_rank"
        body.__qualname__ = body.__name__
        test.__globals__[body.__name__] = body
        _, _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate


def _enter(rank: int, world_size: int, backend: str, folder: str, body: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    result = body(dist.group.WORLD, torch.device("cpu"), *args)
    torch.save(result, f"{folder}/result-{rank}")
    dist.barrier()
    # Not after an error: NCCL may wait here for ranks that are waiting elsewhere, and the error would never be seen.
    dist.destroy_process_group()


# --- forked ranks: the process that runs the tests --------------------------------------------------------------------

_sources: dict[int, "_Source"] = {}


class _Source:
    """A process that forks a rank for each job that it gets, and ends with its pipe."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, far_end = spawn.Pipe()
        self.process = spawn.Process(target=_fork_for_each_job, args=(far_end,))
        self.process.start()
        far_end.close()
        atexit.register(self.pipe.close)  # comes before multiprocessing waits for the process

    def stop(self) -> None:
        """End the process, and the rank that it may have."""
        self.pipe.close()
        self.process.join()


def fork_ranks(world_size: int, body: Callable[..., None], *args: Any) -> None:
    """Run `body(rank, *args)` on every rank; raises with what failed first and what fails soon after."""
    ranks = range(world_size)
    for rank in ranks:
        if rank not in _sources:
            _sources[rank] = _Source()
    running = {_sources[rank].pipe: rank for rank in ranks}
    try:
        for pipe, rank in running.items():
            pipe.send((dict(os.environ), os.getcwd(), pickle.dumps((body, rank, *args))))
        wait_for_ranks(running, {rank: _sources[rank].process for rank in ranks})
    finally:
        for rank in running.values():
            _sources.pop(rank).stop()


# --- forked ranks: a source -------------------------------------------------------------------------------------------


def _fork_for_each_job(jobs: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the tests close the pipe
    _import_what_ranks_import()
    fork = multiprocessing.get_context("fork")
    while True:
        try:
            job = jobs.recv()
        except (EOFError, OSError):
            return
        reader, writer = fork.Pipe(duplex=False)
        rank = fork.Process(target=_run_job, args=(*job, writer))
        rank.start()
        writer.close()
        if rank.sentinel not in wait([jobs, rank.sentinel]):
            rank.kill()  # the tests have given up, or have ended
            rank.join()
            return
        rank.join()
        failure = f"ended with exit code {rank.exitcode}" if rank.exitcode else None
        with contextlib.suppress(EOFError):
            failure = reader.recv()
        reader.close()
        jobs.send(failure)


def _import_what_ranks_import() -> None:
    # Where Transformer Engine is installed, each body says whether Megatron may see it, before the import.
    if importlib.util.find_spec("transformer_engine") is None:
        with warnings.catch_warnings(), cpu_pretraining():
            warnings.simplefilter("ignore")
            importlib.import_module("commfuse_megatron.testing.gpt")


def _run_job(environment: dict[str, str], folder: str, job: bytes, failure: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    try:
        body, *args = pickle.loads(job)
        body(*args)
    except BaseException:
        failure.send(f"raised\n{traceback.format_exc()}")
        raise SystemExit(1) from None
