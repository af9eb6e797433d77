"""Reads published failure traces in their original formats."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import LONGEST_S, check_range

_DAY_S = 86_400.0


class OutageSpan(NamedTuple):
    """One outage.

    Args:
        unit: Number of the machine, from 0.
        start_s: When it went down, seconds from the begin of the trace.
        end_s: When it was up again; after the end of the trace if it comes up only after the trace has started over.
    """

    unit: int
    start_s: float
    end_s: float


class TraceFile(NamedTuple):
    """The content of a file.

    Args:
        spells: The outages, in any order.
        units: Number of machines observed.
        span_s: Length of the observation.
    """

    spells: tuple[OutageSpan, ...]
    units: int
    span_s: float


def _watched_s(path: Path, span_s: float | None, last_s: float) -> float:
    """Return how long the machines were observed, for a file that does not say so.

    Args:
        path: The file.
        span_s: The given length, if any.
        last_s: Time of the last event.

    Raises:
        ConfigError: if no length is given, or it is shorter than the file's events.
    """
    if span_s is None:
        raise ConfigError(
            f"{path} does not say how long its machines were observed: give span_s, at least {last_s:g} s, the time "
            "of its last event"
        )
    check_range("span_s", span_s, 0, above=True, most=LONGEST_S)
    if span_s < last_s:
        raise ConfigError(
            f"span_s must be at least {last_s:g} s, the time of the last event of {path}, got {span_s:g} s"
        )
    return span_s


def _still_down(spells: Sequence[OutageSpan], down: Mapping[int, float], span_s: float) -> list[OutageSpan]:
    """Return outages of machines that are down when a trace ends; they last until the repeated trace ends them.

    A machine that never comes back is up again when the trace starts over.

    Args:
        spells: The other outages.
        down: Begin of the outage, by machine.
        span_s: End of the trace.
    """
    back_s: dict[int, float] = {}
    for spell in spells:
        if spell.end_s > 0:
            back_s.setdefault(spell.unit, spell.end_s)
    return [OutageSpan(unit, since_s, span_s + back_s.get(unit, 0.0)) for unit, since_s in down.items()]


_MOST_MACHINES = 1_000_000
_DAMAGED = (lzma.LZMAError, zlib.error, zipfile.BadZipFile, UnicodeDecodeError)  # the last: a name in a zip file
"""Errors of damaged compressed files."""


def open_text(path: Path) -> io.TextIOBase:
    """Return the content of a file, decompressed.

    Raises:
        ConfigError: if it is missing or damaged, or no file but a pipe or a device, which may never end.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} cannot be read: it is no file")
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        elif path.suffix == ".xz":
            data = lzma.decompress(data)
        elif path.suffix == ".zip":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                data = archive.read(archive.namelist()[0])
    except (OSError, EOFError, IndexError, RuntimeError, *_DAMAGED) as error:  # zipfile also raises bare RuntimeErrors
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return io.StringIO(data.decode("utf-8", errors="replace"), newline="")


