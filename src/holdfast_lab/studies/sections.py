"""Typed builders for the sections of a study's page, the list under ``page`` in ``results.json``.

:mod:`holdfast_lab.pages.study` documents how each kind is drawn. A section shows either its own ``rows``, or the rows
of the study selected by ``where``. The JSON keeps the order of the keywords.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NotRequired, TypedDict, Unpack

from holdfast_lab.studies.base import MEASURED, NOT_RUN, Row

Section = dict[str, Any]
Column = list[str]
Sentence = dict[str, Any]
Axis = Sequence[str]
"""The key of a column of the rows, and its label in the plot."""
Rows = Sequence[Mapping[str, Any]]


def column(
    kind: Literal["number", "text", "truth", "count", "ms", "s", "MB", "%"], key: str, heading: str = "", of: str = ""
) -> Column:
    """Return a column of a table.

    Args:
        kind: How values are displayed; numbers, times, sizes and shares as the median of a line's rows.
        key: Key of the rows.
        heading: Column heading; "" is the key.
        of: The thing that a number or a text counts, shown below the heading; "" for none.
    """
    return [key, heading or key.replace("_", " "), kind, *([of] if of else [])]


number, text, truth = partial(column, "number"), partial(column, "text"), partial(column, "truth")
milliseconds, seconds = partial(column, "ms"), partial(column, "s")
megabytes, percent, count = partial(column, "MB"), partial(column, "%"), partial(column, "count")


class TableLook(TypedDict):
    """Options of a table: one line for all rows with the same values of ``by``; ``folded`` collapses it."""

    by: Sequence[str]
    columns: Sequence[Column]
    folded: NotRequired[bool]


class BarsLook(TypedDict):
    """Options of bars: a bar for each group in ``by``, stacked from ``values``, ``[key, name]`` each."""

    by: Sequence[str]
    values: Sequence[Axis]
    unit: str
    range: NotRequired[bool]
    whole: NotRequired[float]


class LinesLook(TypedDict):
    """Options of lines: a line for each group in ``series``."""

    series: Sequence[str]
    x: Axis
    y: Axis


class PointsLook(LinesLook):
    """Options of points: a point per row; ``interval`` names its two ends, ``band`` and ``limits`` are ranges of y."""

    interval: NotRequired[Sequence[str]]
    label: NotRequired[str]
    limits: NotRequired[Sequence[float]]
    band: NotRequired[Sequence[float]]
    log: NotRequired[Sequence[Literal["x", "y"]]]
    curves: NotRequired[Sequence[Any]]


class IntervalsLook(TypedDict):
    """Options of intervals: a line for each group in ``by``; ``band`` and ``limits`` are ranges of x."""

    by: Sequence[str]
    series: Sequence[str]
    x: Axis
    interval: NotRequired[Sequence[str]]
    limits: NotRequired[Sequence[float]]
    band: NotRequired[Sequence[float]]


def _section(
    kind: str,
    name: str,
    title: str,
    note: str,
    rows: Rows | None,
    where: Mapping[str, Any] | None,
    look: Mapping[str, Any],
) -> Section:
    chosen = {} if rows is None else {"rows": list(rows)}
    return {"kind": kind, "id": name, "title": title, "note": note, "where": dict(where or {}), **chosen, **look}


def table(
    name: str,
    title: str,
    note: str = "",
    rows: Rows | None = None,
    where: Mapping[str, Any] | None = None,
    **look: Unpack[TableLook],
) -> Section:
    """Return a table, see :class:`TableLook`; ``name`` is its HTML anchor, ``note`` explains how to read it."""
    return _section("table", name, title, note, rows, where, look)


def bars(
    name: str,
    title: str,
    note: str = "",
    rows: Rows | None = None,
    where: Mapping[str, Any] | None = None,
    **look: Unpack[BarsLook],
) -> Section:
    """Return stacked bars, see :class:`BarsLook`."""
    return _section("bars", name, title, note, rows, where, look)


def lines(name: str, title: str, note: str, where: Mapping[str, Any], **look: Unpack[LinesLook]) -> Section:
    """Return lines, see :class:`LinesLook`."""
    return _section("lines", name, title, note, None, where, look)


def points(name: str, title: str, note: str, rows: Rows, **look: Unpack[PointsLook]) -> Section:
    """Return points, see :class:`PointsLook`."""
    return _section("points", name, title, note, rows, None, look)


def intervals(name: str, title: str, note: str, rows: Rows, **look: Unpack[IntervalsLook]) -> Section:
    """Return intervals, see :class:`IntervalsLook`."""
    return _section("intervals", name, title, note, rows, None, look)


def sentences(name: str, title: str, items: Sequence[Sentence]) -> Section:
    """Return a list of sentences, each built by :func:`sentence`."""
    return {"kind": "list", "id": name, "title": title, "items": list(items)}


def sentence(words: str, section: str, *values: Any) -> Sentence:
    """Return a sentence with a link to its evidence: a table's name, and the values that identify the line."""
    return {"text": words, "section": section, "row": [str(value) for value in values]}


def not_run(
    by: Sequence[str],
    rows: Sequence[Row] | None = None,
    title: str = "Not run",
    columns: Sequence[Column] = (text("why"),),
) -> Section:
    """Return the table of failed measurements and the reasons.

    Args:
        by: One line for all rows with the same values of these.
        rows: Rows to select from, for a section with its own rows; None: the page selects from all rows of the study.
        title: Title of the section.
        columns: The reason, and any further columns.
    """
    mine = None if rows is None else [row for row in rows if row["status"] == NOT_RUN]
    where = {"status": NOT_RUN} if rows is None else None
    return table("not-run", title, "", mine, where, by=by, columns=list(columns))


def measured(part: str, **values: Any) -> dict[str, Any]:
    """Return the ``where`` that selects a part's measured rows with the given values."""
    return {"part": part, "status": MEASURED, **values}
