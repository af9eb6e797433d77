"""Registries of classes by name: Holdfast's own, and those that other packages offer as entry points."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


def named(place: str) -> Any:
    """Import what a text such as ``"package.module:Class"`` names, and return it."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class Registry:
    """Classes by name.

    Args:
        what: The setting whose value is such a name.
        group: The entry-point group in which other packages register theirs.
        built_in: Holdfast's own classes by name, each as ``"package.module:Class"``.
    """

    def __init__(self, what: str, group: str, built_in: Mapping[str, str]) -> None:
        self._what = what
        self._group = group
        self._built_in = built_in

    def names(self) -> tuple[str, ...]:
        """Return all names: built-in ones first, then those of other packages."""
        return (*self._built_in, *sorted(self._offered().names - self._built_in.keys()))

    def load(self, name: str, base: type) -> Any:
        """Return the class with this name.

        Args:
            name: One of :meth:`names`.
            base: The class that it must be a subclass of.

        Raises:
            ConfigError: if the name is unknown, or its entry point is not a subclass of ``base``.
        """
        if name in self._built_in:
            return named(self._built_in[name])
        matches = [point for point in self._offered() if point.name == name]
        if not matches:
            raise ConfigError(f"{self._what} must be one of {', '.join(self.names())}, got {name!r}")
        kind = matches[0].load()
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise ConfigError(
                f"the entry point {name!r} of {self._group} must name a subclass of {base.__module__}.{base.__name__}, got {kind!r}"
            )
        return kind

    def _offered(self) -> EntryPoints:
        import importlib.metadata  # takes 20 ms, and most runs use built-in classes only

        return importlib.metadata.entry_points(group=self._group)