def read_infinitehbd(path: Path, units: int = 400) -> TraceFile:
    """Read faults of GPU servers; a fault without an end lasts to the end of the trace, which is at least 348 days."""
    with open_text(path) as file:
        try:
            events = json.load(file)
            places = [
                (
                    str(e["node_id"]),
                    float(e["event_time"]) * _DAY_S,
                    e["event_type"] == "fault_start",
                    str(e["fault_type"]),
                )
                for e in events
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a list of fault starts and ends: {error!r}") from error
        except RecursionError as error:
            raise ConfigError(
                f"{path} is not a list of fault starts and ends: its brackets are nested too deep"
            ) from error
    numbers: dict[str, int] = {}
    begun: dict[tuple[str, str], list[float]] = {}
    spells: list[OutageSpan] = []
    span_s = max([348 * _DAY_S, *(at_s for _, at_s, _, _ in places)])
    for node, at_s, starts, why in places:
        number = numbers.setdefault(node, len(numbers))
        waiting = begun.setdefault((node, why), [])
        if starts:
            waiting.append(at_s)
        elif waiting:
            spells.append(OutageSpan(number, waiting.pop(0), at_s))
    spells += [OutageSpan(numbers[node], at_s, span_s) for (node, _), waiting in begun.items() for at_s in waiting]
    if units < len(numbers):
        raise ConfigError(f"units must be at least the {len(numbers)} servers that failed, got {units}")
    return TraceFile(tuple(spells), units, span_s)


def read_lanl(path: Path, system: int = 20) -> TraceFile:
    """Read the outages of one of LANL's 22 systems; an outage without an end is not counted.

    A system was observed from its first to its last outage or, if it was in use to the end, to the last outage of the
    whole file.
    """
    spells: list[tuple[int, datetime, datetime]] = []
    units, is_in_use = 0, False
    end = datetime.min
    for number, row in _rows(path, ("System", "nodes", "nodenumz", "Prob Started", "Prob Fixed")):
        try:
            fixed = _american(row["Prob Fixed"]) if row["Prob Fixed"].strip() else None
            end = max(end, fixed or end)
            if row["System"].strip() != str(system):
                continue
            is_in_use = is_in_use or (row.get("node decom") or "").strip() == "current"
            units = max(units, _machines(row["nodes"]), _machines(row["nodenumz"]) + 1)
            if fixed is not None:
                spells.append((int(row["nodenumz"]), _american(row["Prob Started"]), fixed))
        except ValueError as error:
            raise _bad_line(path, number, error) from error
    if not spells:
        return TraceFile((), max(units, 1), 1.0)
    begin = min(start for _, start, _ in spells)
    counted = tuple(
        OutageSpan(unit, (start - begin).total_seconds(), (end - begin).total_seconds())
        for unit, start, end in spells
        if end >= start
    )
    last_s = (end - begin).total_seconds() if is_in_use else max((spell.end_s for spell in counted), default=0.0)
    return TraceFile(counted, units, last_s + 1)


def read_spot(path: Path, span_s: float | None = None) -> TraceFile:
    """Read when spot machines were granted and revoked. A granted machine takes the lowest free place.

    There are as many places as machines at the peak; a free place is down.
    """
    places: dict[str, int] = {}
    free: dict[int, float] = {}
    spells: list[OutageSpan] = []
    at_s, units = 0.0, 0
    for number, line in _lines(path):
        try:
            at_ms, what, name = _three(line, "milliseconds,add|remove,name")
            next_s = _time(at_ms) / 1000
            if what not in ("add", "remove") or (what == "add") is (name in places):
                raise ValueError(f"{what} {name}: only an absent machine can be added, and only a present one removed")
            if next_s < at_s:
                raise ValueError("the time is before that of the previous line")
        except ValueError as error:
            raise _bad_line(path, number, error) from error
        at_s = next_s
        if what == "remove":
            free[places.pop(name)] = at_s
            continue
        if not free:
            free[units], units = 0.0, units + 1
        places[name] = min(free)
        spells.append(OutageSpan(places[name], free.pop(places[name]), at_s))
    if not units:
        return TraceFile((), 1, 1.0)
    span_s = _watched_s(path, span_s, at_s)
    spells += _still_down(spells, free, span_s)
    return TraceFile(tuple(s for s in spells if s.end_s > s.start_s), units, span_s)


def read_sizes(path: Path) -> TraceFile:
    """Read the number of machines over time; the oldest machine leaves first."""
    sizes: list[tuple[datetime, int]] = []
    for number, line in _lines(path):
        try:
            day, time, count = _three(line, "date, time, machines")
            sizes.append((_local_time(f"{day} {time}"), _machines(count)))
        except ValueError as error:
            raise _bad_line(path, number, error) from error
        if len(sizes) > 1 and sizes[-1][0] < sizes[-2][0]:
            raise _bad_line(path, number, ValueError("the time is before that of the previous line"))
    if not sizes:
        return TraceFile((), 1, 1.0)
    units, begin = max(size for _, size in sizes), sizes[0][0]
    up: list[int] = []
    down = dict.fromkeys(range(units), 0.0)
    spells: list[OutageSpan] = []
    for at, size in sizes:
        at_s = (at - begin).total_seconds()
        while len(up) > size:
            down[up.pop(0)] = at_s
        while len(up) < size:
            unit = next(iter(down))
            spells.append(OutageSpan(unit, down.pop(unit), at_s))
            up.append(unit)
    span_s = (sizes[-1][0] - begin).total_seconds() + 1
    spells += _still_down(spells, down, span_s)
    return TraceFile(tuple(s for s in spells if s.end_s > s.start_s), max(units, 1), span_s)


def read_ssd(path: Path, room: int = 0, repair_s: float = _DAY_S, nodes_per_rack: int = 16) -> TraceFile:
    """Read failed drives; each takes its node down. The file lists only racks with a failure.

    Args:
        path: The file.
        room: Number of the machine room; 0 takes all.
        repair_s: How long a failed drive keeps its node down.
        nodes_per_rack: Nodes per rack; at least as many as failed in it.
    """
    check_range("repair_s", repair_s, 0)
    found: list[tuple[int, int, datetime]] = []
    begin, end = datetime.max, datetime.min  # over all rooms, which were observed for the same time
    for number, row in _rows(path, ("failure_time", "node_id", "rack_id", "machine_room_id")):
        try:
            at = _local_time(row["failure_time"])
            begin, end = min(begin, at), max(end, at)
            if room in (0, int(row["machine_room_id"])):
                found.append((int(row["rack_id"]), int(row["node_id"]), at))
        except ValueError as error:
            raise _bad_line(path, number, error) from error
    if not found:
        return TraceFile((), 1, 1.0)
    racks: dict[int, dict[int, int]] = {}
    for rack, node, _ in sorted(found, key=lambda one: one[:2]):
        nodes = racks.setdefault(rack, {})
        nodes.setdefault(node, len(nodes))
    bases, units = {}, 0
    for rack, nodes in racks.items():
        bases[rack] = units
        units += max(nodes_per_rack, len(nodes))
    spells = (
        OutageSpan(
            bases[rack] + racks[rack][node], (at - begin).total_seconds(), (at - begin).total_seconds() + repair_s
        )
        for rack, node, at in found
    )
    return TraceFile(tuple(spells), units, (end - begin).total_seconds() + repair_s + 1)


def read_table(path: Path, span_s: float | None = None) -> TraceFile:
    """Read outages of units with arbitrary names. An outage may end after the trace."""
    numbers: dict[str, int] = {}
    spells: list[OutageSpan] = []
    for number, row in _rows(path, ("unit", "start_s", "end_s")):
        try:
            unit = numbers.setdefault(row["unit"], len(numbers))
            spells.append(OutageSpan(unit, _time(row["start_s"]), _time(row["end_s"])))
        except ValueError as error:
            raise _bad_line(path, number, error) from error
    if not spells:
        return TraceFile((), 1, 1.0)
    return TraceFile(tuple(spells), len(numbers), _watched_s(path, span_s, max(spell.start_s for spell in spells)))


READERS: Mapping[str, tuple[Callable[..., TraceFile], tuple[str, ...]]] = {
    "infinitehbd": (read_infinitehbd, ("units",)),
    "lanl": (read_lanl, ("system",)),
    "spot": (read_spot, ("span_s",)),
    "sizes": (read_sizes, ()),
    "ssd": (read_ssd, ("room", "repair_s", "nodes_per_rack")),
    "table": (read_table, ("span_s",)),
}
"""The reader of each kind, and its options."""


def read_interruptions(path: Path) -> dict[str, int]:
    """Read how often a job was interrupted, by cause: a CSV with the columns ``component`` and ``count``.

    Raises:
        ConfigError: if the file has another format.
    """
    counts: dict[str, int] = {}
    for number, row in _rows(path, ("component", "count")):
        try:
            counts[row["component"]] = counts.get(row["component"], 0) + int(row["count"])
        except ValueError as error:
            raise _bad_line(path, number, error) from error
    return counts


def _machines(text: str) -> int:
    count = int(text)
    if not 0 <= count <= _MOST_MACHINES:
        raise ValueError(f"{count} machines, but from 0 to {_MOST_MACHINES} are allowed")
    return count


def _local_time(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    if at.tzinfo is not None:
        raise ValueError(f"{text} has a time zone, and times of such a trace have none")
    return at


def _american(text: str) -> datetime:
    return datetime.strptime(text.strip(), "%m/%d/%Y %H:%M")  # the trace has no time zone


def _time(text: str) -> float:
    time = float(text)
    if not math.isfinite(time):
        raise ValueError(f"{text!r} is not a time")
    return time


def _three(line: str, form: str) -> list[str]:
    """Return the three parts of a line."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 3:
        shown = line.strip()
        raise ValueError(f"it must be {form}, got {shown[:60] + '...' * (len(shown) > 60)!r}")
    return parts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with open_text(path) as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the row of each line of a CSV file.

    Raises:
        ConfigError: if a column is missing.
    """
    with open_text(path) as file:
        reader = csv.DictReader(file)
        try:
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise ConfigError(f"{path} has no column {', '.join(missing)}")
            for row in reader:
                if all(row[name] is not None for name in columns):
                    yield reader.line_num, row
        except csv.Error as error:
            raise _bad_line(path, reader.line_num + 1, error) from error


def _bad_line(path: Path, number: int, error: Exception) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {error}")
