"""Registry of fabrics: the built-in ones, and those that other packages provide.

Another package provides a fabric with an entry point::

    [project.entry-points."holdfast.fabrics"]
    mine = "my_package.mine:Mine"

Mine is a subclass of :class:`~holdfast.comm.fabrics.base.Fabric` whose constructor takes no arguments.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from holdfast.base.registered import Registry

if TYPE_CHECKING:
    from holdfast.comm.fabrics.base import Fabric

BUILT_IN = {
    "ulfm": "holdfast.comm.fabrics.ulfm:UlfmFabric",
    "gloo": "holdfast.comm.fabrics.gloo:GlooFabric",
    "virtual": "holdfast.comm.fabrics.virtual:VirtualFabric",
}
"""Name: module and class."""
_FABRICS = Registry("fabric", "holdfast.fabrics", BUILT_IN)

DEFAULT = "ulfm"
"""Default of ``holdfast run --fabric``."""


@functools.cache
def make_fabric(name: str) -> Fabric:
    """Return the fabric called ``name``; ``ConfigError`` if there is none, or the registered class is not a fabric."""
    from holdfast.comm.fabrics.base import Fabric

    fabric: Fabric = _FABRICS.load(name, Fabric)()
    return fabric
