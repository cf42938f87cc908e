"""`commfuse bench --report`: tables of documents, made of rows: what was measured is never typed by hand.

A document says where a table belongs, and what it is made of:

    <!-- table: linears results/linears_h200_202611.json pass=fprop M=8192 -->
    <!-- end -->

`render` puts the table between the two lines. The file is named as seen from the document; `key=value` keeps rows whose
`key` is that value, several may be given with commas, and `*` stands for anything. A file has a list "rows", a list
"runs" of such documents, or both; what a header says counts for all rows below it. Lines of a "report", as contexts
give it, are rows, too.
"""

import argparse
import fnmatch
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.bench.document_tables import KINDS
from commfuse_megatron.tools.common.options import refuse_given
from commfuse_megatron.tools.common.output import results, say_count
from commfuse_megatron.tools.common.ranks import UsageError, is_speaker

# At the beginning of a line: what is indented is an example.
_MARKED = re.compile(r"^(<!-- table: (\S+) (\S+)((?: [^\s=]+=\S+)*) -->\n).*?(<!-- end -->)$", re.S | re.M)
_BEGIN = re.compile("^<!-- table:", re.M)


def run_report(arguments: argparse.Namespace) -> int:
    """Render all documents, then write those that changed; 0. Needs no ranks and no GPU."""
    others = sorted(set(vars(arguments)) - {"report", "run", "parser", "command", "verbose"})
    refuse_given(arguments, others, "{}: of rows, which --report does not make")
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


def render(text: str, folder: Path) -> str:
    """`text` with every table made anew. folder: that of the document.

    Raises ConfigError for a table of no known kind or without rows, and for a marker without its end.
    """
    text, count = _MARKED.subn(lambda found: _render_one(found, folder), text)
    if count != count_tables(text):
        raise ConfigError('a table has no end, or not the form "<!-- table: KIND FILE key=value ... -->"')
    return text


def count_tables(text: str) -> int:
    """How many tables a document has."""
    return len(_BEGIN.findall(text))


def _render_one(found: re.Match[str], folder: Path) -> str:
    begin, kind, file, filters, end = found.groups()
    if kind not in KINDS:
        raise ConfigError(f'there is no table "{kind}"; known are {", ".join(KINDS)}')
    wanted = dict(each.split("=", 1) for each in filters.split())
    ops, make = KINDS[kind]
    rows = [
        row
        for row in read_rows(folder / file)
        if row.get("op") in ops and all(_is_wanted(row.get(key), wanted[key]) for key in wanted)
    ]
    if not rows:
        raise ConfigError(f"{begin.strip()}: {file} has no such rows")
    return f"{begin}{make(rows)}\n\n{_source(rows, file)} {end}"


def _is_wanted(value: object, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(str(value), pattern) for pattern in patterns.split(","))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, each with what the headers above it say. Raises ConfigError for what is no such file."""
    try:
        return list(_rows_below(json.loads(path.read_text(encoding="utf-8")), {}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: no file of rows: {error}") from error


def _rows_below(document: dict[str, Any], above: dict[str, Any]) -> Iterable[dict[str, Any]]:
    header = above | {key: value for key, value in document.items() if not isinstance(value, list | dict)}
    for row in (*document.get("rows", ()), *document.get("report", ())):
        yield header | row
    for run in document.get("runs", ()):
        # A run says itself what it was made with.
        yield from _rows_below(run, {key: header[key] for key in ("device", "dtype") if key in header})


def _source(rows: Sequence[dict[str, Any]], file: str) -> str:
    """One line below a table: where its rows come from."""
    device = _all_values(rows, "device")
    ranks = [row["group_size"] for row in rows if not row.get("emulated") and row.get("group_size")]
    if device and ranks and len(set(ranks)) == 1:
        device = f"{ranks[0]} x {device}"
    parts = [device, _all_values(rows, "link"), _all_values(rows, "dtype")]
    commits = _all_values(rows, "commit")
    parts += [f"commit {commits}" if commits and len(commits) < 40 else "", f"[rows]({file})"]
    return f"*{'; '.join(part for part in parts if part)}*"


def _all_values(rows: Iterable[dict[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(str(row[key]) for row in rows if row.get(key)))
