"""Fabrics by name: those that come with Holdfast, and those of other packages.

Another package offers a fabric by an entry point::

    [project.entry-points."holdfast.fabrics"]
    mine = "my_package.mine:Mine"

Mine is a subclass of :class:`~holdfast.comm.fabrics.base.Fabric` that is made without arguments.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from holdfast.registered import Registered

if TYPE_CHECKING:
    from holdfast.comm.fabrics.base import Fabric

BUILT_IN = {
    "ulfm": "holdfast.comm.fabrics.ulfm:Ulfm",
    "gloo": "holdfast.comm.fabrics.gloo:Gloo",
    "virtual": "holdfast.comm.fabrics.virtual:Virtual",
}
"""Name: module and class."""
_FABRICS = Registered("fabric", "holdfast.fabrics", BUILT_IN)

DEFAULT = "ulfm"
"""What ``holdfast run`` takes."""

fabric_names = _FABRICS.names


@functools.cache
def make_fabric(name: str) -> Fabric:
    """Return the fabric called ``name``; ``ConfigError`` if there is none, or what another package offers is no fabric."""
    from holdfast.comm.fabrics.base import Fabric

    fabric: Fabric = _FABRICS.load(name, Fabric)()
    return fabric
