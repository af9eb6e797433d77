"""Conversion of records to dictionaries for JSON, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from holdfast.records import types
from holdfast.records.types import STAMPS, Record

RECORDS: dict[str, type[Record]] = {
    kind.__name__: kind
    for kind in vars(types).values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
}
"""Every kind of record by its name, the value of ``"event"`` in the JSON line."""


def record_to_dict(record: Record) -> dict[str, Any]:
    """Return the content of the JSON line of ``record``: ``{"event": name, "t_s": ..., ...}``."""
    return {"event": type(record).__name__} | dataclasses.asdict(record)


def record_from_dict(line: Mapping[str, Any]) -> Record:
    """Return the record that :func:`record_to_dict` made ``line`` from.

    Raises:
        KeyError: if the kind is unknown.
        TypeError: if fields are missing or unknown.
    """
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in line.items() if k != "event"}
    record = RECORDS[line["event"]](**fields)
    if missing := [name for name in STAMPS if name not in fields]:
        raise TypeError(f"{line['event']}.__init__() missing 1 required keyword-only argument: {missing[0]!r}")
    return record
