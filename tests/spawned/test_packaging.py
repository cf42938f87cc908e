"""The package as users get it: a source distribution, its wheel, and that wheel in an environment of its own."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import commfuse_megatron

ROOT = Path(__file__).resolve().parents[2]
NAME = f"commfuse_megatron-{commfuse_megatron.__version__}"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def build(kind: str, source: Path, target: Path) -> Path:
    """What the build backend makes of a tree, as pip would have it."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, check=True, capture_output=True, text=True
    )
    return target / made.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaging")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    tree = folder / "tree"
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    return build("sdist", tree, folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent / "unpacked", filter="data")
    return build("wheel", sdist.parent / "unpacked" / NAME, sdist.parent)


def test_a_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = Parser().parsestr(archive.read(f"{NAME}.dist-info/METADATA").decode())
        entry_points = archive.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"commfuse_megatron", f"{NAME}.dist-info"}
    assert {"commfuse_megatron/py.typed", "commfuse_megatron/tools/simulate/measured_steps.json"} <= names
    assert any(name.endswith("/LICENSE") for name in names)
    modules = {name for name in names if name.endswith(".py")}
    package = ROOT / "commfuse_megatron"
    assert modules == {f"commfuse_megatron/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    assert metadata["Version"] == commfuse_megatron.__version__
    assert "commfuse =" in entry_points


def test_a_wheel_works_where_nothing_else_of_the_tree_is(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment, as plain folders; without the tree, which is installed there."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, str(wheel)], check=True)
    libraries = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    Path(libraries, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    code = "import commfuse_megatron as c; print(c.__file__, c.__version__)"
    ran = subprocess.run([python, "-c", code], cwd=tmp_path, env=clean, check=True, capture_output=True, text=True)
    assert ran.stdout.split() == [f"{libraries}/commfuse_megatron/__init__.py", commfuse_megatron.__version__]
    command = [tmp_path / "venv" / "bin" / "commfuse", "--version"]
    ran = subprocess.run(command, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True)
    assert commfuse_megatron.__version__ in ran.stdout
