"""The manifest: what a complete checkpoint holds, and the only sign that it is complete.

A JSON object whose last member is the digest of all bytes before it, so that no byte of it can change
unseen. Read as if somebody hostile had written it.
"""

from __future__ import annotations

import json
import math
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NoReturn

import torch
import xxhash

from holdfast.checkpoint.format import DTYPES
from holdfast.errors import CheckpointCorrupt, CheckpointError

MANIFEST_NAME = "manifest.json"
SCHEMA = 1

_SEAL = re.compile(rb'"xxh3": "([0-9a-f]{16})"\n}\n\Z')
_DIGEST = re.compile(r"[0-9a-f]{16}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_ELEMENTS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """What the manifest says of one tensor.

    Args:
        dtype: One of :data:`~holdfast.checkpoint.format.DTYPES`.
        shape: Sizes; empty for a scalar.
        size_bytes: Of its values; ``bytes`` in the file.
        xxh3: XXH3-64 of its values, little-endian, 16 hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: Steps that the state has behind it.
        generation: How many communicators there had been when the step was known to be stable.
        format: Of the tensor file: ``"safetensors"``.
        file: Name of the tensor file, beside the manifest.
        file_bytes: Its size.
        header_bytes: Bytes of it that come before the tensors.
        header_xxh3: XXH3-64 of these.
        tensors: By path.
        skeleton: How they hang together, see :func:`~holdfast.checkpoint.format.unflatten`.
        info: What the caller wrote down; plain JSON.
        versions: Of ``holdfast``, ``torch`` and ``python`` that wrote it.
    """

    step: int
    generation: int
    format: str
    file: str
    file_bytes: int
    header_bytes: int
    header_xxh3: str
    tensors: dict[str, TensorEntry]
    skeleton: Any
    info: dict[str, Any]
    versions: dict[str, str]


def dump(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``."""
    fields = {
        "schema": SCHEMA,
        "step": manifest.step,
        "generation": manifest.generation,
        "format": manifest.format,
        "file": manifest.file,
        "file_bytes": manifest.file_bytes,
        "header_bytes": manifest.header_bytes,
        "header_xxh3": manifest.header_xxh3,
        "versions": manifest.versions,
        "info": manifest.info,
        "tensors": {
            path: {"dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.size_bytes, "xxh3": entry.xxh3}
            for path, entry in manifest.tensors.items()
        },
        "skeleton": manifest.skeleton,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)},\n" for name, value in fields.items()]
    body = ("{\n" + "".join(lines)).encode()
    return body + f'"xxh3": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()


def parse(data: bytes) -> Manifest:
    """Read the bytes of ``manifest.json``.

    Raises:
        CheckpointCorrupt: if anything in it is not as :func:`dump` writes it.
    """
    seal = _SEAL.search(data)
    if seal is None:
        _damaged("end", "it does not end with the digest of its own bytes: it was cut short or altered")
    found = xxhash.xxh3_64_hexdigest(data[: seal.start()])
    if found != seal[1].decode():
        _damaged("xxh3", f"its bytes have the digest {found}, it says {seal[1].decode()}")
    fields = _read_json(data)
    if type(fields.get("schema")) is not int or fields["schema"] != SCHEMA:
        _damaged("schema", f"must be {SCHEMA}, is {fields.get('schema')!r}; a newer version of holdfast may read it")
    return _check(fields)


def check_info(info: Any) -> None:
    """Make sure that ``info`` comes back from JSON as it is.

    Raises:
        CheckpointError: if it does not; the message names the place.
    """
    if type(info) is not dict:
        msg = (
            f"info must be a dict of plain JSON values, got {type(info).__name__}; pass {{}} if there is nothing to say"
        )
        raise CheckpointError(msg)
    _check_json(info, "info", 0)


def versions() -> dict[str, str]:
    """Return what writes checkpoints here."""
    return {"holdfast": metadata.version("holdfast"), "torch": torch.__version__, "python": platform.python_version()}


def _check_json(value: Any, where: str, depth: int) -> None:
    if type(value) is dict and all(type(key) is str for key in value):
        children = value.items()
    elif type(value) is list:
        children = dict(enumerate(value)).items()
    elif value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return
    else:
        msg = (
            f"{where} must be plain JSON, is {value!r:.80} of type {type(value).__name__}; allowed are dicts with "
            "string keys, lists, strings, finite numbers, bools and None (put anything else into the state)"
        )
        raise CheckpointError(msg)
    if depth >= 64:
        msg = (
            f"{where:.80} is nested deeper than 64 levels, which is not allowed in the info of a checkpoint; flatten it"
        )
        raise CheckpointError(msg)
    for key, child in children:
        _check_json(child, f"{where}/{key}", depth + 1)


# ---------------------------------------------------------------------------------------------
# Strict reading


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(
            data.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        _damaged("JSON", str(error), error)
    if type(fields) is not dict:
        _damaged("JSON", f"must be an object, is {type(fields).__name__}")
    return fields


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        msg = f"the key {repeated!r} stands in it twice"
        raise ValueError(msg)
    return fields


def _no_constants(name: str) -> NoReturn:
    msg = f"{name} is not a number of JSON"
    raise ValueError(msg)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        msg = f"{text} is too large for a float"
        raise ValueError(msg)
    return value


_KINDS: dict[str, type] = {
    "schema": int,
    "step": int,
    "generation": int,
    "format": str,
    "file": str,
    "file_bytes": int,
    "header_bytes": int,
    "header_xxh3": str,
    "versions": dict,
    "info": dict,
    "tensors": dict,
    "xxh3": str,
}


def _check(fields: dict[str, Any]) -> Manifest:
    if fields.keys() != _KINDS.keys() | {"skeleton"}:
        odd = fields.keys() ^ (_KINDS.keys() | {"skeleton"})
        _damaged("keys", f"{', '.join(sorted(odd))} must not be there, or is missing")
    _check_kinds("", fields, _KINDS)
    if not _FILE_NAME.fullmatch(fields["file"]) or fields["file"] == MANIFEST_NAME:
        _damaged("file", f"must be the plain name of a file beside the manifest, is {fields['file']!r}")
    if not _DIGEST.fullmatch(fields["header_xxh3"]):
        _damaged("header_xxh3", f"must be 16 hexadecimal digits, is {fields['header_xxh3']!r}")
    if not all(type(version) is str for version in fields["versions"].values()):
        _damaged("versions", "must be strings")
    tensors = {path: _check_entry(path, entry) for path, entry in fields["tensors"].items()}
    total = fields["header_bytes"] + sum(entry.size_bytes for entry in tensors.values())
    if total != fields["file_bytes"]:
        _damaged("file_bytes", f"is {fields['file_bytes']}, but header and tensors are {total} bytes together")
    rest = {name: value for name, value in fields.items() if name not in ("schema", "xxh3", "tensors")}
    return Manifest(**rest, tensors=tensors)


def _check_entry(path: str, entry: Any) -> TensorEntry:
    where = f"tensors/{path}"
    kinds = {"dtype": str, "shape": list, "bytes": int, "xxh3": str}
    if type(entry) is not dict or entry.keys() != kinds.keys():
        _damaged(where, f"must have dtype, shape, bytes and xxh3, is {entry!r:.80}")
    _check_kinds(f"{where}/", entry, kinds)
    if entry["dtype"] not in DTYPES:
        _damaged(f"{where}/dtype", f"must be one of {', '.join(DTYPES)}, is {entry['dtype']!r}")
    if not _DIGEST.fullmatch(entry["xxh3"]):
        _damaged(f"{where}/xxh3", f"must be 16 hexadecimal digits, is {entry['xxh3']!r}")
    wanted = _num_elements(f"{where}/shape", entry["shape"]) * DTYPES[entry["dtype"]].itemsize
    if entry["bytes"] != wanted:
        _damaged(f"{where}/bytes", f"is {entry['bytes']}, but its shape and dtype need {wanted}")
    return TensorEntry(dtype=entry["dtype"], shape=tuple(entry["shape"]), size_bytes=entry["bytes"], xxh3=entry["xxh3"])


def _num_elements(where: str, shape: list[Any]) -> int:
    if len(shape) > 64 or not all(type(size) is int and size >= 0 for size in shape):
        _damaged(where, f"must be at most 64 whole numbers of at least 0, is {shape!r:.80}")
    # The zeros are left out: torch cannot hold (0, 2**62, 2**62) either.
    if math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
        _damaged(where, f"must be at most {_MAX_ELEMENTS} elements, is {shape!r:.80}")
    return math.prod(shape)


def _check_kinds(where: str, fields: dict[str, Any], kinds: dict[str, type]) -> None:
    for name, kind in kinds.items():
        value = fields[name]
        if type(value) is not kind:
            _damaged(where + name, f"must be of type {kind.__name__}, is {value!r:.80}")
        if isinstance(value, int) and value < 0:
            _damaged(where + name, f"must be at least 0, is {value}")


def _damaged(where: str, what: str, cause: Exception | None = None) -> NoReturn:
    msg = f"manifest, {where}: {what}"
    raise CheckpointCorrupt(msg) from cause
