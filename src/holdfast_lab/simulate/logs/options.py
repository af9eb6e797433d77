"""The options that say how to read a log, where the log itself leaves it open."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.simulate.checks import check_choice
from holdfast_lab.simulate.units import parse_seconds

FORMS = ("lifetimes", "lives", "outages", "events", "failures", "snapshots", "sizes")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
"""Seconds of each unit."""
ROLES = ("lifetime", "ended", "start", "end", "time", "node", "event", "size")
"""What a column may hold. Each is also an option, whose value is a column's name or its number from 1."""
_WORDS = {
    "as": FORMS,
    "unit": tuple(UNITS),
    "dates": ("mdy", "dmy"),
    "begin": ("running", "new"),
    "leaves": ("oldest", "newest"),
    "order": ("sort",),
}
"""Options that take one of some words."""
_LISTS = {"up": "up", "down": "down", "failed": "down", "censored": "censored", "ignored": "ignored"}
"""Options that take words of the log, and the meaning of these words."""
KEYS = (*_WORDS, *ROLES, "where", *_LISTS, "nodes", "span", "repair")


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How to read a log. Whatever is not given, the log must say itself.

    Args:
        words: Of ``as`` (the form), ``unit`` (of plain numbers), ``dates`` (order of day and month), ``begin`` (whether
            machines that are up at the begin of the log are ``new`` or have been ``running`` for an unknown time),
            ``leaves`` (which machine leaves when a size falls) and ``order`` (``sort``: rows may be in any order).
        columns: The column of a role, by name or by number from 1; of ``node`` also several, joined by ``+``.
        where: Column and value: rows with another value are not used.
        up: Words of events after which a machine is up, in addition to those known.
        down: Words of events by which a machine fails, or of lifetimes that ended in a failure.
        censored: Words of events by which a machine leaves by plan, or of lifetimes that did not end in a failure.
        ignored: Words of rows that are not used.
        nodes: Number of machines observed, with those that the log does not mention; None: those of the log.
        span_s: How long they were observed, seconds from the log's first time; None: to its last time.
        repair_s: How long a failed machine is down where the log does not say it, seconds.
        is_of_job: The failures of all machines together are those of one job.
        spelled: How an option is written where this comes from, with ``{}`` for its name and value.
    """

    words: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    where: tuple[tuple[str, str], ...] = ()
    up: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    censored: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    nodes: int | None = None
    span_s: float | None = None
    repair_s: float = 0.0
    is_of_job: bool = False
    spelled: str = "--log {}={}"

    def get(self, name: str) -> str:
        """Return the given word of an option, or ""."""
        return self.words.get(name, "")

    def hint(self, name: str, value: str) -> str:
        """Return how to write an option, for an error."""
        return self.spelled.format(name, value)


def parse_options(given: Iterable[tuple[str, Any]], spelled: str = "--log {}={}") -> LogOptions:
    """Return the options from names and values.

    Raises:
        ConfigError: if a name is unknown, or a value is not allowed.
    """
    words: dict[str, str] = {}
    columns: dict[str, str] = {}
    where: list[tuple[str, str]] = []
    lists: dict[str, tuple[str, ...]] = dict.fromkeys(_LISTS.values(), ())
    nodes, span_s, repair_s = None, None, 0.0
    for name, value in given:
        shown = spelled.format(name, value)
        if name in _WORDS:
            check_choice(f"{name} of {shown}", str(value), _WORDS[name])
            words[name] = str(value)
        elif name in ROLES:
            columns[name] = str(value)
        elif name == "where":
            column, equals, wanted = str(value).partition("=")
            if not equals:
                raise ConfigError(f"{shown}: where must be COLUMN=VALUE, such as where=System=20")
            where.append((column.strip(), wanted.strip()))
        elif name in _LISTS:
            lists[_LISTS[name]] += tuple(word.strip().lower() for word in str(value).split(",") if word.strip())
        elif name == "nodes":
            nodes = _count(value, shown)
        elif name == "span":
            span_s = parse_seconds(value, f"span of {shown}")
        elif name == "repair":
            repair_s = parse_seconds(value, f"repair of {shown}")
        else:
            close = difflib.get_close_matches(name, KEYS, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{shown}: there is no option {name}{meant} (allowed: {', '.join(KEYS)})")
    return LogOptions(
        words,
        columns,
        tuple(where),
        lists["up"],
        lists["down"],
        lists["censored"],
        lists["ignored"],
        nodes,
        span_s,
        repair_s,
        spelled=spelled,
    )


def parse_words(texts: Iterable[str]) -> LogOptions:
    """Return the options from ``KEY=VALUE`` texts.

    Raises:
        ConfigError: as :func:`parse_options`, or if there is no ``=``.
    """
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--log must be KEY=VALUE, such as --log unit=h, got {text!r}")
        pairs.append((name.strip(), value.strip()))
    return parse_options(pairs)


def _count(value: object, shown: str) -> int:
    text = str(value)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10_000_000:
        raise ConfigError(f"{shown}: nodes must be a whole number from 1 to 10000000")
    return int(text)
