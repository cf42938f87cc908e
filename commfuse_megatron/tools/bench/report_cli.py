"""`commfuse bench --report`: tables of documents, made anew from their files of rows."""

from __future__ import annotations

import argparse
from pathlib import Path

from commfuse_megatron.tools.common.output import results, say_count
from commfuse_megatron.tools.common.ranks import UsageError, is_speaker


def run_report(arguments: argparse.Namespace) -> int:
    """Render all documents, then write those that changed; 0. Needs no ranks and no GPU."""
    from commfuse_megatron.tools.bench.report import count_tables, render

    default = arguments.parser.get_default
    unused = sorted(set(vars(arguments)) - {"report", "run", "parser", "command", "verbose"})
    given = [f"--{name.replace('_', '-')}" for name in unused if getattr(arguments, name) != default(name)]
    if given:
        raise UsageError(f"{', '.join(given)}: of rows, which --report does not make")
    texts = {}
    for file in map(Path, arguments.report):
        try:
            before = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--report {file}: {getattr(error, 'strerror', None) or error}") from None
        texts[file] = before, render(before, file.parent)
    for file, (before, after) in texts.items():
        if after != before and is_speaker():
            file.write_text(after, encoding="utf-8")
        said = "written" if after != before else "as it was"
        results().print(f"{file}: {say_count(count_tables(after), 'table')}, {said}", soft_wrap=True)
    return 0
