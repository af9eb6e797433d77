"""The manifest: the content of a complete checkpoint, and the only proof that it is complete.

A JSON object whose last member is the digest of all bytes before it, so that no byte can change
unnoticed. It is parsed as untrusted input.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NoReturn

import torch
import xxhash

from holdfast.checkpoint.blocks import num_blocks
from holdfast.checkpoint.format import DTYPES, unflatten
from holdfast.errors import CheckpointCorrupt, CheckpointError

MANIFEST_NAME = "manifest.json"
SCHEMA = 2
SCHEMA_SHARED = 3
"""Schema of a manifest that shares files with an earlier checkpoint: a reader of schema 2 refuses it."""
MAX_BYTES = 256 << 20
"""Maximum size of a manifest. This much describes about 100 TB."""

_SEAL = re.compile(rb'"xxh3": "([0-9a-f]{16})"\n}\n')
_SEAL_BYTES = 29
_DIGEST = re.compile(r"[0-9a-f]{16}")
_FOLDER = re.compile(r"data-[0-9a-z][0-9a-z-]{0,63}")
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_ELEMENTS = 2**62
_MAX_INT = 2**63 - 1
"""Maximum file offset of an operating system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """A box of a tensor, and the location of its values: row-major, without padding."""

    file: str  # Name of the file
    offset: int  # Offset of the first byte
    start: tuple[int, ...]  # First index in each dimension of the tensor
    shape: tuple[int, ...]  # Shape of the box
    size_bytes: int  # Size of its values; ``bytes`` in the manifest
    blocks: tuple[str, ...]
    """XXH3-64 of every :data:`~holdfast.checkpoint.blocks.BLOCK_BYTES` of its values, 16 hexadecimal digits each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """The manifest's entry for one tensor."""

    dtype: str  # One of :data:`~holdfast.checkpoint.format.DTYPES`
    shape: tuple[int, ...]  # Shape; empty for a scalar
    pieces: tuple[TensorPiece, ...]  # Boxes that fill the tensor, without overlap

    @property
    def size_bytes(self) -> int:
        """Total size of its values."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def xxh3(self) -> str:
        """A digest of the whole tensor: its block's digest if there is one block, else the digest of all blocks' concatenated digests."""
        blocks = [block for piece in self.pieces for block in piece.blocks]
        return blocks[0] if len(blocks) == 1 else xxhash.xxh3_64_hexdigest("".join(blocks).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """The manifest's entry for one file."""

    size_bytes: int  # Size of the file; ``bytes`` in the manifest
    rest_xxh3: str | None
    """XXH3-64 of all bytes that are not values, in order: headers, padding, tables of contents. None if the file was written
    for an earlier checkpoint, too: its other bytes are no part of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint."""

    step: int  # Number of steps that the state contains
    generation: int  # Generation of the communicator when the step was durable
    format: str  # Format of the files, one of :func:`~holdfast.checkpoint.files.registry.format_names`
    folder: str  # Folder of the files, next to the manifest
    files: dict[str, FileEntry]  # By name
    tensors: dict[str, TensorEntry]  # By path
    skeleton: Any  # Structure of the state, see :func:`~holdfast.checkpoint.format.unflatten`
    info: dict[str, Any]  # The caller's metadata; plain JSON
    versions: dict[str, str]  # Versions of ``holdfast``, ``torch`` and ``python`` that wrote it

    @property
    def size_bytes(self) -> int:
        """Total size of its files; of a file that it shares with an earlier checkpoint, of its values there."""
        if not self.is_incremental:
            return self.new_bytes
        pieces = [piece for entry in self.tensors.values() for piece in entry.pieces]
        return self.new_bytes + sum(p.size_bytes for p in pieces if self.files[p.file].rest_xxh3 is None)

    @property
    def new_bytes(self) -> int:
        """Total size of the files that were written for it; it shares the others with an earlier checkpoint."""
        return sum(file.size_bytes for file in self.files.values() if file.rest_xxh3 is not None)

    @property
    def is_incremental(self) -> bool:
        """Whether it shares files with an earlier checkpoint."""
        return any(file.rest_xxh3 is None for file in self.files.values())


