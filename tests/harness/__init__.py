"""Two ways to run one body `fn(group, device)` on several ranks: threads of one process, or processes; and commands."""

from tests.harness.commands import run_on_ranks, run_python
from tests.harness.spawned import on_processes, run_spawned
from tests.harness.threads import make_groups, on_ranks, run_threads

__all__ = ["make_groups", "on_processes", "on_ranks", "run_on_ranks", "run_python", "run_spawned", "run_threads"]
