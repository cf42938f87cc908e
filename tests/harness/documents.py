"""Code of documents: indented blocks under a heading, as one program."""

import re
import textwrap
from pathlib import Path

__all__ = ["code_of", "section_of"]


def section_of(document: Path, heading: str) -> str:
    """What follows a heading, up to the next one of its level."""
    level = heading.split(" ")[0]
    _, _, below = document.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    assert below, f"{document.name} has no {heading}"
    return re.split(rf"^{level} ", below, maxsplit=1, flags=re.MULTILINE)[0]


def code_of(document: Path, heading: str) -> str:
    """The indented blocks of a section, joined."""
    blocks = re.findall(r"(?:^    .*\n)+", section_of(document, heading), re.MULTILINE)
    return "".join(map(textwrap.dedent, blocks))
