"""What docs/support.md and docs/field_bugs.md call tested names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

from commfuse_megatron.tools.verify.megatron_cases import CONFIGURATIONS

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
OUR_STAND_IN = "integrations/transformer_engine_checks.py"
REFERENCE = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows_of(file: Path, heading: str) -> list[list[str]]:
    """The cells of the first table after `heading`."""
    lines = file.read_text(encoding="utf-8").split(heading, 1)[1].splitlines()
    table: list[str] = []
    for line in lines:
        if line.startswith("|"):
            table.append(line)
        elif table:
            break
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def names_in(file: Path) -> set[str]:
    """Functions of a test file and what is made of checks; of the one that runs them, also configurations of models."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if file.name == "test_models.py":
        found |= {configuration.name for configuration in CONFIGURATIONS}
    return found


def assert_references_exist(cell: str) -> None:
    for file, name in REFERENCE.findall(cell):
        assert (TESTS / file).is_file(), f"{file} does not exist"
        assert name in names_in(TESTS / file), f"{file} has no {name}"


SUPPORT_FILE = ROOT / "docs" / "support.md"
SUPPORT = rows_of(SUPPORT_FILE, "# What is supported")
ADAPTERS = rows_of(SUPPORT_FILE, "## Adapters, quantisers, exporters")


@pytest.mark.parametrize("row", SUPPORT, ids=lambda row: row[0][:40])
def test_a_feature_that_is_supported_names_its_tests(row: list[str]) -> None:
    feature, answer, tested_in = row
    assert answer, feature
    assert_references_exist(tested_in)
    if re.match(r"yes\b", answer):
        assert REFERENCE.search(tested_in), f"{feature}: says yes and names no test"


@pytest.mark.parametrize("row", ADAPTERS, ids=lambda row: f"{row[0][:40]} {row[1][:20]}".strip())
def test_what_is_said_of_a_library_names_its_tests(row: list[str]) -> None:
    _, order, result, tested_in = row
    assert order
    assert result
    assert REFERENCE.search(tested_in)
    assert_references_exist(tested_in)


def test_every_check_of_another_library_is_in_the_table() -> None:
    said = {reference for row in ADAPTERS for reference in REFERENCE.findall(row[3])}
    libraries = {file for file, _ in said if file.startswith("integrations/")} - {OUR_STAND_IN}
    checks = {(file, name) for file in libraries for name in names_in(TESTS / file) if name.startswith("check_")}
    assert len(checks) > 5
    assert checks <= said


def test_the_support_tables_are_found() -> None:
    assert len(SUPPORT) > 15
    assert len(ADAPTERS) > 5


@pytest.mark.parametrize("row", rows_of(ROOT / "docs" / "field_bugs.md", "# Faults"), ids=lambda row: row[0])
def test_every_reported_fault_names_its_tests(row: list[str]) -> None:
    assert REFERENCE.search(row[2])
    assert_references_exist(row[2])


def test_all_fifteen_faults_are_there() -> None:
    assert [row[0] for row in rows_of(ROOT / "docs" / "field_bugs.md", "# Faults")] == [str(n) for n in range(1, 16)]


def test_names_of_tests_have_up_to_60_characters() -> None:
    names = {name for file in TESTS.rglob("*.py") for name in names_in(file) if name.startswith(("test_", "check_"))}
    assert len(names) > 500
    assert [name for name in sorted(names) if len(name) > 60] == []
