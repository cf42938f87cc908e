"""Tables of documents: made of rows, and what every document holds is what its rows give."""

import json
import re
from pathlib import Path

import pytest

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools import main as cli
from commfuse_megatron.tools.bench.document_tables import KINDS
from commfuse_megatron.tools.bench.report import count_tables, read_rows, render

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "docs" / "results"

# Their figures are not measurements of this project's speed: docstrings of the code, simulated tables that another test
# makes again, and what a document about tests says.
OTHER_FIGURES = {"configuration.md", "order_by_cost.md"}
TABLE = re.compile(r"^<!-- table:.*?<!-- end -->$", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(r"\d(?:\.\d+)?(?: (?:ms|us|times as|TFLOP)\b| ?%)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_holds_what_its_rows_give(document):
    text = document.read_text(encoding="utf-8")
    assert render(text, document.parent) == text, f"run `commfuse bench --report {document.relative_to(ROOT)}`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_figure_is_typed_by_hand(document):
    """What was measured stands in a table that is made of rows, and nowhere else."""
    if document.name in OTHER_FIGURES:
        return
    outside = TABLE.sub("", document.read_text(encoding="utf-8"))
    words = [line for line in outside.splitlines() if not line.startswith("    ") and MEASURED.search(line)]
    assert not words, "\n".join(words)


def test_files_of_rows_are_in_tables_each_report_has_its_own():
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    file = re.compile(r"^<!-- table: \S+ (?:\S*/)?(\S+\.json)", re.M)
    used = {name for text in texts.values() for name in file.findall(text)}
    assert used == {path.name for path in RESULTS.glob("*.json")}
    assert len(list(RESULTS.iterdir())) <= 15
    reports = [path for path in DOCUMENTS if path.parent == RESULTS and path.name != "README.md"]
    assert all(count_tables(texts[path]) for path in reports)


def test_every_kind_of_table_is_used():
    used = {kind for path in DOCUMENTS for kind in re.findall(r"^<!-- table: (\S+)", path.read_text(), re.M)}
    assert used == set(KINDS)


# -- rendering --------------------------------------------------------------------------------------------------------


def a_step(variant: str, step_ms: float, **more) -> dict:
    row = {"case": "llama-8b", "op": "whole_step", "pass": "step", "variant": variant, "layers": 4, "group_size": 2}
    return {**row, "step_ms": step_ms, **more}


STEPS = {
    "sequence": 8192,
    "device": "a GPU",
    "commit": "abc",
    "rows": [a_step("stock", 110.0), a_step("planned", 101.0), a_step("no_communication", 100.0)],
}


def rendered(folder: Path, data: object, marker: str) -> str:
    (folder / "rows.json").write_text(json.dumps(data), encoding="utf-8")
    return render(f"Before.\n\n<!-- table: {marker} -->\nold\n<!-- end -->\n\nAfter.\n", folder)


def test_a_table_takes_the_place_of_what_is_between_its_markers(tmp_path):
    text = rendered(tmp_path, STEPS, "whole-step rows.json")
    assert "old" not in text
    assert text.startswith("Before.\n\n<!-- table: whole-step rows.json -->\n| step | stock | **plugin** |")
    assert "| llama-8b, 4 layers, S 8192 | 110.0 | **101.0** | 100.0 | 0.918 | 10.0 | 1.0 |" in text
    assert "*2 x a GPU; commit abc; [rows](rows.json)*" in text
    assert text.endswith("<!-- end -->\n\nAfter.\n")
    assert render(text, tmp_path) == text


def test_rows_of_several_runs_keep_what_their_headers_say(tmp_path):
    later = {**STEPS, "commit": "def", "sequence": 2048}
    text = rendered(tmp_path, {"runs": [STEPS, later]}, "whole-step rows.json commit=d*,x")
    assert "S 2048" in text
    assert "S 8192" not in text
    assert len(read_rows(tmp_path / "rows.json")) == 6


@pytest.mark.parametrize(("data", "marker", "message"), [
    (STEPS, "whole-steps rows.json", 'no table "whole-steps"; known are linears,'),
    (STEPS, "whole-step rows.json commit=x", "rows.json has no such rows"),
    (STEPS, "linears rows.json", "rows.json has no such rows"),
    (STEPS, "whole-step missing.json", "missing.json: no file of rows"),
    ([STEPS], "whole-step rows.json", "rows.json: no file of rows"), (STEPS, "whole-step", "not the form"),
])  # fmt: skip
def test_what_cannot_be_rendered_is_refused(tmp_path, data, marker, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        rendered(tmp_path, data, marker)


def test_a_marker_without_an_end_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no end"):
        render("<!-- table: lost rows.json -->\n", tmp_path)


def test_an_indented_marker_is_an_example(tmp_path):
    text = "    <!-- table: lost rows.json -->\n    <!-- end -->\n"
    assert render(text, tmp_path) == text


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_documents_that_changed(tmp_path, capsys):
    (tmp_path / "rows.json").write_text(json.dumps(STEPS))
    document = tmp_path / "mine.md"
    document.write_text("<!-- table: whole-step rows.json -->\n<!-- end -->\n")
    assert cli.main(["bench", "--report", str(document)]) == 0
    assert "**101.0**" in document.read_text()
    assert "1 table, written" in capsys.readouterr().out
    assert cli.main(["bench", "--report", str(document)]) == 0
    assert "1 table, as it was" in capsys.readouterr().out


def test_the_command_writes_nothing_if_a_document_fails(tmp_path, capsys):
    (tmp_path / "rows.json").write_text(json.dumps(STEPS))
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("<!-- table: whole-step rows.json -->\n<!-- end -->\n")
    bad.write_text("<!-- table: lost rows.json -->\n<!-- end -->\n")
    assert cli.main(["bench", "--report", str(good), str(bad)]) == 2
    assert "has no such rows" in capsys.readouterr().err
    assert "101" not in good.read_text()


@pytest.mark.parametrize(("arguments", "message"), [
    (["--report", "no.md"], "--report no.md: No such file"),
    (["--report", "README.md", "--rounds", "3", "--json", "f"], "--json, --rounds: of rows, which --report does"),
])  # fmt: skip
def test_what_the_command_refuses(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
