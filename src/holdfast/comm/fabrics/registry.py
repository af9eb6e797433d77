"""Fabrics by name: those that come with Holdfast, and those of other packages.

Another package offers a fabric by an entry point::

    [project.entry-points."holdfast.fabrics"]
    mine = "my_package.mine:Mine"

Mine is a subclass of :class:`~holdfast.comm.fabrics.base.Fabric` that is made without arguments.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from holdfast.comm.fabrics.base import Fabric

GROUP = "holdfast.fabrics"
"""Of entry points."""

BUILT_IN = {
    "ulfm": "holdfast.comm.fabrics.ulfm:Ulfm",
    "gloo": "holdfast.comm.fabrics.gloo:Gloo",
    "virtual": "holdfast.comm.fabrics.virtual:Virtual",
}
"""Name: module and class."""

DEFAULT = "ulfm"
"""What ``holdfast run`` takes."""


def _offered() -> EntryPoints:
    import importlib.metadata  # takes 20 ms, and most runs name a fabric of ours

    return importlib.metadata.entry_points(group=GROUP)


def fabric_names() -> tuple[str, ...]:
    """Return the names of all fabrics: ours first, then those of other packages."""
    return (*BUILT_IN, *sorted(_offered().names - set(BUILT_IN)))


@functools.cache
def make_fabric(name: str) -> Fabric:
    """Return the fabric called ``name``; ``ConfigError`` if there is none, or what another package offers is no fabric."""
    from holdfast.comm.fabrics.base import Fabric

    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        kind: Any = getattr(importlib.import_module(module), attribute)
    else:
        found = [point for point in _offered() if point.name == name]
        if not found:
            raise ConfigError(f"fabric must be one of {', '.join(fabric_names())}, got {name!r}")
        kind = found[0].load()
    if not (isinstance(kind, type) and issubclass(kind, Fabric)):
        raise ConfigError(
            f"the entry point {name!r} of {GROUP} must name a subclass of holdfast.comm.fabrics.base.Fabric, got {kind!r}"
        )
    made: Fabric = kind()
    return made
