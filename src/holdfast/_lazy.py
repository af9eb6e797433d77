"""Names of a package that are imported on first use, and old names of renamed classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(module: str, where: Mapping[str, str], renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: it imports a name on first use, and knows the old names of its classes.

    Args:
        module: Its ``__name__``.
        where: Module of each name that is imported on first use, relative to ``module`` if it starts with a dot.
        renamed: New name of each renamed class, by its old name.
    """

    def attribute(name: str) -> Any:
        new = renamed.get(name, name)
        if new in where:
            value = getattr(importlib.import_module(where[new], module), new)
        elif new != name:
            value = getattr(sys.modules[module], new)
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(sys.modules[module], name, value)
        return value

    return attribute
