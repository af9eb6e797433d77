"""Empties the page cache of files, and proves it: ``posix_fadvise`` is only a request, ``mincore`` says what is left."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_MOST_LEFT = 0.001
"""Part of a file that may stay in memory: the kernel keeps single pages that it uses at the moment."""


def evict(folder: Path) -> None:
    """Write the files below a folder to the disk, and drop them from the page cache; needs no rights.

    Raises:
        RuntimeError: if more than a thousandth of them is still in memory.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)
    size_bytes = sum(path.stat().st_size for path in files)
    left_bytes = sum(resident_bytes(path) for path in files)
    if left_bytes > max(_MOST_LEFT * size_bytes, mmap.PAGESIZE):
        raise RuntimeError(f"{left_bytes} of {size_bytes} bytes in {folder} are still in the page cache")


def resident_bytes(path: Path) -> int:
    """Return how many bytes of a file are in the page cache, in whole pages."""
    size_bytes = path.stat().st_size
    if not size_bytes:
        return 0
    with path.open("rb") as file:
        place = _C.mmap(
            None, ctypes.c_size_t(size_bytes), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0)
        )
    if place in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"cannot map {path}")
    try:
        pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
        if _C.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size_bytes), pages):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
    finally:
        _C.munmap(ctypes.c_void_p(place), ctypes.c_size_t(size_bytes))
    return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE
