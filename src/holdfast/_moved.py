"""Old names of public modules still work: importing one returns the module under its new name.

The finder below is installed first in ``sys.meta_path``. Otherwise a leftover old folder with nothing but caches would be imported.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MOVED = {
    "holdfast.dist": "holdfast.distributed",
    "holdfast.faults.files": "holdfast_lab.inject.files",
    "holdfast.faults.inject": "holdfast_lab.inject.inject",
    "holdfast.interval": "holdfast.checkpoint.interval",
    "holdfast.links": "holdfast.integrity.hash_chain",
    "holdfast.points": "holdfast.faults.points",
    "holdfast.probe": "holdfast.doctor",
    "holdfast.settings": "holdfast.config",
    "holdfast.simulate": "holdfast_lab.simulate",
    "holdfast.study": "holdfast_lab.studies",
    "holdfast.testing.counting": "holdfast_lab.counting",
    "holdfast.testing.unordered": "holdfast_lab.studies.exact.unordered",
    "holdfast.train.batched": "holdfast_lab.virtual_ddp.training",
    "holdfast.train.session": "holdfast.session.session",
    "holdfast.train.step": "holdfast.session.step",
    "holdfast.train": "holdfast.engine",
    "holdfast.workloads": "holdfast_lab.workloads",
}
"""Maps an old module name to the new one; the first match counts. Submodules of an old name map to submodules of the new one."""


def new_name(name: str) -> str:
    """Return the current name of a module, or "" if no module of that name was moved."""
    if not name.startswith("holdfast."):
        return ""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return ""


# Neither class below has a base of importlib.abc: to import that takes as long as all else that the package imports.


class _Alias:
    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module under its new name. The import system overwrites its ``__spec__``; :meth:`exec_module` restores it."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the ``__spec__`` that the import system overwrote: the module was loaded under its new name."""
        module.__spec__ = self._spec


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an alias, or None if no module of this name was moved."""
        name = new_name(fullname)
        if not name or importlib.util.find_spec(name) is None:
            return None
        alias: Any = _Alias(name)
        return importlib.machinery.ModuleSpec(fullname, alias)


def install() -> None:
    """Enable imports by old names. Called once, when the package is imported."""
    sys.meta_path.insert(0, _Finder())