def dump(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``."""
    fields = {
        "schema": SCHEMA_SHARED if manifest.is_incremental else SCHEMA,
        "step": manifest.step,
        "generation": manifest.generation,
        "format": manifest.format,
        "folder": manifest.folder,
        "files": {
            name: {"bytes": file.size_bytes, "rest_xxh3": file.rest_xxh3} for name, file in manifest.files.items()
        },
        "versions": manifest.versions,
        "info": manifest.info,
        "tensors": {
            path: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "pieces": [_plain(piece) for piece in entry.pieces],
            }
            for path, entry in manifest.tensors.items()
        },
        "skeleton": manifest.skeleton,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)},\n" for name, value in fields.items()]
    body = ("{\n" + "".join(lines)).encode()
    return body + f'"xxh3": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()


def _plain(piece: TensorPiece) -> dict[str, Any]:
    return {
        "file": piece.file,
        "offset": piece.offset,
        "start": list(piece.start),
        "shape": list(piece.shape),
        "bytes": piece.size_bytes,
        "blocks": list(piece.blocks),
    }


def parse(data: bytes, *, is_part: bool = False) -> Manifest:
    """Parse the bytes of ``manifest.json``.

    Args:
        data: The bytes.
        is_part: The manifest describes the part of one of several writers: tensors may be incomplete.

    Raises:
        CheckpointCorrupt: if anything in it differs from what :func:`dump` writes.
    """
    if len(data) > MAX_BYTES:
        _damaged("size", f"it has {len(data)} bytes, at most {MAX_BYTES} are allowed")
    seal = _SEAL.fullmatch(data, max(0, len(data) - _SEAL_BYTES))
    if seal is None:
        _damaged("end", "it does not end with the digest of its own bytes: it was cut short or altered")
    digest = xxhash.xxh3_64_hexdigest(memoryview(data)[: seal.start()])
    if digest != seal[1].decode():
        _damaged("xxh3", f"its bytes have the digest {digest}, it says {seal[1].decode()}")
    fields = _read_json(data)
    if type(fields.get("schema")) is not int or fields["schema"] not in (SCHEMA, SCHEMA_SHARED):
        _damaged(
            "schema",
            f"must be {SCHEMA} or {SCHEMA_SHARED}, is {fields.get('schema')!r:.80}; another version of holdfast may read it",
        )
    return _check(fields, is_part=is_part)


def is_data_folder(name: str) -> bool:
    """Return whether this is a valid name of a folder next to a manifest."""
    return _FOLDER.fullmatch(name) is not None


def check_info(info: Any) -> None:
    """Check that ``info`` survives a round trip through JSON unchanged.

    Raises:
        CheckpointError: if it does not; the message names the place.
    """
    if type(info) is not dict:
        raise CheckpointError(
            f"info must be a dict of plain JSON values, got {type(info).__name__}; pass {{}} if there is none"
        )
    _check_json(info, "info", 0)


def versions() -> dict[str, str]:
    """Return the versions of the software that writes checkpoints here."""
    return {"holdfast": metadata.version("holdfast"), "torch": torch.__version__, "python": platform.python_version()}


def _check_json(value: Any, where: str, depth: int) -> None:
    if type(value) is dict and all(type(key) is str for key in value):
        children = value.items()
    elif type(value) is list:
        children = dict(enumerate(value)).items()
    elif value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return
    else:
        raise CheckpointError(
            f"{where} must be plain JSON, is {value!r:.80} of type {type(value).__name__}; allowed are dicts with "
            "string keys, lists, strings, finite numbers, bools and None (put anything else into the state)"
        )
    if depth >= 64:
        raise CheckpointError(
            f"{where:.80} is nested deeper than 64 levels, which is not allowed in the info of a checkpoint; flatten it"
        )
    for key, child in children:
        _check_json(child, f"{where}/{key}", depth + 1)


# ---------------------------------------------------------------------------------------------
# Strict parsing


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(
            data.decode(), object_pairs_hook=no_duplicates, parse_constant=_no_constants, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        _damaged("JSON", str(error), error)
    if type(fields) is not dict:
        _damaged("JSON", f"must be an object, is {type(fields).__name__}")
    return fields


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object, for ``object_pairs_hook``; raise ``ValueError`` for a duplicate key."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in fields if names.count(n) > 1)!r:.80} occurs twice")
    return fields


def _no_constants(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a float")
    return value


_KINDS: dict[str, type] = {
    **dict.fromkeys(("schema", "step", "generation"), int),
    **dict.fromkeys(("format", "folder"), str),
    **dict.fromkeys(("files", "versions", "info", "tensors"), dict),
    "xxh3": str,
}
_FILE_KINDS: dict[str, type] = {"bytes": int, "rest_xxh3": str}
_TENSOR_KINDS: dict[str, type] = {"dtype": str, "shape": list, "pieces": list}
_PIECE_KINDS: dict[str, type] = {"file": str, "offset": int, "start": list, "shape": list, "bytes": int, "blocks": list}


class _Wrong(Exception):
    """A member is not allowed. Its place is put together only if one is: a thousand texts would take longer than the checks."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what)
        self.where, self.what = where, what


def _check(fields: dict[str, Any], *, is_part: bool) -> Manifest:
    try:
        _check_members("", fields, _KINDS | {"skeleton": object})
    except _Wrong as wrong:
        _damaged(wrong.where, wrong.what)
    if not is_data_folder(fields["folder"]):
        _damaged("folder", f"must be the plain name of a folder beside the manifest, is {fields['folder']!r:.80}")
    if not all(type(version) is str for version in fields["versions"].values()):
        _damaged("versions", "must be strings")
    try:
        check_info(fields["info"])
    except CheckpointError as error:
        _damaged("info", str(error), error)
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for name, file in fields["files"].items():
        try:
            files[name] = _check_file(name, file, may_share=fields["schema"] == SCHEMA_SHARED)
        except _Wrong as wrong:
            _damaged(f"files/{name:.80}{wrong.where}", wrong.what)
    for path, entry in fields["tensors"].items():
        try:
            tensors[path] = _check_entry(entry, files, is_part=is_part)
        except _Wrong as wrong:
            _damaged(f"tensors/{path:.200}{wrong.where}", wrong.what)
    _check_places(files, tensors)
    if not is_part:
        # A dry run with one stand-in for all tensors checks that the skeleton can be reassembled.
        unflatten(dict.fromkeys(tensors, torch.empty(0)), fields["skeleton"])
    rest = {name: value for name, value in fields.items() if name not in ("schema", "xxh3", "files", "tensors")}
    return Manifest(**rest, files=files, tensors=tensors)


def _check_file(name: str, fields: Any, *, may_share: bool) -> FileEntry:
    if not _FILE_NAME.fullmatch(name) or name in (".", ".."):
        raise _Wrong("", "must be the plain name of a file")
    if may_share and type(fields) is dict and fields.get("rest_xxh3", "") is None:
        _check_members("/", fields, _FILE_KINDS | {"rest_xxh3": object})
    else:
        _check_members("/", fields, _FILE_KINDS)
        _check_digest("/rest_xxh3", fields["rest_xxh3"])
    return FileEntry(size_bytes=fields["bytes"], rest_xxh3=fields["rest_xxh3"])


def _check_entry(entry: Any, files: Mapping[str, FileEntry], *, is_part: bool) -> TensorEntry:
    _check_members("/", entry, _TENSOR_KINDS)
    if entry["dtype"] not in DTYPES:
        raise _Wrong("/dtype", f"must be one of {', '.join(DTYPES)}, is {entry['dtype']!r:.80}")
    shape, itemsize = entry["shape"], DTYPES[entry["dtype"]].itemsize
    elements = _num_elements("/shape", shape)
    pieces = []
    for number, fields in enumerate(entry["pieces"]):
        try:
            pieces.append(_check_piece(fields, shape, itemsize))
        except _Wrong as wrong:
            raise _Wrong(f"/pieces/{number}{wrong.where}", wrong.what) from None
        if pieces[-1].file not in files:
            raise _Wrong("/pieces", f"name the file {pieces[-1].file!r:.80}, which is not in the list of files")
    if not is_part:
        _check_filled(elements, pieces)
    return TensorEntry(dtype=entry["dtype"], shape=tuple(shape), pieces=tuple(pieces))


def _check_piece(fields: Any, whole: list[int], itemsize: int) -> TensorPiece:
    _check_members("/", fields, _PIECE_KINDS)
    start, shape, size_bytes, blocks = fields["start"], fields["shape"], fields["bytes"], fields["blocks"]
    elements = _num_elements("/shape", shape)
    if len(start) != len(whole) or [first for first in start if type(first) is not int or first < 0]:
        raise _Wrong("/start", f"must be {len(whole)} whole numbers of at least 0, is {start!r:.80}")
    if len(shape) != len(whole) or [1 for a, n, size in zip(start, shape, whole, strict=True) if a + n > size]:
        raise _Wrong("/shape", f"must lie inside {whole!r:.80}, is {shape!r:.80} from {start!r:.80}")
    if size_bytes != elements * itemsize:
        raise _Wrong("/bytes", f"is {size_bytes}, but its shape and dtype need {elements * itemsize}")
    if len(blocks) != num_blocks(size_bytes):
        raise _Wrong("/blocks", f"must be {num_blocks(size_bytes)} digests, are {len(blocks)}")
    for digest in blocks:
        _check_digest("/blocks", digest)
    return TensorPiece(
        file=fields["file"],
        offset=fields["offset"],
        start=tuple(start),
        shape=tuple(shape),
        size_bytes=size_bytes,
        blocks=tuple(blocks),
    )


def _check_filled(elements: int, pieces: Sequence[TensorPiece]) -> None:
    """Check that the boxes of a tensor fill it, each index exactly once."""
    total = sum([math.prod(piece.shape) for piece in pieces])
    if total != elements or not pieces:
        raise _Wrong("", f"has {elements} values, its {len(pieces)} pieces hold {total}")
    if len(pieces) > 1 and _any_overlap([piece for piece in pieces if piece.size_bytes]):
        raise _Wrong("", "has pieces that overlap")


def _any_overlap(pieces: Sequence[TensorPiece]) -> bool:
    """Sweep along the dimension with the most cuts, so that a piece is compared only with those that extend beyond its start."""
    if len(pieces) < 2:
        return False
    along = max(range(len(pieces[0].start)), key=lambda d: len({piece.start[d] for piece in pieces}), default=None)
    if along is None:
        return True  # a scalar has room for one piece
    open_: list[TensorPiece] = []
    for piece in sorted(pieces, key=lambda piece: piece.start[along]):
        open_ = [other for other in open_ if other.start[along] + other.shape[along] > piece.start[along]]
        if any(_overlap(piece, other) for other in open_):
            return True
        open_.append(piece)
    return False


def _overlap(one: TensorPiece, other: TensorPiece) -> bool:
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(one.start, one.shape, other.start, other.shape, strict=True)
    )


