"""Every error class, warning and reason that a user can meet is in `docs/troubleshooting.md`."""

import ast
import functools
import re
from pathlib import Path

import pytest

from commfuse_megatron import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "commfuse_megatron"
PAGE = " ".join((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").split())

# Calls that log a text made elsewhere: what of it the page quotes.
MADE_ELSEWHERE = {
    "runtime/link.py": ["the text of a TransportTimeoutError"],
    "plan/store.py": ["`no plans are read: ...`", "`plans are not stored: ...`"],
    "plugin/convert.py": ["`... stays: ...`", "`convert_model: nothing was converted"],
}
REASONS = ("support.py", "classes.py", "capture.py", "ulysses.py", "ulysses_block.py")


def texts(node: ast.AST) -> list[str]:
    """The literal parts of a string, or of a format string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant)]
    return []


@functools.cache
def parsed(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def logged() -> list[tuple[str, str]]:
    """(file, format) of what is logged as a warning or an error, or warned of."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in parsed(file):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            called = ast.unparse(node.func)
            if called in ("logger.warning", "logger.error", "logger.exception", "warnings.warn"):
                found.append((str(file.relative_to(PACKAGE)), "".join(texts(node.args[0]))))
    return found


def reasons() -> list[tuple[str, list[str]]]:
    """(file, literal parts) of the sentences for which layers stay stock."""
    found = []
    for name in REASONS:
        for node in parsed(PACKAGE / "plugin" / name):
            values = node.values if isinstance(node, ast.Dict) else [getattr(node, "value", None)]
            if isinstance(node, ast.Return | ast.Assign | ast.Dict):
                found += [(name, texts(value)) for value in values if value is not None]
    return [(name, parts) for name, parts in found if max(map(len, parts), default=0) > 12]


@pytest.mark.parametrize("name", errors.__all__)
def test_every_class_of_errors(name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize(("file", "text"), logged())
def test_every_warning(file, text):
    parts = [part.strip(" :") for part in re.split(r"%[.\d]*[a-z]", text)]
    wanted = [part for part in parts if len(part) > 2] or MADE_ELSEWHERE[file]
    assert [part for part in wanted if part not in PAGE] == []


@pytest.mark.parametrize(("file", "parts"), reasons())
def test_every_reason(file, parts):
    if "messages go over NCCL" in parts[0]:
        parts = [parts[0].partition(":")[0]]
    assert [part for part in parts if part.strip(" :") not in PAGE] == []


def quoted() -> list[str]:
    """Messages in the first column of the page's tables."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def test_what_the_page_quotes_is_said_somewhere():
    """Fails with a message that was reworded in the code."""
    said = "\n".join("...".join(texts(node)) for file in PACKAGE.rglob("*.py") for node in parsed(file) if texts(node))
    unknown = []
    for message in quoted():
        parts = [part.strip(' ";,:()') for part in message.split("...")]
        unknown += [(message, part) for part in parts if len(part) > 6 and part not in said]
    assert unknown == []
    assert (len(quoted()) > 70, len(logged()) >= 12, len(reasons()) > 30) == (True, True, True)
