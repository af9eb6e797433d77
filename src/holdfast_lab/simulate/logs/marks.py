"""Reads the words by which a log marks how lifetimes ended, and counts what was taken for what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast_lab.simulate.logs.clock_times import is_number, is_time
from holdfast_lab.simulate.logs.options import LogOptions
from holdfast_lab.simulate.logs.rows import LogTable
from holdfast_lab.simulate.logs.vocabulary import (
    CENSORED,
    FAILED,
    FALSE,
    TRUE,
    chosen,
    columns_named,
    known_as,
    of_any_other,
    plain,
)

_SHOWN = 6
"""Words of a kind that a message names."""
_MEANS = {"down": "failed", "up": "censored"}
"""What a meaning of the options is for a lifetime."""
_EXIT = re.compile(r"(-?\d+)(?::(\d+))?")
"""An exit status, and that of a signal as Slurm writes it: ``1:0``, ``0:9``."""


@dataclass(frozen=True, slots=True)
class Marks:
    """A column that says how lifetimes ended.

    Args:
        kinds: Of each row: ``"failed"``, ``"censored"``, ``"ignored"``, ``"unknown"``, or "" without a mark.
        words: How often each word occurs, by kind.
    """

    kinds: tuple[str, ...]
    words: Mapping[str, Counter[str]]

    @property
    def unknown(self) -> Counter[str]:
        """The words whose meaning is not known."""
        return self.words.get("unknown", Counter())

    @property
    def is_known(self) -> bool:
        """Whether there are words, and all are known."""
        return bool(self.words) and not self.unknown

    def shown(self) -> str:
        """Return what was taken for what, such as ``failed: NODE_FAIL 20, censored: COMPLETED 180``."""
        return shown_words({kind: self.words[kind] for kind in ("failed", "censored") if kind in self.words})


def read_marks(cells: Sequence[str], options: LogOptions, column: str = "ended") -> Marks:
    """Read the marks of a column.

    Cells without a word are lifetimes without a mark. If all other cells mean a failure, they are censored: nothing
    happened to these; and if all others are marked as censored with a plain yes, they failed.

    Args:
        cells: The cells.
        options: May give words a meaning.
        column: What a plain yes means: ``"ended"``: it failed; ``"censored"``; or ``"exit"``: the numbers are exit
            statuses.
    """
    truth = ("censored", "failed") if column == "censored" else ("failed", "censored")
    read = {cell: _read(cell, options, truth, is_exit=column == "exit") for cell in set(cells)}
    if {read[cell] for cell in read if cell} == {truth[0]} and (column == "censored" or "failed" in read.values()):
        read[""] = truth[1]
    words: dict[str, Counter[str]] = {}
    for cell in cells:
        if read[cell]:
            words.setdefault(read[cell], Counter())[_called(cell)] += 1
    return Marks(tuple(read[cell] for cell in cells), words)


def _read(cell: str, options: LogOptions, truth: tuple[str, str], *, is_exit: bool) -> str:
    word = plain(cell)
    if kind := chosen(word, options):
        return _MEANS.get(kind, kind)
    if is_exit and (match := _EXIT.fullmatch(cell)):
        return "failed" if int(match[1]) or int(match[2] or 0) else "censored"
    if is_number(cell) and float(cell) in (0, 1):  # also 1.0
        return truth[float(cell) == 0]
    if word in TRUE:
        return truth[0]
    if word in FALSE:
        return truth[1]
    if known := known_as(word, (("failed", FAILED), ("censored", CENSORED))):
        return known
    return _MEANS.get(kind := of_any_other(options), kind or "unknown") if cell else ""


def _called(cell: str) -> str:
    return re.sub(r"(?i) by .*", " by ...", cell)[:40] or "(empty)"


def shown_words(words: Mapping[str, Counter[str]]) -> str:
    """Return counts by word, such as ``failed: down 20, up: idle 12 and 3 others``."""
    parts = []
    for kind, counts in words.items():
        most = counts.most_common(_SHOWN)
        rest = sum(counts.values()) - sum(count for _, count in most)
        others = f" and {rest:,} others" if rest else ""
        parts.append(f"{kind}: {', '.join(f'{word} {count:,}' for word, count in most)}{others}")
    return ", ".join(parts)


def column_kind(table: LogTable, place: int) -> str:
    """Return what a yes in a column means, by its name; see :func:`read_marks`."""
    return next((kind for kind in ("censored", "exit") if place in columns_named(table.header, kind)), "ended")


def mark_column(
    name: str, table: LogTable, options: LogOptions, lifetime: int | None, column: int | None
) -> int | None:
    """Return the column that says how lifetimes ended; None if there is none.

    Args:
        name: The log's name in an error.
        table: Its rows.
        options: May give words a meaning.
        lifetime: The column of lifetimes.
        column: The column by the options.

    Raises:
        ConfigError: if no such column has only known words, but one has others.
    """
    places = [column] if column is not None else _candidates(table, options, lifetime)
    read = {place: read_marks(table.column(place), options, column_kind(table, place)) for place in places}
    whole = next((place for place, marks in read.items() if marks.is_known), None)
    if whole is None and (unknown := next((place for place, marks in read.items() if marks.unknown), None)) is not None:
        marks = read[unknown]
        known = f"; known: {marks.shown()}" if marks.shown() else ""
        raise ConfigError(
            f"{name}: it is not known what these words in {table.name(unknown)} mean: "
            f"{shown_words({'': marks.unknown})[2:]}{known}: give {options.hint('failed', 'WORD,...')} for "
            f"those of failures, {options.hint('censored', 'WORD,...')} for the others (WORD also stands for texts that "
            f"begin with it, * for any other), or another column as {options.hint('ended', 'NAME')}"
        )
    if whole is None and column is None and (options.down or options.censored):
        raise ConfigError(
            f"{name} does not say which column says how lifetimes ended: give {options.hint('ended', 'NAME')}, or a "
            f"number from 1 to {table.width}"
        )
    return whole if column is None else column


def _candidates(table: LogTable, options: LogOptions, lifetime: int | None) -> list[int]:
    """Return the columns that may be one, the likeliest first: by their names, then by their words."""
    named = [place for role in ("censored", "ended", "exit") for place in columns_named(table.header, role)]
    worded = [place for place in range(table.width) if _has_words(table.column(place), options)]
    places = [place for place in dict.fromkeys([*named, *worded]) if place != lifetime]
    return [place for place in places if sum(map(is_time, table.column(place))) * 2 <= len(table.rows)]


def _has_words(cells: Sequence[str], options: LogOptions) -> bool:
    """Return whether most cells have words that say how something ended, and are no numbers or plain yes and no."""
    filled = Counter(cell for cell in cells if cell)
    words = {cell for cell in filled if not is_number(cell) and plain(cell) not in TRUE | FALSE}
    marks = {cell for cell in words if _read(cell, options, ("", ""), is_exit=False) not in ("", "unknown")}
    return bool(marks) and 2 * sum(filled[cell] for cell in marks) > sum(filled.values())