def _check_places(files: dict[str, FileEntry], tensors: dict[str, TensorEntry]) -> None:
    """Check that values lie inside their files and do not overlap."""
    ends = dict.fromkeys(files, 0)
    pieces = [(p.file, p.offset, p.size_bytes, path) for path, entry in tensors.items() for p in entry.pieces]
    for file, offset, size, path in sorted(pieces):
        if size and offset < ends[file]:
            _damaged(f"tensors/{path:.200}", f"overlaps another tensor at byte {offset} of {file}")
        if offset + size > files[file].size_bytes:
            _damaged(f"tensors/{path:.200}", f"ends beyond the end of {file}, at byte {offset + size}")
        ends[file] = max(ends[file], offset + size)


def _check_digest(where: str, digest: Any) -> None:
    if type(digest) is not str or not _DIGEST.fullmatch(digest):
        raise _Wrong(where, f"must be 16 hexadecimal digits, is {digest!r:.80}")


def _num_elements(where: str, shape: list[Any]) -> int:
    elements = bounded = 1
    for size in shape:
        if type(size) is not int or size < 0 or len(shape) > 64:
            raise _Wrong(where, f"must be at most 64 whole numbers of at least 0, is {shape!r:.80}")
        elements *= size
        bounded *= size or 1  # zero sizes are left out: torch cannot hold (0, 2**62, 2**62) either
        if bounded > _MAX_ELEMENTS:
            raise _Wrong(where, f"must be at most {_MAX_ELEMENTS} elements, is {shape!r:.80}")
    return elements


def _check_members(where: str, fields: Any, kinds: Mapping[str, type]) -> None:
    """Check that an object has exactly these members, each of its type; integers must fit into 63 bits."""
    if type(fields) is not dict:
        raise _Wrong(where or "JSON", f"must be an object, is {fields!r:.80}")
    if fields.keys() != kinds.keys():
        odd = fields.keys() ^ kinds.keys()
        raise _Wrong(where + "keys", f"{', '.join(sorted(odd)):.200} must not be there, or is missing")
    for name, kind in kinds.items():
        value = fields[name]
        if type(value) is not kind and kind is not object:
            raise _Wrong(where + name, f"must be of type {kind.__name__}, is {value!r:.80}")
        if kind is int and not 0 <= value <= _MAX_INT:
            raise _Wrong(where + name, f"must be at least 0 and at most {_MAX_INT}, is {value!r:.80}")


def _damaged(where: str, what: str, cause: Exception | None = None) -> NoReturn:
    # Names come from the file: control characters, which a terminal would interpret, are escaped.
    msg = f"manifest, {where}: {what}"
    raise CheckpointCorrupt(msg if msg.isprintable() else msg.encode("unicode_escape").decode()) from cause
