"""Turns the rows of a log with a time axis into times that machines were up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.lifetimes import UpTime
from holdfast_lab.simulate.logs.options import LogOptions
from holdfast_lab.simulate.reading import OutageSpan, TraceFile

UP_AGAIN = "'up' of a machine that was up"
DOWN_AGAIN = "'down' of a machine that was down"
MISSED = "a missed answer of a machine that answered again, or was then set down"
"""Why rows are not used."""


@dataclass(slots=True)
class Timeline:
    """The times that machines were up.

    Args:
        up: These times, seconds from the begin of the log.
        units: Number of machines, with those that never failed.
        span_s: Length of the log.
        used: Rows that were used.
        ignored: Why other rows were not, and how many.
        notes: What was assumed.
    """

    up: list[UpTime]
    units: int
    span_s: float
    used: int
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

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

    If no event says that a machine is up, each is up again after the time of repair that the options give.

    Args:
        events: Time, machine, and ``"up"``, ``"down"``, ``"left"`` or ``"missed"``, in any order.
        options: May give the number of machines, the length of the log, and whether machines begin as new.
        ignored: Rows that were not used, by reason; counted on.
        rows: Number of rows that the events are from.
    """
    events = _judged(sorted(events, key=lambda event: event[0]), ignored)
    if not events:
        return Timeline([], 0, 0.0, 0, ignored)
    if not any(kind == "up" for _, _, kind in events):
        return _of_failures(events, options, ignored)
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
                ignored[UP_AGAIN] += 1
                continue
            since[node] = at_s
        elif start_s is None:
            ignored[DOWN_AGAIN] += 1
        else:
            up.append(UpTime(number, start_s, at_s, kind == "down", running and not known))
            since[node] = None
    up += [UpTime(numbers[node], at_s, span_s, ended=False) for node, at_s in since.items() if at_s is not None]
    used = rows - ignored[UP_AGAIN] - ignored[DOWN_AGAIN] - ignored[MISSED]
    units = _units(len(numbers), options)
    up += [UpTime(unit, 0.0, span_s, ended=False, running=running) for unit in range(len(numbers), units)]
    return Timeline(up, units, span_s, used, ignored)


def _judged(events: Iterable[tuple[float, str, str]], ignored: Counter[str]) -> list[tuple[float, str, str]]:
    """Return events in which a machine that did not answer has failed, unless it answered again or was then set down."""
    judged: list[tuple[float, str, str] | None] = []
    missed: dict[str, int] = {}
    for at, node, kind in events:
        if kind == "missed":
            if node in missed:
                ignored[MISSED] += 1
                continue
            missed[node] = len(judged)
        elif (place := missed.pop(node, None)) is not None:
            judged[place] = None
            ignored[MISSED] += 1
        judged.append((at, node, "down" if kind == "missed" else kind))
    return [event for event in judged if event is not None]


def _of_failures(events: Sequence[tuple[float, str, str]], options: LogOptions, ignored: Counter[str]) -> Timeline:
    """Return the timeline of a list of failures, in order of time; every row is one."""
    begin, span_s = events[0][0], _span_s(events[-1][0] - events[0][0], options)
    outages: dict[str, list[tuple[float, float, bool]]] = {}
    for at, node, kind in events:
        outages.setdefault("" if options.is_of_job else node, []).append((at, at + options.repair_s, kind == "down"))
    timeline = _of_spans(outages, begin, span_s, options, ignored)
    timeline.notes.append(f"no event says that a machine is up again: each is {_repaired(options)}")
    return timeline


def _repaired(options: LogOptions) -> str:
    given = options.repair_s
    return f"repaired after {given:g} s" if given else f"repaired at once ({options.hint('repair', 'TIME')} says when)"


def of_outages(
    outages: Sequence[tuple[str, float | None, float | None, bool]], options: LogOptions, ignored: Counter[str]
) -> Timeline:
    """Return the timeline of outages.

    An outage without an end is one to the end of the log. If the machine failed again later, or no outage of the log
    has an end, the machine was repaired at a time that is not known.

    Args:
        outages: Machine, begin, end, and whether it was a failure; rows without a machine, a begin, or with an end
            before it are not used. An end of infinity has not come.
        options: As for :func:`of_events`.
        ignored: Rows that were not used, by reason; counted on.
    """
    kept: dict[str, list[tuple[float, float, bool]]] = {}
    for node, start, end, is_failure in outages:
        if not node or start is None or end is None:
            ignored["no machine, begin or end"] += 1
        elif end < start:
            ignored["end before begin"] += 1
        else:
            kept.setdefault(node, []).append((start, end, is_failure))
    spans = [span for of_node in kept.values() for span in of_node]
    if not spans:
        return Timeline([], 0, 0.0, 0, ignored)
    begin = min(start for start, _, _ in spans)
    last = max(start if end == math.inf else end for start, end, _ in spans)
    span_s, notes = _span_s(last - begin, options), []
    no_end = all(end == math.inf for _, end, _ in spans)
    repaired = still = 0
    for of_node in kept.values():
        of_node.sort()
        for place, (start, end, is_failure) in enumerate(of_node):
            if end == math.inf and (no_end or place + 1 < len(of_node)):
                later = of_node[place + 1][0] if place + 1 < len(of_node) else math.inf
                of_node[place] = (start, min(start + options.repair_s, later), is_failure)
                repaired += 1
            still += of_node[place][1] == math.inf
    if repaired:
        when = "no outage has one" if no_end else "the machine failed again later"
        notes.append(f"{repaired:,} outages without an end ({when}) are {_repaired(options)}")
    if still:
        notes.append(f"{still:,} outages without an end last to the end of the log")
    timeline = _of_spans(kept, begin, span_s, options, ignored)
    timeline.notes += notes
    return timeline


