"""The files that hold the tensors, behind a seam: one class per format.

A format only lays a file out, so that programs that know the format can read it: it makes the file with everything
but the values, and says where each tensor's values belong. Values are written, digested and read by one piece of code
for all formats, straight from and to memory. So nothing in a format's own structures is ever trusted, or parsed, when
a checkpoint is loaded.
"""

from __future__ import annotations

from holdfast.checkpoint.formats.base import Layout, TensorFormat
from holdfast.checkpoint.formats.dcp import Dcp
from holdfast.checkpoint.formats.hdf5 import Hdf5
from holdfast.checkpoint.formats.npz import Npz
from holdfast.checkpoint.formats.safetensors import Safetensors

__all__ = ["FORMATS", "Layout", "TensorFormat"]

FORMATS: dict[str, TensorFormat] = {known.name: known for known in (Safetensors(), Hdf5(), Npz(), Dcp())}
"""Every format by the name that a manifest gives it. A library that only one of them needs is imported when it writes."""
