"""Recognises the form of a log and the columns that it needs, from column names and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.clock_times import is_duration, is_number, is_time
from holdfast_lab.simulate.logs.options import LogOptions
from holdfast_lab.simulate.logs.rows import LogTable
from holdfast_lab.simulate.logs.vocabulary import NO, YES, columns_named, meaning, read_line

_MOST = 0.5
"""Share of the values that must fit for a column to be recognised by its values."""


@dataclass(frozen=True, slots=True)
class LogShape:
    """What a log is taken for.

    Args:
        form: One of :data:`~holdfast_lab.simulate.logs.options.FORMS`.
        places: The column of each role, by place from 0; empty if events are read from whole lines.
        ended_means_censored: The column ``ended`` says which lifetimes are censored.
    """

    form: str
    places: Mapping[str, int]
    ended_means_censored: bool = False


def recognize(name: str, table: LogTable, options: LogOptions) -> LogShape:
    """Return what a log is.

    Args:
        name: Its name in an error.
        table: Its rows.
        options: May give the form and the columns.

    Raises:
        ConfigError: if it could be several forms, or none.
    """
    given = {role: _place(name, table, role, text) for role, text in options.columns.items()}
    if form := options.get("as"):
        return _of_form(name, table, options, form, given)
    for attempt in (_by_given, _by_header, _by_events, _by_values, _by_lines):
        if (shape := attempt(name, table, options, given)) is not None:
            return shape
    columns = f"columns {', '.join(table.header)}" if table.header else f"{table.width} columns without a header"
    raise ConfigError(
        f"{name} ({columns}) is not a form that is recognised: give {options.hint('as', 'lifetimes')} (or lives, "
        f"outages, events, sizes) and its columns, such as {options.hint('lifetime', '3')}"
    )


def _place(name: str, table: LogTable, role: str, text: str) -> int:
    if text in table.header:
        return table.header.index(text)
    if text.isascii() and text.isdigit() and 1 <= int(text) <= table.width:
        return int(text) - 1
    known = f"columns {', '.join(table.header)}" if table.header else f"columns 1 to {table.width}"
    raise ConfigError(f"{name} has no column {text!r} for {role}: it has {known}")


def _by_given(name: str, table: LogTable, options: LogOptions, given: Mapping[str, int]) -> LogShape | None:
    for form, role in (("lifetimes", "lifetime"), ("sizes", "size"), ("events", "event")):
        if role in given:
            return _of_form(name, table, options, form, given)
    return None


def _by_header(name: str, table: LogTable, options: LogOptions, given: Mapping[str, int]) -> LogShape | None:
    if not table.header:
        return None

    def named(role: str) -> list[int]:
        return columns_named(table.header, role)

    if named("down_from") and named("down_to"):
        return _of_form(name, table, options, "outages", given)
    if named("up_from") and named("up_to"):
        return _of_form(name, table, options, "lives", given)
    if (named("start") or "start" in given) and (named("end") or "end" in given) and not named("lifetime"):
        raise ConfigError(
            f"{name} has columns {table.header[(named('start') or [given.get('start', 0)])[0]]} and "
            f"{table.header[(named('end') or [given.get('end', 0)])[0]]}, of the time up or of an outage: give "
            f"{options.hint('as', 'lives')} or {options.hint('as', 'outages')}"
        )
    if named("lifetime"):
        return _of_form(name, table, options, "lifetimes", given)
    if named("time") and named("size") and not named("event"):
        return _of_form(name, table, options, "sizes", given)
    return None


def _by_events(name: str, table: LogTable, options: LogOptions, given: Mapping[str, int]) -> LogShape | None:
    """Recognise events in columns: one of the columns has mostly words that mean up or down."""
    if _event_column(table, options, given) is None or _time_column(table, given) is None:
        return None
    return _of_form(name, table, options, "events", given)


def _by_values(name: str, table: LogTable, options: LogOptions, given: Mapping[str, int]) -> LogShape | None:
    """Recognise a column of lifetimes, lifetimes with a mark, or sizes over time, without column names."""
    if table.width == 1 and _share(table.column(0), lambda cell: is_number(cell) or is_duration(cell)) > _MOST:
        return LogShape("lifetimes", {"lifetime": 0, **given})
    if table.width != 2 or _share(table.column(1), lambda cell: is_number(cell) or cell.lower() in YES | NO) <= _MOST:
        return None
    first, second = table.column(0), table.column(1)
    if _share(first, is_time) > _MOST:
        return LogShape("sizes", {"time": 0, "size": 1, **given})
    if table.header:  # with names that say something else
        return None
    marks = {cell.lower() for cell in second if cell} <= YES | NO
    values = [float(cell) for cell in first if is_number(cell)]
    rises = all(a <= b for a, b in pairwise(values))
    if marks and not rises:
        return LogShape("lifetimes", {"lifetime": 0, "ended": 1, **given})
    if rises and not marks and values:
        return LogShape("sizes", {"time": 0, "size": 1, **given})
    if marks and values:
        raise ConfigError(
            f"{name} may be lifetimes with a mark, or sizes of 0 and 1 over time: give "
            f"{options.hint('as', 'lifetimes')} or {options.hint('as', 'sizes')}"
        )
    return None


def _by_lines(name: str, table: LogTable, options: LogOptions, given: Mapping[str, int]) -> LogShape | None:
    """Recognise lines of a system's log."""
    found = sum(read_line(row.text, options.up, options.down) is not None for row in table.lines)
    return LogShape("events", {}) if found else None


