"""What the workers of a job run: a script, or a module."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from holdfast.errors import refuse

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
MODULE = "-m"
"""Precedes the name of a module, as in a command line of Python."""


@dataclass(frozen=True, slots=True)
class Target:
    """A Python file with its arguments; ``module`` is its name if it is run as a module, else ""."""

    script: Path
    args: tuple[str, ...] = ()
    module: str = ""

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Target:
        """Return the target of a command line: ``SCRIPT [ARGS]...`` or ``-m MODULE [ARGS]...``."""
        if words[0] != MODULE:
            return cls(Path(words[0]), tuple(words[1:]))
        return cls(module_file(words[1]), tuple(words[2:]), words[1])


def find_target(word: str, args: Sequence[str], *, is_module: bool = False) -> Target:
    """Return what ``holdfast run`` is asked to run.

    Args:
        word: A script; a module, with ``is_module``; or Python, followed by either in ``args``.
        args: What follows.
        is_module: Whether ``-m`` was given.

    Raises:
        ConfigError: if there is no such module; or Python is another one than this, or has options.
    """
    if is_module:
        return Target.of_words((MODULE, word, *args))
    if not _PYTHON.fullmatch(Path(word).name):
        return Target(Path(word), tuple(args))
    _check_same_python(word)
    rest = list(args)
    while rest[:1] == ["-u"]:  # output of workers is forwarded line by line in any case
        del rest[0]
    if not rest or (rest[0].startswith("-") and rest[0] != MODULE) or rest == [MODULE]:
        got = " ".join([word, *rest[:1]])
        refuse(f"a command must be {word} SCRIPT [ARGS]... or {word} -m MODULE [ARGS]..., got {got!r}")
    return Target.of_words(rest)


def _check_same_python(word: str) -> None:
    path = shutil.which(word)
    if path is None:
        refuse(f"there is no command {word!r}")
    ours = Path(sys.executable)
    is_ours = os.path.samefile(path, ours) and os.path.samefile(Path(path).parent, ours.parent)
    if not is_ours:
        refuse(
            f"{word} is {path}, and holdfast runs workers with {ours}: give the script alone, or start holdfast with that Python"
        )


def module_file(name: str) -> Path:
    """Return the file that ``python -m NAME`` would run in this directory. Imports nothing.

    Raises:
        ConfigError: if there is none.
    """
    spec, path = None, [os.getcwd(), *sys.path]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:depth]), path) if all(parts) else None
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            refuse(f"there is no module {name!r} in {os.getcwd()} or among the installed ones (-m)")
        path = list(spec.submodule_search_locations or ())
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__", path)
        if spec is None:
            refuse(f"{name!r} is a package without __main__.py, so it cannot be run (-m)")
    if spec is None or not spec.has_location or spec.origin is None:
        refuse(f"module {name!r} is not in a Python file, so it cannot be run (-m)")
    return Path(spec.origin)


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return the description of a module; unlike :func:`importlib.util.find_spec`, without importing its package."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None
