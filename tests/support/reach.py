"""What a test reaches, read from its source: the strings and the commands in its body, its fixtures and its helpers.

A word of a parameter counts for that parameter's test alone, so that a list of tests to leave out can be judged.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = (TESTS / "support", TESTS / "lab", TESTS)
"""Where tests import helpers from."""


@dataclass
class Reach:
    """Strings, the first words of lists and calls, and the names used."""

    words: set[str] = field(default_factory=set)
    heads: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    def add(self, other: Reach) -> None:
        """Add what another piece of source reaches."""
        self.words |= other.words
        self.heads |= other.heads


def of_values(values: object) -> Reach:
    """Return the reach of a parameter: its strings, and the first string of each list."""
    found = Reach()
    if isinstance(values, str | Path):
        found.words.update(split(str(values)))
    elif isinstance(values, dict):
        for each in (*values, *values.values()):
            found.add(of_values(each))
    elif isinstance(values, list | tuple | set | frozenset):
        texts = [each for each in values if isinstance(each, str)]
        found.heads.update(texts[:1])
        for each in values:
            found.add(of_values(each))
    return found


def split(text: str) -> set[str]:
    """Return a string, and its words: commands stand in one string, too, options with ``=`` and a value."""
    words = text.split()
    return {text, *words, *(word.partition("=")[0] for word in words if word.startswith("--"))}


def of_item(item: object) -> Reach:
    """Return what a collected test reaches."""
    found = Reach()
    if (callspec := getattr(item, "callspec", None)) is not None:
        found.add(of_values(dict(callspec.params)))
    found.add(_reached(Path(item.path), item.originalname, frozenset(item.fixturenames)))
    return found


@functools.cache
def _reached(path: Path, name: str, fixtures: frozenset[str]) -> Reach:
    found, seen = Reach(), set()
    ahead = [(path, name), *((path, fixture) for fixture in fixtures)]
    while ahead:
        if (step := ahead.pop()) in seen:
            continue
        seen.add(step)
        where, wanted = step
        module = _module(where)
        if wanted in module.pieces:
            found.add(module.pieces[wanted])
            ahead.extend((where, each) for each in module.pieces[wanted].names)
        if wanted in module.imports:
            source, original = module.imports[wanted]
            ahead.extend((source, each) for each in ([original] if original else _used(module, wanted)))
    return found


@dataclass
class Module:
    """Its functions, classes and constants by name; what it imports from other files of tests."""

    pieces: dict[str, Reach] = field(default_factory=dict)
    imports: dict[str, tuple[Path, str]] = field(default_factory=dict)


@functools.cache
def _module(path: Path) -> Module:
    module = Module()
    for statement in ast.parse(path.read_text()).body:
        for name in _defined(statement):
            module.pieces[name] = _of_tree(statement)
        if isinstance(statement, ast.ImportFrom | ast.Import):
            _import(module, statement)
    return module


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))


def _import(module: Module, statement: ast.ImportFrom | ast.Import) -> None:
    for alias in statement.names:
        source = statement.module or "" if isinstance(statement, ast.ImportFrom) else alias.name
        for folder in FOLDERS:
            if (path := folder / f"{source.replace('.', '/')}.py").is_file():
                original = alias.name if isinstance(statement, ast.ImportFrom) else ""
                module.imports[alias.asname or alias.name] = (path, original)
                break


def _used(module: Module, name: str) -> list[str]:
    """Return the attributes of an imported module that are used anywhere in a module."""
    uses = [piece.names for piece in module.pieces.values() if name in piece.names]
    return [each for names in uses for each in names]


def _of_tree(statement: ast.stmt) -> Reach:
    found = Reach()
    nodes = list(ast.walk(statement))
    if isinstance(statement, ast.FunctionDef):  # parameters of tests are those of the collected test
        nodes = [node for each in (*statement.body, statement.args) for node in ast.walk(each)]
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.words |= split(node.value)
        elif isinstance(node, ast.Name):
            found.names.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.names.add(node.attr)
        elif isinstance(node, ast.arg):
            found.names.add(node.arg)
        if isinstance(node, ast.List | ast.Tuple | ast.Call):
            found.heads |= _heads(node.args if isinstance(node, ast.Call) else node.elts)
    return found


def _heads(nodes: list[ast.expr]) -> set[str]:
    """Return the first string of a list, and the one after "holdfast"."""
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {*texts[:1], *(after for before, after in itertools.pairwise(texts) if before == "holdfast")}
