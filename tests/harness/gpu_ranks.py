"""Ranks on GPUs: processes that stay, with their process group, for the next test.

Importing, a CUDA context and a communicator take some 15 s (2 x H200, 11/2026), most bodies take 2. So the ranks of a
group wait for more bodies of the same module, with the same functions among their arguments; those of another one may
need other libraries (two of cuDNN in one process do not go together), those of another size, backend or environment,
which is read at the start, replace them. What is left in memory or on the device by a body that failed is not known:
its ranks are killed.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from commfuse_megatron.transport.select import take_gpu

__all__ = ["run_on_gpu_ranks", "wait_for_ranks"]

# A rank that fails breaks the connections of the others, one of which may say so first.
_CONSEQUENCES_S = 1.0
_END_WITHIN_S = 10.0

# By what they were started with; at most one group at a time, since every rank keeps device memory.
_ranks: dict[tuple, "_Ranks"] = {}


class _Job(NamedTuple):
    """What every rank is told; results go into files of the folder."""

    folder: str
    body: Callable[..., Any]
    args: tuple


def wait_for_ranks(running: dict[Connection, int], processes: Mapping[int, Any]) -> None:
    """Until each has said through its pipe how it ended, None or what failed; raises what failed first and what fails
    soon after. Those that are waited for no longer are left in `running`."""
    failures: list[str] = []
    while running and (ready := wait(list(running), timeout=_CONSEQUENCES_S if failures else None)):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = running.pop(pipe)
            try:
                failure = pipe.recv()
            except (EOFError, OSError):
                processes[rank].join()
                failure = f"ended with exit code {processes[rank].exitcode}"
            if failure is not None:
                failures.append(f"rank {rank} {failure}")
    if failures:
        raise RuntimeError("\n".join(failures))


def run_on_gpu_ranks(world_size: int, backend: str, folder: str, body: Callable[..., Any], args: tuple) -> None:
    """Run `body` on every rank; raises with what failed first and what fails soon after."""
    functions = (f"{each.__module__}.{each.__qualname__}" for each in args if callable(each))
    key = (body.__module__, *functions, world_size, backend, *sorted(_environment().items()))
    if key not in _ranks:
        for other in list(_ranks):
            _ranks.pop(other).end()
        _ranks[key] = _Ranks(world_size, backend)
    ranks = _ranks.pop(key)  # until they have proved to be sound
    try:
        ranks.run(_Job(folder, body, args))
    except BaseException:
        ranks.kill()
        raise
    _ranks[key] = ranks


def _environment() -> dict[str, str]:
    """Without what pytest changes for every test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


class _Ranks:
    """The processes of one group, seen from the tests."""

    def __init__(self, world_size: int, backend: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._processes, self._pipes = [], []
        self._folder = tempfile.TemporaryDirectory()
        store = f"{self._folder.name}/store"
        for rank in range(world_size):
            pipe, far_end = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, world_size, backend, store, far_end))
            process.start()
            far_end.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        atexit.register(self.end)  # comes before multiprocessing kills what is left

    def run(self, job: _Job) -> None:
        sent = pickle.dumps(job)
        for pipe in self._pipes:
            pipe.send(sent)
        wait_for_ranks({pipe: rank for rank, pipe in enumerate(self._pipes)}, dict(enumerate(self._processes)))

    def end(self) -> None:
        """Let them destroy their group; who does not is killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _END_WITHIN_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, world_size: int, backend: str, store: str, jobs: Connection) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = take_gpu(rank)
    shared = dist.FileStore(store, world_size)
    dist.init_process_group(backend, store=shared, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    while True:
        try:
            sent = jobs.recv()
        except (EOFError, OSError):
            break
        failure = None
        try:
            _run(pickle.loads(sent), rank, device)
        except BaseException:
            failure = f"raised\n{traceback.format_exc()}"
        with contextlib.suppress(OSError):
            jobs.send(failure)
    dist.destroy_process_group()


def _run(job: _Job, rank: int, device: torch.device) -> None:
    result = job.body(dist.group.WORLD, device, *job.args)
    torch.save(result, f"{job.folder}/result-{rank}")
    del result
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    dist.barrier()
