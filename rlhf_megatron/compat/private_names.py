"""Private names of libraries that are used here, and whether the source of a version has them: read, not imported.

``tools/private_names.py`` reads unpacked wheels, tests/unit/test_compat.py what is installed, and a start with an
unknown version says which names it lacks.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """A name in the source of a library.

    Attributes:
        module: such as "vllm.v1.engine.core".
        name: what a module defines or imports, such as "LLMEngine"; or what a class or a base of it in the same module
            has or sets on itself, such as "EngineCore.scheduler"; in brackets the first parameters of a function.
        why: what it is used for.
        absent: what is done where a version lacks it; empty where nothing works without it.
        first: the oldest known version that has it; empty where none that is known lacks it.
        last: the newest, likewise.
    """

    module: str
    name: str
    why: str
    absent: str = ""
    first: str = ""
    last: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


REGISTRY: dict[tuple[str, ...], tuple[PrivateName, ...]] = {}
"""Names by the distributions that have them, of the modules that have been imported."""


def missing(names: Sequence[PrivateName], root: Path) -> list[PrivateName]:
    """Return those of ``names`` that the packages in the folder ``root`` do not have."""
    return [name for name in names if not _is_defined(name, root)]


def missing_of_installed(packages: tuple[str, ...]) -> list[PrivateName]:
    """Return the registered names of a library, by its distributions, that the installed version does not have."""
    names = REGISTRY.get(packages, ())
    spec = importlib.util.find_spec(names[0].module.partition(".")[0]) if names else None
    locations = spec.submodule_search_locations if spec else None
    return missing(names, Path(next(iter(locations))).parent) if locations else []


def _is_defined(private: PrivateName, root: Path) -> bool:
    path = root.joinpath(*private.module.split("."))
    file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
    if file is None:
        return False
    module = _tree(file)
    name, _, parameters = private.name.removesuffix(")").partition("(")
    owner, _, member = name.rpartition(".")
    bindings = list(_members(module, owner, member) if owner else _definitions(module, member))
    if not parameters:
        return bool(bindings)
    wanted = parameters.split(", ")
    return any(_parameters(node)[: len(wanted)] == wanted for node in bindings)


@functools.lru_cache(maxsize=64)
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _definitions(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the statements outside of functions and classes that bind ``name``."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any((alias.asname or alias.name) == name for alias in node.names):
                yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node
        else:
            yield from _definitions(node, name)


def _members(module: ast.Module, owner: str, name: str) -> Iterator[ast.AST]:
    """Yield what binds ``name`` in a class, in its methods (on self) or in its bases of the same module."""
    for definition in _definitions(module, owner):
        if not isinstance(definition, ast.ClassDef):
            continue
        yield from _definitions(definition, name)
        for node in ast.walk(definition):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
                yield node
        for base in definition.bases:
            if isinstance(base, ast.Name) and base.id != owner:
                yield from _members(module, base.id, name)


def _parameters(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names
