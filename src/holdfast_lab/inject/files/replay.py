"""A record of alterations as a JSON file, and its replay in an equal file, to the bit, or in another, by a map.

::

    {
    "schema": 1,
    "scale": null,
    "places": [{"path": "model/fc.weight", "dtype": "float32", "shape": [10, 64]}],
    "flips": [
    {"path": "model/fc.weight", "index": 17, "bit": 30, "before": 0.01, "after": 3.4e+36}
    ]
    }

``index`` counts values in row-major order, ``bit`` from the least significant one. ``before`` and ``after`` are those
of the value, with all of its flips; infinity and NaN are written as text, the hexadecimal digits of their bits. If
values were multiplied by ``scale`` there is one entry per value, and ``bit`` is null.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError, refuse
from holdfast.faults.alteration import ValueChange, ValuePosition, Values
from holdfast.faults.formats import FORMATS
from holdfast.faults.reading import check_keys
from holdfast_lab.inject.record import InjectionRecord, TensorRecord, flips_of

SCHEMA = 1
_MAX_BYTES = 1 << 30
"""Largest record or map that is read into memory."""


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """The place of a tensor's values in another program's state.

    Args:
        path: The name of the tensor.
        axes: Axis ``i`` there is axis ``axes[i]`` here; None: the same order.
    """

    path: str
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A record applied to values.

    Args:
        changes: The changes to make.
        missing: Paths that do not exist.
        others: Number of values that differ from the record beforehand.
    """

    changes: list[ValueChange]
    missing: tuple[str, ...]
    others: int


def lines(record: InjectionRecord) -> Iterator[str]:
    """Yield the lines of a record's file."""
    places = [
        {"path": t.place.path, "dtype": t.place.format.name, "shape": list(t.place.shape)} for t in record.tensors
    ]
    yield f'{{\n"schema": {SCHEMA},\n"scale": {json.dumps(record.scale)},\n"places": {json.dumps(places)},\n"flips": ['
    separator = "\n"
    for path, flips in flips_of(record, lambda value: f'"{value}"' if type(value) is str else repr(value)):
        start = f'{{"path": {json.dumps(path)}, "index": '
        for index, bit, before, after in flips:  # equal to json.dumps of an entry, which takes ten times as long
            shown = "null" if bit is None else bit
            yield f'{separator}{start}{index}, "bit": {shown}, "before": {before}, "after": {after}}}'
            separator = ",\n"
    yield "\n]\n}\n"


def parse_record(text: str) -> InjectionRecord:
    """Read a record.

    Raises:
        ConfigError: if it does not have exactly the format of :func:`lines`.
    """
    fields = _read_json("the record", text)
    check_keys("the record", fields, ("schema", "scale", "places", "flips"))
    _check_schema("the record", fields["schema"])
    scale = fields["scale"]
    if scale is not None and type(scale) not in (int, float):
        refuse(f"scale of the record must be a number or null, got {scale!r:.60}")
    if type(fields["places"]) is not list or type(fields["flips"]) is not list:
        refuse("places and flips of the record must be lists")
    places = [_read_place(place) for place in fields["places"]]
    rows: dict[str, list[dict[str, Any]]] = {place.path: [] for place in places}
    if len(rows) < len(places):
        refuse("places of the record must have different paths")
    for number, flip in enumerate(fields["flips"]):
        check_keys(f"flip {number} of the record", flip, ("path", "index", "bit", "before", "after"))
        if type(flip["path"]) is not str or flip["path"] not in rows:
            refuse(f"flip {number} of the record names {flip['path']!r:.80}, which is none of its places")
        rows[flip["path"]].append(flip)
    return InjectionRecord(tuple(_read_tensor(place, rows[place.path], scale) for place in places), scale)


def parse_map(text: str) -> dict[str, ReplayTarget]:
    """Read a map: ``{"schema": 1, "paths": {FROM: TO, FROM: {"path": TO, "axes": [3, 2, 0, 1]}}}``.

    FROM is the path of a tensor, or a prefix of paths up to a slash or a dot, which TO replaces.

    Raises:
        ConfigError: if it does not have exactly this format.
    """
    fields = _read_json("the map", text)
    check_keys("the map", fields, ("schema", "paths"))
    _check_schema("the map", fields["schema"])
    if type(fields["paths"]) is not dict:
        refuse(f"paths of the map must be a JSON object, got {fields['paths']!r:.60}")
    return {path: _read_target(path, target) for path, target in fields["paths"].items()}