def _of_spans(
    kept: Mapping[str, Sequence[tuple[float, float, bool]]],
    begin: float,
    span_s: float,
    options: LogOptions,
    ignored: Counter[str],
) -> Timeline:
    """Return the timeline of outages by machine: begin, end, and whether it was a failure."""
    running = options.get("begin") != "new"
    up: list[UpTime] = []
    for number, spans in enumerate(kept.values()):
        at_s, is_first = 0.0, True
        for start, end, is_failure in _merged(spans):
            up.append(UpTime(number, at_s, start - begin, ended=is_failure, running=running and is_first))
            at_s, is_first = min(end - begin, span_s), False
        up.append(UpTime(number, at_s, span_s, ended=False))
    units = _units(len(kept), options)
    up += [UpTime(unit, 0.0, span_s, ended=False, running=running) for unit in range(len(kept), units)]
    up = [one for one in up if one.end_s > one.start_s or one.ended]
    return Timeline(up, units, span_s, sum(map(len, kept.values())), ignored)


def of_snapshots(rows: Sequence[tuple[float, str, bool]], options: LogOptions, ignored: Counter[str]) -> Timeline:
    """Return the timeline of regular rows about each machine: time, machine, and whether it has failed.

    Each row stands for the time to the next row of the log, so a machine that failed in its only row lived as long.
    """
    rows = sorted(rows)
    moments = sorted({at for at, _, _ in rows})
    steps = [b - a for a, b in pairwise(moments)]
    step_s = sorted(steps)[len(steps) // 2] if steps else 0.0
    begin, span_s = moments[0], _span_s(moments[-1] - moments[0] + step_s, options)
    new = options.get("begin") == "new"
    numbers: dict[str, int] = {}
    since: dict[str, float] = {}
    seen: dict[str, float] = {}
    up: list[UpTime] = []
    for at, node, has_failed in rows:
        at_s = at - begin
        is_first = node not in numbers
        numbers.setdefault(node, len(numbers))
        if node not in since and (not has_failed or is_first):
            since[node] = at_s
        if has_failed and node in since:
            start_s = since.pop(node)
            up.append(UpTime(numbers[node], start_s, at_s + step_s, ended=True, running=not new and start_s == 0))
        elif has_failed:
            ignored[DOWN_AGAIN] += 1
        seen[node] = at_s + step_s
    up += [
        UpTime(numbers[node], at_s, seen[node], ended=False, running=not new and at_s == 0)
        for node, at_s in since.items()
    ]
    units = _units(len(numbers), options)
    up += [UpTime(unit, 0.0, span_s, ended=False, running=not new) for unit in range(len(numbers), units)]
    return Timeline(up, units, span_s, len(rows) - ignored[DOWN_AGAIN], ignored)


def of_lives(
    lives: Sequence[tuple[float | None, float | None, bool]], options: LogOptions, ignored: Counter[str]
) -> Timeline:
    """Return the timeline of machines.

    Args:
        lives: Begin, end, and whether this end is a failure; with an end of infinity, a machine is still up.
        options: May give the number of machines and the length of the log.
        ignored: Rows that were not used, by reason; counted on.
    """
    kept = [
        (start, end, is_failure)
        for start, end, is_failure in lives
        if start is not None and end is not None and end >= start
    ]
    ignored["no begin or end, or the end before the begin"] += len(lives) - len(kept)
    if not kept:
        return Timeline([], 0, 0.0, 0, ignored)
    begin = min(start for start, _, _ in kept)
    last = max(start if end == math.inf else end for start, end, _ in kept)
    span_s = _span_s(last - begin, options)
    up = [
        UpTime(unit, start - begin, min(end - begin, span_s), ended=is_failure and end < math.inf)
        for unit, (start, end, is_failure) in enumerate(kept)
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


def _merged(spans: Iterable[tuple[float, float, bool]]) -> list[tuple[float, float, bool]]:
    """Return spans in order; those that overlap are one, and a failure if the first of them is."""
    merged: list[tuple[float, float, bool]] = []
    for start, end, is_failure in sorted(spans):
        if merged and (start < merged[-1][1] or (start == merged[-1][1] > merged[-1][0])):
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), merged[-1][2])
        else:
            merged.append((start, end, is_failure))
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
    """Return the outages between the times that each unit was up; one at the end lasts until the trace's next up time.

    A unit that failed and was up again at once has an outage of length 0.
    """
    by_unit: Mapping[int, list[UpTime]] = {unit: [] for unit in range(units)}
    for one in up:
        by_unit[one.unit].append(one)
    spells = []
    for unit, times in by_unit.items():
        at_s, has_failed = 0.0, False
        for one in times:
            if one.start_s > at_s or has_failed:
                spells.append(OutageSpan(unit, at_s, max(at_s, one.start_s)))
            at_s, has_failed = max(at_s, one.end_s), one.ended
        if at_s < span_s:
            spells.append(OutageSpan(unit, at_s, span_s + (times[0].start_s if times else 0.0)))
    return spells
