"""Checksums in zip archives, as .npz and .pt files are: those of members that were altered are computed anew."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from holdfast.checkpoint.blocks import PART_BYTES
from holdfast.checkpoint.foreign.base import member_start
from holdfast_lab.inject.files.base import Bytes


def renew_checksums(path: Path, file: Bytes) -> None:
    """Make the CRC of every member right in which a value was written; reads these members whole."""
    touched = np.sort(np.concatenate([np.empty(0, np.int64), *file.touched]))
    with zipfile.ZipFile(path) as archive:
        line = archive.start_dir
        for member in archive.infolist():
            start = member_start(path, member)
            end = start + member.compress_size
            if np.searchsorted(touched, start) < np.searchsorted(touched, end):
                _renew(file, member, line, start, end)
            line += 46 + sum(struct.unpack("<3H", bytes(file.get(line + 28, 6))))


def _renew(file: Bytes, member: zipfile.ZipInfo, line: int, start: int, end: int) -> None:
    """Write the CRC of a member whose data have these ends, and whose line in the table of contents begins at ``line``."""
    crc = 0
    for first in range(start, end, PART_BYTES):
        crc = zlib.crc32(file.get(first, min(PART_BYTES, end - first)).data, crc)
    new = struct.pack("<L", crc)
    file.replace(line + 16, new)
    if not member.flag_bits & 8:
        file.replace(member.header_offset + 14, new)
    else:  # it stands behind the data, mostly with a mark before it
        is_marked = bytes(file.get(end, 4)) == b"PK\7\x08"
        file.replace(end + (4 if is_marked else 0), new)
