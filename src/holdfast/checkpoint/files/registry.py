"""Registry of the formats in which checkpoints are written: the built-in ones, and those that other packages provide.

Another package provides a format with an entry point::

    [project.entry-points."holdfast.formats"]
    mine = "my_package.mine:Mine"

``Mine`` is a subclass of :class:`~holdfast.checkpoint.files.base.TensorWriter` whose constructor takes no arguments.

Reading a checkpoint needs none of these classes: its manifest says where the values are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from holdfast.base.registered import Registry
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.checkpoint.files.base import TensorWriter

FORMATS = {
    "safetensors": "holdfast.checkpoint.files.safetensors:Safetensors",
    "hdf5": "holdfast.tools.formats.hdf5:Hdf5",
    "npz": "holdfast.tools.formats.npz:Npz",
    "dcp": "holdfast.tools.formats.dcp:Dcp",
}
"""Name in the manifest: module and class. The core's own format is the first; the others are loaded when one is written,
and with it the library that only that one needs. They stand here, and are no entry points, because a checkout that is
only on ``PYTHONPATH`` has none."""
_WRITERS = Registry("the format of checkpoints", "holdfast.formats", FORMATS)

format_names = _WRITERS.names


def is_format(name: str) -> bool:
    """Return whether checkpoints may have this format."""
    return name in FORMATS or name in format_names()  # the second reads the metadata of all installed packages


def check_format(name: str, what: str = "the format of checkpoints") -> None:
    """Raise a ConfigError if there is no format of this name, the value of ``what``, or another package's is no writer."""
    if not is_format(name):
        raise ConfigError(f"{what} must be one of {', '.join(format_names())}, got {name!r}")
    if name not in FORMATS:
        make_writer(name)


@functools.cache
def make_writer(name: str) -> TensorWriter:
    """Return the writer of a format; ``ConfigError`` if there is none, or the registered class is not a writer."""
    from holdfast.checkpoint.files.base import TensorWriter

    writer: TensorWriter = _WRITERS.load(name, TensorWriter)()
    return writer
