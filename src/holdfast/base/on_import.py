"""Changes modules of other packages once they are imported, without importing them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Change = Callable[[ModuleType], object]
"""Receives a module that has just been loaded."""


def when_imported(changes: Mapping[str, Change]) -> None:
    """Call each function with its module: now if that is imported, else as soon as it is loaded.

    Args:
        changes: The functions, by name of the module.
    """
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _Finder({n: change for n, change in changes.items() if n not in sys.modules}))


class _Finder(MetaPathFinder):
    """Finds some modules as all other finders do, and lets a function change each of them once it is loaded."""

    def __init__(self, changes: dict[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.pop(fullname, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec
