"""Checks shared by readers of other programs' files: errors, limits, and turning names into a state. No torch at import."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from holdfast.errors import CheckpointCorrupt, CheckpointError
from holdfast.tools.formats.base import TensorInfo

if TYPE_CHECKING:
    import torch

FREE_BYTES = 256 << 20
"""A file may declare this many bytes of tensors, however small it is."""

MOST_RATIO = 100
"""A larger file may declare this multiple of its own size. Compression shrinks weights to two thirds, zeros to a thousandth."""

MAX_NAMES = 1_000_000
"""Maximum number of tensors in one file."""

_MAX_ELEMENTS = 2**62
_BEGINNINGS = {
    b"PK\x03\x04": "a zip archive, as .pt and .npz files are",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUM": "a single array of numpy (.npy)",
    b"\x80\x02": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x1f\x8b": "a gzip archive",
}


def refuse(path: Path, what: str, cause: BaseException | None = None) -> NoReturn:
    """Raise :class:`~holdfast.errors.CheckpointError`: a valid file contains something that is not supported."""
    raise CheckpointError(f"{path} {what}") from cause


def damaged(path: Path, what: str, cause: BaseException | None = None) -> NoReturn:
    """Raise :class:`~holdfast.errors.CheckpointCorrupt`: a file violates its format."""
    raise CheckpointCorrupt(f"{path} {what}") from cause


def not_a(kind: str, path: Path, why: str, cause: BaseException | None = None) -> NoReturn:
    """Raise as :func:`damaged` does, for a file that is not of the format its name indicates; name the format it may have."""
    with path.open("rb") as file:
        head = file.read(4)
    looks = next((what for start, what in _BEGINNINGS.items() if head.startswith(start)), None)
    damaged(path, f"is not {kind}: {why}" + (f"; it begins like {looks}" if looks else ""), cause)


def check_size(path: Path, declared_bytes: int) -> None:
    """Call :func:`damaged` if a file declares disproportionately much memory."""
    size_bytes = path.stat().st_size
    most = max(FREE_BYTES, MOST_RATIO * size_bytes)
    if declared_bytes > most:
        damaged(
            path,
            f"has {size_bytes} bytes and says that its tensors have {declared_bytes}; more than {most} are "
            "rejected, since such a file can be made to fill the memory",
        )


def check_shape(path: Path, name: str, shape: Iterable[Any]) -> tuple[int, ...]:
    """Return a shape that torch can hold; call :func:`damaged` for any other."""
    sizes = tuple(shape)
    if len(sizes) > 64 or not all(type(size) is int and size >= 0 for size in sizes):
        damaged(path, f"has the tensor {name!r:.80} of shape {sizes!r:.80}; it must be at most 64 whole numbers")
    if math.prod(size or 1 for size in sizes) > _MAX_ELEMENTS:
        damaged(path, f"has the tensor {name!r:.80} of the impossible shape {sizes!r:.80}")
    return sizes


def check_name(path: Path, name: str) -> None:
    """Call :func:`damaged` if a name leads out of the archive: a program that extracts it could overwrite other files."""
    parts = name.replace("\\", "/").split("/")
    if not name or ".." in parts or "." in parts or "" in parts or "\0" in name or ":" in parts[0][1:2]:
        damaged(path, f"has a member named {name!r:.80}, which leads out of the file, or nowhere")


def check_zip(path: Path, archive: zipfile.ZipFile, compressions: tuple[int, ...]) -> None:
    """Check that numpy or torch could have written an archive.

    Raises:
        CheckpointCorrupt: if it is malicious or damaged.
        CheckpointError: if its members are encrypted or use another compression.
    """
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(names) > MAX_NAMES:
        damaged(path, f"has {len(names)} members; more than {MAX_NAMES} are rejected")
    if len(set(names)) < len(names):
        damaged(path, f"has the member {_repeated(names)!r:.80} twice")
    for member in members:
        check_name(path, member.filename)
        if member.flag_bits & 1:
            refuse(path, f"has the encrypted member {member.filename!r:.80}; decrypt it first")
        if member.compress_type not in compressions:
            refuse(path, f"has the member {member.filename!r:.80}, compressed in a way that is not supported")
    check_size(path, sum(member.file_size for member in members))


def _repeated(names: list[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def dtype_of(path: Path, name: str, dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's dtype for numpy's; call :func:`refuse` for dtypes that are not numeric."""
    from holdfast.checkpoint.format import DTYPES

    if dtype.hasobject:
        refuse(path, f"has {name!r:.80} of Python objects, which are pickles: reading them could run anything")
    dtype_name = "bool" if dtype.kind == "b" else dtype.newbyteorder("=").name
    if dtype.kind not in "biufc" or dtype_name not in DTYPES:
        refuse(path, f"has {name!r:.80} of type {dtype!s:.80}; tensors may be {', '.join(DTYPES)}")
    return DTYPES[dtype_name]


def state_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as nested dicts, split at the ``/`` in their names; flat if a name is both a tensor and a dict.

    Names are paths of :func:`~holdfast.checkpoint.format.tensor_path`, so that they are preserved.
    """
    nested: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]
        folder = nested
        for parent in parents:
            folder = folder.setdefault(parent, {})
            if not isinstance(folder, dict):
                return dict(tensors)
        if last in folder:
            return dict(tensors)
        folder[last] = tensor
    return nested


def total_bytes(entries: Mapping[str, TensorInfo]) -> int:
    """Return the total size of tensors in bytes."""
    return sum(entry.size_bytes for entry in entries.values())


def step_in(value: Any) -> int | None:
    """Return a step that a file records, or None if the value is not one."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 15:
        return int(value)
    return value if type(value) is int and 0 <= value < 10**15 else None
