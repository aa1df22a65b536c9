"""The import rule of docs/design.md: a folder of the library imports only folders below it."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_megatron"
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "kernels")


def rooms_in_order() -> list[str]:
    """Return the folders as docs/design.md lists them, the topmost first."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tree = text[text.index("rlhf_megatron/\n") : text.index("kernels/  ")]
    return re.findall(r"^  (\w+)/", tree, re.MULTILINE)


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, folder) of each import of a folder of the library, also within functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "rlhf_megatron":
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rlhf_megatron."):
            yield node.lineno, node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("rlhf_megatron.")]
            yield from ((node.lineno, name.split(".")[1]) for name in names)


def test_the_page_lists_every_folder() -> None:
    assert sorted(rooms_in_order()) == FOLDERS


def test_the_page_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    folders = (PACKAGE, *(ROOT / name for name in ("kernels", "launch", "tools", "tests")))
    files = [path.as_posix() for folder in folders for path in folder.rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert len(named) > 30
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_import_goes_up(folder: str) -> None:
    order = rooms_in_order()
    above = set(order[: order.index(folder)])
    upward = [
        f"{path.relative_to(PACKAGE)}:{line} imports {room}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for line, room in imported_rooms(path)
        if room in above
    ]
    assert upward == []


def test_no_file_has_the_name_of_another_or_its_plural() -> None:
    names = collections.Counter(path.stem for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    assert {name for name, files in names.items() if files > 1 or f"{name}s" in names} == set()


def test_modules_beside_the_folders_import_no_folder() -> None:
    for path in sorted(PACKAGE.glob("*.py")):
        assert [room for _, room in imported_rooms(path) if room in FOLDERS] == [], path.name
