"""Reads the times in a log: plain numbers with a unit, dates in several notations, and durations."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.options import UNITS, LogOptions
from holdfast_lab.simulate.units import parse_seconds

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{4}")
_OF_DAY = re.compile(r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?")
_SLASHED = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})(?:[ T,]+(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?)?")
_ELAPSED = re.compile(r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2}(?:\.\d+)?)")
"""As Slurm writes a duration: ``[DAYS-]HOURS:MINUTES:SECONDS``."""
_LONGEST_DURATION = 64
"""Characters; to look for units in a long row of digits takes long."""
_UNIT_NAMES = {
    **{unit: unit for unit in UNITS},
    **dict.fromkeys(("msec", "millis", "milliseconds", "millisecond"), "ms"),
    **dict.fromkeys(("usec", "microseconds"), "us"),
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "mins", "minute", "minutes"), "min"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "d"),
}
_EPOCHS = ((3e8, 4.2e9, 1.0, "s"), (3e11, 4.2e12, 1e-3, "ms"), (3e14, 4.2e15, 1e-6, "us"))
"""Range, unit in seconds, and its name, of counts since 1970 for the years 1980 to 2100."""


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """The times of a column.

    Args:
        seconds: Seconds, from 1970 for dates; None for a cell that is not a time.
        unit: What they were taken for, such as ``"h"`` or ``"dates"``.
    """

    seconds: tuple[float | None, ...]
    unit: str


def is_number(cell: str) -> bool:
    """Return whether a cell is a plain finite number."""
    return _NUMBER.fullmatch(cell) is not None and math.isfinite(float(cell))


def is_date(cell: str) -> bool:
    """Return whether a cell is a date without a time of day."""
    return _DATE.fullmatch(cell) is not None


def is_time_of_day(cell: str) -> bool:
    """Return whether a cell is a time of day."""
    return _OF_DAY.fullmatch(cell) is not None


def is_time(cell: str) -> bool:
    """Return whether a cell is a date, with or without a time of day."""
    return iso_seconds(cell) is not None or _SLASHED.fullmatch(cell) is not None


def is_duration(cell: str) -> bool:
    """Return whether a cell is a time with a unit, such as ``3h``, or ``1-02:30:00``."""
    return _duration(cell) is not None


def unit_of(name: str) -> str:
    """Return the unit in a column's name, such as that of ``lifetime_h``, ``uptime (hours)`` or ``time_ms``; or ""."""
    last = re.split(r"[\s_\-.(\[/]+", re.sub(r"[\])]+$", "", name.strip()).strip().lower())[-1]
    alone = last if last != name.strip().lower() or last in ("hours", "days", "minutes", "seconds") else ""
    return _UNIT_NAMES.get(alone, "")


def read_times(cells: Sequence[str], name: str, options: LogOptions, *, spans: bool = False) -> ReadTimes:
    """Read a column of times.

    Args:
        cells: The column.
        name: Its name in messages, which may contain a unit.
        options: May give ``unit`` and ``dates``.
        spans: They are durations, so large numbers do not count from 1970.

    Raises:
        ConfigError: if the unit or the order of day and month is open.
    """
    filled = [cell for cell in cells if cell]
    numbers = [float(cell) for cell in filled if is_number(cell)]
    if len(numbers) * 2 > len(filled):
        return _of_numbers(cells, numbers, name, options, spans=spans)
    if spans or sum(map(is_duration, filled)) * 2 > len(filled):
        return ReadTimes(tuple(map(_duration, cells)), "durations with units")
    if sum(_SLASHED.fullmatch(cell) is not None for cell in filled) * 2 > len(filled):
        return _of_slashed(cells, name, options)
    return ReadTimes(tuple(map(iso_seconds, cells)), "dates")


def _of_numbers(
    cells: Sequence[str], numbers: Sequence[float], name: str, options: LogOptions, *, spans: bool
) -> ReadTimes:
    unit, scale = options.get("unit") or unit_of(name.strip("'")), 0.0
    low, high = min(numbers), max(numbers)
    if unit:
        scale = UNITS[unit]
    elif not spans:
        found = [(one, called) for least, most, one, called in _EPOCHS if least < low and high < most]
        scale, unit = (found[0][0], f"{found[0][1]} since 1970") if found else (0.0, "")
    if not scale:
        others = ", ".join(UNITS)
        raise ConfigError(
            f"{name} has plain numbers from {low:g} to {high:g} without a unit: give {options.hint('unit', 's')} "
            f"(or another of {others})"
        )
    return ReadTimes(tuple(float(cell) * scale if is_number(cell) else None for cell in cells), unit)


def _of_slashed(cells: Sequence[str], name: str, options: LogOptions) -> ReadTimes:
    parts = [_SLASHED.fullmatch(cell) for cell in cells]
    order = options.get("dates")
    if not order:
        months = [max(int(part[place]) for part in parts if part) for place in (1, 2)]
        if (months[0] > 12) == (months[1] > 12):
            both = "no order fits all rows" if months[0] > 12 else "day and month cannot be told apart"
            raise ConfigError(
                f"{name} has dates with slashes, and {both}: give {options.hint('dates', 'mdy')} (month first) or "
                f"{options.hint('dates', 'dmy')}"
            )
        order = "dmy" if months[0] > 12 else "mdy"
    return ReadTimes(tuple(_slashed(part, order) for part in parts), f"dates, {order}")


def _slashed(part: re.Match[str] | None, order: str) -> float | None:
    if part is None:
        return None
    day, month = (part[1], part[2]) if order == "dmy" else (part[2], part[1])
    try:
        at = datetime(int(part[3]), int(month), int(day), int(part[4] or 0), int(part[5] or 0), tzinfo=UTC)
    except ValueError:
        return None
    return at.timestamp() + float(part[6] or 0)


def iso_seconds(cell: str) -> float | None:
    """Return seconds since 1970 of a date in ISO's notation, in UTC if it names no zone; None if it is none."""
    if not _DATE.match(cell):
        return None
    try:
        at = datetime.fromisoformat(cell.replace(",", "."))
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _duration(cell: str) -> float | None:
    if len(cell) > _LONGEST_DURATION:
        return None
    if part := _ELAPSED.fullmatch(cell):
        return int(part[1] or 0) * 86_400 + int(part[2]) * 3600 + int(part[3]) * 60 + float(part[4])
    if not cell or is_number(cell):
        return None
    try:
        return parse_seconds(cell, "")
    except ConfigError:
        return None
