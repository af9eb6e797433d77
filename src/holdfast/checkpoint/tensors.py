"""The file that holds the tensors, behind a seam: one class per format, safetensors so far.

Writing is left to the ``safetensors`` package. Reading is done here, because a checkpoint is read tensor
by tensor into memory of its own and its digest is taken of that memory: nothing that happens to the file
later can change a tensor, and a damaged one is known by its name and its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NoReturn, Protocol

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

from holdfast.checkpoint.format import DTYPES, tensor_bytes
from holdfast.checkpoint.manifest import Manifest, TensorEntry
from holdfast.errors import CheckpointCorrupt, CheckpointError

_HEADER_LENGTH_BYTES = 8

_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """What was written: the part of a manifest that a format knows."""

    file_bytes: int
    header_bytes: int
    header_xxh3: str
    tensors: dict[str, TensorEntry]


class TensorFormat(Protocol):
    """One way to lay tensors out in a file. The manifest, the digests and the commit are not its business."""

    name: str
    """What the manifest says under ``format``."""
    suffix: str
    """Of the file's name."""

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> TensorFile:
        """Write ``tensors`` to a new file and describe them. The caller makes it durable.

        Raises:
            OSError: if the file cannot be written.
            CheckpointError: if the format cannot hold a tensor, or could not be written.
        """
        ...

    def read(self, file: BufferedReader, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor after its digest was found right; holds one at a time.

        Raises:
            CheckpointCorrupt: at the first byte range that is not what was saved.
        """
        ...


class Safetensors:
    """The safetensors format: eight bytes of length, a JSON header, the values."""

    name = "safetensors"
    suffix = ".safetensors"

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> TensorFile:
        """See :meth:`TensorFormat.write`."""
        plain = _separate(tensors)
        try:
            save_file(plain, path)
        except SafetensorError as error:
            msg = (
                f"cannot write {len(plain)} tensors to {path}: {error}. The checkpoints that were complete are "
                "untouched; make sure that the disk has room and that the directory may be written"
            )
            raise CheckpointError(msg) from error
        with path.open("rb") as file:
            prefix = file.read(_HEADER_LENGTH_BYTES)
            header = prefix + file.read(int.from_bytes(prefix, "little"))
        return TensorFile(
            file_bytes=path.stat().st_size,
            header_bytes=len(header),
            header_xxh3=xxhash.xxh3_64_hexdigest(header),
            tensors={name: _describe(tensor) for name, tensor in plain.items()},
        )

    def read(self, file: BufferedReader, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`TensorFormat.read`."""
        offset = manifest.header_bytes
        for name in _read_header(file, manifest):
            entry = manifest.tensors[name]
            yield name, _read_tensor(file, name, entry, offset)
            offset += entry.size_bytes


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous CPU tensors no two of which share memory; copies only where it must."""
    seen: set[int] = set()
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone(memory_format=torch.contiguous_format)
        seen.add(own.untyped_storage().data_ptr())
        plain[name] = own
    return plain


def _describe(tensor: torch.Tensor) -> TensorEntry:
    data = tensor_bytes(tensor)
    return TensorEntry(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        size_bytes=data.nbytes,
        xxh3=xxhash.xxh3_64_hexdigest(data),
    )


# ---------------------------------------------------------------------------------------------
# Reading


def _read_header(file: BufferedReader, manifest: Manifest) -> list[str]:
    """Return the names of the tensors in the order of the file."""
    header = file.read(manifest.header_bytes)
    found = xxhash.xxh3_64_hexdigest(header)
    if found != manifest.header_xxh3:
        what = f"the header, bytes 0 to {manifest.header_bytes}, has the digest {found}, not {manifest.header_xxh3}"
        _damaged(manifest, what)
    try:
        fields = json.loads(header[_HEADER_LENGTH_BYTES:])
        fields.pop("__metadata__", None)
        begins = {name: field["data_offsets"][0] for name, field in fields.items()}
        names = sorted(begins, key=lambda name: (begins[name], fields[name]["data_offsets"][1]))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        _damaged(manifest, f"the header is not that of safetensors: {error!r}")
    if fields != _expected_header(manifest, names):
        _damaged(manifest, "the header and the manifest list different tensors, or place them differently")
    return names


def _expected_header(manifest: Manifest, names: list[str]) -> dict[str, object] | None:
    header: dict[str, object] = {}
    offset = 0
    for name in names:
        entry = manifest.tensors.get(name)
        if entry is None:
            return None
        end = offset + entry.size_bytes
        dtype = _SAFETENSORS_DTYPES[entry.dtype]
        header[name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    return header if header.keys() == manifest.tensors.keys() else None


def _read_tensor(file: BufferedReader, name: str, entry: TensorEntry, offset: int) -> torch.Tensor:
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    data = tensor_bytes(tensor)
    place = f"tensor {name!r} ({entry.dtype}, shape {list(entry.shape)}), bytes {offset} to {offset + entry.size_bytes}"
    got = file.readinto(data) if data.nbytes else 0
    if got != entry.size_bytes:
        msg = f"{place}: the file ends after {got} of them"
        raise CheckpointCorrupt(msg)
    found = xxhash.xxh3_64_hexdigest(data)
    if found != entry.xxh3:
        msg = f"{place}: they have the digest {found}, not {entry.xxh3}"
        raise CheckpointCorrupt(msg)
    return tensor


def _damaged(manifest: Manifest, what: str) -> NoReturn:
    msg = f"{manifest.file}: {what}"
    raise CheckpointCorrupt(msg)


FORMATS: dict[str, TensorFormat] = {"safetensors": Safetensors()}
"""Every format by the name that a manifest gives it."""
