"""Where results, progress and logs go: results to stdout, everything else to stderr, JSON to a file."""

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from commfuse_megatron.cli.ranks import UsageError

__all__ = [
    "configure_logging",
    "make_progress",
    "require_files",
    "require_names_for_files",
    "results",
    "say_count",
    "silence_foreign_warnings",
    "status",
    "why_file_cannot_be_written",
    "why_folder_cannot_be_written",
    "write_json",
]

WIDTH_WITHOUT_TERMINAL = 140


def _console(stream: TextIO, *, stderr: bool) -> Console:
    """A console that does not squeeze tables into 80 columns when it writes to a file or a pipe."""
    fixed = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, width=fixed, highlight=False)


def say_count(count: int, what: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def each_once[T](values: Iterable[T]) -> tuple[T, ...]:
    """In the order in which they come first."""
    return tuple(dict.fromkeys(values))


def results() -> Console:
    """The console for results (stdout)."""
    return _console(sys.stdout, stderr=False)


def make_progress(*, is_shown: bool = True) -> Progress:
    """A progress bar on stderr; silent on ranks that do not speak."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=_console(sys.stderr, stderr=True),
        disable=not is_shown,
    )


@contextmanager
def status(text: str) -> Iterator[None]:
    """Say on stderr what takes a while, with a spinner on terminals."""
    with _console(sys.stderr, stderr=True).status(text):
        yield


def configure_logging(level: int, *, rank: int = 0) -> None:
    """Send log records to stderr; ranks other than the first only from WARNING on."""
    logging.basicConfig(
        level=level if rank == 0 else max(level, logging.WARNING),
        format=f"%(levelname)s rank {rank} %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def silence_foreign_warnings() -> None:
    """Megatron says on import which optional packages it goes without; nobody can act on that here."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", module=r"torch\.")
    # What the compiler says when a file is first imported is filed under the file's path, not its module's name.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[/\\]megatron[/\\]")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def why_file_cannot_be_written(path: str | Path) -> str | None:
    """Why no file could be written to `path`, in folders that are made then; None if it can. Makes nothing."""
    path = Path(path)
    if path.is_dir():
        return "is a folder; name a file"
    if path.exists() and not path.is_file():
        return "is no regular file"
    if path.exists() and not os.access(path, os.W_OK):
        return "cannot be overwritten"
    return why_folder_cannot_be_written(path.parent)


def require_names_for_files(option: str, name: str) -> None:
    """Raise UsageError where `name`, which files in a folder begin with, would lead out of that folder."""
    if Path(name).name != name:
        raise UsageError(f"{option} {name}: name the files, not a folder; that is what --output is for")


def require_files(folder: str | Path, names: Iterable[str]) -> None:
    """Raise UsageError where files of these names could not be written into `folder`. Makes nothing."""
    for name in names:
        path = Path(folder) / name
        reason = why_file_cannot_be_written(path)
        if reason is not None:
            raise UsageError(f"{path}: {reason}")


def why_folder_cannot_be_written(path: str | Path) -> str | None:
    """Why nothing could be written into the folder `path`, which is made then; None if it can. Makes nothing."""
    existing = Path(path)
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"the folder cannot be made: {existing} is none"
    try:
        # Asking for permission proves nothing for root or on special file systems.
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"the folder {existing} is not writable: {error.strerror or error}"


def write_json(path: str | Path, data: Any) -> None:
    """Write `data` to `path`, making its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
