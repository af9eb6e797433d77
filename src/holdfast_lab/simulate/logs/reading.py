"""Reads a log of any form, and says what it was taken for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs import building
from holdfast_lab.simulate.logs.clock_times import is_number, read_times
from holdfast_lab.simulate.logs.lifetimes import Lifetimes
from holdfast_lab.simulate.logs.options import LogOptions, parse_options
from holdfast_lab.simulate.logs.recognize import LogShape, recognize
from holdfast_lab.simulate.logs.rows import LogRow, LogTable, read_rows
from holdfast_lab.simulate.logs.vocabulary import NO, YES, meaning, read_line
from holdfast_lab.simulate.reading import TraceFile
from holdfast_lab.simulate.units import DAY_S, parse_seconds

_NAMED = 4
"""Unknown words of events that a message names."""
_TOGETHER = 0.8
"""If failures happened at fewer different times, as a share of their number, a message says so."""


@dataclass(frozen=True, slots=True)
class FailureLog:
    """The content of a log.

    Args:
        name: Name of the file.
        form: One of :data:`~holdfast_lab.simulate.logs.options.FORMS`.
        lifetimes: The lifetimes in it.
        trace: The outages in it; None if it has no time axis.
        said: What was taken for what, in one or two lines.
    """

    name: str
    form: str
    lifetimes: Lifetimes
    trace: TraceFile | None
    said: tuple[str, ...]


def read_log(path: str | Path, options: LogOptions | None = None) -> FailureLog:
    """Read a log of failures or preemptions.

    Raises:
        ConfigError: if it cannot be read, is not recognised, is ambiguous, or contains no lifetime.
    """
    path, options = Path(path), options or LogOptions()
    table = _selected(path, read_rows(path), options)
    shape = recognize(path.name, table, options)
    reader = _Reader(path.name, table, shape, options)
    if shape.form == "lifetimes":
        lifetimes, trace = reader.lifetimes(), None
        used, units, moments = len(lifetimes), "", lifetimes.failures
    else:
        timeline = reader.timeline()
        known = shape.form != "sizes" or bool(options.get("leaves"))
        lifetimes = Lifetimes.of_up_times(timeline.up, has_shape=known)
        trace = timeline.trace() if timeline.up and timeline.span_s > 0 else None
        used = timeline.used
        units = f" of {timeline.units:,} machines over {shown_time(timeline.span_s)}"
        moments = len({one.end_s for one in timeline.up if one.ended})
    if not lifetimes.failures:
        raise ConfigError(
            f"{path.name} ({reader.taken()}) has no lifetime that ends in a failure, so that none can be fitted: "
            f"{used} rows used{reader.left_out()}"
        )
    first = f"{path.name}: {reader.taken()}; {used:,} rows used{reader.left_out()}{reader.together()}"
    said = (first, _counted(lifetimes, units, moments))
    return FailureLog(path.name, shape.form, lifetimes, trace, said)


def _selected(path: Path, table: LogTable, options: LogOptions) -> LogTable:
    """Return the rows that ``where`` selects."""
    for column, wanted in options.where:
        if column not in table.header:
            raise ConfigError(f"{path.name} has no column {column!r}: it has {', '.join(table.header) or 'no names'}")
        place = table.header.index(column)
        rows = tuple(row for row in table.rows if row.cells[place] == wanted)
        if not rows:
            values = list(dict.fromkeys(table.column(place)))[:8]
            raise ConfigError(f"{path.name} has no row where {column} is {wanted!r}; it has {', '.join(values)}, ...")
        table = LogTable(table.header, rows, table.odd, table.lines)
    return table


class _Reader:
    """Reads the rows of one log of a known shape, and counts what it does not use."""

    def __init__(self, name: str, table: LogTable, shape: LogShape, options: LogOptions) -> None:
        self._name, self._table, self._shape, self._options = name, table, shape, options
        self._units: dict[str, str] = {}
        self._ignored: Counter[str] = Counter()
        if shape.places:
            self._ignored["another number of cells"] = table.odd

    def taken(self) -> str:
        """Return the form, with the column and unit of each role."""
        if not self._shape.places:
            return f"{self._shape.form} in lines of text"
        columns = [
            f"{role} in {self._table.name(place)}{f' ({self._units[role]})' if role in self._units else ''}"
            for role, place in self._shape.places.items()
            if role != "group"
        ]
        return f"{self._shape.form}, {', '.join(columns)}"

    def left_out(self) -> str:
        """Return how many rows were not used, and why."""
        reasons = [f"{count:,} with {why}" for why, count in self._ignored.items() if count]
        return f", {', '.join(reasons)} ignored" if reasons else ", none ignored"

    def together(self) -> str:
        """Return a note if the log is of several systems."""
        place = self._shape.places.get("group")
        groups = set() if place is None else set(self._table.column(place))
        if place is None or len(groups) < 2:
            return ""
        name = self._table.name(place).strip("'")
        which = self._options.hint("where", f"{name}=...")
        return f"; {len(groups)} values of {name} count as observed for all of that time ({which} selects one)"

    def lifetimes(self) -> Lifetimes:
        """Return lifetimes from a column."""
        found = self._times("lifetime", spans=True)
        marks = [""] * len(found)
        if (place := self._shape.places.get("ended")) is not None:
            marks = [cell.lower() for cell in self._table.column(place)]
        has_marks = "ended" in self._shape.places
        seconds, ended = [], []
        for at_s, mark in zip(found, marks, strict=True):
            if at_s is None or at_s < 0:
                self._ignored["no lifetime" if at_s is None else "a negative lifetime"] += 1
            elif has_marks and mark not in YES | NO:
                self._ignored["no mark of its end"] += 1
            else:
                seconds.append(at_s)
                ended.append((mark in YES) is not self._shape.ended_means_censored if has_marks else True)
        return Lifetimes.of(seconds, ended)

    def timeline(self) -> building.Timeline:
        """Return the times that machines were up, from a log of any other form."""
        form = self._shape.form
        if form == "sizes":
            return building.of_sizes(self._sizes(), self._options, self._ignored)
        if form == "lives":
            starts, ends = self._times("start"), self._times("end")
            return building.of_lives(list(zip(starts, ends, strict=True)), self._options, self._ignored)
        if form == "outages":
            outages = list(zip(self._nodes(), self._times("start"), self._times("end"), strict=True))
            return building.of_outages(outages, self._options, self._ignored)
        events, rows = self._events_of_columns() if self._shape.places else self._events_of_lines()
        if not events:
            raise ConfigError(f"{self._name} ({self.taken()}) has no row with a time, a machine and a known event")
        return building.of_events(events, self._options, self._ignored, rows)

    def _times(self, role: str, *, spans: bool = False) -> tuple[float | None, ...]:
        place = self._shape.places[role]
        try:
            read = read_times(self._table.column(place), self._table.name(place), self._options, spans=spans)
        except ConfigError as error:
            raise ConfigError(f"{self._name}: {error}") from error
        self._units[role] = read.unit
        return read.seconds

    def _nodes(self) -> list[str]:
        nodes = self._table.column(self._shape.places["node"])
        if (group := self._shape.places.get("group")) is not None and group != self._shape.places["node"]:
            return [f"{of} {node}" for of, node in zip(self._table.column(group), nodes, strict=True)]
        return nodes

    def _sizes(self) -> list[tuple[float, int]]:
        sizes: list[tuple[float, int]] = []
        times, cells = self._times("time"), self._table.column(self._shape.places["size"])
        last: LogRow | None = None
        for at, cell, row in zip(times, cells, self._table.rows, strict=True):
            if at is None or not is_number(cell) or float(cell) < 0 or float(cell) % 1:
                self._ignored["no time or no number of machines"] += 1
                continue
            if sizes and at < sizes[-1][0] and self._options.get("order") != "sort" and last is not None:
                raise ConfigError(
                    f"{self._name}, line {row.number}: its time is before that of line {last.number}; if the rows may "
                    f"be sorted by time, give {self._options.hint('order', 'sort')}"
                )
            sizes.append((at, int(float(cell))))
            last = row
        if not sizes:
            raise ConfigError(f"{self._name} ({self.taken()}) has no row with a time and a number of machines")
        return sorted(sizes, key=lambda one: one[0])

    def _events_of_columns(self) -> tuple[list[tuple[float, str, str]], int]:
        words = self._table.column(self._shape.places["event"])
        events: list[tuple[float, str, str]] = []
        unknown: Counter[str] = Counter()
        for at, node, word in zip(self._times("time"), self._nodes(), words, strict=True):
            kind = meaning(word, self._options.up, self._options.down)
            if at is None or not node:
                self._ignored["no time or machine"] += 1
            elif not kind:
                unknown[word] += 1
            else:
                events.append((at, node, kind))
        for number, (word, count) in enumerate(unknown.most_common()):
            named = f"event {word!r}" if number < _NAMED else "other events"
            self._ignored[named] += count
        return events, len(events)

    def _events_of_lines(self) -> tuple[list[tuple[float, str, str]], int]:
        found = [read_line(row.text, self._options.up, self._options.down) for row in self._table.lines]
        lines = [line for line in found if line is not None]
        self._ignored["no time, machine or known event"] += len(found) - len(lines)
        texts = [at.replace(",", ".") for at, _, _ in lines]
        times = read_times(texts, "the time", self._options).seconds
        events = [
            (at, node, kind)
            for at, (_, nodes, kind) in zip(times, lines, strict=True)
            if at is not None
            for node in nodes
        ]
        return events, len(lines)


def _counted(lifetimes: Lifetimes, units: str, moments: int) -> str:
    censored = len(lifetimes) - lifetimes.failures
    text = (
        f"{len(lifetimes):,} lifetimes{units}: {lifetimes.failures:,} ended in a failure, {censored:,} right-censored"
    )
    if moments <= _TOGETHER * lifetimes.failures:
        text += f" (failures at {moments:,} different times: where several have one cause, intervals are too narrow)"
    if before := int(lifetimes.running.sum()):
        text += f"; {before:,} had begun before the log"
    if lifetimes.rounded:
        text += f"; {lifetimes.rounded:,} of length 0 count as half of the shortest other one"
    if not lifetimes.has_shape:
        text += "; sizes do not say which machine left, so only the mean is fitted"
    return text


def shown_time(seconds: float) -> str:
    """Return a time in a suitable unit, three digits."""
    for unit, one in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * one:
            return f"{seconds / one:,.0f} {unit}" if seconds >= 999.5 * one else f"{seconds / one:.3g} {unit}"
    return f"{seconds:.3g} s"


def is_log(value: str, name: str) -> bool:
    """Return whether an option's value is a file and not a time.

    Raises:
        ConfigError: if it is neither.
    """
    try:
        parse_seconds(value, name)
    except ConfigError as error:
        if not Path(value).is_file():
            raise ConfigError(f"{error}; there is no log of that name either") from error
        return True
    return False


def options_of_table(table: Mapping[str, object]) -> LogOptions:
    """Return the options of a scenario's ``reading`` table; ``where`` is a table of column and value."""
    pairs: list[tuple[str, object]] = []
    for name, value in table.items():
        if name == "where" and isinstance(value, Mapping):
            pairs += [("where", f"{column}={wanted}") for column, wanted in value.items()]
        elif isinstance(value, list):
            pairs.append((name, ",".join(map(str, value))))
        else:
            pairs.append((name, value))
    return parse_options(pairs, spelled='reading = {{ {} = "{}" }}')
