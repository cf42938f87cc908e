"""Imports point downward only and never in circles; none has side effects; nothing syncs a whole device or prints.

Reads syntax trees, so an import inside a function, or for types alone, counts as well.
"""

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import pytest

from tests.harness import run_python

PACKAGE = Path(__file__).resolve().parents[2] / "commfuse_megatron"
NAME = "commfuse_megatron"

# From the bottom up. Parts on one line may not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"), ("config", "problem"), ("schedule",), ("transport", "kernels"), ("plan",), ("runtime",),
    ("ops",), ("__init__",),  # the public names; it may import nothing above itself
    ("plugin",), ("testing",), ("tools",),  # the command line, which nothing below knows
    ("__main__",),
)  # fmt: skip
HEIGHT = {part: height for height, parts in enumerate(LAYERS) for part in parts}
#: The rooms of the tools, likewise: each command's beside those whose code it has no need of.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("__init__", "common"), ("trace",), ("bench", "verify", "demo", "doctor"), ("simulate",), ("main",),
)  # fmt: skip
HEIGHT_OF_ROOM = {room: height for height, rooms in enumerate(ROOMS) for room in rooms}
MAY_IMPORT_MEGATRON = {"plugin", "testing", "tools"}
NO_DEVICE_WIDE_SYNC = {"ops", "runtime", "plugin", "transport"}
# When mapped memory is freed, PyTorch waits for the device itself, where no error can be raised: we do so before.
BUT_WHERE_PYTORCH_DOES_SO = PACKAGE / "transport" / "mapped_window.py"

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """The folder, or the top-level file, that a module belongs to."""
    first = file.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(tree: ast.AST, file: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a file imports; `from a import b` yields `a.b`."""
    package = [NAME, *file.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}"


def own_part(dotted: str) -> str | None:
    """The part of our package that a dotted name leads to, None for foreign modules."""
    names = dotted.split(".")
    if names[0] != NAME:
        return None
    return names[1] if len(names) > 1 and names[1] in HEIGHT else "__init__"


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def file_of(dotted: str) -> Path | None:
    """The file that defines what is imported, which may be what an `__init__` exports; None for foreign modules."""
    names = dotted.split(".")
    if names[0] != NAME:
        return None
    place = PACKAGE.joinpath(*names[1:])
    if place.with_suffix(".py").is_file():
        return place.with_suffix(".py")
    package = place / "__init__.py"
    if package.is_file():
        return package
    above = file_of(".".join(names[:-1]))
    if above is None or above.name != "__init__.py":
        return above
    exported = (name for _, name in imported_modules(parse(above), above) if name.split(".")[-1] == names[-1])
    return next((file_of(name) for name in exported), above)


def circles(imports: Mapping[str, Set[str]]) -> list[list[str]]:
    """Groups of names of which each leads to every other."""

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        ahead = set(imports.get(name, ()))
        while ahead:
            found |= ahead
            ahead = {after for one in ahead for after in imports.get(one, ())} - found
        return found

    ahead_of = {name: reached(name) for name in imports}
    groups = {
        frozenset({name} | {other for other in after if name in ahead_of.get(other, ())})
        for name, after in ahead_of.items()
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def test_every_part_has_a_layer() -> None:
    assert FILES, f"no sources under {PACKAGE}"
    unknown = sorted({part_of(file) for file in FILES} - set(HEIGHT))
    assert not unknown, f"give these a place in LAYERS: {unknown}"


def test_imports_point_downward() -> None:
    wrong = []
    for file in FILES:
        part = part_of(file)
        for line, dotted in imported_modules(parse(file), file):
            target = own_part(dotted)
            if target is not None and target != part and HEIGHT[target] >= HEIGHT[part]:
                wrong.append(f"{file.relative_to(PACKAGE)}:{line}: {part} must not import {target} ({dotted})")
    assert not wrong, "\n".join(wrong)


def test_rooms_of_the_tools_import_downward() -> None:
    wrong, seen = [], set()
    for file in FILES:
        if part_of(file) != "tools":
            continue
        room = file.relative_to(PACKAGE / "tools").parts[0].removesuffix(".py")
        seen.add(room)
        for line, dotted in imported_modules(parse(file), file):
            names = dotted.split(".")
            is_other = names[:2] == [NAME, "tools"] and len(names) > 2 and names[2] != room
            if is_other and HEIGHT_OF_ROOM[names[2]] >= HEIGHT_OF_ROOM[room]:
                wrong.append(f"{file.relative_to(PACKAGE)}:{line}: {room} must not import {names[2]} ({dotted})")
    assert seen == set(HEIGHT_OF_ROOM)
    assert not wrong, "\n".join(wrong)


def test_the_search_for_circles_finds_them() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}}) == [["b", "c"]]


def test_files_do_not_import_each_other_in_circles() -> None:
    imports = {
        str(file.relative_to(PACKAGE)): {
            str(target.relative_to(PACKAGE))
            for _, dotted in imported_modules(parse(file), file)
            if (target := file_of(dotted)) is not None and target.name != "__init__.py"
        }
        for file in FILES
        if file.name != "__init__.py"
    }
    assert any(imports.values()), "no import was found"
    assert not circles(imports), "\n".join(" <-> ".join(group) for group in circles(imports))


@pytest.mark.parametrize(("parts", "foreign"), [
    (set(HEIGHT) - MAY_IMPORT_MEGATRON, {"megatron", "transformer_engine"}),
    ({"schedule", "errors"}, {"torch", "triton", "numpy"}),
])  # fmt: skip
def test_parts_import_nothing_foreign(parts: set[str], foreign: set[str]) -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line}: {dotted}"
        for file in FILES
        if part_of(file) in parts
        for line, dotted in imported_modules(parse(file), file)
        if dotted.split(".")[0] in foreign
    ]
    assert not wrong, "\n".join(wrong)


def dotted_call(node: ast.Call) -> str:
    """`torch.cuda.synchronize` for that call; an empty string where the callee is no plain dotted name."""
    names: list[str] = []
    callee: ast.expr = node.func
    while isinstance(callee, ast.Attribute):
        names.append(callee.attr)
        callee = callee.value
    if not isinstance(callee, ast.Name):
        return ""
    return ".".join([callee.id, *reversed(names)])


def is_device_wide_sync(call: str) -> bool:
    return call.endswith(("cuda.synchronize", "accelerator.synchronize")) or call.split(".")[-1] in {
        "cudaDeviceSynchronize",
        "cuCtxSynchronize",
    }


@pytest.mark.parametrize(("parts", "is_wrong"), [
    (NO_DEVICE_WIDE_SYNC, is_device_wide_sync), (set(HEIGHT) - {"tools"}, lambda call: call == "print"),
], ids=["syncs of a device", "prints"])  # fmt: skip
def test_parts_call_nothing_wrong(parts: set[str], is_wrong: Callable[[str], bool]) -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {dotted_call(node)}"
        for file in FILES
        if part_of(file) in parts and file != BUT_WHERE_PYTORCH_DOES_SO
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Call) and is_wrong(dotted_call(node))
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_below_the_plugin_touches_no_cuda_nor_megatron() -> None:
    below = [
        ".".join([NAME, *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for file in FILES
        if HEIGHT[part_of(file)] < HEIGHT["plugin"]
    ]
    source = (
        "import importlib, sys\n"
        f"for name in {[NAME, *below]!r}:\n"  # the public names first, by themselves
        "    importlib.import_module(name)\n"
        "    assert not {'megatron', 'transformer_engine', 'matplotlib'} & set(sys.modules), name\n"
        "    torch = sys.modules.get('torch')\n"
        "    assert torch is None or not torch.cuda.is_initialized(), name\n"
    )
    ran = run_python("-c", source, cwd=PACKAGE.parent)
    assert ran.returncode == 0, ran.stderr