def replay(values: Values, record: InjectionRecord, paths: Mapping[str, ReplayTarget] | None = None) -> ReplayResult:
    """Return the changes of a record in some values; nothing is written.

    Existing bits are flipped, and existing values multiplied; they need not equal those of the record.

    Args:
        values: The values to change.
        record: The record.
        paths: New names of tensors; other tensors keep their names.

    Raises:
        ConfigError: if a tensor's format or shape differs from the record, or two tensors are mapped to one.
    """
    numbers = {place.path: number for number, place in enumerate(values.places)}
    found: dict[int, tuple[TensorRecord, NDArray[np.int64], NDArray[np.int64]]] = {}
    missing = []
    for tensor in record.tensors:
        target = _mapped(tensor.place.path, paths or {})
        number = numbers.get(target.path)
        if number is None:
            missing.append(target.path)
            continue
        if number in found:
            refuse(f"the map leads two tensors of the record to {target.path!r:.80}; map each to its own tensor")
        index = _moved(tensor, target, values.places[number])
        order = np.argsort(index)
        found[number] = tensor, index[order], order
    numbered = sorted(found)
    read = values.read([(number, found[number][1]) for number in numbered])
    changes, others = [], 0
    for number, before in zip(numbered, read, strict=True):
        tensor, index, order = found[number]
        if record.scale is None:
            after = before ^ (tensor.before ^ tensor.after)[order]
        else:
            format = tensor.place.format
            after = format.raw_of(format.values(before).astype(np.float64) * record.scale)
        others += int(np.count_nonzero(before != tensor.before[order]))
        changes.append(ValueChange(number, index, before, after))
    return ReplayResult(changes, tuple(missing), others)


def read_file(path: Path) -> str:
    """Return the text of a record or a map.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which may never end
            refuse(f"cannot read {path}: it is no file")
        if path.stat().st_size > _MAX_BYTES:
            refuse(f"{path} has more than {_MAX_BYTES} bytes, the most that is read")
        return path.read_text("utf-8")
    except OSError as error:
        refuse(f"cannot read {path}: {error.strerror or error}")
    except UnicodeDecodeError:
        refuse(f"{path} is not UTF-8 text; give a file that --record wrote")


# -- maps


def _mapped(path: str, paths: Mapping[str, ReplayTarget]) -> ReplayTarget:
    """Return the mapped path of a tensor, by its own name or else by its longest mapped prefix."""
    if path in paths:
        return paths[path]
    beginnings = [name for name in paths if path.startswith((f"{name}/", f"{name}."))]
    if not beginnings:
        return ReplayTarget(path)
    longest = max(beginnings, key=len)
    if paths[longest].axes is not None:
        refuse(f"the map gives axes for {longest!r:.80}, a prefix of {path!r:.80}; give them for the tensor itself")
    return ReplayTarget(paths[longest].path + path[len(longest) :])


def _moved(tensor: TensorRecord, target: ReplayTarget, place: ValuePosition) -> NDArray[np.int64]:
    """Return the indices of a tensor's values after mapping."""
    shape = tensor.place.shape
    if place.format.name != tensor.place.format.name:
        refuse(
            f"{place.path!r:.80} is of {place.format.name}, the record of {tensor.place.format.name}: their bits differ"
        )
    axes = tuple(range(len(shape))) if target.axes is None else target.axes
    if sorted(axes) != list(range(len(shape))):
        refuse(f"axes of {target.path!r:.80} must be the numbers 0 to {len(shape) - 1} in some order, got {list(axes)}")
    if tuple(shape[axis] for axis in axes) != place.shape:
        refuse(f"{place.path!r:.80} has shape {list(place.shape)}, the record {list(shape)} with axes {list(axes)}")
    if axes == tuple(range(len(shape))):
        return tensor.index
    indices = np.unravel_index(tensor.index, shape)
    moved: NDArray[np.int64] = np.ravel_multi_index([indices[axis] for axis in axes], place.shape).astype(np.int64)
    return moved


