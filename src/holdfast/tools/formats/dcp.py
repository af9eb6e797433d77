"""The format of ``torch.distributed.checkpoint``: ``__0_0.distcp`` with the tensors, ``.metadata`` with their description.

``torch.distributed.checkpoint.load(state_dict, storage_reader=FileSystemReader(folder))`` reads it; a tensor's key is its
path. Its ``.metadata`` is a pickle, to be read only from a trusted source. Holdfast itself never reads it, and has no
reader for the format.

Torch writes the values here, all of them from one process.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from holdfast.checkpoint.blocks import block_ranges, digest
from holdfast.checkpoint.files.base import FileLayout, TensorWriter
from holdfast.checkpoint.format import tensor_bytes
from holdfast.errors import CheckpointError

_FIRST = "part-00000"
_FILE = "__0_0.distcp"


class Dcp(TensorWriter):
    """See :class:`~holdfast.checkpoint.files.base.TensorWriter`; other programs read the folder with torch."""

    name = "dcp"
    one_writer = True

    def lay_out(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> FileLayout:
        """Write everything, including values; torch chooses the file names."""
        if stem != _FIRST:
            raise CheckpointError(
                f"the dcp format can be written by one writer only, and this is {stem}: let the first write all "
                "(parts=1), or choose the format safetensors"
            )
        archives = _save(folder, {key: _alone(tensor) for key, tensor in tensors.items()})
        with (folder / _FILE).open("rb") as file:
            places = {key: (_FILE, _find_values(file, *archives[key], tensors[key])) for key in tensors}
        return FileLayout(files=(_FILE, ".metadata"), places=places, has_values=True)


def _save(folder: Path, state: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Save as ``dcp.save(state, no_dist=True)`` does; return offset and size of each tensor's archive in the file.

    Not ``dcp.save`` itself: it warns about ``no_dist``, and hides errors of the operating system.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False)  # the storage syncs them
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    return {result.index.fqn: (result.storage_data.offset, result.storage_data.length) for result in results}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage is just its own values: of a view, torch would copy the whole storage."""
    data = torch.frombuffer(tensor_bytes(tensor), dtype=torch.uint8) if tensor.numel() else torch.empty(0).byte()
    return data.view(tensor.dtype).view(tensor.shape)


def _find_values(file: IO[bytes], start: int, size_bytes: int, tensor: torch.Tensor) -> int:
    """Return the offset of a tensor's values, which torch.save wrote as a ZIP archive into a part of the file.

    Raises:
        CheckpointError: if they are not there: another version of torch writes a different layout.
    """
    with zipfile.ZipFile(_Part(file, start, size_bytes)) as archive:
        member = next((member for member in archive.infolist() if member.filename.endswith("/data/0")), None)
    if member is not None:
        file.seek(start + member.header_offset)
        name_bytes, extra_bytes = struct.unpack("<26x2H", file.read(30))
        offset = int(start + member.header_offset + 30 + name_bytes + extra_bytes)
        if _are_at(file, offset, tensor_bytes(tensor)):
            return offset
    raise CheckpointError(
        f"torch {torch.__version__} writes the dcp format in an unknown layout: the values of a tensor were "
        "not found in its archive; choose the format safetensors, or another version of torch"
    )


def _are_at(file: IO[bytes], offset: int, data: memoryview) -> bool:
    file.seek(offset)
    # Digests, because Python compares memoryviews element by element.
    return all(digest(file.read(end - start)) == digest(data[start:end]) for start, end in block_ranges(len(data)))


class _Part(io.RawIOBase):
    """A part of a file as a file object."""

    def __init__(self, file: IO[bytes], start: int, size_bytes: int) -> None:
        self._file, self._start, self._size_bytes, self._at = file, start, size_bytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        return self._at

    def readinto(self, out: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(out), max(0, self._size_bytes - self._at)))
        out[: len(data)] = data
        self._at += len(data)
        return len(data)
