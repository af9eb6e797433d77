"""Turns the rows of a log with a time axis into times that machines were up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.lifetimes import UpTime
from holdfast_lab.simulate.logs.options import LogOptions
from holdfast_lab.simulate.reading import OutageSpan, TraceFile


@dataclass(slots=True)
class Timeline:
    """The times that machines were up.

    Args:
        up: These times, seconds from the begin of the log.
        units: Number of machines, with those that never failed.
        span_s: Length of the log.
        used: Rows that were used.
        ignored: Why other rows were not, and how many.
    """

    up: list[UpTime]
    units: int
    span_s: float
    used: int
    ignored: Counter[str] = field(default_factory=Counter)

    def trace(self) -> TraceFile:
        """Return the times in between as outages.

        If most machines never come back after a failure, as spot machines, each new one takes the lowest free place:
        a place stands for one machine of the job.
        """
        up = sorted(self.up, key=lambda one: (one.start_s, one.unit))
        lives = Counter(one.unit for one in up)
        left = sum(one.end_s < self.span_s for one in up)
        comes_back = sum(count - 1 for count in lives.values())
        if left and 2 * comes_back < left:
            up = _packed(up)
        units = max((one.unit + 1 for one in up), default=0)
        units = max(units, self.units if up and not (left and 2 * comes_back < left) else 0)
        return TraceFile(tuple(_between(up, units, self.span_s)), units, self.span_s)


def of_events(
    events: Sequence[tuple[float, str, str]], options: LogOptions, ignored: Counter[str], rows: int
) -> Timeline:
    """Return the timeline of events.

    Args:
        events: Time, machine, and ``"up"``, ``"down"`` or ``"left"``, in any order.
        options: May give the number of machines, the length of the log, and whether machines begin as new.
        ignored: Rows that were not used, by reason; counted on.
        rows: Number of rows that the events are from.
    """
    events = sorted(events, key=lambda event: event[0])
    begin, span_s = events[0][0], _span_s(events[-1][0] - events[0][0], options)
    numbers: dict[str, int] = {}
    since: dict[str, float | None] = {}
    running = options.get("begin") != "new"
    up: list[UpTime] = []
    for at, node, kind in events:
        at_s = at - begin
        known = node in numbers
        number = numbers.setdefault(node, len(numbers))
        start_s = since.get(node) if known else 0.0
        if kind == "up":
            if known and start_s is not None:
                ignored["'up' of a machine that was up"] += 1
                continue
            since[node] = at_s
        elif start_s is None:
            ignored["'down' of a machine that was down"] += 1
        else:
            up.append(UpTime(number, start_s, at_s, kind == "down", running and not known))
            since[node] = None
    up += [UpTime(numbers[node], at_s, span_s, ended=False) for node, at_s in since.items() if at_s is not None]
    used = rows - ignored["'up' of a machine that was up"] - ignored["'down' of a machine that was down"]
    units = _units(len(numbers), options)
    up += [UpTime(unit, 0.0, span_s, ended=False, running=running) for unit in range(len(numbers), units)]
    return Timeline(up, units, span_s, used, ignored)


def of_outages(
    outages: Sequence[tuple[str, float | None, float | None]], options: LogOptions, ignored: Counter[str]
) -> Timeline:
    """Return the timeline of outages: machine, begin and end.

    An outage without an end, or one that ends before it begins, is not used.
    """
    kept: dict[str, list[tuple[float, float]]] = {}
    for node, start, end in outages:
        if start is None or end is None:
            ignored["no begin or end"] += 1
        elif end < start:
            ignored["end before begin"] += 1
        else:
            kept.setdefault(node, []).append((start, end))
    if not kept:
        return Timeline([], 0, 0.0, 0, ignored)
    begin = min(spans[0] for found in kept.values() for spans in found)
    last = max(spans[1] for found in kept.values() for spans in found)
    span_s, running = _span_s(last - begin, options), options.get("begin") != "new"
    up: list[UpTime] = []
    for number, spans in enumerate(kept.values()):
        at_s, is_first = 0.0, True
        for start, end in _merged(spans):
            up.append(UpTime(number, at_s, start - begin, ended=True, running=running and is_first))
            at_s, is_first = end - begin, False
        up.append(UpTime(number, at_s, span_s, ended=False))
    units = _units(len(kept), options)
    up += [UpTime(unit, 0.0, span_s, ended=False, running=running) for unit in range(len(kept), units)]
    up = [one for one in up if one.end_s > one.start_s or one.ended]
    return Timeline(up, units, span_s, sum(map(len, kept.values())), ignored)


def of_lives(
    lives: Sequence[tuple[float | None, float | None]], options: LogOptions, ignored: Counter[str]
) -> Timeline:
    """Return the timeline of begins and ends of machines; without an end, a machine is still up."""
    kept = [(start, end) for start, end in lives if start is not None and (end is None or end >= start)]
    ignored["no begin, or end before it"] += len(lives) - len(kept)
    if not kept:
        return Timeline([], 0, 0.0, 0, ignored)
    begin = min(start for start, _ in kept)
    last = max(max(start, start if end is None else end) for start, end in kept)
    span_s = _span_s(last - begin, options)
    up = [
        UpTime(unit, start - begin, span_s if end is None else end - begin, ended=end is not None)
        for unit, (start, end) in enumerate(kept)
    ]
    return Timeline(up, _units(len(kept), options), span_s, len(kept), ignored)


def of_sizes(sizes: Sequence[tuple[float, int]], options: LogOptions, ignored: Counter[str]) -> Timeline:
    """Return the timeline of a number of machines over time: the oldest leaves first, or the newest if so chosen."""
    begin, span_s = sizes[0][0], _span_s(sizes[-1][0] - sizes[0][0], options)
    newest, running = options.get("leaves") == "newest", options.get("begin") != "new"
    alive: list[tuple[int, float]] = []
    up: list[UpTime] = []
    units = 0
    for number, (at, size) in enumerate(sizes):
        at_s = at - begin
        while len(alive) > size:
            unit, start_s = alive.pop(-1 if newest else 0)
            up.append(UpTime(unit, start_s, at_s, ended=True, running=running and unit < sizes[0][1]))
        for _ in range(size - len(alive)):
            alive.append((units, at_s if number else 0.0))
            units += 1
    first = sizes[0][1]
    up += [UpTime(unit, start_s, span_s, ended=False, running=running and unit < first) for unit, start_s in alive]
    return Timeline(up, units, span_s, len(sizes), ignored)


def _span_s(last_s: float, options: LogOptions) -> float:
    if options.span_s is None:
        return last_s
    if options.span_s < last_s:
        hint = options.hint("span", f"{last_s:g}s")
        raise ConfigError(f"the log's last time is {last_s:g} s after its first: give {hint} or more, or no span")
    return options.span_s


def _units(seen: int, options: LogOptions) -> int:
    if options.nodes is None:
        return seen
    if options.nodes < seen:
        raise ConfigError(
            f"the log names {seen} machines: give {options.hint('nodes', str(seen))} or more, got {options.nodes}"
        )
    return options.nodes


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans in order; those that overlap or touch are one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _packed(up: Iterable[UpTime]) -> list[UpTime]:
    """Return the times, in order of their begin, with the lowest place that is free then as the unit."""
    busy: list[float] = []
    packed = []
    for one in up:
        place = next((place for place, until in enumerate(busy) if until <= one.start_s), len(busy))
        busy[place : place + 1] = [one.end_s]
        packed.append(one._replace(unit=place))
    return packed


def _between(up: Iterable[UpTime], units: int, span_s: float) -> list[OutageSpan]:
    """Return the outages between the times that each unit was up; one at the end lasts until the trace's next up time."""
    by_unit: Mapping[int, list[UpTime]] = {unit: [] for unit in range(units)}
    for one in up:
        by_unit[one.unit].append(one)
    spells = []
    for unit, times in by_unit.items():
        at_s = 0.0
        for one in times:
            if one.start_s > at_s:
                spells.append(OutageSpan(unit, at_s, one.start_s))
            at_s = max(at_s, one.end_s)
        if at_s < span_s:
            spells.append(OutageSpan(unit, at_s, span_s + (times[0].start_s if times else 0.0)))
    return spells
