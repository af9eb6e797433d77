"""Splits a log into rows and cells: separated or aligned columns, with or without a header, or JSON."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.clock_times import is_date, is_duration, is_number, is_time, is_time_of_day
from holdfast_lab.simulate.reading import open_text

_SEPARATORS = ",\t;|"
_ENOUGH = 0.8
"""Share of the rows that must have the same number of cells."""


@dataclass(frozen=True, slots=True)
class LogRow:
    """One row: its line number from 1, its cells, and the line itself."""

    number: int
    cells: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class LogTable:
    """A log in rows.

    Args:
        header: Column names as written; empty if there are none.
        rows: The rows with as many cells as most, in order.
        odd: Number of rows with another number of cells, which are not used.
        lines: All lines that are not empty, for logs that are not in columns.
    """

    header: tuple[str, ...]
    rows: tuple[LogRow, ...]
    odd: int
    lines: tuple[LogRow, ...]

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.rows[0].cells) if self.rows else 0

    def column(self, place: int) -> list[str]:
        """Return the cells of a column, by place from 0."""
        return [row.cells[place] for row in self.rows]

    def name(self, place: int) -> str:
        """Return how to call a column in a message."""
        return f"'{self.header[place]}'" if self.header else f"column {place + 1}"


def read_rows(path: Path) -> LogTable:
    """Read a log.

    Raises:
        ConfigError: if it cannot be read, or is empty.
    """
    text = open_text(path).read().lstrip("\ufeff")
    if "\0" in text[:4096]:
        raise ConfigError(f"{path} is not a text file")
    table = _of_json(text, path) if text.lstrip()[:1] in ("{", "[") else None
    table = table or _of_lines(text)
    if not table.lines:
        raise ConfigError(f"{path} is empty")
    return table


def _of_lines(text: str) -> LogTable:
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and line.lstrip()[0] != "#"]
    if len(lines) > 2 and (spans := _ruled(lines[1][1])):
        del lines[1]
        rows = [LogRow(number, tuple(line[a:b].strip() for a, b in spans), line.strip()) for number, line in lines]
    else:
        separator = _separator([line for _, line in lines[:200]])
        rows = [LogRow(number, _cells(line, separator), line.strip()) for number, line in lines]
    widths = Counter(len(row.cells) for row in rows[:2000])
    width = widths.most_common(1)[0][0] if widths else 0
    kept = _with_whole_times([row for row in rows if len(row.cells) == width])
    header: tuple[str, ...] = ()
    if kept and _is_header(kept):
        header = tuple(cell or f"column {place}" for place, cell in enumerate(kept[0].cells, 1))
        kept = kept[1:]
    return LogTable(header, tuple(kept), len(rows) - len(kept) - bool(header), tuple(rows))


def _ruled(line: str) -> list[tuple[int, int]]:
    """Return the columns of a table of fixed width whose header is underlined, as Slurm prints it; else an empty list."""
    spans = [match.span() for match in re.finditer(r"-+|=+", line)]
    return (
        spans if len(spans) > 1 and re.fullmatch(r"(?:(?:-{2,}|={2,})\s+)+(?:-{2,}|={2,})?\s*", line.lstrip()) else []
    )


def _separator(lines: Sequence[str]) -> str:
    """Return the separator that occurs equally often in most lines; "" if columns are separated by spaces."""
    for mark in _SEPARATORS:
        counts = Counter(line.count(mark) for line in lines)
        if counts and (most := counts.most_common(1)[0])[0] and most[1] >= _ENOUGH * len(lines):
            return mark
    return ""


def _cells(line: str, separator: str) -> tuple[str, ...]:
    if not separator:
        return tuple(line.split())
    try:
        return tuple(cell.strip() for cell in next(csv.reader([line], delimiter=separator, skipinitialspace=True)))
    except csv.Error:
        return ()


def _with_whole_times(rows: list[LogRow]) -> list[LogRow]:
    """Join a column of dates and a column of times of day that follows it."""
    probe = rows[1:200] or rows
    for place in range(len(rows[0].cells) - 1 if rows else 0):
        if probe and all(is_date(row.cells[place]) and is_time_of_day(row.cells[place + 1]) for row in probe):
            return [
                LogRow(row.number, (*row.cells[:place], " ".join(row.cells[place : place + 2]), *row.cells[place + 2 :]), row.text)
                for row in rows
            ]  # fmt: skip
    return rows


def _is_header(rows: Sequence[LogRow]) -> bool:
    """Return whether the first row has no number or time, and the rows below have some in the same column."""
    first, below = rows[0].cells, rows[1:50]
    if any(map(_is_value, first)):
        return False
    return any(_is_value(row.cells[place]) for place in range(len(first)) for row in below)


def _is_value(cell: str) -> bool:
    return is_number(cell) or is_time(cell) or is_duration(cell)


def _of_json(text: str, path: Path) -> LogTable | None:
    """Return a list of objects, or one object per line, as rows; None if it is not JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            return None
    if isinstance(found, dict) and isinstance(found.get("items"), list):  # kubectl get events -o json
        found = found["items"]
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"{path} is JSON, but not a list of objects with a time, a machine and an event each")
    flat = [_flat(one) for one in found]
    header = tuple(dict.fromkeys(key for one in flat for key in one))
    rows = tuple(
        LogRow(number, tuple(one.get(key, "") for key in header), json.dumps(found[number - 1])[:200])
        for number, one in enumerate(flat, 1)
    )
    return LogTable(header, rows, 0, rows)


def _flat(one: dict[str, Any], before: str = "") -> dict[str, str]:
    cells: dict[str, str] = {}
    for key, value in one.items():
        if isinstance(value, dict):
            cells |= _flat(value, f"{before}{key}.")
        elif not isinstance(value, list):
            cells[before + key] = "" if value is None else re.sub(r"\s+", " ", str(value)).strip()
    return cells
