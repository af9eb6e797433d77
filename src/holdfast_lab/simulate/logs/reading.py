"""Reads a log of any form, and says what it was taken for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs import building
from holdfast_lab.simulate.logs.clock_times import is_number, read_times
from holdfast_lab.simulate.logs.lifetimes import Lifetimes
from holdfast_lab.simulate.logs.marks import Marks, column_kind, read_marks, shown_words
from holdfast_lab.simulate.logs.options import LogOptions, parse_options
from holdfast_lab.simulate.logs.recognize import LogShape, recognize
from holdfast_lab.simulate.logs.rows import LogRow, LogTable, read_rows
from holdfast_lab.simulate.logs.selection import select
from holdfast_lab.simulate.logs.vocabulary import OPEN, columns_named, plain, read_line, state_meaning
from holdfast_lab.simulate.reading import TraceFile
from holdfast_lab.simulate.units import DAY_S, parse_seconds

_NAMED = 4
"""Unknown words of events that a message names."""
_TOGETHER = 0.8
"""If failures happened at fewer different times, as a share of their number, a message says so."""
_PAIRS, _RISING = 10, 0.9
"""If of so many pairs of rows of one machine this share rises, the rows are not lifetimes, but ages of the machine."""
_CHOSEN = "words that are to be ignored"
"""Why rows are not used that the options or the vocabulary leave out."""
_SHOWN = {"down": "failed", "up": "up", "left": "left by plan", "missed": "missed answers"}
"""How a message calls the meanings of events."""


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
        ConfigError: if it cannot be read, is not recognised, is ambiguous, contains no lifetime, or if most of its rows
            are not understood.
    """
    path, options = Path(path), options or LogOptions()
    table, options, notes = select(path.name, read_rows(path), options)
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
        notes += timeline.notes
        units = f" of {timeline.units:,} machines over {shown_time(timeline.span_s)}"
        moments = len({one.end_s for one in timeline.up if one.ended})
    reader.check_used()
    if not lifetimes.failures:
        raise ConfigError(
            f"{path.name} ({reader.taken()}) has no lifetime that ends in a failure, so that none can be fitted: "
            f"{used} rows used{reader.left_out()}"
        )
    first = f"{path.name}: {reader.taken()}; {used:,} rows used{reader.left_out()}{reader.together()}"
    said = ("; ".join([first, *notes]), _counted(lifetimes, units, moments))
    return FailureLog(path.name, shape.form, lifetimes, trace, said)


