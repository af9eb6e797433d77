"""Recognises the form of a log and the columns that it needs, from column names and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.clock_times import is_duration, is_number, is_time
from holdfast_lab.simulate.logs.marks import mark_column, read_marks
from holdfast_lab.simulate.logs.options import LogOptions
from holdfast_lab.simulate.logs.rows import LogTable
from holdfast_lab.simulate.logs.selection import column_place
from holdfast_lab.simulate.logs.vocabulary import FALSE, TRUE, columns_named, is_journal, read_line, state_meaning

_OTHERS = ("lives", "outages", "events", "snapshots", "sizes")
_MOST = 0.5
"""Share of the values that must fit for a column to be recognised by its values."""


@dataclass(frozen=True, slots=True)
class LogShape:
    """What a log is taken for.

    Args:
        form: One of :data:`~holdfast_lab.simulate.logs.options.FORMS`.
        places: The column of each role, by place from 0; empty if events are read from whole lines.
    """

    form: str
    places: Mapping[str, int]


def recognize(name: str, table: LogTable, options: LogOptions) -> LogShape:
    """Return what a log is.

    Args:
        name: Its name in an error.
        table: Its rows.
        options: May give the form and the columns.

    Raises:
        ConfigError: if it could be several forms, or none.
    """
    given = {role: column_place(name, table, role, text) for role, text in options.columns.items()}
    if form := options.get("as"):
        return _of_form(name, table, options, form, given)
    for attempt in (_by_given, _by_header, _by_journal, _by_events, _by_snapshots, _by_values, _by_lines):
        if (shape := attempt(name, table, options, given)) is not None:
            return shape
    columns = f"columns {', '.join(table.header)}" if table.header else f"{table.width} columns without a header"
    raise ConfigError(
        f"{name} ({columns}) is not a form that is recognised: give {options.hint('as', 'failures')} if each row is a "
        f"failure of a machine, or {options.hint('as', 'lifetimes')} (or {', '.join(_OTHERS)}) and its columns, such as "
        f"{options.hint('lifetime', '3')}"
    )


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


def _by_journal(name: str, table: LogTable, options: LogOptions, given: Mapping[str, int]) -> LogShape | None:
    """Recognise lines of a journal, whose texts are no columns even if most have as many words."""
    if _share([row.text for row in table.lines], is_journal) <= _MOST:
        return None
    return _by_lines(name, table, options, given)


def _by_events(name: str, table: LogTable, options: LogOptions, given: Mapping[str, int]) -> LogShape | None:
    """Recognise events in columns: one of the columns has mostly words that mean up or down."""
    if _event_column(table, options, given) is None or _time_column(table, given) is None:
        return None
    return _of_form(name, table, options, "events", given)


def _by_snapshots(name: str, table: LogTable, options: LogOptions, given: Mapping[str, int]) -> LogShape | None:
    """Recognise rows that say of each machine, at each time, whether it has failed."""
    node, time = given.get("node", _first(table, "node", None)), _time_column(table, given)
    marks = [given["ended"]] if "ended" in given else columns_named(table.header, "ended")
    if node is None or time is None or not any(_is_yes_or_no(table.column(place)) for place in marks):
        return None
    nodes = table.column(node)
    times = {(of, at) for of, at in zip(nodes, table.column(time), strict=True)}
    if len(times) < len(nodes) or 2 * len(set(nodes)) > len(nodes):
        return None
    return _of_form(name, table, options, "snapshots", given)


def _is_yes_or_no(cells: Sequence[str]) -> bool:
    return {cell.lower() for cell in cells} <= TRUE | FALSE | {"0.0", "1.0"}


def _by_values(name: str, table: LogTable, options: LogOptions, given: Mapping[str, int]) -> LogShape | None:
    """Recognise a column of lifetimes, lifetimes with a mark, or sizes over time, without column names."""
    if table.width == 1 and _share(table.column(0), lambda cell: is_number(cell) or is_duration(cell)) > _MOST:
        return LogShape("lifetimes", {"lifetime": 0, **given})
    if table.width != 2:
        return None
    first, second = table.column(0), table.column(1)
    read = read_marks(second, options)
    if not read.is_known and _share(second, is_number) <= _MOST:
        return None
    if _share(first, is_time) > _MOST:
        return LogShape("sizes", {"time": 0, "size": 1, **given})
    if table.header:  # with names that say something else
        return None
    marks = read.is_known
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
    found = any(read_line(row.text, options) is not None for row in table.lines)
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
        places["ended"] = mark_column(
            name, table, options, given.get("lifetime", places["lifetime"]), given.get("ended")
        )
    elif form in ("lives", "outages"):
        before = "up" if form == "lives" else "down"
        places["start"] = _first(table, f"{before}_from", _first(table, "start", None))
        places["end"] = _first(table, f"{before}_to", _first(table, "end", None))
        places["node"] = _first(table, "node", None)
        states = columns_named(table.header, "state") if form == "outages" else []
        if states and any(table.column(states[0])):
            places["state"] = states[0]
        if form == "lives":
            places["ended"] = mark_column(name, table, options, None, given.get("ended"))
    elif form in ("events", "failures", "snapshots"):
        places["time"] = _time_column(table, given)
        if form == "events":
            places["event"] = _event_column(table, options, given)
            if places["time"] is None and places["event"] is None and not given:
                return LogShape("events", {})
        elif form == "snapshots":
            places["ended"] = mark_column(name, table, options, None, given.get("ended"))
        taken = set(places.values())
        words = [place for place in range(table.width) if place not in taken]
        named = [place for place in columns_named(table.header, "node") if place not in taken]
        places["node"] = named[0] if named else words[0] if len(words) == 1 else None
    else:
        places["time"] = _first(table, "time", 0)
        places["size"] = _first(table, "size", 1 if table.width == 2 else None)
    if form != "lifetimes" and (groups := columns_named(table.header, "group")):
        places["group"] = groups[0]
    found = {role: place for role, place in {**places, **given}.items() if place is not None}
    optional = {
        ("node", "lives"),
        ("ended", "lives"),
        ("ended", "lifetimes"),
        *([("node", "failures")] if options.is_of_job else []),
    }
    for role in ("lifetime", "start", "end", "time", "event", "size", "node", "ended"):
        if role in places and role not in found and (role, form) not in optional:
            failures = f" (or {options.hint('as', 'failures')} if each row is a failure)" if role == "event" else ""
            raise ConfigError(
                f"{name} does not say which column holds the {role}: give {options.hint(role, 'NAME')}, or a number "
                f"from 1 to {table.width}{failures}"
            )
    return LogShape(form, found)


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
        if _share(table.column(place), lambda cell: bool(state_meaning(cell, options))) > _MOST:
            return place
    return named[0] if named and (options.up or options.down or options.censored) else None


def _share(cells: Sequence[str], fits: Callable[[str], bool]) -> float:
    """Return the share of the filled cells that fit."""
    filled = [cell for cell in cells if cell]
    return sum(map(fits, filled)) / len(filled) if filled else 0.0
