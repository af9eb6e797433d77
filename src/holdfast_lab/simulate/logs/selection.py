"""Selects the rows of a log that are about machines or jobs as wholes, one row for each event."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.clock_times import iso_seconds
from holdfast_lab.simulate.logs.options import LogOptions
from holdfast_lab.simulate.logs.rows import LogRow, LogTable
from holdfast_lab.simulate.logs.vocabulary import columns_named

_STEP = re.compile(r"(\d[\w\[\]+]*)\.(?:batch|extern|interactive|\d+)")
"""The step of a job, as Slurm writes it: ``123.batch``, ``123_4.0``."""
_ABOUT = ("involvedObject.kind", "regarding.kind")
_FIRST = ("firstTimestamp", "deprecatedFirstTimestamp", "eventTime", "metadata.creationTimestamp")
_LAST = ("lastTimestamp", "series.lastObservedTime", "deprecatedLastTimestamp")
_COUNT = ("count", "series.count", "deprecatedCount")
"""Columns of Kubernetes' events: what they are about, when they were first and last seen, and how often."""
_MOST_EVENTS = 100_000
"""Events that one row may stand for."""


def select(name: str, table: LogTable, options: LogOptions) -> tuple[LogTable, LogOptions, list[str]]:
    """Return the rows to read, options for them, and notes on the rows left out, for the line that says so.

    Args:
        name: The log's name in an error.
        table: Its rows.
        options: May select rows, and name several columns for a machine.

    Raises:
        ConfigError: if nothing is left, or a column is not there.
    """
    notes: list[str] = []
    for column, value in options.where:
        table = _where(name, table, column, value)
    table = _of_machines(name, table, options, notes)
    table = _without_steps(table, notes)
    table, options = _joined(name, table, options)
    return table, options, notes


def _where(name: str, table: LogTable, column: str, value: str) -> LogTable:
    if column not in table.header:
        raise ConfigError(f"{name} has no column {column!r}: it has {', '.join(table.header) or 'no names'}")
    place = table.header.index(column)
    rows = tuple(row for row in table.rows if row.cells[place] == value)
    if not rows:
        values = list(dict.fromkeys(table.column(place)))[:8]
        raise ConfigError(f"{name} has no row where {column} is {value!r}; it has {', '.join(values)}, ...")
    return replace(table, rows=rows)


def _of_machines(name: str, table: LogTable, options: LogOptions, notes: list[str]) -> LogTable:
    """Return Kubernetes' events about nodes, unless others are selected, with one row for each time they occurred."""
    about = next((column for column in _ABOUT if column in table.header), None)
    if about is None:
        return table
    if about not in dict(options.where):
        kinds = Counter(table.column(table.header.index(about)))
        if not kinds["Node"]:
            others = ", ".join(f"{kind or '(empty)'} {count:,}" for kind, count in kinds.most_common(4))
            raise ConfigError(
                f"{name} has no event about a node, only about others ({others}): if these are the machines, give "
                f"{options.hint('where', f'{about}={kinds.most_common(1)[0][0]}')}"
            )
        others = ", ".join(f"{kind or '(empty)'} {count:,}" for kind, count in kinds.most_common() if kind != "Node")
        if others:
            notes.append(f"events about others left out ({others})")
        table = _where(name, table, about, "Node")
    rows, several = [], 0
    for row in table.rows:
        times = _times(dict(zip(table.header, row.cells, strict=True)))
        several += len(times) > 1
        rows += [replace(row, cells=(*row.cells, at)) for at in times]
    if several:
        notes.append(f"{several:,} rows stand for several events each, laid evenly between the first and the last time")
    return replace(table, header=(*table.header, "time"), rows=tuple(rows))


def _times(row: dict[str, str]) -> list[str]:
    """Return when an event occurred, as often as it did."""

    def cell(names: tuple[str, ...]) -> str:
        return next((row[name] for name in names if row.get(name)), "")

    first, last, count = cell(_FIRST), cell(_LAST) or cell(_FIRST), cell(_COUNT)
    begin, end = iso_seconds(first), iso_seconds(last)
    times = int(count) if count.isascii() and count.isdigit() else 1
    if begin is None or end is None or not 1 < times <= _MOST_EVENTS or end <= begin:
        return [last]
    steps = ((end - begin) * place / (times - 1) for place in range(times))
    return [datetime.fromtimestamp(begin + step, UTC).isoformat() for step in steps]


def _without_steps(table: LogTable, notes: list[str]) -> LogTable:
    """Return jobs without their steps; a job of which only steps are in the log is its first step."""
    place = next(iter(columns_named(table.header, "job")), None)
    if place is None:
        return table
    jobs, rows = set(table.column(place)), []
    for row in table.rows:
        if match := _STEP.fullmatch(row.cells[place]):
            if match[1] in jobs:
                continue
            jobs.add(match[1])
        rows.append(row)
    if steps := len(table.rows) - len(rows):
        notes.append(f"{steps:,} steps of jobs (such as 123.batch) left out")
    return replace(table, rows=tuple(rows))


def _joined(name: str, table: LogTable, options: LogOptions) -> tuple[LogTable, LogOptions]:
    """Return a table with a column that joins those which together name a machine, such as ``cabinet+slot``."""
    asked = options.columns.get("node", "")
    if "+" not in asked or asked in table.header:
        return table, options
    places = [column_place(name, table, "node", part.strip()) for part in asked.split("+")]

    def joined(row: LogRow) -> LogRow:
        return replace(row, cells=(*row.cells, "/".join(row.cells[place] for place in places)))

    header = (*table.header, asked) if table.header else ()
    table = replace(table, header=header, rows=tuple(map(joined, table.rows)))
    columns = {**options.columns, "node": asked if header else str(table.width)}
    return table, replace(options, columns=columns)


def column_place(name: str, table: LogTable, role: str, text: str) -> int:
    """Return the place from 0 of a column that is given by name, or by number from 1.

    Raises:
        ConfigError: if there is none.
    """
    if text in table.header:
        return table.header.index(text)
    if text.isascii() and text.isdigit() and 1 <= int(text) <= table.width:
        return int(text) - 1
    known = f"columns {', '.join(table.header)}" if table.header else f"columns 1 to {table.width}"
    raise ConfigError(f"{name} has no column {text!r} for {role}: it has {known}")
