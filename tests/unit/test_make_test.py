"""`make test` ends and fails where a worker dies, as by a segmentation fault, instead of going on or waiting."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DIES = """
import os, pathlib, signal

def test_before():
    pass

def test_dies():
    with pathlib.Path(__file__).with_name("deaths").open("a") as deaths:
        deaths.write("x")
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""


def options_of_make_test() -> list[str]:
    recipe = re.search(r"^test:.*\n\t.* -m pytest (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe, "the Makefile has no such target"
    return recipe[1].replace("$(TEST_WORKERS)", "2").replace("$(PYTEST_ARGS)", "").split()


def test_a_worker_that_dies_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(DIES, encoding="utf-8")
    for other in ("before", "later", "last"):
        (tmp_path / f"test_{other}.py").write_text("def test_passes():\n    pass\n", encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", *options_of_make_test(), "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=45)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "crashed while running" in ran.stdout
    assert "test_dies.py::test_dies" in ran.stdout
    # The other worker may get what killed the first; new ones would get it again and again.
    assert len((tmp_path / "deaths").read_text(encoding="utf-8")) <= 2