def _of_form(name: str, table: LogTable, options: LogOptions, form: str, given: Mapping[str, int]) -> LogShape:
    """Return the shape of a known form.

    Raises:
        ConfigError: if a column that it needs is not found.
    """
    places: dict[str, int | None] = {}
    if form == "lifetimes":
        numeric = [
            p for p in range(table.width) if _share(table.column(p), lambda c: is_number(c) or is_duration(c)) > _MOST
        ]
        alone = numeric[0] if len(numeric) == 1 or (not table.header and numeric[:1] == [0]) else None
        places["lifetime"] = _first(table, "lifetime", alone)
        marks = columns_named(table.header, "censored") or columns_named(table.header, "ended")
        marks = [place for place in marks if {cell.lower() for cell in table.column(place) if cell} <= YES | NO]
        if marks and marks[0] != places["lifetime"]:
            places["ended"] = marks[0]
    elif form in ("lives", "outages"):
        before = "up" if form == "lives" else "down"
        places["start"] = _first(table, f"{before}_from", _first(table, "start", None))
        places["end"] = _first(table, f"{before}_to", _first(table, "end", None))
        places["node"] = _first(table, "node", None)
    elif form == "events":
        places["time"], places["event"] = _time_column(table, given), _event_column(table, options, given)
        if places["time"] is None and places["event"] is None and not given:
            return LogShape("events", {})
        taken = {places["time"], places["event"]}
        words = [place for place in range(table.width) if place not in taken]
        named = [place for place in columns_named(table.header, "node") if place not in taken]
        places["node"] = named[0] if named else words[0] if len(words) == 1 else None
    else:
        places["time"] = _first(table, "time", 0)
        places["size"] = _first(table, "size", 1 if table.width == 2 else None)
    if form != "lifetimes" and (groups := columns_named(table.header, "group")):
        places["group"] = groups[0]
    found = {role: place for role, place in {**places, **given}.items() if place is not None}
    censored = "ended" not in given and found.get("ended") in columns_named(table.header, "censored")
    for role in ("lifetime", "start", "end", "time", "event", "size", "node"):
        if role in places and role not in found and (role, form) != ("node", "lives"):
            raise ConfigError(
                f"{name} does not say which column holds the {role}: give {options.hint(role, 'NAME')}, or a number "
                f"from 1 to {table.width}"
            )
    return LogShape(form, found, censored)


def _first(table: LogTable, role: str, otherwise: int | None) -> int | None:
    return next(iter(columns_named(table.header, role)), otherwise)


def _time_column(table: LogTable, given: Mapping[str, int]) -> int | None:
    if "time" in given:
        return given["time"]
    if named := columns_named(table.header, "time"):
        return named[0]
    for place in range(table.width):
        if _share(table.column(place), is_time) > _MOST:
            return place
    return 0 if table.width and not table.header and _share(table.column(0), is_number) > _MOST else None


def _event_column(table: LogTable, options: LogOptions, given: Mapping[str, int]) -> int | None:
    if "event" in given:
        return given["event"]
    named = columns_named(table.header, "event")
    places: list[int] = [*named, *range(table.width)]
    for place in places:
        if _share(table.column(place), lambda cell: bool(meaning(cell, options.up, options.down))) > _MOST:
            return place
    return named[0] if named and (options.up or options.down) else None


def _share(cells: Sequence[str], fits: Callable[[str], bool]) -> float:
    """Return the share of the filled cells that fit."""
    filled = [cell for cell in cells if cell]
    return sum(map(fits, filled)) / len(filled) if filled else 0.0
