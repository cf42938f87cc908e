"""Ranks as threads: real gloo groups over one in-process store. Fast enough for the bulk of the tests."""

import functools
import inspect
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["make_groups", "on_ranks", "run_threads"]

# PyTorch 2.11 keeps one record of collectives per process, and a group's first collective enters the group into its map
# before it takes the lock (FlightRecorder::recordWithResetEnabled). Ranks as threads do that at once; 8 threads
# with new groups crash within seconds. Read at the first collective of a process; 0 keeps no record.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

# How long the other ranks may go on once one has failed.
_GRACE_S = 3.0

Body = Callable[[dist.ProcessGroup, torch.device], Any]


def make_group(store: dist.Store, name: str, group_rank: int, group_size: int, timeout_s: float) -> dist.ProcessGroup:
    """One member's process group, made as torch.distributed makes it but without its global registry."""
    prefixed = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(prefixed, group_rank, group_size)
    backend = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", prefixed), group_rank, group_size, timedelta(seconds=timeout_s)
    )
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def make_groups(members: list[list[int]], timeout_s: float = 30.0) -> Callable[[int], list[dist.ProcessGroup]]:
    """A function that makes, for one global rank, its groups among `members` (lists of global ranks), in that order."""
    store = dist.HashStore()

    def of_rank(global_rank: int) -> list[dist.ProcessGroup]:
        return [
            make_group(store, f"group-{number}", ranks.index(global_rank), len(ranks), timeout_s)
            for number, ranks in enumerate(members)
            if global_rank in ranks
        ]

    return of_rank


def run_threads(group_size: int, body: Body, *, timeout_s: float = 30.0) -> list[Any]:
    """Run `body(group, device)` on every rank; results by rank, or an error with each rank's traceback."""
    store = dist.HashStore()
    results: list[Any] = [None] * group_size
    failures: list[tuple[int, BaseException, str]] = []

    def run(rank: int) -> None:
        try:
            group = make_group(store, "group", rank, group_size, timeout_s)
            results[rank] = body(group, torch.device("cpu"))
        except BaseException as error:
            failures.append((rank, error, traceback.format_exc()))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(group_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * timeout_s
    while time.monotonic() < deadline:
        running = [thread for thread in threads if thread.is_alive()]
        if not running:
            break
        running[0].join(0.01)
        if failures:  # the other ranks may now wait for this one in vain
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if hanging and not failures:
        raise AssertionError(f"ranks {hanging} hang")
    if failures:
        text = "\n".join(f"rank {rank}:\n{trace}" for rank, _, trace in sorted(failures, key=lambda f: f[0]))
        raise AssertionError(f"{len(failures)} of {group_size} ranks failed\n{text}") from failures[0][1]
    return results


def on_ranks(group_size: int | str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorates a test `test(group, device, ...)` that all ranks run; a text names the parameter with their number."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            number = given[group_size] if isinstance(group_size, str) else group_size
            run_threads(number, lambda group, device: test(group, device, **given), **options)

        _, _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate
