"""Names of a package that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(module: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: it imports a name on first use.

    Args:
        module: Its ``__name__``.
        where: Module of each name that is imported on first use, relative to ``module`` if it starts with a dot.
    """

    def attribute(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(where[name], module), name)
        setattr(sys.modules[module], name, value)
        return value

    return attribute