class _Reader:
    """Reads the rows of one log of a known shape, and counts what it does not use."""

    def __init__(self, name: str, table: LogTable, shape: LogShape, options: LogOptions) -> None:
        self._name, self._table, self._shape, self._options = name, table, shape, options
        self._units: dict[str, str] = {}
        self._ignored: Counter[str] = Counter()
        self._words = ""
        if shape.places:
            self._ignored["another number of cells"] = table.odd

    def taken(self) -> str:
        """Return the form, with the column and unit of each role."""
        if not self._shape.places:
            return f"{self._shape.form} in lines of text{f' ({self._words})' if self._words else ''}"
        details = {**self._units, **dict.fromkeys(("event", "ended", "state"), self._words)}
        columns = [
            f"{role} in {self._table.name(place)}{f' ({details[role]})' if details.get(role) else ''}"
            for role, place in self._shape.places.items()
            if role != "group"
        ]
        return f"{self._shape.form}, {', '.join(columns)}"

    def left_out(self) -> str:
        """Return how many rows were not used, and why."""
        reasons = [f"{count:,} with {why}" for why, count in self._ignored.items() if count]
        return f", {', '.join(reasons)} ignored" if reasons else ", none ignored"

    def check_used(self) -> None:
        """Refuse a log of which most rows were not understood.

        Rows that say what is known already do not count, nor lines of text, most of which are about other things.

        Raises:
            ConfigError: if they are the most.
        """
        known = (building.UP_AGAIN, building.MISSED, _CHOSEN)
        why = {reason: count for reason, count in self._ignored.items() if count and reason not in known}
        rows = len(self._table.rows) + self._table.odd - self._ignored[_CHOSEN]
        if not self._shape.places or 2 * sum(why.values()) <= rows:
            return
        option = self._options.hint
        raise ConfigError(
            f"{self._name} ({self.taken()}): {sum(why.values()):,} of {rows:,} rows are not understood "
            f"({', '.join(f'{count:,} with {reason}' for reason, count in why.items())}): name the columns "
            f"({option('time', 'NAME')}), give words a meaning ({option('failed', 'WORD,...')}, up=, censored=, ignored=; "
            f"* is any other), select rows ({option('where', 'COLUMN=VALUE')}), or give {option('as', 'failures')} if each row "
            "is a failure"
        )

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
        self._check_ages(found)
        marks = self._marks()
        seconds, ended = [], []
        for at_s, mark in zip(found, marks, strict=True):
            if mark == "ignored":
                self._ignored[_CHOSEN] += 1
            elif at_s is None or at_s < 0:
                self._ignored["no lifetime" if at_s is None else "a negative lifetime"] += 1
            elif not mark:
                self._ignored["no mark of its end"] += 1
            else:
                seconds.append(at_s)
                ended.append(mark == "failed")
        return Lifetimes.of(seconds, ended)

    def _marks(self) -> Sequence[str]:
        """Return how each row's lifetime ended; in a failure if the log does not say it."""
        place = self._shape.places.get("ended")
        if place is None:
            return ["failed"] * len(self._table.rows)
        marks: Marks = read_marks(self._table.column(place), self._options, column_kind(self._table, place))
        self._words = marks.shown()
        return marks.kinds

    def _check_ages(self, found: Sequence[float | None]) -> None:
        """Refuse rows of which many are of one machine, with a lifetime that rises from one to the next.

        Raises:
            ConfigError: if they are so.
        """
        places = columns_named(self._table.header, "node")
        place = self._shape.places.get("node", places[0] if places else None)
        if place is None:
            return
        ages: dict[str, list[float]] = {}
        for node, at_s in zip(self._table.column(place), found, strict=True):
            if node and at_s is not None:
                ages.setdefault(node, []).append(at_s)
        rises = [b - a for of_node in ages.values() for a, b in pairwise(of_node)]
        share = max(sum(rise > 0 for rise in rises), sum(rise < 0 for rise in rises))
        if len(rises) >= _PAIRS and share >= _RISING * len(rises):
            rows = sum(map(len, ages.values()))
            raise ConfigError(
                f"{self._name} has {rows:,} rows of {len(ages):,} machines ({self._table.name(place)}), with "
                f"{self._table.name(self._shape.places['lifetime'])} rising from row to row: these are ages of machines "
                f"at several times, not lifetimes; give {self._options.hint('as', 'snapshots')} with time=, node= and "
                "ended=, or a file with the last row of each machine"
            )

    def timeline(self) -> building.Timeline:
        """Return the times that machines were up, from a log of any other form."""
        form = self._shape.form
        if form == "sizes":
            return building.of_sizes(self._sizes(), self._options, self._ignored)
        if form == "lives":
            marks = self._marks()
            lives = [
                (start, end, mark == "failed")
                for start, end, mark in zip(self._times("start"), self._ends(), marks, strict=True)
                if mark != "ignored"
            ]
            self._ignored[_CHOSEN] += len(marks) - len(lives)
            return building.of_lives(lives, self._options, self._ignored)
        if form == "outages":
            return building.of_outages(self._outages(), self._options, self._ignored)
        if form == "snapshots":
            return building.of_snapshots(self._snapshots(), self._options, self._ignored)
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

    def _ends(self) -> list[float | None]:
        """Return the ends; infinity for those that have not come."""
        cells = self._table.column(self._shape.places["end"])
        is_open = [not cell or plain(cell) in OPEN for cell in cells]
        if all(is_open):
            self._units["end"] = "none has come"
            return [math.inf] * len(cells)
        return [math.inf if waits else end for waits, end in zip(is_open, self._times("end"), strict=True)]

    def _outages(self) -> list[tuple[str, float | None, float | None, bool]]:
        """Return the outages: machine, begin, end, and whether it was a failure.

        Raises:
            ConfigError: if a state is not known.
        """
        kinds = ["down"] * len(self._table.rows)
        nodes = self._nodes()
        if (place := self._shape.places.get("state")) is not None:
            states = self._table.column(place)
            kinds = [state_meaning(state, self._options) if state else "down" for state in states]
            words: dict[str, Counter[str]] = {}
            for kind, state, node in zip(kinds, states, nodes, strict=True):
                if node:
                    shown = {"down": "failed", "left": "planned", "": "unknown", "up": "unknown"}.get(kind, kind)
                    words.setdefault(shown, Counter())[state or "(empty)"] += 1
            self._words = shown_words(words)
            self._refuse_unknown(place, words.get("unknown", Counter()))
        outages = [
            (node, start, end, kind == "down")
            for node, start, end, kind in zip(nodes, self._times("start"), self._ends(), kinds, strict=True)
            if kind != "ignored"
        ]
        self._ignored[_CHOSEN] += len(nodes) - len(outages)
        return outages

    def _refuse_unknown(self, place: int, words: Counter[str]) -> None:
        """Refuse states of machines that are not known.

        Raises:
            ConfigError: if there are any.
        """
        if not words:
            return
        option = self._options.hint
        raise ConfigError(
            f"{self._name}: it is not known what these words in {self._table.name(place)} mean: "
            f"{shown_words({'': words})[2:]}: give {option('failed', 'WORD,...')} for those of failures, "
            f"{option('censored', 'WORD,...')} for planned outages, {option('up', 'WORD,...')} if the machine is up, or "
            f"{option('ignored', 'WORD,...')} (WORD also stands for texts that begin with it, * for any other)"
        )

    def _snapshots(self) -> list[tuple[float, str, bool]]:
        """Return time, machine, and whether it has failed."""
        marks, rows = self._marks(), []
        for at, node, mark in zip(self._times("time"), self._nodes(), marks, strict=True):
            if mark == "ignored":
                self._ignored[_CHOSEN] += 1
            elif at is None or not node or not mark:
                self._ignored["no time, machine or mark"] += 1
            else:
                rows.append((at, node, mark == "failed"))
        if not rows:
            raise ConfigError(f"{self._name} ({self.taken()}) has no row with a time, a machine and a mark")
        return rows

    def _nodes(self) -> list[str]:
        if (place := self._shape.places.get("node")) is None:
            return ["the job"] * len(self._table.rows)
        nodes = self._table.column(place)
        if (group := self._shape.places.get("group")) is not None and group != self._shape.places["node"]:
            return [f"{of} {node}" if node else "" for of, node in zip(self._table.column(group), nodes, strict=True)]
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
        place = self._shape.places.get("event")
        cells = self._table.column(place) if place is not None else ["failure"] * len(self._table.rows)
        events: list[tuple[float, str, str]] = []
        unknown: Counter[str] = Counter()
        words: dict[str, Counter[str]] = {}
        for at, node, word in zip(self._times("time"), self._nodes(), cells, strict=True):
            kind = state_meaning(word, self._options) if place is not None else "down"
            if at is None or not node:
                self._ignored["no time or machine"] += 1
            elif kind == "ignored":
                self._ignored[_CHOSEN] += 1
            elif not kind:
                unknown[word] += 1
            else:
                events.append((at, node, kind))
                words.setdefault(_SHOWN[kind], Counter())[word] += 1
        self._words = shown_words(words)
        if place in columns_named(self._table.header, "state"):
            self._refuse_unknown(place or 0, unknown)
        for number, (word, count) in enumerate(unknown.most_common()):
            named = f"event {word!r}" if number < _NAMED else "other events"
            self._ignored[named] += count
        return events, len(events)

    def _events_of_lines(self) -> tuple[list[tuple[float, str, str]], int]:
        found = [read_line(row.text, self._options) for row in self._table.lines]
        lines = [line for line in found if line is not None]
        self._ignored["no time, machine or known event"] += len(found) - len(lines)
        times = read_times([line.time.replace(",", ".") for line in lines], "the time", self._options).seconds
        words: dict[str, Counter[str]] = {}
        for line in lines:
            words.setdefault(_SHOWN[line.kind], Counter())[line.words] += 1
        self._words = shown_words(words)
        events = [
            (at, node, line.kind)
            for at, line in zip(times, lines, strict=True)
            if at is not None
            for node in line.nodes
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
