"""The tree holds sources only: no binaries but figures, no paths of one machine, no package hosts, ASCII text.

The patterns are put together from pieces so that this file does not contain what it looks for.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED_DIRS = {".git", "__pycache__", "demo_output", "trace_output", "build", "dist"}
FIGURE_SUFFIXES = {".png", ".svg"}
BINARY_SUFFIXES = {
    ".whl", ".so", ".o", ".a", ".pt", ".pth", ".npy", ".npz", ".pkl", ".zip", ".gz", ".tar", ".cubin", ".exe",
}  # fmt: skip
MAX_SIZE_BYTES = 1 << 20

MACHINE_PATH = re.compile(
    r"(?<![\w.\-])/(?:" + "|".join(["ho" + "me", "ro" + "ot", "wo" + "rk", "Us" + "ers"]) + r")/\w"
)
PACKAGE_HOST = re.compile("|".join(["py" + r"pi\.org", "python" + "hosted", "conda" + r"\.anaconda"]))


# In Markdown, within backticks or as a link's target: a file by its suffix, or a folder by its slash.
NAMED = re.compile(r"(?:`|\]\()((?:[\w.-]+/)*(?:[\w-][\w.-]*\.(?:py|md|ya?ml|json|toml|png|svg)|[\w.-]+/))[`:)#]")
WRITTEN_BY_COMMANDS = {"demo_output/", "trace_output/"}


def files_of_the_tree() -> list[Path]:
    """What git tracks or would track; without git, all files outside hidden and generated folders."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout.split("\0")
        return [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    return [
        file
        for file in ROOT.rglob("*")
        if file.is_file()
        and not any(
            part in SKIPPED_DIRS or part.endswith(".egg-info") or (part.startswith(".") and part != ".ci")
            for part in file.relative_to(ROOT).parts[:-1]
        )
    ]


FILES = files_of_the_tree()
TEXTS = {file: file.read_bytes() for file in FILES if file.suffix not in FIGURE_SUFFIXES}
DOCUMENTS = {file: text.decode("utf-8") for file, text in TEXTS.items() if file.suffix == ".md"}


def lines_of(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """(where, line) of all of them."""
    for file in files:
        for number, line in enumerate(TEXTS[file].decode("utf-8").splitlines(), 1):
            yield f"{file.relative_to(ROOT)}:{number}", line


def test_tables_of_documents_have_one_head_each() -> None:
    """Fails with a second table stuck to the end of one, which is then read as its rows."""
    wrong = []
    for file, text in DOCUMENTS.items():
        lines = text.splitlines()
        rules = [number for number, line in enumerate(lines) if re.fullmatch(r"\|[-:| ]+\|", line)]
        wrong += [f"{file}:{number}" for number in rules if number >= 2 and lines[number - 2].startswith("|")]
    assert not wrong, "\n".join(wrong)


def test_no_binaries_and_no_large_files() -> None:
    assert len(FILES) > 10, "the tree was not found"
    wrong = [f for f in FILES if f.suffix in BINARY_SUFFIXES or f.stat().st_size > MAX_SIZE_BYTES]
    wrong += [f for f, text in TEXTS.items() if b"\0" in text]
    wrong += [f for f in FILES if f.suffix in FIGURE_SUFFIXES and f.relative_to(ROOT).parts[0] != "docs"]
    assert not wrong, f"not sources: {wrong}"


def test_texts_are_ascii() -> None:
    wrong = [where for where, line in lines_of(TEXTS) if not line.isascii()]
    assert not wrong, f"not ASCII: {wrong}"


def test_files_that_documents_name_exist() -> None:
    names = {str(path.relative_to(ROOT)) for file in FILES for path in (file, *file.parents) if ROOT in path.parents}
    wrong = []
    for file in DOCUMENTS:
        # As seen from the root, the package, the tests (in the support table), or beside the document.
        folders = ("", "commfuse_megatron", "tests", str(file.parent.relative_to(ROOT)))
        for where, line in lines_of([file]):
            for named in NAMED.findall(line):
                possible = {os.path.normpath(os.path.join(folder, named)) for folder in folders}
                if named not in WRITTEN_BY_COMMANDS and not possible & names:
                    wrong.append(f"{where}: {named}")
    assert not wrong, "\n".join(wrong)


def anchors_of(text: str) -> set[str]:
    """What links may name of a document: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_documents_lead_somewhere() -> None:
    wrong, count = [], 0
    for file, text in DOCUMENTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("https://"):
                continue
            count += 1
            name, _, anchor = target.partition("#")
            there = (file.parent / name) if name else file
            if not there.exists() or (anchor and anchor not in anchors_of(DOCUMENTS[there.resolve()])):
                wrong.append(f"{file.relative_to(ROOT)}: {target}")
    assert not wrong, "\n".join(wrong)
    assert count > 30


def test_every_document_is_reached_from_the_readme() -> None:
    reached, left = set(), [ROOT / "README.md"]
    while left:
        file = left.pop()
        reached.add(file)
        text = DOCUMENTS[file]
        named = [*re.findall(r"\]\(([^)#\s]+\.md)", text), *re.findall(r"`([\w./-]+\.md)`", text)]
        there = {Path(os.path.normpath(file.parent / name)) for name in named}
        left += [each for each in there if each.is_file() and each not in reached]
    assert DOCUMENTS.keys() - reached == set()


def test_every_figure_is_shown_and_its_command_is_written_down() -> None:
    shown = {
        os.path.normpath(file.parent.relative_to(ROOT) / target)
        for file, text in DOCUMENTS.items()
        for target in re.findall(r"!\[[^]]*\]\((\S+\.png)\)", text)
    }
    commands = DOCUMENTS[ROOT / "docs" / "tracing.md"].split("## The figures")[1].split("##")[0]
    drawn = {f"{folder}/{name}.png" for folder, name in re.findall(r"--output (\S+) --name (\S+)", commands)}
    figures = {str(file.relative_to(ROOT)) for file in FILES if file.suffix in FIGURE_SUFFIXES}
    assert shown == drawn == figures
    assert figures


def test_no_machine_paths_and_no_package_hosts() -> None:
    wrong = [
        f"{where}: {line.strip()}"
        for where, line in lines_of(TEXTS)
        if MACHINE_PATH.search(line) or PACKAGE_HOST.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_test_files_have_names_of_their_own() -> None:
    """Two of one name are one module to pytest where their folders are no packages."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
