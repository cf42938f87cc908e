"""Where results, progress and logs go: results to stdout, everything else to stderr, JSON to a file."""

import io
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

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from commfuse_megatron.tools.common.ranks import UsageError

# A file or a pipe has no width of its own; no line is as long.
_WIDTH_WITHOUT_TERMINAL = 100_000
# In a narrow table texts are folded to no less than this; below it, rows are written as sentences.
_LEAST_TEXT_WIDTH = 12


class _FittingConsole(Console):
    """Prints tables whole at any width: names fold, values never do, and no cell is cut off."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(self._fit(thing) if isinstance(thing, Table) else thing for thing in objects), **options)

    def on_broken_pipe(self) -> None:
        """Whoever reads (`| head`) has read enough: no failure, so the command goes on and says how it ended."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def _fit(self, table: Table) -> RenderableType:
        """The table as it is if there is room for it, else with folded texts, else its rows as sentences.

        Columns that are justified to the right hold values; rich would take from the widest columns first, values or
        not, then from all, and would cut off what has no spaces to break at.
        """
        columns = [[self.render_str(str(text)) for text in (column.header, *column.cells)] for column in table.columns]
        widths = [max(text.cell_len for text in texts) for texts in columns]
        frame = self.measure(table, options=self.options.update(width=_WIDTH_WITHOUT_TERMINAL)).maximum - sum(widths)
        room = self.width - frame
        if sum(widths) <= room:
            return table
        least = []
        for column, (header, *cells) in zip(table.columns, columns, strict=True):
            widest = max((text.cell_len for text in cells), default=0)
            heading = max((len(word) for word in header.plain.split()), default=0)
            least.append(max(heading, widest if column.justify == "right" else min(widest, _LEAST_TEXT_WIDTH)))
        if sum(least) > room:
            return self._as_sentences(table, columns)
        while sum(widths) > room:
            widest = max((n for n, width in enumerate(widths) if width > least[n]), key=widths.__getitem__)
            widths[widest] -= 1
        for column, width in zip(table.columns, widths, strict=True):
            column.width, column.no_wrap, column.overflow = width, False, "fold"
        return table

    def _as_sentences(self, table: Table, columns: list[list[Text]]) -> Group:
        """ "heading value | heading value": line breaks come between such pairs where a pair fits into a line."""
        lines = [self.render_str(str(table.title or ""), style="table.title")]
        headers = [texts[0].plain for texts in columns]
        for row in zip(*(texts[1:] for texts in columns), strict=True):
            line = Text()
            for header, value in zip(headers, row, strict=True):
                if not value:
                    continue
                pair = Text.assemble((f"{header} " if header else "", "dim"), value)
                if line and line.cell_len + len(" | ") + pair.cell_len > self.width:
                    lines.append(line)
                    line = Text("  ") + pair
                else:
                    line = line + Text(" | " if line else "") + pair
            lines.append(line)
        return Group(*lines)


def _console(stream: TextIO, *, stderr: bool) -> Console:
    """The only way to a console: it neither squeezes what goes into a file or a pipe, nor fails at a character."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        # What an encoding lacks, as in a file's name, is no reason to lose results. Frames are ASCII there, by rich.
        stream.reconfigure(errors="backslashreplace")
    has_width = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    width = None if has_width else _WIDTH_WITHOUT_TERMINAL
    return _FittingConsole(stderr=stderr, width=width, highlight=False, emoji=False)


def say_count(count: int, what: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def each_once[T](values: Iterable[T]) -> tuple[T, ...]:
    """In the order in which they come first."""
    return tuple(dict.fromkeys(values))


def make_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table; columns whose heading begins with ">" hold values, which are never folded."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*row)
    return table


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
    with _console(sys.stderr, stderr=True).status(text, spinner="line"):
        yield


def configure_logging(level: int, *, rank: int = 0) -> None:
    """Send log records to stderr; ranks other than the first only from WARNING on.

    Above INFO, which is what --verbose asks for, foreign warnings are silenced. Called before torch is imported.
    """
    if level > logging.INFO:
        silence_foreign_warnings()
    logging.basicConfig(
        level=level if rank == 0 else max(level, logging.WARNING),
        format=f"%(levelname)s rank {rank} %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def silence_foreign_warnings() -> None:
    """Megatron and Transformer Engine say on import, and at every layer, what they go without; nobody can act on it."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine)(\.|$)")
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
        return f"the folder cannot be made: {existing} is a file"
    try:
        # Asking for permission proves nothing for root or on special file systems.
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"nothing can be written into {existing}: {error.strerror or error}"


def write_json(path: str | Path, data: Any) -> None:
    """Write `data` to `path`, making its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
