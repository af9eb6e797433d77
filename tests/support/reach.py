"""What a test reaches, read from its source: the words in its body, its fixtures and its helpers.

The words of a parameter count for the test with that parameter alone, because lists leave out tests by parameter.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = (TESTS / "support", TESTS / "lab", TESTS)
"""Where tests import helpers from."""


@dataclass
class Reach:
    """The words of a piece of source, and the names that it uses."""

    words: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)


def words_of_value(value: object) -> set[str]:
    """Return the words of a parameter."""
    if isinstance(value, str | Path):
        return split(str(value))
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return set().union(*map(words_of_value, value))
    return set()


def split(text: str) -> set[str]:
    """Return a string, and its words: commands stand in one string, too, options with ``=`` and a value."""
    words = text.split()
    return {text, *words, *(word.partition("=")[0] for word in words if word.startswith("--"))}


def words_of(item: object) -> set[str]:
    """Return the words that a collected test reaches."""
    callspec = getattr(item, "callspec", None)
    own = words_of_value(dict(callspec.params)) if callspec is not None else set()
    return own | _reached(Path(item.path), item.originalname, frozenset(item.fixturenames))


@functools.cache
def _reached(path: Path, name: str, fixtures: frozenset[str]) -> set[str]:
    words, seen = set(), set()
    ahead = [(path, name), *((path, fixture) for fixture in fixtures)]
    while ahead:
        if (step := ahead.pop()) in seen:
            continue
        seen.add(step)
        where, wanted = step
        module = _module(where)
        if wanted in module.pieces:
            words |= module.pieces[wanted].words
            ahead.extend((where, each) for each in module.pieces[wanted].names)
        if wanted in module.imports:
            source, original = module.imports[wanted]
            ahead.extend((source, each) for each in ([original] if original else _used(module, wanted)))
    return words


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
    return found
