"""Locates values in the files of other programs, except for HDF5."""

from __future__ import annotations

import zipfile
from contextlib import ExitStack
from pathlib import Path

import torch

from holdfast.base.torch_private import fake_tensors, offset_in_file
from holdfast.checkpoint.format import flatten
from holdfast.tools.formats.base import TensorInfo
from holdfast.tools.formats.checks import refuse
from holdfast.tools.formats.npz import NpzArray, arrays_of, open_archive
from holdfast.tools.formats.safetensors import read_header
from holdfast.tools.formats.torch import MAX_VALUES, ZIP, load_data, plain
from holdfast_lab.inject.locate.base import FileBoxes, Places, apart, in_place, member_start, row_major


def locate_safetensors(path: Path, stack: ExitStack) -> Places:
    """See :data:`~holdfast_lab.inject.locate.Locate`; tensors are consecutive, and none shares values with another."""
    with path.open("rb") as file:
        tensors, starts, _ = read_header(path, file)
    return {name: in_place(path, entry, starts[name]) for name, entry in tensors.items()}


def locate_npz(path: Path, stack: ExitStack) -> Places:
    """See :data:`~holdfast_lab.inject.locate.Locate`; an archive with a compressed array is refused."""
    archive = open_archive(path, stack)
    return apart({name: _place(path, archive, name, array) for name, array in arrays_of(path, archive).items()})


def _place(path: Path, archive: zipfile.ZipFile, name: str, array: NpzArray) -> FileBoxes:
    member, shape = archive.getinfo(array.member), array.entry.shape
    if member.compress_type != zipfile.ZIP_STORED:
        refuse(path, f"has the compressed array {name!r:.80}, whose values have no place in the file; use numpy.savez")
    strides = row_major(shape[::-1])[::-1] if array.is_fortran else row_major(shape)
    order = ">" if array.dtype.byteorder == ">" else "<"
    return in_place(path, array.entry, member_start(path, member) + array.header_bytes, strides, order)


def locate_torch(path: Path, stack: ExitStack) -> Places:
    """See :data:`~holdfast_lab.inject.locate.Locate`. Tied tensors are listed once.

    Other tensors may share some of their values.

    Raises:
        CheckpointError: also if torch wrote the file in its format before 1.6, or does not expose the places of values.
    """
    with path.open("rb") as file:
        if file.read(4) != ZIP:
            refuse(
                path, "is in torch's format before 1.6, in which values cannot be located; load it and save it again"
            )
    with fake_tensors():
        found = load_data(path)
    with zipfile.ZipFile(path) as archive:
        sizes = {member_start(path, member): member.file_size for member in archive.infolist()}
        order = next((archive.read(m) for m in archive.infolist() if m.filename.endswith("/byteorder")), b"little")
    stand_ins: dict[FileBoxes, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        start = offset_in_file(tensor)
        if sizes.get(start, -1) < tensor.untyped_storage().nbytes():
            refuse(path, f"cannot be altered: torch {torch.__version__} does not expose the places of its values")
        offset = start + int(tensor.storage_offset()) * tensor.element_size()
        entry = TensorInfo(tensor.dtype, tuple(tensor.shape))
        place = in_place(path, entry, offset, tuple(tensor.stride()), ">" if order == b"big" else "<")
        return stand_ins.setdefault(place, torch.empty(1))

    leaves, _ = flatten(plain(found, [MAX_VALUES], stand_in))
    names = {id(leaf): name for name, leaf in leaves.items()}
    return apart({names[id(stand_in)]: place for place, stand_in in stand_ins.items()})