def _read_target(path: str, target: Any) -> ReplayTarget:
    if type(target) is str:
        return ReplayTarget(target)
    check_keys(f"paths/{path:.80} of the map", target, ("path", "axes"))
    axes = target["axes"]
    if type(target["path"]) is not str or type(axes) is not list or not all(type(axis) is int for axis in axes):
        refuse(f"paths/{path:.80} of the map must be a path and a list of whole numbers, got {target!r:.120}")
    return ReplayTarget(target["path"], tuple(axes))


# -- records


def _read_tensor(place: ValuePosition, flips: list[dict[str, Any]], scale: float | None) -> TensorRecord:
    values: dict[int, list[dict[str, Any]]] = {}
    for flip in flips:
        index = flip["index"]
        if type(index) is not int or not 0 <= index < place.count:
            refuse(
                f"an index of {place.path!r:.80} in the record must be from 0 to {place.count - 1}, got {index!r:.40}"
            )
        values.setdefault(index, []).append(flip)
    raws = [
        [_raw_of(place, flip[key]) for flip in values[index]] for key in ("before", "after") for index in sorted(values)
    ]
    before, after = raws[: len(values)], raws[len(values) :]
    for index, was, became in zip(sorted(values), before, after, strict=True):
        where = f"the value {index} of {place.path!r:.80} in the record"
        if len({*was}) > 1 or len({*became}) > 1:
            refuse(f"{where} has several different values before, or after")
        bits = [flip["bit"] for flip in values[index]]
        if scale is not None:
            if bits != [None]:
                refuse(f"{where} must occur once, with bit null, because scale is given")
        elif not all(type(bit) is int and 0 <= bit < place.format.bits for bit in bits) or len({*bits}) < len(bits):
            refuse(f"{where} must have different bits from 0 to {place.format.bits - 1}, got {bits!r:.60}")
        elif was[0] ^ became[0] != sum(1 << bit for bit in bits):
            refuse(f"{where} differs before and after in other bits than {bits!r:.60}")
    raw = place.format.raw
    return TensorRecord(
        place,
        np.array(sorted(values), np.int64),
        np.array([was[0] for was in before], raw),
        np.array([became[0] for became in after], raw),
    )


def _raw_of(place: ValuePosition, value: Any) -> int:
    """Return the bits of a value of the record."""
    format = place.format
    if type(value) is str and value[:2] == "0x" and len(value) == 2 + format.bits // 4:
        digits = value[2:]
        if not set(digits) - set("0123456789abcdef"):
            return int(digits, 16)
    if format.is_float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return int(format.raw_of(np.array([value], np.float64))[0])
    low = -(1 << (format.bits - 1)) if format.signed else 0
    if not format.is_float and type(value) is int and low <= value < low + (1 << format.bits):
        return value % (1 << format.bits)
    return refuse(f"a value of {place.path!r:.80} in the record must be one of {format.name}, got {value!r:.40}")


def _read_place(fields: Any) -> ValuePosition:
    check_keys("a place of the record", fields, ("path", "dtype", "shape"))
    path, dtype, shape = fields["path"], fields["dtype"], fields["shape"]
    if type(path) is not str or type(dtype) is not str or dtype not in FORMATS:
        refuse(
            f"a place of the record must have a path and one of {', '.join(FORMATS)}, got {path!r:.60} of {dtype!r:.40}"
        )
    if type(shape) is not list or len(shape) > 64 or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        refuse(f"shape of {path!r:.60} in the record must be a list of whole numbers, got {shape!r:.60}")
    if math.prod(shape) >= 2**62:
        refuse(f"shape of {path!r:.60} in the record must be of less than 2**62 values, got {shape!r:.60}")
    return ValuePosition(path, FORMATS[dtype], tuple(shape))


# -- JSON


def _check_schema(what: str, schema: Any) -> None:
    if type(schema) is not int or schema != SCHEMA:
        refuse(f"schema of {what} must be {SCHEMA}, got {schema!r:.40}; another version of holdfast may read it")


def _read_json(what: str, text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            refuse(f"a key occurs twice in one object of {what}")
        return fields

    def no_number(name: str) -> Any:
        refuse(f"{name} in {what} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_number)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        refuse(f"{what} is not JSON: {error}")
