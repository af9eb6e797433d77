"""What readers of other programs' files share: how to refuse, what is too much, how names become a state. No torch at import."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from holdfast.checkpoint.files.base import Entry
from holdfast.errors import CheckpointCorrupt, CheckpointError

if TYPE_CHECKING:
    import torch

FREE_BYTES = 256 << 20
"""So much memory a file may ask for, however small it is."""

MOST_RATIO = 100
"""So many times its own size a larger one. Weights shrink to two thirds when they are compressed, zeros to a thousandth."""

MAX_NAMES = 1_000_000
"""More tensors than this in one file are no model."""

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
    """Say that a sound file holds something that is not read, by a :class:`~holdfast.errors.CheckpointError`."""
    raise CheckpointError(f"{path} {what}") from cause


def damaged(path: Path, what: str, cause: BaseException | None = None) -> NoReturn:
    """Say that a file is not what its kind should be, by a :class:`~holdfast.errors.CheckpointCorrupt`."""
    raise CheckpointCorrupt(f"{path} {what}") from cause


def not_a(kind: str, path: Path, why: str, cause: BaseException | None = None) -> NoReturn:
    """Say that a file is not of the kind that its name says, and of which it may be; it is :func:`damaged`."""
    with path.open("rb") as file:
        head = file.read(4)
    looks = next((what for start, what in _BEGINNINGS.items() if head.startswith(start)), None)
    damaged(path, f"is not {kind}: {why}" + (f"; it begins like {looks}" if looks else ""), cause)


def check_size(path: Path, declared_bytes: int) -> None:
    """Say that a file is :func:`damaged` if it asks for memory out of all proportion."""
    size_bytes = path.stat().st_size
    most = max(FREE_BYTES, MOST_RATIO * size_bytes)
    if declared_bytes > most:
        damaged(
            path,
            f"has {size_bytes} bytes and says that its tensors have {declared_bytes}; more than {most} are not "
            "believed, since such a file can be made to fill the memory",
        )


def check_shape(path: Path, name: str, shape: Iterable[Any]) -> tuple[int, ...]:
    """Return a shape that torch can hold; with any other the file is :func:`damaged`."""
    sizes = tuple(shape)
    if len(sizes) > 64 or not all(type(size) is int and size >= 0 for size in sizes):
        damaged(path, f"has the tensor {name!r:.80} of shape {sizes!r:.80}; it must be at most 64 whole numbers")
    if math.prod(size or 1 for size in sizes) > _MAX_ELEMENTS:
        damaged(path, f"has the tensor {name!r:.80} of the absurd shape {sizes!r:.80}")
    return sizes


def check_name(path: Path, name: str) -> None:
    """Say that a file is :func:`damaged` if a name in it leads out of it: a program that wrote there would do harm."""
    parts = name.replace("\\", "/").split("/")
    if not name or ".." in parts or "." in parts or "" in parts or "\0" in name or ":" in parts[0][1:2]:
        damaged(path, f"has a member of the name {name!r:.80}, which leads out of the file, or nowhere")


def check_zip(path: Path, archive: zipfile.ZipFile, compressions: tuple[int, ...]) -> None:
    """Make sure that an archive is one that numpy or torch could have written.

    Raises:
        CheckpointCorrupt: if it is made to do harm, or damaged.
        CheckpointError: if its members are encrypted or compressed in another way.
    """
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(names) > MAX_NAMES:
        damaged(path, f"has {len(names)} members; more than {MAX_NAMES} are not believed")
    if len(set(names)) < len(names):
        damaged(path, f"has the member {_repeated(names)!r:.80} twice")
    for member in members:
        check_name(path, member.filename)
        if member.flag_bits & 1:
            refuse(path, f"has the encrypted member {member.filename!r:.80}; decrypt it first")
        if member.compress_type not in compressions:
            refuse(path, f"has the member {member.filename!r:.80}, compressed in a way that is not read")
    check_size(path, sum(member.file_size for member in members))


def _repeated(names: list[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def dtype_of(path: Path, name: str, dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's name of a dtype; :func:`refuse` what has none, because these are no numbers."""
    from holdfast.checkpoint.format import DTYPES

    if dtype.hasobject:
        refuse(path, f"has {name!r:.80} of Python objects, which are pickles: reading them could run anything")
    known = "bool" if dtype.kind == "b" else dtype.newbyteorder("=").name
    if dtype.kind not in "biufc" or known not in DTYPES:
        refuse(path, f"has {name!r:.80} of type {dtype!s:.80}; tensors may be {', '.join(DTYPES)}")
    return DTYPES[known]


def state_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as nested dicts, by the ``/`` in their names; flat if a name is both a tensor and a dict.

    Names are paths of :func:`~holdfast.checkpoint.format.tensor_path`, so that they stay as they are.
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


def total_bytes(entries: Mapping[str, Entry]) -> int:
    """Return how much memory tensors need."""
    return sum(entry.size_bytes for entry in entries.values())


def step_in(value: Any) -> int | None:
    """Return a step that a file names, None if this is none."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 15:
        return int(value)
    return value if type(value) is int and 0 <= value < 10**15 else None
